"""`warmroute keys`: API keys made, hashed and checked. What is printed once is all there is: nothing keeps a key."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from gateway.auth.keys import LEAST_CHARACTERS, digest_of, new_key, read_keys
from gateway.cli import Parser
from gateway.errors import UserError


class _Verb(Parser):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, "")


def main(args: Sequence[str]) -> int:
    parser = Parser("warmroute keys", "Make, hash or check API keys of the gateway (auth.keys_file).")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="new|hash|check", parser_class=_Verb)
    new = verbs.add_parser("new", help="print a new key, once, and its entry for the keys file")
    new.add_argument("--tenant", required=True, help="whose it is")
    new.add_argument("--name", help="tells the keys of one tenant apart")
    new.add_argument(
        "--model", action="append", metavar="NAME", help="may be asked for (repeat it); abc* for all abc..."
    )
    new.add_argument("--requests-per-minute", type=int, metavar="N")
    new.add_argument("--tokens-per-minute", type=int, metavar="N", help="of prompts and answers")
    new.add_argument("--concurrent-requests", type=int, metavar="N")
    new.add_argument("--priority", type=int, nargs=2, metavar=("LOW", "HIGH"), help="numbers it may ask for")
    new.add_argument("--expires", metavar="TIME", help="2027-01-31, or with a time: 2027-01-31T12:00:00Z")
    verbs.add_parser("hash", help="the sha256 of a key that is read from standard input")
    check = verbs.add_parser("check", help="exit code 0, or 2 with all that is wrong with a keys file")
    check.add_argument("file")
    options = parser.parse(args)
    if options.verb == "new":
        return _new(options)
    if options.verb == "hash":
        key = sys.stdin.readline().strip()  # As it is read off a header.
        if len(key) < LEAST_CHARACTERS:
            raise UserError(f"a key has {LEAST_CHARACTERS} characters or more: shorter ones can be guessed")
        print(digest_of(key).hex())
        return 0
    keys = read_keys(_text(options.file), options.file)
    print(f"{len(keys)} keys of {len({key.tenant for key in keys})} tenants")
    return 0


def _new(options: Any) -> int:
    key = new_key()
    entry: dict[str, Any] = {
        "tenant": options.tenant,
        "name": options.name,
        "sha256": digest_of(key).hex(),
        "models": options.model,
        "requests_per_minute": options.requests_per_minute,
        "tokens_per_minute": options.tokens_per_minute,
        "concurrent_requests": options.concurrent_requests,
        "priority": options.priority,
        "expires": options.expires,
    }
    entry = {name: value for name, value in entry.items() if value is not None}
    line = "- " + msgspec.json.encode(entry).decode()  # JSON is YAML, too.
    try:
        read_keys(f"keys:\n{line}\n", "new key")
    except UserError as exc:
        raise UserError(str(exc).replace("new key:2: keys[0]: ", "")) from None
    print(f"key (shown once): {key}", file=sys.stderr)
    print(line)
    return 0


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{file}: is not UTF-8 text") from None
