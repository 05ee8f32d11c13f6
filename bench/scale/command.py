"""`python -m bench scale`: what changes with size.

`quality`: the planner that serves as 1, 2, 4 and 8 replicas behind a balancer, which share what they have in flight or
do not, on llm-d's ladder in simulated time; one and the most also on chats with prefill and decode apart. Medians over
seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bench.scale import cells, exchange, quality, replicas
from bench.scale.exchange import Settings
from bench.scale.replicas import BALANCES
from bench.sim.ahead import Ahead
from bench.sim.arms import arms
from bench.sim.grid import Traces
from bench.sim.jobs import Jobs, cores, stopped_alike
from bench.sim.kept import Kept

_SEEDS = 3


class Found(msgspec.Struct):
    """What a part came to. `figures`: one number each; `targets`: name, goal, measured, met."""

    lines: list[str]
    figures: dict[str, float]
    targets: list[dict[str, Any]]


def measure_quality(options: argparse.Namespace) -> Found:
    settings = Settings(
        interval_s=options.interval_ms / 1000,
        ttl_s=options.ttl_s,
        delay_s=options.delay_ms / 1000,
        loss=options.loss,
    )
    asked = [
        make(options.replicas, options.seeds, settings, options.balance, quick=options.quick)
        for make in (cells.ladder, cells.chats)
    ]
    arms()  # Loads all that a run needs, so that no later edit gets into runs that are kept as this code's.
    with Jobs(options.jobs) as jobs:
        told = partial(print, file=sys.stderr, flush=True) if options.verbose else lambda line: None
        sweep = Ahead(jobs, Kept(options.cache, Traces(), also=(cells, exchange, replicas)), told=told)

        def ask(cell: cells.Replicated) -> Found:
            sweep.need(cell, cell.arms)
            head = f"{cell.name}; medians of {len(sweep.seeds(cell))} seeds"
            return Found(
                [head, "", *quality.lines(sweep, cell)], quality.figures(sweep, cell), quality.targets(sweep, cell)
            )

        parts = [worked.answer for _, worked in sweep.work({cell.name: partial(ask, cell) for cell in asked})]
    return Found(
        [line for part in parts for line in part.lines],
        {key: value for part in parts for key, value in part.figures.items()},
        [target for part in parts for target in part.targets],
    )


PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {"quality": measure_quality}
"""Each takes the options; its figures and targets are named so that they are told apart from other parts'."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench scale", description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--quick", action="store_true", help="a few seconds of load (figures are not comparable)")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--replicas", type=_counts, default=quality.COUNTS, metavar="N,N", help="numbers of replicas")
    parser.add_argument("--seeds", type=_count, help=f"runs of each ({_SEEDS}; with --quick 1)")
    parser.add_argument("--balance", choices=BALANCES, default="random", help="which replica gets a request")
    told = Settings()
    parser.add_argument("--interval-ms", type=_amount, default=1000 * told.interval_s, help="redis.interval_ms")
    parser.add_argument("--ttl-s", type=_amount, default=told.ttl_s, help="redis.ttl_s")
    parser.add_argument("--delay-ms", type=_amount, default=1000 * told.delay_s, help="of a message between replicas")
    parser.add_argument("--loss", type=_share, default=0.0, help="share of messages that each replica misses")
    parser.add_argument("--jobs", type=_count, metavar="N", default=cores(), help="processes (default: one per CPU)")
    parser.add_argument("--cache", type=Path, metavar="FILE", help="keep finished runs there, and use those of before")
    parser.add_argument("--verbose", action="store_true", help="a line for each run, on standard error")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def _counts(text: str) -> list[int]:
    return sorted({_count(part) for part in text.split(",")})


def _amount(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no share of all, from 0 to below 1")
    return value


def main(args: Sequence[str]) -> int:
    """Exit code 0 also where a target is missed; 2 for what cannot be run."""
    options = _parser().parse_args(args)
    options.seeds = options.seeds or (1 if options.quick else _SEEDS)
    found: dict[str, Found] = {}
    try:
        with stopped_alike():
            for name, measure in PARTS.items():
                if options.only in (None, name):
                    found[name] = measure(options)
                    print("\n".join(found[name].lines), flush=True)
    except OSError as exc:
        print(f"bench scale: error: {exc.filename or 'system'}: {exc.strerror or exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        how = f"; what is finished is in {options.cache}, the same command goes on from there" if options.cache else ""
        print(f"stopped{how}", file=sys.stderr)
        return 130
    judged = [target for part in found.values() for target in part.targets]
    for target in judged:
        verdict = {True: "met ", False: "MISS", None: "none"}[target["met"]]
        print(f"{verdict} {target['name']}: {target['measured']} (goal {target['goal']})")
    if options.json:
        figures = {key: value for part in found.values() for key, value in part.figures.items()}
        print(json.dumps({"bench": "scale", "figures": figures, "targets": judged}))
    return 0
