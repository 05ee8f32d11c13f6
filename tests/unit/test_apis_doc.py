"""docs/apis.md names every path that is served, with its methods, and no other."""

import re
from pathlib import Path

from gateway.proxy.holders import PREFIX as RESPONSES
from gateway.proxy.models import PATH as MODELS
from gateway.proxy.realtime import PATH as REALTIME
from gateway.proxy.routes import ROUTES

DOC = Path(__file__).parents[2] / "docs" / "apis.md"
PAGES = {"/health", "/ping", "/livez", "/readyz", "/metrics", MODELS, f"{MODELS}/{{id}}", REALTIME}
STORED = {RESPONSES + "{id}": "GET", RESPONSES + "{id}/cancel": "POST"}


def test_the_table_is_complete() -> None:
    methods: dict[str, str] = {}
    for line in DOC.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `/"):
            paths = re.findall(r"`(/[^`]*)`", cells[0])
            if "/derender" in paths:
                paths.remove("/derender")
                paths += [path.replace("/render", "/derender") for path in paths]
            methods |= dict.fromkeys(paths, cells[1].split(" ")[0].strip(","))
    served = {path: "POST" if "POST" in route.methods else "GET" for path, route in ROUTES.items()}
    assert methods == served | STORED | dict.fromkeys(PAGES, "GET")
