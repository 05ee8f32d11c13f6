"""The simulator beside single measurements: idle servers, suffixes, streams beside a long prompt, queues.

Not all of it is a test. Fitted to these same tables were: the step and prefill constants (decode step, idle TTFT), the
pull's (aged caches), how long the streams were watched (the p50 of 32,768 in chunks of 1024 and the p99 of 8,192 remote
depend on it); that a short chunk costs no floor behind a long one was learned from the suffixes. Nothing was fitted to
the stalls' p99 of local prefills, the chunk sizes' p99 and TTFT, and the queue at P.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from bench.sim import measured
from bench.sim.engine import Pace
from bench.sim.figure import MEDIAN, TAIL, Figure
from bench.sim.fleet import FleetSpec, servers
from bench.sim.hardware import hardware
from bench.sim.record import Record
from bench.sim.report import percentile
from bench.sim.scripted import Line, named, play
from bench.sim.transfers import NVLINK, NVLINK_FRESH, Link


def _pair(link: Link, chunk_tokens: int = 0, floor_s: float | None = None) -> FleetSpec:
    kind = hardware("h200-7b")
    if floor_s is not None:
        kind = replace(kind, timing=replace(kind.timing, prefill_floor_s=floor_s))
    return FleetSpec(servers(kind, prefill=1, decode=1, chunk_tokens=chunk_tokens), link=link)


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
    noise = _least_noise(measured.SUFFIX_TTFT)
    reason = (
        "the table's own noise: warm remote less local is a hop and a transfer, so it cannot fall with more new tokens,"
        f" yet falls by {2 * noise:g} ms; figures are wrong by {noise:g} ms at least, and with that this one is within"
    )
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
                found = Figure(row, column, figure, _ms(run.records[2]), MEDIAN)
                yield found.because(found.near(found.simulated, noise), reason)


def _least_noise(table: Mapping[int, Mapping[int, tuple[int, int, int]]]) -> float:
    """By how much figures of the table must be wrong at least, as (warm remote - local) cannot fall, in ms."""
    least = 0.0
    for rows in table.values():
        extra = [warm - local for _, (local, _, warm) in sorted(rows.items())]
        least = max(least, *((before - after) / 2 for i, before in enumerate(extra) for after in extra[i:]))
    return least


_BESIDE_S = 0.045
"""The streams were watched from so long before the long prompt was sent until so long after its first token. It was not
written down; this is what makes more than half of the gaps long where 32,768 tokens went in chunks of 1024 (at 0.15 s
that p50 would be 5.6, and the p99 beside 8,192 remote 8 instead of 17).
"""


class _Stalled(NamedTuple):
    """16 streams' gaps around a long prompt, sorted, and its own TTFT. Milliseconds."""

    gaps: list[float]
    ttft: float

    @property
    def p99(self) -> float:
        return percentile(self.gaps, 0.99)

    def figures(self, row: str, p50: float, p99: float, ttft: float) -> tuple[Figure, Figure, Figure]:
        return (
            Figure(row, "ITL p50", p50, percentile(self.gaps, 0.5), MEDIAN),
            Figure(row, "ITL p99", p99, self.p99, TAIL),
            Figure(row, "its TTFT", ttft, self.ttft, MEDIAN),
        )


def _stalled(spec: FleetSpec, n: int, prefill: str | None) -> _Stalled:
    streams = [Line(1, ((10 + i, 512),), "d0", None, 600, "stream") for i in range(16)]
    sent_s = 2.5
    lines = [_MEET, *streams, Line(sent_s, ((2, n),), "d0", prefill, 1, "long")]
    run = play(spec, lines)
    own = named(run, "long")[0]
    pace = run.engines["d0"].pace
    gaps = _window(pace, named(run, "stream")[0], sent_s - _BESIDE_S, (own.first_s or 0.0) + _BESIDE_S)
    return _Stalled(sorted(1000 * gap for gap in gaps), _ms(own))


def _window(pace: Pace, stream: Record, from_s: float, to_s: float) -> Iterator[float]:
    """The gaps that ended in that time; all streams have the same."""
    at_s = stream.last_s - sum(pace.steps_s[-(stream.output_tokens - 1) :])
    for step_s in pace.steps_s[-(stream.output_tokens - 1) :]:
        at_s += step_s
        if from_s <= at_s <= to_s:
            yield step_s


def stalls() -> Iterator[Figure]:
    for (n, remote), (p50, p99, ttft) in measured.STALLS.items():
        found = _stalled(_pair(NVLINK), n, "p0" if remote else None)
        median, tail, own = found.figures(f"{n} {'remote' if remote else 'local'}", p50, p99, ttft)
        if remote and n == 32_768:
            # The posting stays the longest; another gap is longer by what D's processes do, the last step is as told.
            outside, begin = measured.OUTSIDE[n], measured.BEGIN_STEP
            *others, _, posting = found.gaps
            others[0] += outside
            so = _Stalled(sorted([*others, begin, posting]), found.ttft).p99
            again = ", ".join(f"{it:g}" for it in measured.STALLED_AGAIN)
            tail = tail.because(
                tail.near(so),
                f"p99 is the third longest of {len(found.gaps)} gaps; with the {outside} ms that D's processes spend"
                f" outside the engine on such a prompt as one gap and its first step as long as the server said"
                f" ({begin} ms), neither simulated, it is {so:.1f} (measured again: {again})",
            )
        yield from (median, tail, own)


def chunks() -> Iterator[Figure]:
    for (chunk, n), (p50, p99, ttft) in measured.CHUNKS.items():
        found = _stalled(_pair(NVLINK, chunk), n, None)
        median, tail, own = found.figures(f"{n} in chunks of {chunk}", p50, p99, ttft)
        if own.unexplained:
            floor = measured.CACHED_STEP[1]
            so_own = _stalled(_pair(NVLINK, chunk, floor_s=floor / 1000), n, None).ttft
            own = own.because(
                own.near(so_own),
                f"{n // chunk} eager steps one after the other, each as long as a lone one is ({found.gaps[-1]:.0f} ms,"
                f" from idle TTFTs); with the {floor} ms that such a step took for a cached prompt it is {so_own:.0f}",
            )
        if tail.unexplained:
            outside = measured.OUTSIDE[n]
            so = _Stalled([*found.gaps[:-1], found.gaps[-1] + outside], found.ttft).p99
            more = {
                of: longest - _stalled(_pair(NVLINK, of), n, None).gaps[-1]
                for (of, tokens), longest in measured.CHUNKS_MAX.items()
                if tokens == n
            }
            tail = tail.because(
                tail.near(so),
                f"of {len(found.gaps)} gaps p99 is the longest; the longest was measured"
                f" {', '.join(f'{ms:.0f}' for ms in more.values())} ms above the last chunk's step in chunks of"
                f" {', '.join(map(str, more))}, near the {outside} ms that D's processes spend outside the engine on"
                f" such a prompt, not simulated: with them {so:.0f}",
            )
        yield from (median, tail, own)


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
