"""How a worker's clock differs from ours, by the Date headers of its answers. Pure.

A Date has whole seconds, and uvicorn makes one a second, so an answer that was asked for at `sent` and came at `came`
with `date` proves only that the worker's clock is between `date - came` and `date + 2 - sent` ahead. Several answers
narrow that down; what is reported is what no answer contradicts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.doctor.catalogue import finding
from gateway.doctor.findings import Finding
from gateway.doctor.identity import Identity

SKEW_S = 1.0
_STALE_S = 2.0


class Offset:
    """The worker's clock is at least `least_s` and at most `most_s` ahead of ours (negative: behind)."""

    def __init__(self) -> None:
        self.least_s = -math.inf
        self.most_s = math.inf

    def heard(self, date_s: float, sent_s: float, came_s: float) -> None:
        """All in Unix seconds, the last two by our clock."""
        least_s, most_s = date_s - came_s, date_s + _STALE_S - sent_s
        if least_s > self.most_s or most_s < self.least_s:  # A clock was set meanwhile: begin anew.
            self.least_s, self.most_s = least_s, most_s
            return
        self.least_s = max(self.least_s, least_s)
        self.most_s = min(self.most_s, most_s)

    @property
    def skew_s(self) -> float:
        """By so much it is ahead (below 0: behind) for certain."""
        if self.least_s > 0:
            return self.least_s
        return min(0.0, self.most_s)


def judge_clock(me: Identity, offset: Offset, *, margin_s: float) -> list[Finding]:
    """`margin_s` is what the gateway leaves of a lease (pd.lease_margin_s)."""
    skew_s = offset.skew_s
    if abs(skew_s) <= SKEW_S:
        return []
    said = f"its clock is at least {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} ours"
    code = "clock-skew-lease" if me.hands_over and abs(skew_s) > margin_s else "clock-skew"
    return [finding(code, me.url, said, evidence={"offset_s": round(skew_s, 3)})]


def judge_clocks(workers: Sequence[tuple[str, Offset]]) -> list[Finding]:
    """Workers (by URL) whose clocks differ from each other's: the two that are furthest apart."""
    if len(workers) < 2:
        return []
    ahead, most = max(workers, key=lambda worker: worker[1].least_s)
    behind, least = min(workers, key=lambda worker: worker[1].most_s)
    apart_s = most.least_s - least.most_s
    if not SKEW_S < apart_s < math.inf:
        return []
    said = f"the clock of {ahead} is at least {apart_s:.1f} s ahead of that of {behind}"
    shown = {"ahead": ahead, "behind": behind, "apart_s": round(apart_s, 3)}
    return [finding("clocks-differ", "", said, evidence=shown)]
