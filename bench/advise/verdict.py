"""Whether a split pays, from what was simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.advise.splits import KEPT, Outcome

MARGIN = 0.02
"""Of the requests: less than that between two fleets says nothing."""
SMOOTHER = 2.0
"""So many times shorter gaps are worth a sentence."""
FLAG = 0.9
"""Smaller chunks are named only where they shorten gaps to so much of what they were: a flag that changes nothing is
no advice.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`pays`: take `split` rather than `whole` (the best of each kind). `enough`: one of them carries the traffic.
    `reasons` are whole sentences.
    """

    pays: bool
    enough: bool
    whole: Outcome
    split: Outcome | None
    reasons: tuple[str, ...]

    @property
    def choice(self) -> Outcome:
        return self.split if self.pays and self.split is not None else self.whole


def judge(outcomes: Sequence[Outcome]) -> Verdict:
    """More kept objectives decide, by a margin that counts. A split that only equals whole servers does not pay, since
    it costs a network, KV capacity and a second kind of server.
    """
    whole = _best([it for it in outcomes if not it.fleet.prefill])
    splits = [it for it in outcomes if it.fleet.prefill]
    if not splits:
        return Verdict(False, whole.carries, whole, None, tuple(_remarks(False, whole, whole)))
    split = _best(splits)
    least = margin(whole, split)
    told = (
        f"{split.fleet.name} keeps the objectives of {split.met:.1%} of the requests, "
        f"{whole.fleet.name} of {whole.met:.1%}"
    )
    if not (whole.carries or split.carries):
        return Verdict(False, False, whole, split, (f"{told}. Add servers, or loosen the objectives.",))
    pays = split.met - whole.met >= least
    if pays:
        why = ""
    elif whole.met - split.met >= least:
        why = ", and the other splits keep no more"
    else:
        why = f"; less than {least:.1%} between them says nothing, and whole servers need no network for KV"
    return Verdict(pays, True, whole, split, (f"{told}{why}.", *_remarks(pays, whole, split)))


def margin(one: Outcome, other: Outcome) -> float:
    """MARGIN, or twice the standard error of the difference where that is more (few requests)."""
    variance = sum(it.met * (1 - it.met) / it.requests for it in (one, other))
    return max(MARGIN, 2 * math.sqrt(variance))


def _best(outcomes: Sequence[Outcome]) -> Outcome:
    """The most kept objectives; where that is equal within a percent, the smoothest answers, then the fastest."""
    most = max(it.met for it in outcomes)
    near = [it for it in outcomes if it.met >= most - MARGIN / 2]

    def rough(it: Outcome) -> float:
        return (it.itl_p99_ms + it.tpot_p95_ms) / (FLAG if it.fleet.chunk_tokens else 1.0)

    return min(near, key=lambda it: (rough(it), it.ttft_p95_ms))


def _remarks(pays: bool, whole: Outcome, split: Outcome) -> list[str]:
    found = []
    if not pays and whole.itl_p99_ms > SMOOTHER * split.itl_p99_ms:
        found.append(
            "What a split would buy is smoother answers: the longest gaps between tokens (p99) go from "
            f"{whole.itl_p99_ms:.0f} to {split.itl_p99_ms:.0f} ms, TTFT p95 from {whole.ttft_p95_ms:,.0f} to "
            f"{split.ttft_p95_ms:,.0f} ms."
        )
    better = split if pays else whole
    if better.met < KEPT:
        either = "Either way" if split is not whole else "As it is,"
        found.append(f"{either} more than {1 - KEPT:.0%} of the requests miss an objective: add servers, or loosen it.")
    return found
