"""`warmroute doctor URL...`: the command line."""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from gateway.cli import Parser
from gateway.config.flags import add_config_flags, parse_flags
from gateway.config.load import load_config, load_workers
from gateway.config.schema import Worker
from gateway.core import engine_headers
from gateway.discovery.lines import is_lines, read_lines
from gateway.doctor.examine import Options, examine, is_listening
from gateway.doctor.report import as_document, as_text, exit_code, wants_colour
from gateway.errors import UserError
from scorer.types import Role

_WORKERS, _WORKERS_FILE = ("workers",), ("workers_file",)


def main(args: Sequence[str]) -> int:
    """Exit code 0: nothing worse than a note; 1: warnings; 2: errors (or bad usage)."""
    parser = Parser(
        "warmroute doctor",
        "Check what cache-aware routing, and handing prompts over, needs of vLLM servers. Sends each rank a few "
        "hundred random token ids, two to four times, with max_tokens=1, and each pair of prefill and decode workers "
        "as many once. Takes the flags, the file and the environment of warmroute gateway.",
    )
    parser.add_argument("urls", metavar="URL", nargs="*", help="vLLM servers, e.g. http://10.0.0.1:8000")
    parser.add_argument(
        "--events",
        metavar="ENDPOINT",
        action="append",
        default=[],
        help="rank 0's event address, if the server does not tell: once, or once per URL in their order; "
        "tcp://*:PORT listens for engines that connect",
    )
    parser.add_argument(
        "--replay", metavar="ENDPOINT", action="append", default=[], help="rank 0's replay address, likewise"
    )
    parser.add_argument("--admin", metavar="URL", help="admin address of a running gateway, to be asked what it sees")
    parser.add_argument("--no-probe", action="store_true", help="send no prompt")
    parser.add_argument("--timeout-s", type=_positive, default=5.0, metavar="S", help="bound of each wait (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_config_flags(parser, aliases={})
    options, flags, unknown = parse_flags(parser, args)
    given = [worker_url(text) for text in options.urls]
    urls = list(dict.fromkeys(given))
    if urls:
        flags[_WORKERS] = [*flags.get(_WORKERS, ()), *urls]
    config = load_config(options.config, os.environ, flags, unknown)
    named = _WORKERS in flags and _WORKERS_FILE not in flags  # Who names workers asks about no others.
    workers = _workers(config.workers, None if named else config.workers_file)
    if not workers and not options.admin:
        raise UserError("no worker is named: give URLs, --prefill URL and --decode URL, or --config FILE")
    tokenizer = config.tokens.tokenizer
    if tokenizer is not None and not os.path.exists(tokenizer):
        raise UserError(f"--tokenizer: no such file or directory: {tokenizer}")
    report = asyncio.run(
        examine(
            list(workers),
            Options(
                timeout_s=options.timeout_s,
                tokenizer=tokenizer,
                events={url: it.events for url, it in workers.items() if it.events}
                | _by_url("--events", options.events, given or list(workers)),
                replays={url: it.replay for url, it in workers.items() if it.replay}
                | _by_url("--replay", options.replay, given or list(workers)),
                probe=not options.no_probe,
                headers=engine_headers(config),
                roles={url: Role(it.role) for url, it in workers.items()},
                nixl={url: it.nixl for url, it in workers.items() if it.nixl},
                config=config,
                admin=None if options.admin is None else worker_url(options.admin),
            ),
            rng=random.SystemRandom(),
            repeated=[url for url in urls if given.count(url) > 1],
        )
    )
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(as_document(report)), indent=2).decode())
    else:
        print(as_text(report, colour=wants_colour()))
    return exit_code(report)


def _workers(workers: Sequence[Worker], file: str | None) -> dict[str, Worker]:
    """By URL, those of the file of workers as well. Raises UserError."""
    found = list(workers)
    if file is not None:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
        found += read_lines(text, file) if is_lines(text) else load_workers(file)
    return {it.url.rstrip("/"): it for it in found}


def worker_url(text: str) -> str:
    """The normal form of a worker's URL. Raises UserError."""
    full = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(full)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"{text}: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise UserError(f"{text}: not an http:// or https:// URL")
    if parts.username or parts.password:
        raise UserError("a URL must not hold credentials; set the environment variable VLLM_API_KEY instead")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise UserError(f"{text}: give the server's address without a path")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{port}" if port is not None else f"{parts.scheme}://{shown}"


def _by_url(flag: str, endpoints: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    for endpoint in endpoints:
        where = urlsplit(endpoint.replace("*", "any"))
        try:
            valid = where.scheme == "ipc" or (where.scheme == "tcp" and bool(where.hostname) and where.port is not None)
        except ValueError:
            valid = False
        if not valid:
            raise UserError(f"{flag}: {endpoint} is not tcp://HOST:PORT or ipc://PATH")
        if flag == "--replay" and "*" in endpoint:
            raise UserError(f"{flag}: {endpoint}: give the engine's host, it listens for replays itself")
    if len(endpoints) == 1 and is_listening(endpoints[0]):
        return dict.fromkeys(given, endpoints[0])
    if endpoints and len(endpoints) != len(given):
        raise UserError(f"{flag} must be given once per URL ({len(given)}), not {len(endpoints)} times")
    return dict(zip(given, endpoints, strict=False))


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value
