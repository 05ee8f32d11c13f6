"""The simulator beside the mixed load, of which there was one run of 20 s per rate, the same requests for each policy.

Which requests those were is not known, but how many: simulated are draws of as many. Short prompts and answers were not
written down (64 to 1000 and 128 tokens are deduced: the answers from the ITL p50); nothing else here was fitted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, islice
from typing import Final, NamedTuple

from bench.sim import measured
from bench.sim.arms import arm
from bench.sim.figure import MEDIAN, TAIL, Figure
from bench.sim.fleet import FleetSpec, servers
from bench.sim.jobs import Jobs
from bench.sim.record import Record, gap_of
from bench.sim.report import gap_percentiles, percentile
from bench.sim.workloads.generated import Mixed
from bench.sim.world import World

DRAWS: Final = 150
NAMES: Final = (
    "TTFT p50 short", "TTFT p95 short", "TTFT p50 long", "TTFT p95 long", "ITL p50", "ITL p99", "TPOT p95", "SLO met",
)  # fmt: skip
_ARMS: Final = {"agg": "round-robin", "disagg": "always-remote", "cond": "threshold-1024"}
_LONG_TOKENS: Final = 9000
"""The mean of the long prompts."""
_POSTED_S: Final = 0.012
"""A step in which the pull of a long prompt is posted takes longer, any other that only decodes does not."""


class Drawn(NamedTuple):
    """The figures of one simulated run, as `NAMES`; `itl_p99`: if each long pull held the streams up a second time."""

    figures: tuple[float, ...]
    itl_p99: float


def seeds(rate: int) -> Iterator[int]:
    """Those that draw as many requests as were measured."""
    return (seed for seed in count() if len(Mixed(seed, rate=rate)) == measured.MIXED_REQUESTS[rate])


def draw(rate: int, policy: str, seed: int) -> Drawn:
    apart = policy != "agg"
    spec = FleetSpec(servers("h200-7b", both=0 if apart else 2, prefill=int(apart), decode=int(apart)))
    records = World(spec, arm(_ARMS[policy]), Mixed(seed, rate=rate), seed=seed).run().records
    ttfts = [
        1000 * percentile(sorted(record.ttft_s for record in records if record.group == group), share)
        for group in ("short", "long")
        for share in (0.5, 0.95)
    ]
    p50, p99 = (1000 * gap for gap in gap_percentiles(records, (0.5, 0.99)))
    tpot = 1000 * percentile(sorted(record.tpot_s for record in records), 0.95)
    met = sum(record.met() for record in records) / len(records)
    return Drawn((*ttfts, p50, p99, tpot, met), _held_up(records, p50))


def _outside_ms() -> float:
    """What the processes around the engine spend on a long prompt."""
    return measured.OUTSIDE[8192] * _LONG_TOKENS / 8192


def _held_up(records: Sequence[Record], p50_ms: float) -> float:
    """The p99 of the gaps with as many more that are longer by what D's processes spend on a long prompt, as there are
    gaps in which one's pull was posted.
    """
    total = sum(record.gaps.total() for record in records)
    posted = sum(n for record in records for bin_, n in record.gaps.items() if gap_of(bin_) > _POSTED_S)
    (p99,) = gap_percentiles(records, (min(1.0, 0.99 + posted / total),))
    return min(1000 * p99, p50_ms + _outside_ms())


def _draws(rate: int, policy: str, n: int) -> list[Drawn]:
    return [draw(rate, policy, seed) for seed in islice(seeds(rate), n)]


def rarity(value: float, among: Sequence[float]) -> float:
    """Two-sided: how often one of `among` (sorted) is at least as far out, `value` itself counted; 1 at most."""
    below, above = bisect_right(among, value), len(among) - bisect_left(among, value)
    return min(1.0, 2 * (min(below, above) + 1) / (len(among) + 1))


def mixed(jobs: Jobs, draws: int = DRAWS) -> Iterator[Figure]:
    """All rows; `simulated` is the median of the draws."""
    found = jobs.all({row: partial(_draws, *row, draws) for row in measured.MIXED})
    for rate in measured.MIXED_REQUESTS:
        columns = {
            (policy, name): [it.figures[i] for it in found[rate, policy]]
            for policy in _ARMS
            for i, name in enumerate(NAMES)
        }
        rarest = _rarest(list(columns.values()))
        for policy in _ARMS:
            held_up = percentile(sorted(it.itl_p99 for it in found[rate, policy]), 0.5)
            for name, told in zip(NAMES, measured.MIXED[rate, policy], strict=True):
                values = sorted(columns[policy, name])
                tolerance = TAIL if "p9" in name else MEDIAN
                figure = Figure(f"{rate}/s {policy}", name, told, percentile(values, 0.5), tolerance)
                figure = _by_chance(figure, values, rarest, measured.MIXED_REQUESTS[rate])
                if name == "ITL p99" and policy != "agg":
                    figure = figure.because(
                        figure.near(held_up),
                        f"one gap in a hundred decides, and nearly as many stand beside a pull; with the"
                        f" {_outside_ms():.0f} ms that D's processes spend outside the engine on a long prompt, not"
                        f" simulated, as a second long gap beside each, it is {held_up:.1f}",
                    )
                yield figure


def _rarest(columns: Sequence[Sequence[float]]) -> list[float]:
    """For each draw how rare the rarest of its figures is among the other draws'; sorted."""
    ordered = [sorted(column) for column in columns]
    out = []
    for i in range(len(columns[0])):
        found = []
        for column, values in zip(columns, ordered, strict=True):
            at = bisect_left(values, column[i])
            found.append(rarity(column[i], values[:at] + values[at + 1 :]))
        out.append(min(found))
    return sorted(out)


def _by_chance(figure: Figure, values: Sequence[float], rarest: Sequence[float], requests: int) -> Figure:
    """One run may well be so: the figure is within what nine in ten are, or no further out than the furthest of the
    figures of one draw usually is.
    """
    least, most = percentile(values, 0.05), percentile(values, 0.95)
    figure = figure._replace(interval=(least, most))
    n, told = len(values), figure.measured
    figure = figure.because(
        least <= told <= most,
        f"one run of {requests} requests: nine in ten of {n} simulated ones are {least:.4g} to {most:.4g}",
    )
    rare = rarity(told, values)
    as_rare = bisect_right(rarest, rare) / len(rarest)
    return figure.because(
        values[0] <= told <= values[-1] and as_rare >= 0.1,
        f"one draw of {requests} requests, seen in {len(NAMES) * len(_ARMS)} figures: {rare:.0%} of {n} simulated"
        f" draws are as far out in this one ({values[0]:.4g} to {values[-1]:.4g} in all), and {as_rare:.0%}"
        " are in one of theirs",
    )
