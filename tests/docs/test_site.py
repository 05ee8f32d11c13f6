"""The documentation as a site: built strictly, no link in it leads nowhere, nothing is fetched from elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.collect import PAGES, ROOT


class _Page(HTMLParser):
    """Its links, its anchors, and what a browser fetches for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(given.get("href", ""))
        elif tag in ("script", "img", "iframe") and "src" in given:
            self.fetched.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, _Page]:
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {path: _Page(path.read_text(encoding="utf-8")) for path in out.rglob("*.html") if path.name != "404.html"}


def test_every_page_is_there_and_the_readme_is_the_first(site: dict[Path, _Page]) -> None:
    names = {path.stem for path in site}
    assert names >= {page.stem for page in PAGES if page.name != "README.md"}
    (home,) = (
        path
        for path in site
        if path.name == "index.html" and path.parent == min(site, key=lambda p: len(p.parts)).parent
    )
    assert "how-well-it-knows-the-caches" in site[home].anchors
    assert (home.parent / "search" / "search_index.json").stat().st_size > 10_000


def test_no_link_and_no_anchor_leads_nowhere(site: dict[Path, _Page]) -> None:
    dead = []
    for path, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = site[target].anchors if target in site else None
            if not target.exists() or (
                parts.fragment and anchors is not None and unquote(parts.fragment) not in anchors
            ):
                dead.append(f"{path.name}: {link}")
    assert dead == []


def test_nothing_is_fetched_from_elsewhere(site: dict[Path, _Page]) -> None:
    assert [url for page in site.values() for url in page.fetched if urlsplit(url).netloc] == []


def test_items_keep_their_numbers(site: dict[Path, _Page]) -> None:
    """Lists of the README, indented for GitHub, are lists here too."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("ci_site", ROOT / ".ci" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = module_from_spec(spec)
    spec.loader.exec_module(hooks)
    given = "Text\n1. one\n\n   ```console\n   $ a\n   ```\n\n2. two\n   more\n\nEnd\n- a\n  - b\n"
    wanted = "Text\n\n1. one\n\n    ```console\n    $ a\n    ```\n\n2. two\n    more\n\nEnd\n\n- a\n    - b\n"
    assert hooks.reindented(given) == wanted
