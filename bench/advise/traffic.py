"""The requests to be served: of a recorded trace, or drawn from what running servers have counted."""

from __future__ import annotations

import codecs
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.advise.drawn import Drawn, Histogram
from bench.advise.errors import InputError
from bench.sim.load import Workload
from bench.sim.report import percentile
from bench.sim.workloads.traces import Replay, Row, hit_bound, read_azure, read_mooncake

_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"BZh", b"\xfd7zXZ")
"""How gzip, zstd, zip, bzip2 and xz begin."""
_COLDER = 0.05
"""Of the prompt tokens: a part that shares so much less than the whole is told of."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """`rows` in the order of their times, from 0. `shared`: of each prompt, the share that is its group's beginning
    (drawn traffic; a trace says it block by block).
    """

    source: str
    rows: tuple[Row, ...]
    shared: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def span_s(self) -> float:
        return self.rows[-1].at_s

    @property
    def requests_per_s(self) -> float:
        return (len(self.rows) - 1) / self.span_s

    @property
    def mean_input_tokens(self) -> float:
        return sum(row.input_tokens for row in self.rows) / len(self.rows)

    @property
    def mean_output_tokens(self) -> float:
        return sum(row.output_tokens for row in self.rows) / len(self.rows)

    @property
    def longest_tokens(self) -> int:
        """Of a request and its answer."""
        return max(row.input_tokens + row.output_tokens for row in self.rows)

    @property
    def p95_input_tokens(self) -> int:
        return int(percentile(sorted(row.input_tokens for row in self.rows), 0.95))

    @property
    def reuse(self) -> float:
        """Share of the prompts that an endless cache would hold."""
        return hit_bound(self.rows) if self.shared is None else self.shared

    def workload(self, seed: int, slo_ttft_s: float, slo_tpot_s: float, faster: float = 1.0) -> Workload:
        """`faster`: so many times the rate."""
        if self.shared is None:
            return Replay(self.rows, speed=faster, slo_ttft_s=slo_ttft_s, slo_tpot_s=slo_tpot_s)
        return Drawn(self.rows, self.shared, seed, faster, slo_ttft_s, slo_tpot_s)

    def at_rate(self, requests_per_s: float, seed: int) -> Traffic:
        """The same requests, faster or slower; by Poisson where they all bear one time."""
        if not self.span_s:
            rng = random.Random(f"advise rate {seed}")
            at_s, rows = -math.inf, []
            for row in self.rows:
                at_s = max(0.0, at_s + rng.expovariate(requests_per_s))
                rows.append(row._replace(at_s=at_s))
            return replace(self, rows=tuple(rows))
        factor = requests_per_s / self.requests_per_s
        return replace(self, rows=tuple(row._replace(at_s=row.at_s / factor) for row in self.rows))

    def fitting(self, most_tokens: int) -> Traffic:
        """Without what no server could hold. Raises InputError if that is nearly everything."""
        kept = [row for row in self.rows if row.input_tokens + row.output_tokens <= most_tokens]
        left_out = len(self.rows) - len(kept)
        if not left_out:
            return self
        if len(kept) < 2:
            raise InputError(
                f"no request fits in a server's KV cache of {most_tokens:,} tokens (the longest takes "
                f"{self.longest_tokens:,}); raise --tensor-parallel or --kv-tokens, or take a larger --gpu"
            )
        note = f"{left_out:,} of {len(self.rows):,} requests are longer than a server's KV cache and were left out"
        return replace(self, rows=_from_zero(kept), notes=(*self.notes, note))

    def part(self, n: int) -> Traffic:
        """`n` requests in a row whose tokens per second come nearest to those of the whole; of drawn ones any."""
        if n >= len(self.rows):
            return self
        if self.shared is not None:
            return replace(self, rows=self.rows[:n])
        goal = _pace(self.rows)
        step = max(1, n // 4)
        starts = range(0, len(self.rows) - n + 1, step)
        best = min(starts, key=lambda start: abs(math.log(_pace(self.rows[start : start + n]) / goal)))
        rows = self.rows[best : best + n]
        note = (
            f"simulated: {n:,} of {len(self.rows):,} requests in a row, from {rows[0].at_s:,.0f} s on, chosen because "
            "their tokens per second are nearest to the whole (--requests for more)"
        )
        part = replace(self, rows=_from_zero(rows), notes=(*self.notes, note))
        if part.reuse >= self.reuse - _COLDER:
            return part
        colder = (
            f"among themselves they share {part.reuse:.0%} of their prompt tokens, in the whole trace {self.reuse:.0%} "
            "were seen before: servers with warm caches would compute less than is simulated here (--requests for more)"
        )
        return replace(part, notes=(*part.notes, colder))


def _pace(rows: Sequence[Row]) -> float:
    """Tokens per second."""
    tokens = sum(row.input_tokens + row.output_tokens for row in rows)
    return tokens / max(1e-3, rows[-1].at_s - rows[0].at_s)


def _from_zero(rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(row._replace(at_s=row.at_s - rows[0].at_s) for row in rows)


def read_trace(path: Path) -> Traffic:
    """Mooncake's JSON lines or Azure's CSV, told apart by the first character. Raises InputError."""
    try:
        with path.open("rb") as file:
            begin = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    except OSError as exc:
        raise InputError(f"{path}: {exc.strerror or exc}") from None
    if begin.startswith(_PACKED):
        raise InputError(f"{path}: is compressed; unpack it first")
    if begin.startswith(b"["):
        raise InputError(f"{path}: is one JSON array; a trace has one JSON object a line (jq -c '.[]' makes it so)")
    try:
        rows = read_mooncake(path) if begin.startswith(b"{") else read_azure(path)
    except (ValueError, UnicodeDecodeError) as exc:
        raise InputError(
            f"{exc}; a trace is JSON lines with timestamp (ms), input_length, output_length and hash_ids, or a CSV "
            "with TIMESTAMP, ContextTokens and GeneratedTokens"
        ) from None
    if len(rows) < 2:
        raise InputError(f"{path}: holds {len(rows)} requests; at least 2 are needed")
    rows.sort(key=lambda row: row.at_s)
    if not math.isfinite(rows[-1].at_s - rows[0].at_s):
        raise InputError(f"{path}: the times of its requests are no times; they should be milliseconds")
    shares = any(row.hash_ids is not None for row in rows)
    notes = () if shares else ("the trace does not say which prompts share a beginning: all are taken as new",)
    return Traffic(str(path), _from_zero(rows), notes=notes)


def draw(
    source: str,
    requests_per_s: float,
    prompt: Histogram,
    answer: Histogram,
    hit_share: float | None,
    n: int,
    seed: int,
) -> Traffic:
    """`n` requests with those lengths, by Poisson."""
    rng = random.Random(f"advise {seed}")
    at_s, rows = 0.0, []
    for _ in range(n):
        rows.append(Row(at_s, prompt.draw(rng), answer.draw(rng), None))
        at_s += rng.expovariate(requests_per_s)
    notes = [
        "lengths drawn from the servers' histograms, prompts and answers independently; arrivals by Poisson",
        "metrics do not say which prompts share a beginning: "
        + (
            "no hit share was counted, so all are taken as new"
            if hit_share is None
            else f"each has {hit_share:.0%} of itself (the hit share that was counted) in common with others"
        ),
    ]
    return Traffic(source, tuple(rows), hit_share or 0.0, tuple(notes))
