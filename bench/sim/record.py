"""What became of one request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

_BINS_PER_E: Final = 200
"""Gaps are kept in bins half a per cent wide."""
_MIN_GAP_S: Final = 1e-6


def bin_of(gap_s: float) -> int:
    return math.floor(math.log(max(gap_s, _MIN_GAP_S)) * _BINS_PER_E)


def gap_of(bin_: int) -> float:
    """The middle of a bin, in seconds."""
    return math.exp((bin_ + 0.5) / _BINS_PER_E)


@dataclass(slots=True, eq=False)
class Record:
    """Times are absolute, on the gateway's side. `gaps` counts inter-token latencies by `bin_of`."""

    request_id: str
    group: str
    session: str | None
    turn: int
    arrival_s: float
    prompt_tokens: int
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    decode: str = ""
    prefill: str | None = None
    cached_tokens: int = 0
    """Prompt tokens its decode worker held."""
    predicted_tokens: int | None = None
    """What the arm, or else the view, had promised there."""
    prefill_cached_tokens: int = 0
    """Prompt tokens its prefill worker held."""
    prefill_s: float | None = None
    """The prefill leg, if there was one."""
    first_s: float | None = None
    last_s: float = 0.0
    output_tokens: int = 0
    retries: int = 0
    pull_failed: bool = False
    ok: bool = False
    gaps: Counter[int] = field(default_factory=Counter)
    max_gap_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return math.inf if self.first_s is None else self.first_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.last_s - self.arrival_s if self.ok else math.inf

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; 0 for an answer of one token."""
        if self.first_s is None or self.output_tokens < 2:
            return 0.0
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens nobody had to compute."""
        return self.cached_tokens if self.prefill is None else max(self.cached_tokens, self.prefill_cached_tokens)

    def met(self, slo_ttft_s: float | None = None, slo_tpot_s: float | None = None) -> bool:
        """Whether it ended well within its own SLOs, or, where it has none, within those given."""
        ttft_s = self.slo_ttft_s if self.slo_ttft_s is not None else slo_ttft_s
        tpot_s = self.slo_tpot_s if self.slo_tpot_s is not None else slo_tpot_s
        if not self.ok:
            return False
        return (ttft_s is None or self.ttft_s <= ttft_s) and (tpot_s is None or self.tpot_s <= tpot_s)

    def add_gaps(self, gaps_s: Sequence[float], bins: Sequence[int]) -> None:
        """Inter-token latencies, and the same by `bin_of`."""
        if gaps_s:
            self.gaps.update(bins)
            self.max_gap_s = max(self.max_gap_s, max(gaps_s))
            self.output_tokens += len(gaps_s)
