"""What other replicas have in flight on each rank, put together from messages that may be lost, repeated or reordered.

A replica numbers what it says. It says how single ranks are (`news`) and, now and then, how all are (`whole`): of each
rank the latest word counts, and a whole speaks for every rank it does not name. So what is believed of a replica is
right as of its last whole, whatever was lost before, and newer where news came through. A replica that is not heard of
for a while has nothing in flight any more. The sums are folded into the fleet's loads as they change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from indexer import Holder
from scorer.fleet import Fleet
from scorer.ledger import NEVER_S, InFlight, Load

MOST_WRITERS: Final = 256
MOST_RANKS: Final = 16_384
"""Of one writer."""


class _Word:
    """The latest of one writer about one rank. `at_s`: when it came here."""

    __slots__ = ("at_s", "in_flight", "number")

    def __init__(self, number: int, in_flight: InFlight, at_s: float) -> None:
        self.number = number
        self.in_flight = in_flight
        self.at_s = at_s


class _Writer:
    __slots__ = ("heard_s", "latest", "whole", "words")

    def __init__(self) -> None:
        self.words: dict[Holder, _Word] = {}
        self.whole = -1
        """The number of its last whole; what is older says nothing."""
        self.latest = -1
        self.heard_s = 0.0


class Elsewhere:
    """Writers are any names, one for each life of a replica. Times are monotonic seconds of this process."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._writers: dict[str, _Writer] = {}
        self.missed = 0
        """How often some of a writer's news were jumped over."""

    @property
    def writers(self) -> Mapping[str, float]:
        """Who is known, and when each was last heard of."""
        return {name: writer.heard_s for name, writer in self._writers.items()}

    def news(
        self, writer: str, number: int, ranks: Mapping[Holder, InFlight], now_s: float, after: int | None = None
    ) -> bool:
        """These ranks have changed. `after`: the number of its news before, as wholes have numbers too and are read
        now and then only; None: the last number. Whether none were missed, as far as is known.
        """
        state = self._known(writer)
        if state is None:
            return True
        in_order = (number - 1 if after is None else after) <= state.latest or state.latest < 0
        self.missed += not in_order
        self._heard(state, number, now_s)
        if number <= state.whole:
            return in_order
        changed = [holder for holder, each in ranks.items() if self._put(state, holder, number, each, now_s)]
        self._fold(changed, now_s)
        return in_order

    def whole(self, writer: str, number: int, ranks: Mapping[Holder, InFlight], now_s: float) -> None:
        """So are all its ranks; those it does not name have nothing."""
        state = self._known(writer)
        if state is None or number <= state.whole:
            return
        self._heard(state, number, now_s)
        state.whole = number
        changed = {holder for holder, word in state.words.items() if word.number <= number and holder not in ranks}
        for holder in changed:
            del state.words[holder]
        for holder, each in ranks.items():
            if self._put(state, holder, number, each, now_s):
                changed.add(holder)
        self._fold(changed, now_s)

    def gone(self, writer: str, now_s: float) -> None:
        """It has nothing in flight any more."""
        state = self._writers.pop(writer, None)
        if state is not None:
            self._fold(list(state.words), now_s)

    def expire(self, now_s: float, ttl_s: float) -> list[str]:
        """Forget those not heard of for `ttl_s`; who they were."""
        late = [name for name, writer in self._writers.items() if now_s - writer.heard_s > ttl_s]
        for name in late:
            self.gone(name, now_s)
        return late

    def refold(self, now_s: float) -> None:
        """Into the loads the fleet has by now, some of which may be new."""
        self._fold({holder for state in self._writers.values() for holder in state.words}, now_s)

    def _known(self, writer: str) -> _Writer | None:
        state = self._writers.get(writer)
        if state is None and len(self._writers) < MOST_WRITERS:
            state = self._writers[writer] = _Writer()
        return state

    @staticmethod
    def _heard(state: _Writer, number: int, now_s: float) -> None:
        """What was said before, or again, is no sign of life."""
        if number > state.latest:
            state.latest, state.heard_s = number, now_s

    @staticmethod
    def _put(state: _Writer, holder: Holder, number: int, in_flight: InFlight, now_s: float) -> bool:
        word = state.words.get(holder)
        if word is None:
            if len(state.words) >= MOST_RANKS:
                return False
        elif word.number >= number:
            return False
        state.words[holder] = _Word(number, in_flight, now_s)
        return True

    def _fold(self, holders: Iterable[Holder], now_s: float) -> None:
        for holder in holders:
            load = self._load(holder)
            if load is not None:
                load.set_others(self._sum(holder, now_s), now_s)

    def _load(self, holder: Holder) -> Load | None:
        worker = self._fleet.workers.get(holder[0])
        return None if worker is None else worker.loads.get(holder[1])

    def _sum(self, holder: Holder, now_s: float) -> InFlight:
        prefills = streams = kv_tokens = 0
        comp_s = head_s = 0.0
        booked_s, left_s = math.inf, now_s - NEVER_S
        for state in self._writers.values():
            word = state.words.get(holder)
            if word is None:
                continue
            it = word.in_flight
            if it.prefills and word.at_s - it.booked_age_s < booked_s:
                booked_s, head_s = word.at_s - it.booked_age_s, it.head_s
            left_s = max(left_s, word.at_s - it.left_age_s)
            prefills, streams, kv_tokens = prefills + it.prefills, streams + it.streams, kv_tokens + it.kv_tokens
            comp_s += it.comp_s
        booked_age_s = max(0.0, now_s - booked_s) if prefills else 0.0
        return InFlight(prefills, comp_s, head_s, streams, kv_tokens, booked_age_s, now_s - left_s)
