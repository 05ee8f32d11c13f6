"""`warmroute demo`: which of the two comparisons, and what to do next."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from bench.demo import reuse, split


def main(args: Sequence[str]) -> int:
    """Exit code 0, or 1 when a request failed."""
    parser = argparse.ArgumentParser(
        prog="warmroute demo",
        description="The real gateway over four fake engines on this machine, one policy after the other.",
    )
    parser.add_argument("--pd", action="store_true", help="1 prefill and 3 decode engines: where prompts are computed")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(args)
    figures, failed = (split if options.pd else reuse).compare(options.seed, quiet=options.json)
    if options.json:
        print(json.dumps(figures))
    return 1 if failed else 0
