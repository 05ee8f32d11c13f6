"""What has been promised to a worker's ranks and not come back yet.

A booking holds on to the very load it was booked on, not to a name: when a worker leaves and returns under the same
name, an old booking settles with the old load and the new one is untouched. Settling twice is harmless, so nothing
goes negative.

What other replicas of this router have in flight is folded into the same sums when they say so (`Load.set_others`), so
that a price reads one number and does not ask whose it is.
"""

from __future__ import annotations

import msgspec

from scorer.answers import Answer

_UNKNOWN = Answer()


class Booking:
    """One request on one rank: first its prefill, then (after `first_token`) its decode stream."""

    __slots__ = (
        "answer",
        "booked_s",
        "charged_at",
        "charged_s",
        "comp_s",
        "done_tokens",
        "kv_tokens",
        "load",
        "prefilling",
        "pulled",
        "settled",
        "since",
        "slo_tpot_s",
        "stalled_s",
    )

    def __init__(
        self,
        load: Load,
        comp_s: float,
        kv_tokens: int,
        now_s: float,
        *,
        answer: Answer = _UNKNOWN,
        slo_tpot_s: float | None = None,
        pulled: bool = False,
    ) -> None:
        """`answer` is how long it is thought to get, `slo_tpot_s` what its tokens may take each."""
        self.answer = answer
        self.done_tokens = 0
        self.slo_tpot_s = slo_tpot_s
        self.charged_s = 0.0
        """What its prefill was said to cost each stream beside it."""
        self.charged_at = 0
        """How many had become streams here by then: who came later was not charged."""
        self.since = 0
        """Its own place among them."""
        self.stalled_s = 0.0
        """What its stream has lost to prefills beside it, as far as they were booked here."""
        self.load = load
        self.comp_s = comp_s
        self.kv_tokens = kv_tokens
        self.booked_s = now_s
        self.prefilling = True
        self.pulled = pulled
        self.settled = False
        load.prefills[self] = None
        load.in_line += 1
        load.comp_s += comp_s
        if not pulled:
            load.computing += 1
        load.kv_tokens += kv_tokens

    def first_token(self, now_s: float) -> None:
        if self.prefilling and not self.settled:
            self.prefilling = False
            self.load.left_line(self, now_s)
            self.load.streaming[self] = None
            self.load.streams += 1
            self.load.n_streamed += 1
            self.load.with_objective += self.slo_tpot_s is not None
            self.since = self.load.n_streamed

    def compute_here(self, comp_s: float) -> None:
        """Nothing is pulled after all."""
        if self.prefilling and not self.settled:
            self.load.comp_s += comp_s - self.comp_s
            self.load.computing += self.pulled
            self.pulled = False
        self.comp_s = comp_s

    def charge(self, stall_s: float) -> None:
        """Every stream here stands still for so long because of it; what it was charged before is taken back."""
        self._take_back()
        self.charged_s, self.charged_at = stall_s, self.load.n_streamed
        for booking in self.load.streaming:
            booking.stalled_s += stall_s

    def _take_back(self) -> None:
        if self.charged_s:
            for booking in self.load.streaming:
                if booking.since <= self.charged_at:
                    booking.stalled_s = max(0.0, booking.stalled_s - self.charged_s)

    def head_s(self, now_s: float) -> float:
        """How long its prefill has been the first in line here."""
        return max(0.0, now_s - max(self.booked_s, self.load.head_since_s)) if self.load.is_head(self) else 0.0

    def grow(self, n_tokens: int) -> None:
        """`n_tokens` more were generated."""
        if not self.settled:
            self.kv_tokens += n_tokens
            self.done_tokens += n_tokens
            self.load.kv_tokens += n_tokens

    def settle(self, now_s: float) -> None:
        """The request is over on this rank, however it ended."""
        if self.settled:
            return
        self.settled = True
        if self.prefilling:
            self.load.left_line(self, now_s)
            self._take_back()  # Whether it was computed is not known; if it was, that is over for most of them.
        else:
            del self.load.streaming[self]
            self.load.streams -= 1
            self.load.with_objective -= self.slo_tpot_s is not None
        self.load.kv_tokens -= self.kv_tokens


NEVER_S = 86_400.0


class InFlight(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What somebody has in flight on one rank: prompts in line, the seconds of computing they take, those of the first
    of them, answers that stream, KV tokens of all of it; how long ago the first was booked, and one last left the line.

    An engine computes one prompt after the other, so of all that is in line, whoever sent it, only the very first gets
    shorter by itself: whose that is, and since when, only who hears of all can tell.
    """

    prefills: int = 0
    comp_s: float = 0.0
    head_s: float = 0.0
    streams: int = 0
    kv_tokens: int = 0
    booked_age_s: float = 0.0
    left_age_s: float = NEVER_S


NOTHING = InFlight()


class Load:
    """The bookings of one (worker, rank), in order; and what other replicas have there."""

    __slots__ = (
        "comp_s",
        "computed",
        "computing",
        "head_since_s",
        "in_line",
        "kv_tokens",
        "n_streamed",
        "others",
        "others_at_s",
        "prefills",
        "pulled",
        "streaming",
        "streams",
        "with_objective",
    )

    def __init__(self) -> None:
        self.comp_s = 0.0
        """Of those in `prefills`."""
        self.in_line = 0
        self.streams = 0
        """Prompts in line and answers that stream, other replicas' among them."""
        self.others = NOTHING
        self.others_at_s = 0.0
        """What other replicas had here then."""
        self.n_streamed = 0
        self.computing = self.computed = self.pulled = 0
        """Prompts that are computed here, and how many have been, or came from elsewhere."""
        self.prefills: dict[Booking, None] = {}
        self.streaming: dict[Booking, None] = {}
        self.with_objective = 0
        """Of those that stream, how many have a TPOT objective."""
        self.kv_tokens = 0
        """KV tokens of everything booked, here or by others, answers so far included."""
        self.head_since_s = 0.0
        """When the prefill that is first in line got there, at the latest."""

    @property
    def requests(self) -> int:
        """Of this replica."""
        return len(self.prefills) + len(self.streaming)

    @property
    def own_kv_tokens(self) -> int:
        return self.kv_tokens - self.others.kv_tokens

    def own(self, now_s: float) -> InFlight:
        """What this replica has here, for the others."""
        head = next(iter(self.prefills), None)
        left_age_s = NEVER_S
        if self.computed or self.pulled:
            left_age_s = min(NEVER_S, max(0.0, now_s - self.head_since_s))
        return InFlight(
            len(self.prefills),
            0.0 if head is None else self.comp_s,
            0.0 if head is None else head.comp_s,
            len(self.streaming),
            self.own_kv_tokens,
            0.0 if head is None else max(0.0, now_s - head.booked_s),
            left_age_s,
        )

    def set_others(self, others: InFlight, now_s: float) -> None:
        """What all other replicas have here now, instead of what they had."""
        before, self.others, self.others_at_s = self.others, others, now_s
        self.in_line += others.prefills - before.prefills
        self.streams += others.streams - before.streams
        self.kv_tokens += others.kv_tokens - before.kv_tokens

    def left_line(self, booking: Booking, now_s: float) -> None:
        """Its prefill is over."""
        del self.prefills[booking]
        self.in_line -= 1
        self.comp_s = self.comp_s - booking.comp_s if self.prefills else 0.0
        self.head_since_s = now_s
        if booking.pulled:
            self.pulled += 1
        else:
            self.computing -= 1
            self.computed += 1

    def is_head(self, booking: Booking) -> bool:
        return next(iter(self.prefills), None) is booking

    def prefill_backlog_s(self, now_s: float) -> float:
        """Prefill seconds still ahead of a newcomer: all of them, less what the first has probably had already."""
        if not self.in_line:
            return 0.0
        others, head = self.others, next(iter(self.prefills), None)
        total_s, first_s, booked_s = others.comp_s, others.head_s, self.others_at_s - others.booked_age_s
        if head is not None:
            total_s += self.comp_s
            if not others.prefills or head.booked_s <= booked_s:
                first_s, booked_s = head.comp_s, head.booked_s
        since_s = max(booked_s, self.head_since_s, self.others_at_s - others.left_age_s)
        return max(0.0, total_s - min(max(0.0, now_s - since_s), first_s))
