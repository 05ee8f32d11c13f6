"""`warmroute workers`: the workers of a running gateway, listed, added, drained and removed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlencode

from gateway.admin_client import ADDRESS, Refused, ask
from gateway.cli import Parser
from gateway.proxy.routes import WORKERS as PATH

_POLL_S = 0.5
_REFUSED, _LATE = 1, 3


def main(args: Sequence[str]) -> int:
    parser = Parser(
        prog="warmroute workers",
        description="Workers of a running gateway. Exit code 1: it said no; 2: it could not be asked; 3: not idle yet.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_SubParser)
    verb = _verb(verbs, "list", "all of them, with their state and where they are known from")
    verb = _verb(verbs, "add", "one more, until it is removed or the gateway restarts (workers_file is durable)")
    verb.add_argument("url", metavar="URL")
    for key in ("name", "role", "events", "replay", "nixl"):
        verb.add_argument(f"--{key}")
    verb.add_argument("--weight", type=float, help="speed of its hardware relative to the others'")
    verb.add_argument("--label", action="append", default=[], metavar="KEY=VALUE")
    verb = _verb(verbs, "remove", "one that is in no file: it ends its work and goes", "name")
    verb.add_argument("--force", action="store_true", help="at once; what runs may end")
    _waiting(verb)
    verb = _verb(verbs, "drain", "no new requests; it stays in the list", "name")
    _waiting(verb)
    _verb(verbs, "undrain", "new requests again", "name")
    options = parser.parse(args)
    if options.verb is None:
        parser.error("say what to do: list, add, remove, drain or undrain")
    if options.verb == "drain" and options.timeout_s is not None and not options.wait:
        parser.error("--timeout-s bounds the waiting; give --wait too")
    try:
        return _run(parser, options)
    except Refused as exc:
        print(f"warmroute: error: {exc}", file=sys.stderr)
        return _REFUSED


class _SubParser(Parser):
    def __init__(self, prog: str, description: str = "", **_: Any) -> None:
        super().__init__(prog=prog, description=description)


def _verb(verbs: argparse._SubParsersAction[Any], name: str, summary: str, *positional: str) -> Any:
    verb = verbs.add_parser(name, help=summary, description=summary)
    for each in positional:
        verb.add_argument(each, metavar=each.upper(), help="its name or URL")
    verb.add_argument("--admin", default=ADDRESS, metavar="URL", help=f"the gateway's admin address ({ADDRESS})")
    verb.add_argument("--json", action="store_true", help="print the answer as it came")
    return verb


def _waiting(verb: Any) -> None:
    verb.add_argument("--wait", action="store_true", help="until no request needs it any more")
    verb.add_argument("--timeout-s", type=float, metavar="S", help="so long at most; one that is removed is gone then")


def _run(parser: Parser, options: argparse.Namespace) -> int:
    base = options.admin.rstrip("/") + PATH
    if options.verb == "list":
        rows = ask(base)["workers"]
        print(json.dumps(rows, indent=2) if options.json else _table(rows))
        return 0
    if options.verb == "add":
        return _show(options, ask(base, json.dumps(_worker(parser, options)).encode()))
    url = f"{base}/{quote(options.name, safe='')}"
    if options.verb != "remove":
        row = ask(f"{url}/{options.verb}", method="POST")
    else:
        query = {"force": "true"} if options.force else {}
        if options.timeout_s is not None:
            query["timeout_s"] = str(options.timeout_s)
        row = ask(url + (f"?{urlencode(query)}" if query else ""), method="DELETE")
    if getattr(options, "wait", False) and row["state"] != "removed":
        return _wait(options, url, row)
    return _show(options, row)


def _wait(options: argparse.Namespace, url: str, row: dict[str, Any]) -> int:
    """Until it is idle or gone."""
    until_s = None if options.timeout_s is None else time.monotonic() + options.timeout_s
    while row["leaving"] or row["requests"] or row["handing_over"]:
        if until_s is not None and time.monotonic() >= until_s and not row["leaving"]:
            _show(options, row)
            return _LATE
        time.sleep(_POLL_S)
        try:
            row = ask(url)
        except Refused:
            return _show(options, {**row, "state": "removed"})
        if not row["leaving"] and not row["drained"]:
            break  # Somebody has taken it up again.
    return _show(options, row)


def _show(options: argparse.Namespace, row: dict[str, Any]) -> int:
    print(json.dumps(row, indent=2) if options.json else _table([row]))
    return 0


def _worker(parser: Parser, options: argparse.Namespace) -> dict[str, Any]:
    labels: dict[str, str] = {}
    for label in options.label:
        key, equals, value = label.partition("=")
        if not equals:
            parser.error(f"--label takes KEY=VALUE, got {label}")
        labels[key] = value
    keys = ("url", "name", "role", "events", "replay", "nixl", "weight")
    worker = {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
    return worker | ({"labels": labels} if labels else {})


def _table(rows: Sequence[dict[str, Any]]) -> str:
    heads = ("name", "url", "source", "role", "state", "requests", "weight", "models")
    table = [heads, *(tuple(_cell(row[head]) for head in heads) for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(heads))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value) or "?"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
