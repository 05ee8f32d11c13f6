"""`python -m bench trace validate [--json]`: the simulator against measurements, table by table.

A median may be 15 % off and a p99 30 %. A figure that is further off is listed; its table says why, where that is
known. For the mixed load, of which there was one run of 20 s per row, it is enough if the measurement lies within what
different seeds give; how many figures need that is said.

Not all of it is a test. Fitted to these same tables were: the step and prefill constants (decode step, idle TTFT), the
pull's (aged caches), how long the streams were watched (the p50 of 32,768 in chunks of 1024 and the p99 of 8,192 remote
depend on it), the mixed load's answer length (its ITL p50); that a short chunk costs no floor behind a long one was
learned from the suffixes. Nothing was fitted to the stalls' p99 of local prefills, the chunk sizes' p99 and TTFT, the
queue at P, and the mixed load's TTFTs, ITL p99, TPOT and SLO shares.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.sim import measured
from bench.sim.arms import arm
from bench.sim.engine import Pace
from bench.sim.fleet import FleetSpec, servers
from bench.sim.record import Record
from bench.sim.report import gap_percentiles, percentile
from bench.sim.scripted import Line, named, play
from bench.sim.transfers import NVLINK, NVLINK_FRESH, Link
from bench.sim.workloads.generated import Mixed
from bench.sim.world import World

MEDIAN, TAIL = 0.15, 0.30
SEEDS = 8


class Figure(NamedTuple):
    """One cell of a table, in ms or as a share. `spread`: the least and the most that single seeds gave."""

    row: str
    column: str
    measured: float
    simulated: float
    tolerance: float
    spread: tuple[float, float] | None = None

    @property
    def deviation(self) -> float:
        return self.simulated / self.measured - 1

    @property
    def close(self) -> bool:
        return abs(self.deviation) <= self.tolerance

    @property
    def within(self) -> bool:
        return self.close or (self.spread is not None and self.spread[0] <= self.measured <= self.spread[1])


@dataclass(frozen=True, slots=True)
class Table:
    """`why` explains the figures that are off."""

    name: str
    figures: Callable[[], Iterator[Figure]]
    why: str = ""


def _pair(link: Link, chunk_tokens: int = 0) -> FleetSpec:
    return FleetSpec(servers("h200-7b", prefill=1, decode=1, chunk_tokens=chunk_tokens), link=link)


def _ms(record: Record) -> float:
    return 1000 * record.ttft_s


_MEET = Line(0.0, ((1, 300),), "d0", "p0")
"""The pair's first contact, not to be measured."""


def idle() -> Iterator[Figure]:
    for n, (local, remote) in measured.IDLE_TTFT.items():
        run = play(_pair(NVLINK_FRESH), [_MEET, Line(5, ((2, n),), "d0"), Line(10, ((3, n),), "d0", "p0")])
        yield Figure(f"{n}", "local", local, _ms(run.records[1]), MEDIAN)
        yield Figure(f"{n}", "remote", remote, _ms(run.records[2]), MEDIAN)


def suffix() -> Iterator[Figure]:
    for held, rows in measured.SUFFIX_TTFT.items():
        for m, (local, cold, warm) in rows.items():
            row = f"{held} + {m}"
            prefix, whole = ((2, held),), ((2, held), (3, m))
            on_d, on_both = Line(5, prefix, "d0"), Line(5, prefix, "d0", "p0")
            for column, figure, before, prefill in (
                ("local", local, on_d, None),
                ("remote, P cold", cold, on_d, "p0"),
                ("remote, P warm", warm, on_both, "p0"),
            ):
                run = play(_pair(NVLINK_FRESH), [_MEET, before, Line(15, whole, "d0", prefill)])
                yield Figure(row, column, figure, _ms(run.records[2]), MEDIAN)


_BESIDE_S = 0.045
"""The streams were watched from so long before the long prompt was sent until so long after its first token. It was not
written down; this is what makes more than half of the gaps long where 32,768 tokens went in chunks of 1024 (at 0.15 s
that p50 would be 5.6, and the p99 beside 8,192 remote 8 instead of 17).
"""


def _stalled(link: Link, chunk: int, n: int, prefill: str | None) -> tuple[float, float, float]:
    """(p50, p99) of 16 streams' gaps around a prompt of `n`, and its TTFT."""
    streams = [Line(1, ((10 + i, 512),), "d0", None, 600, "stream") for i in range(16)]
    sent_s = 2.5
    lines = [_MEET, *streams, Line(sent_s, ((2, n),), "d0", prefill, 1, "long")]
    run = play(_pair(link, chunk), lines)
    own = named(run, "long")[0]
    pace = run.engines["d0"].pace
    gaps = sorted(_window(pace, named(run, "stream")[0], sent_s - _BESIDE_S, (own.first_s or 0.0) + _BESIDE_S))
    return 1000 * percentile(gaps, 0.5), 1000 * percentile(gaps, 0.99), _ms(own)


def _window(pace: Pace, stream: Record, from_s: float, to_s: float) -> Iterator[float]:
    """The gaps that ended in that time; all streams have the same."""
    at_s = stream.last_s - sum(pace.steps_s[-(stream.output_tokens - 1) :])
    for step_s in pace.steps_s[-(stream.output_tokens - 1) :]:
        at_s += step_s
        if from_s <= at_s <= to_s:
            yield step_s


def stalls() -> Iterator[Figure]:
    for (n, remote), (p50, p99, ttft) in measured.STALLS.items():
        found = _stalled(NVLINK, 8192, n, "p0" if remote else None)
        row = f"{n} {'remote' if remote else 'local'}"
        yield Figure(row, "ITL p50", p50, found[0], MEDIAN)
        yield Figure(row, "ITL p99", p99, found[1], TAIL)
        yield Figure(row, "its TTFT", ttft, found[2], MEDIAN)


def chunks() -> Iterator[Figure]:
    for (chunk, n), (p50, p99, ttft) in measured.CHUNKS.items():
        found = _stalled(NVLINK, chunk, n, None)
        row = f"{n} in chunks of {chunk}"
        yield Figure(row, "ITL p50", p50, found[0], MEDIAN)
        yield Figure(row, "ITL p99", p99, found[1], TAIL)
        yield Figure(row, "its TTFT", ttft, found[2], MEDIAN)


def steps() -> Iterator[Figure]:
    for (streams, context), p50 in measured.STEPS.items():
        spec = _pair(NVLINK)
        # Long enough that none ends while the others' prompts are computed.
        answer = 400 + round(streams * context * 25e-6 / 0.006)
        lines = [Line(0, ((i, context),), "d0", None, answer, "stream") for i in range(streams)]
        run = play(spec, lines)
        began_s = max(record.first_s or 0.0 for record in run.records)
        gaps = sorted(_window(run.engines["d0"].pace, run.records[0], began_s, began_s + 1.5))
        yield Figure(f"{streams} x {context}", "ITL p50", p50, 1000 * percentile(gaps, 0.5), MEDIAN)


def prefill_queue() -> Iterator[Figure]:
    for k, stages in measured.PREFILL_QUEUE.items():
        run = play(_pair(NVLINK), [_MEET, *(Line(5, ((10 + i, 8192),), "d0", "p0", 1, "long") for i in range(k))])
        for i, (stage, record) in enumerate(zip(stages, named(run, "long"), strict=True)):
            yield Figure(f"{k} at once", f"stage {i + 1}", stage, 1000 * (record.prefill_s or 0.0), MEDIAN)


def pull_queue() -> Iterator[Figure]:
    for k, leg in measured.PULL_QUEUE.items():
        # P holds the prompts already, so all of them are ready at nearly the same time.
        prompts = [((10 + i, 8193),) for i in range(k)]
        fill = [Line(1 + i, prompt, "p0") for i, prompt in enumerate(prompts)]
        run = play(_pair(NVLINK), [_MEET, *fill, *(Line(20, it, "d0", "p0", 1, "long") for it in prompts)])
        legs = [1000 * (record.ttft_s - (record.prefill_s or 0.0)) for record in named(run, "long")]
        yield Figure(f"{k} at once", "longest decode leg", leg, max(legs), MEDIAN)


def aged() -> Iterator[Figure]:
    for n, (ttft, leg) in measured.AGED_TTFT.items():
        run = play(_pair(NVLINK), [_MEET, Line(5, ((2, n),), "d0", "p0")])
        record = run.records[1]
        yield Figure(f"{n}", "remote TTFT", ttft, _ms(record), MEDIAN)
        yield Figure(f"{n}", "decode leg", leg, _ms(record) - 1000 * (record.prefill_s or 0.0), MEDIAN)


_MIXED_ARMS = {"agg": "round-robin", "disagg": "always-remote", "cond": "threshold-1024"}


def mixed() -> Iterator[Figure]:
    for (rate, policy), figures in measured.MIXED.items():
        apart = policy != "agg"
        spec = FleetSpec(servers("h200-7b", both=0 if apart else 2, prefill=int(apart), decode=int(apart)))
        runs = [
            World(spec, arm(_MIXED_ARMS[policy]), Mixed(seed, rate=rate), seed=seed).run().records
            for seed in range(SEEDS)
        ]
        everything = [record for run in runs for record in run]
        names = ("TTFT p50 short", "TTFT p50 long", "ITL p50", "ITL p99", "TPOT p95", "SLO met")
        singles = [_mixed_figures(run) for run in runs]
        whole = _mixed_figures(everything)
        for i, (name, figure) in enumerate(zip(names, figures, strict=True)):
            spread = min(it[i] for it in singles), max(it[i] for it in singles)
            tolerance = TAIL if "p9" in name else MEDIAN
            yield Figure(f"{rate}/s {policy}", name, figure, whole[i], tolerance, spread)


def _mixed_figures(records: Sequence[Record]) -> tuple[float, ...]:
    ttfts = [
        1000 * percentile(sorted(record.ttft_s for record in records if record.group == group), 0.5)
        for group in ("short", "long")
    ]
    p50, p99 = gap_percentiles(records, (0.5, 0.99))
    tpot = percentile(sorted(record.tpot_s for record in records), 0.95)
    return (*ttfts, 1000 * p50, 1000 * p99, 1000 * tpot, sum(record.met() for record in records) / len(records))


TABLES: Sequence[Table] = (
    Table("idle TTFT", idle),
    Table(
        "suffix TTFT",
        suffix,
        "8192 + 1024 with P warm: the measured row stands out by itself (67 ms over local; its neighbours 38 and 56).",
    ),
    Table(
        "16 streams beside a long prefill",
        stalls,
        "32,768 remote: two of some 270 gaps are long in the simulator, less than 1 %. Measured were more, of 14 ms, "
        "perhaps while D's API process read the 32k body (/tokenize of 32k alone: p99 8), which is not modelled.",
    ),
    Table(
        "chunk size",
        chunks,
        "Chunks of 1024 are steps at the floor: 42 ms, fitted to idle TTFTs, where 32..36 were seen beside streams. At "
        "32,768 they measured single steps of 102..109 ms where the chunk at full prefix computes 60: not explained.",
    ),
    Table("decode step", steps),
    Table("queue at P", prefill_queue),
    Table("pull queue at D", pull_queue),
    Table("aged caches", aged),
    Table(
        "mixed load",
        mixed,
        "Short prompts and answers were not written down (64..1000 and 128 are deduced). At 3/s about 1 % of the gaps "
        "stand beside a prefill or a pull, so p99 lies on the knee between two kinds of step (agg, 60 other seeds: "
        "6..59). Long prompts at 6/s took less than at 3/s (364, 467): a draw that light came up in one of 60 seeds, "
        "so this is not explained. Every prefill remote at 3/s: higher than simulated whatever the seed, perhaps as "
        "text is tokenised again on D by the process that streams, which is not modelled.",
    ),
)


def main(args: Sequence[str]) -> int:
    """Exit code 0, or 1 when a figure is off and its table does not say why."""
    parser = argparse.ArgumentParser(prog="python -m bench trace validate", description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--table", action="append", help="only tables whose name contains this")
    options = parser.parse_args(args)
    out: list[dict[str, Any]] = []
    for table in TABLES:
        if options.table and not any(part in table.name for part in options.table):
            continue
        figures = list(table.figures())
        good = sum(figure.within for figure in figures)
        close = sum(figure.close for figure in figures)
        print(
            f"\n{table.name}: {close} of {len(figures)} within tolerance, {good - close} more within the seeds' spread"
        )
        for it in figures:
            spread = "" if it.spread is None else f"  seeds {it.spread[0]:.4g}..{it.spread[1]:.4g}"
            print(
                f"  {it.row:<28} {it.column:<18} measured {it.measured:>8.4g}  simulated {it.simulated:>8.4g}"
                f"  {it.deviation:>+7.1%}{'' if it.close else '  spread' if it.within else '  OFF'}{spread}",
                flush=True,
            )
        if good < len(figures) and table.why:
            print(f"  {table.why}")
        rows = [it._asdict() | {"deviation": round(it.deviation, 4), "within": it.within} for it in figures]
        out.append({"table": table.name, "close": close, "within": good, "figures": rows, "why": table.why})
    if options.json:
        print(json.dumps({"tables": out}))
    return 1 if any(it["within"] < len(it["figures"]) and not it["why"] for it in out) else 0
