"""`python -m bench indexer`: the index as a service, on one machine.

An indexer of 64 made-up workers with 20,000 blocks each in one process; in another one questions of 2,048 blocks over a
Unix socket and over TCP, and a copy that follows 100,000 blocks a second, and as many as there can be. CPU time is told
per block, apart for taking events in, for telling of changes, and for the copy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench indexer", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--workers", type=int, default=64, metavar="N")
    parser.add_argument("--blocks", type=int, default=20_000, metavar="N", help="of each worker")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="of each measurement")
    options = parser.parse_args(args)
    command = [sys.executable, "-m", "gateway.measure", "indexer", str(options.workers), str(options.blocks)]
    done = subprocess.run([*command, str(options.seconds)], stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    if done.returncode:
        print("bench: error: the measurement failed, as above", file=sys.stderr)
        return 1
    measured = json.loads(done.stdout)
    if options.json:
        print(json.dumps(measured))
        return 0
    for name, value in measured["figures"].items():
        print(f"{name:<40} {value:>14,.2f}")
    return 0
