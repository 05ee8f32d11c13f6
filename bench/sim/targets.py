"""`python -m bench trace targets`: the numbers this project sets itself, measured in simulated time.

By default with the strongest arms, least-load, and one seed; more where one would not decide (`Cell.seeds`). Every
target has a goal that does not depend on how the run comes out; one that is missed is reported like the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from bench.sim import grid
from bench.sim.ahead import Ahead
from bench.sim.arms import arms
from bench.sim.grid import Cell, Traces
from bench.sim.jobs import Jobs, cores, stopped_alike
from bench.sim.kept import Kept
from bench.sim.page import How, page
from bench.sim.reasons import WHY
from bench.sim.sweep import Sweep
from bench.sim.tables import CONTROLS, OURS
from bench.sim.validate import judged
from bench.sim.workloads.generated import CHAT, CODE

ATTAINED = 0.9
"""Goodput is the highest rate at which so many requests meet their objectives."""
FINE = 1.05
"""A rate is searched to within so much."""


class Target(msgspec.Struct, frozen=True):
    """`measured` is what `goal` speaks of; `why` it is missed, if it is and that is known."""

    name: str
    goal: str
    measured: float
    met: bool
    detail: str = ""
    why: str = ""


def at_least(name: str, goal: float, measured: float, text: str, detail: str = "") -> Target:
    return Target(name, f"{text} >= {goal:g}", measured, measured >= goal, detail)


def at_most(name: str, goal: float, measured: float, text: str, detail: str = "") -> Target:
    return Target(name, f"{text} <= {goal:g}", measured, measured <= goal, detail)


def conversation(sweep: Sweep, traces: Traces) -> Iterator[Target]:
    for speed, goal in ((1.0, 1.7), (1.5, 10.0)):
        cell = grid.conversation(traces, speed)
        ours, least, best = (sweep.figure(cell, arm, "ttft_mean_ms") for arm in (OURS, "least-load", "clairvoyant"))
        detail = f"{ours:.0f} ms against {least:.0f}"
        yield at_least(f"1 {cell.name}", goal, least / ours, "mean TTFT of least-load over ours", detail)
        text = "mean TTFT over the clairvoyant arm's"
        yield at_most(f"1 {cell.name}, clairvoyant", 1.1, ours / best, text, f"{ours:.0f} ms against {best:.0f}")


def shared_prefixes(sweep: Sweep, traces: Traces) -> Iterator[Target]:
    cell, late = grid.ladder(0.01), grid.ladder(1.0)
    ours, other = (sweep.figure(cell, arm, "output_tokens_per_s") for arm in (OURS, "random"))
    text = "tokens/s over random's"
    yield at_least("2 llm-d ladder", 1.8, ours / other, text, f"{ours:.0f} against {other:.0f}")
    for key, what in (("output_tokens_per_s", "tokens/s"), ("ttft_p90_ms", "TTFT p90")):
        now, then = (sweep.figure(each, OURS, key) for each in (cell, late))
        text = f"change of {what} with events 1 s late"
        yield at_most(f"2 llm-d ladder, {what} late", 0.1, abs(then / now - 1), text, f"{now:.0f} to {then:.0f}")
    for shuffled, goal in ((False, 1.9), (True, 1.5)):
        cell = grid.batch(shuffled)
        ours, other = (
            sweep.figure(cell, arm, "prompt_tokens_per_s") + sweep.figure(cell, arm, "output_tokens_per_s")
            for arm in (OURS, "round-robin")
        )
        text = "tokens/s over round-robin's"
        yield at_least(f"2 {cell.name}", goal, ours / other, text, f"{ours:.0f} against {other:.0f}")


def local_or_remote(sweep: Sweep, traces: Traces) -> Iterator[Target]:
    cells = [
        *(grid.sessions("chat", CHAT, rate) for rate in grid.CHAT_RATES),
        *(grid.sessions("code", CODE, rate) for rate in grid.CODE_RATES),
        *(grid.mixed(rate) for rate in grid.MIXED_RATES),
    ]
    won: dict[str, str] = {}
    for cell in cells:
        scores = {arm: sweep.score(cell, arm) for arm in sweep.rivals(cell)}
        ours = sweep.score(cell, OURS)
        best = max(scores, key=lambda arm: scores[arm])
        won |= {arm: cell.name for arm, score in scores.items() if ours > score}
        unit = "1/s" if sweep.keeps_slo(cell) else "SLO"
        detail = f"{ours:.3f} against {best}'s {scores[best]:.3f} ({unit})"
        yield at_least(f"3 {cell.name}", 0.95, ours / scores[best], "of the best other arm's metric", detail)
    unbeaten = sorted({arm for cell in cells for arm in sweep.rivals(cell)} - set(won))
    yield at_most("3 better than each somewhere", 0, len(unbeaten), "arms never beaten", ", ".join(unbeaten) or "none")
    for rate, goal in ((9, 0.96), (11, 0.88)):
        # Seeds differ by 0.2 here: three of them say nothing of a goal like this.
        cell = replace(grid.mixed(rate), seeds=grid.mixed(rate).all_seeds)
        met = sweep.figure(cell, OURS, "slo_share")
        seeds = len(sweep.runs(cell, OURS))
        yield at_least(f"3 {cell.name}, SLO", goal, met, "SLO attainment", f"{seeds} seeds")


def append_prefill(sweep: Sweep, traces: Traces) -> Iterator[Target]:
    for whole_kv in (False, True):
        cell, alone = grid.appends(whole_kv=whole_kv), grid.appends_alone(whole_kv=whole_kv)
        for key, what, goal in (("ttft_mean_ms", "TTFT", 0.35), ("tpot_mean_ms", "TPOT", 1.05)):
            ours, remote, least = (
                sweep.figure(each, arm, "groups", "later turns", key)
                for each, arm in ((cell, OURS), (cell, "always-remote"), (alone, "local"))
            )
            text = f"{what} of later turns over always-remote's"
            detail = f"{ours:.1f} ms against {remote:.1f}; with the fleet to themselves {least:.1f}"
            yield at_most(f"4 {cell.name}, {what}", goal, ours / remote, text, detail)


def goodput(sweep: Sweep, make: Callable[[float], Cell], arm: str, guess: float) -> float:
    """The highest rate, to within `FINE`, at which `ATTAINED` of the requests meet their objectives."""

    def attained(rate: float) -> bool:
        return sweep.figure(make(round(rate, 1)), arm, "slo_share") >= ATTAINED

    low = high = guess
    while attained(high):
        low, high = high, high * 1.25
    while low == high or not attained(low):
        low, high = low / 1.25, low
    while high / low > FINE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if attained(middle) else (low, middle)
    return low


def azure_goodput(sweep: Sweep, traces: Traces) -> Iterator[Target]:
    splits = ((1, 3), (2, 2), (3, 1))

    def best(arm: str) -> tuple[float, str]:
        rates = [partial(goodput, sweep, partial(grid.azure, traces, p, d), arm, 40.0) for p, d in splits]
        return max(zip(sweep.each(rates), (f"{p}P{d}D" for p, d in splits), strict=True))

    ours, how = best(OURS)
    static, static_how = best("always-remote")
    known, known_how = best("clairvoyant")
    (busy, split), p_d = max((grid.azure_ceiling(traces, p, d), f"{p}P{d}D") for p, d in splits)
    whole = goodput(sweep, lambda rate: grid.azure(traces, 1, 3, rate), "aggregated", 40.0)
    detail = (
        f"{ours:.1f}/s ({how}) against {static:.1f} ({static_how}); clairvoyant {known:.1f} ({known_how}); without a"
        f" pause on any engine {busy:.1f}, split {split:.1f} ({p_d})"
    )
    yield at_least("5 azure, static split", 1.3, ours / static, "goodput over the best static split's", detail)
    detail = f"{ours:.1f}/s ({how}) against {whole:.1f}"
    yield at_least("5 azure, aggregated", 1.1, ours / whole, "goodput over the aggregated fleet's", detail)


def churn(sweep: Sweep, traces: Traces) -> Iterator[Target]:
    even = sweep.figure(grid.hot("balanced"), OURS, "ttft_p99_ms")
    for kind in ("hotspot", "shift", "restart", "loss"):
        cell = grid.hot(kind)
        p99 = sweep.figure(cell, OURS, "ttft_p99_ms")
        yield at_most(f"6 {kind}", 2.0, p99 / even, "p99 TTFT over the balanced load's", f"{p99:.0f} ms, {even:.0f}")
        wrong = sweep.figure(cell, OURS, "wrong_after_fault")
        yield at_most(f"6 {kind}, wrong placements", 0.01, wrong, "share 5 s after the fault")


def robustness(sweep: Sweep, traces: Traces) -> Iterator[Target]:
    for kind, known in (
        ("priors/3", "known"),
        ("priors*3", "known"),
        ("mixed-gpus", "mixed-gpus told"),
        ("slow", "slow told"),
        ("slowed", "slow told"),
    ):
        cell, good = grid.robust(kind), grid.robust(known)
        ours, best = (sweep.figure(each, OURS, "settled", "slo_share") for each in (cell, good))
        text = "of the well-calibrated run's SLO attainment"
        yield at_least(f"7 {kind}", 0.9, ours / best if best else 1.0, text, f"{ours:.3f} against {best:.3f}")
    for n in range(3):
        cell = grid.robust(f"broken{n}")
        ours, other = (sweep.figure(cell, arm, "slo_share") for arm in (OURS, "least-load"))
        text = "SLO attainment less least-load's"
        yield at_least(f"7 broken fit {n}", 0.0, ours - other, text, f"{ours:.3f} against {other:.3f}")


GROUPS: dict[str, Callable[[Sweep, Traces], Iterator[Target]]] = {
    "1": conversation,
    "2": shared_prefixes,
    "3": local_or_remote,
    "4": append_prefill,
    "5": azure_goodput,
    "6": churn,
    "7": robustness,
}


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 0 whether or not they are met, 130 when stopped."""
    parser = argparse.ArgumentParser(prog="python -m bench trace targets", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="all arms and seeds: hours, not a quarter of one")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--only", metavar="N,..", default=",".join(GROUPS), help="these targets (1 to 7)")
    parser.add_argument("--jobs", type=int, metavar="N", default=cores(), help="processes (default: as many as CPUs)")
    parser.add_argument("--cache", type=Path, metavar="FILE", help="keep finished runs there, and use those of before")
    parser.add_argument("--mooncake", type=Path, metavar="FILE", help="conversation_trace.jsonl; else one like it")
    parser.add_argument("--azure", type=Path, metavar="FILE", help="AzureLLMInferenceTrace_conv.csv; else one like it")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write all tables there, with the validation's")
    parser.add_argument("--verbose", action="store_true", help="a line for each run, on standard error")
    options = parser.parse_args(args)
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in GROUPS]:
        parser.error(f"no target {unknown[0]!r}; there is: {', '.join(GROUPS)}")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: there must be at least one")
    try:
        with stopped_alike():
            return _judge(options, chosen)
    except (OSError, ValueError) as exc:
        told = f"{exc.filename or 'system'}: {exc.strerror or exc}" if isinstance(exc, OSError) else str(exc)
        print(f"bench trace targets: error: {told}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        how = f"; what is finished is in {options.cache}, the same command goes on from there" if options.cache else ""
        print(f"stopped{how}", file=sys.stderr)
        return 130


def _judge(options: argparse.Namespace, chosen: Sequence[str]) -> int:
    began_s = time.monotonic()
    traces = Traces(options.mooncake, options.azure)
    # What is wrong with a file is to be known now, not after the first hours.
    if options.mooncake:
        traces.conversation(0, 0)
    if options.azure:
        traces.lengths(0, 0)
    if options.markdown:
        options.markdown.open("a").close()
    arms()  # Loads all that a run needs, so that no later edit gets into runs that are kept as this code's.
    found: list[Target] = []
    with Jobs(options.jobs) as jobs:
        told = _tell if options.verbose else lambda line: None
        sweep = Ahead(jobs, Kept(options.cache, traces), full=options.full, told=told)
        askers = {name: partial(_ask, GROUPS[name], sweep, traces) for name in chosen}
        for name, worked in sweep.work(askers):
            found += worked.answer
            for target in worked.answer:
                print(f"{'met ' if target.met else 'MISS'} {target.name}: {_text(target)}")
            took = f"{worked.runs} runs, {worked.cpu_s:.0f} s of CPU, there after {worked.done_s:.0f} s"
            print(f"     {name} ({GROUPS[name].__name__}): {took}", flush=True)
        met, wall_s = sum(target.met for target in found), time.monotonic() - began_s
        print(
            f"{met} of {len(found)} met; {sweep.cpu_s:.0f} s of CPU in {len(sweep.cells)} cells,"
            f" {wall_s:.0f} s with {options.jobs} processes ({sweep.found} of {sweep.made} runs from the cache)"
        )
        if options.markdown:
            how = How(chosen if set(chosen) != set(GROUPS) else (), options.full, options.mooncake, options.azure)
            options.markdown.write_text(page(sweep, found, how, list(judged(jobs))), encoding="utf-8")
    if options.json:
        rows = [msgspec.to_builtins(target) for target in found]
        sums = {"met": met, "cpu_s": round(sweep.cpu_s), "wall_s": round(wall_s), "jobs": options.jobs}
        print(json.dumps({"targets": rows, **sums}))
    return 0


def _ask(group: Callable[[Sweep, Traces], Iterator[Target]], sweep: Ahead, traces: Traces) -> list[Target]:
    """A group's targets; also what the tables show. In full all arms where arms are compared, else the plainest two; by
    default the plainest where arms are compared.
    """
    found = [explained(target) for target in group(sweep, traces)]
    tabled = {cell.name for cell in grid.all_cells(traces)}
    shown = [
        (cell, sweep.arms(cell) if name in tabled else CONTROLS) if sweep.full else (cell, CONTROLS[:1])
        for name, cell in list(sweep.asked.items())
        if name in tabled or (sweep.full and OURS in sweep.run_arms(cell))
    ]
    sweep.each(partial(sweep.need, cell, names) for cell, names in shown)
    return found


def explained(target: Target) -> Target:
    return target if target.met else msgspec.structs.replace(target, why=WHY.get(target.name, ""))


def _text(target: Target) -> str:
    detail = f" ({target.detail})" if target.detail else ""
    return f"{target.measured:.3f}; {target.goal}{detail}{f'. {target.why}' if target.why else ''}"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
