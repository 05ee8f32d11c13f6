"""`python -m bench scale`: what changes with size.

`quality`: the planner that serves as 1, 2, 4 and 8 replicas behind a balancer, which share what they have in flight or
do not, on llm-d's ladder in simulated time; one and the most also on chats with prefill and decode apart. Medians over
seeds.

The others are real processes and one fleet of made-up workers that hold much and publish it as vLLM does. `start`: an
indexer that starts by replay, a gateway that starts from the indexer's snapshot. `steady`: what following costs while
blocks come and go. `fanout`: what one more watcher costs the indexer. `match`: prompts looked up over gRPC, beside
`dynamo.indexer` over the same events with --peers-venv. `redis`: a gateway that starts from what Redis keeps.

`sizes`: what to run at which size, computed from what --keep has kept of an earlier run of those parts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bench.scale import cells, exchange, index, kept, quality, replicas, sizes, tables
from bench.scale.exchange import Settings
from bench.scale.held import Held
from bench.scale.judged import judge
from bench.scale.replicas import BALANCES
from bench.sim.ahead import Ahead
from bench.sim.arms import arms
from bench.sim.grid import Traces
from bench.sim.jobs import Jobs, cores, stopped_alike
from bench.sim.kept import Kept

_SEEDS = 3


Part = Callable[[argparse.Namespace, index.Shared], "Found"]


class Found(msgspec.Struct):
    """What a part came to. `figures`: one number each; `targets`: name, goal, measured, met."""

    lines: list[str]
    figures: dict[str, float]
    targets: list[dict[str, Any]]


def measure_quality(options: argparse.Namespace, shared: index.Shared) -> Found:
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


def _of_index(measure: Callable[[index.Shared], dict[str, float]]) -> Part:
    def part(options: argparse.Namespace, shared: index.Shared) -> Found:
        figures = measure(shared)
        lines = [f"{name:<36} {value:>14,.3f}" for name, value in figures.items()]
        return Found(lines, figures, judge(figures))

    return part


def compute_sizes(options: argparse.Namespace, shared: index.Shared) -> Found:
    load = sizes.Load(requests_per_s=options.gpu_requests, new_tokens_per_s=options.gpu_tokens)
    figures = kept.read(options.figures)
    told = f"Measured on {kept.told(options.figures)}."
    return Found([*tables.lines(figures), told, "", *sizes.lines(figures, load)], {}, [])


PARTS: dict[str, Part] = {
    "quality": measure_quality,
    "start": _of_index(index.starts),
    "steady": _of_index(index.steady),
    "fanout": _of_index(index.fanout),
    "match": _of_index(index.matches),
    "redis": _of_index(index.redis),
    "sizes": compute_sizes,
}
"""Each takes the options and what parts share; its figures are named so that they are told apart from other parts'."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench scale", description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--quick", action="store_true", help="a few seconds of load (figures are not comparable)")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part, or several if given again")
    parser.add_argument("--replicas", type=_counts, default=quality.COUNTS, metavar="N,N", help="numbers of replicas")
    parser.add_argument("--seeds", type=_count, help=f"runs of each ({_SEEDS}; with --quick 1)")
    parser.add_argument("--balance", choices=BALANCES, default="random", help="which replica gets a request")
    told = Settings()
    parser.add_argument("--interval-ms", type=_amount, default=1000 * told.interval_s, help="redis.interval_ms")
    parser.add_argument("--ttl-s", type=_amount, default=told.ttl_s, help="redis.ttl_s")
    parser.add_argument("--delay-ms", type=_amount, default=1000 * told.delay_s, help="of a message between replicas")
    parser.add_argument("--loss", type=_share, default=0.0, help="share of messages that each replica misses")
    fleet, how = Held(), index.Options(held=Held())
    parser.add_argument("--workers", type=_count, help=f"of the made-up fleet ({fleet.workers}; with --quick 32)")
    parser.add_argument("--blocks", type=_count, help=f"of each worker ({fleet.blocks}; with --quick 2000)")
    parser.add_argument("--sharers", type=_count, default=fleet.sharers, help="workers with the same beginning")
    parser.add_argument("--prompt-blocks", type=_count, default=fleet.prompt_blocks, help="half of them shared")
    parser.add_argument("--rate", type=_amount, default=how.rate, help="blocks stored or removed a second")
    parser.add_argument("--seconds", type=_amount, help=f"of each measurement ({how.seconds:g}; with --quick 1)")
    parser.add_argument("--clients", type=_count, default=how.clients, help="of several that ask at once")
    parser.add_argument("--followers", type=_count, default=how.followers, help="watchers beside none")
    parser.add_argument("--peers-venv", type=Path, metavar="DIR", help="an environment with ai-dynamo-runtime in it")
    load = sizes.Load()
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the figures there, for sizes")
    parser.add_argument("--figures", type=Path, metavar="FILE", default=kept.MEASURED, help="what sizes goes by")
    parser.add_argument("--gpu-requests", type=_amount, default=load.requests_per_s, help="a second, for sizes")
    parser.add_argument("--gpu-tokens", type=_amount, default=load.new_tokens_per_s, help="computed a second, likewise")
    parser.add_argument("--jobs", type=_count, metavar="N", default=cores(), help="processes (default: one per CPU)")
    parser.add_argument("--cache", type=Path, metavar="FILE", help="keep finished runs there, and use those of before")
    parser.add_argument("--verbose", action="store_true", help="a line for each run, on standard error")
    return parser


def _of_fleet(options: argparse.Namespace) -> index.Options:
    quick = options.quick
    held = Held(
        workers=options.workers or (32 if quick else Held().workers),
        blocks=options.blocks or (2000 if quick else Held().blocks),
        sharers=options.sharers,
        prompt_blocks=options.prompt_blocks,
    )
    told = partial(print, file=sys.stderr, flush=True) if options.verbose else lambda line: None
    return index.Options(
        held=held,
        rate=options.rate,
        seconds=options.seconds or (1.0 if quick else 10.0),
        clients=options.clients,
        followers=options.followers,
        peers=None if options.peers_venv is None else options.peers_venv / "bin" / "python",
        told=told,
    )


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
    figures: dict[str, float] = {}
    used = {"machine": kept.machine(), "arguments": list(args)}
    try:
        with stopped_alike(), ExitStack() as stack:
            shared = stack.enter_context(index.Shared(_of_fleet(options)))
            for name, measure in PARTS.items():
                if not options.only or name in options.only:
                    found[name] = measure(options, shared)
                    print("\n".join(found[name].lines), flush=True)
                    figures |= found[name].figures
                    if options.keep is not None:
                        kept.write(options.keep, name, found[name].figures, used)
    except OSError as exc:
        print(f"bench scale: error: {exc.filename or 'system'}: {exc.strerror or exc}", file=sys.stderr)
        return 2
    except KeyError as exc:
        print(f"bench scale: error: {options.figures} has no figure {exc}: measure it with --keep", file=sys.stderr)
        return 2
    except (RuntimeError, ValueError) as exc:
        print(f"bench scale: error: {exc}", file=sys.stderr)
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
        print(json.dumps({"bench": "scale", "figures": figures, "targets": judged}))
    return 0
