"""`python -m bench proxy`: routers by themselves on one core, ours with its whole decision on.

CPU time of each router's process tree per finished request and per streamed chunk, latency against no router at all,
requests per second, success, memory. Medians of interleaved rounds. docs/proxy-benchmark.md says how and what it shows.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.proxy import page, prompts, report
from bench.proxy.measure import cases
from bench.proxy.routers import PINS
from bench.proxy.session import Plan, measure, named

_CONCURRENCIES = (1, 32, 256)
_QUICK_BODIES = (32, 8)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench proxy", description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--quick", action="store_true", help="one short round (figures are not comparable)")
    parser.add_argument("--rounds", type=int, help="rounds over all routers (5; with --quick 1)")
    parser.add_argument("--duration", type=float, help="seconds of one sample (0.5; with --quick 0.2)")
    parser.add_argument("--concurrency", help=f"comma-separated; the middle one is judged {_CONCURRENCIES}")
    parser.add_argument("--only", help="cases whose names contain one of these, comma-separated (2kb,64kb_c32,sse)")
    parser.add_argument("--routers", help="those whose names contain one of these, comma-separated (direct,ours,vllm)")
    parser.add_argument("--peers-venv", metavar="PATH", help="a virtual environment with the peers (else PATH)")
    parser.add_argument("--against", metavar="DIR", help="measure the gateway of another checkout too")
    parser.add_argument("--nice", type=int, help="niceness of all that is started; below 0 needs the right to")
    parser.add_argument("--samples", metavar="FILE", help="add the samples to those in FILE, and show them all")
    parser.add_argument("--markdown", metavar="FILE", help="write the page docs/proxy-benchmark.md")
    parser.add_argument("--install-peers", metavar="DIR", help="make such an environment and end")
    return parser


def install_peers(folder: str) -> int:
    """A virtual environment with the peers; they are never dependencies of ours."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)  # noqa: S603
    pip = [f"{folder}/bin/pip", "install", *(f"{name}=={version}" for name, version in PINS.items())]
    return subprocess.run(pip, check=False).returncode  # noqa: S603


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.install_peers:
        return install_peers(args.install_peers)
    numbers = args.concurrency.split(",") if args.concurrency else _CONCURRENCIES
    concurrencies = sorted({int(number) for number in numbers})
    judged = concurrencies[len(concurrencies) // 2]
    n_small, n_large = _QUICK_BODIES if args.quick else (prompts.N_SMALL, prompts.N_LARGE)
    plan = Plan(
        cases=[
            case
            for case in cases(concurrencies, args.duration or (0.2 if args.quick else 0.5))
            if named(case.name, args.only)
        ],
        rounds=args.rounds or (1 if args.quick else 5),
        routers=args.routers,
        bin_folder=f"{args.peers_venv}/bin" if args.peers_venv else None,
        against=None if args.against is None else Path(args.against).resolve(),
        samples=None if args.samples is None else Path(args.samples),
        n_small=n_small,
        n_large=n_large,
    )
    if not plan.cases:
        print(f"bench: error: no case is named like {args.only!r}", file=sys.stderr)
        return 2
    if not hasattr(os, "sched_setaffinity"):
        print(
            "bench: error: processes are pinned and their CPU clocks read, which needs Linux",
            file=sys.stderr,
        )
        return 2
    if args.nice:
        os.nice(args.nice)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # So that what was started is stopped.
    run = measure(plan)
    targets = report.targets(run, judged)
    report.show(run, targets)
    if args.markdown:
        Path(args.markdown).write_text(page.page(run, targets), encoding="utf-8")
    if args.json:
        found = {"bench": "proxy", "figures": report.flat(run), "missing": run.missing, "targets": targets}
        print(json.dumps(found))
    return 0
