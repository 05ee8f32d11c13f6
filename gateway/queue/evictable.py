"""Requests that were sent on, have got nothing yet and are worth less than those that wait: who goes when one must.

A request of lower priority than the usual (a number above 0; an objective below 0) is here from its booking until its
answer begins. One that waits and is worth more may take its place: then it is answered 429, whoever sends answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

from gateway.proxy.access import Record
from gateway.proxy.flight import Flight
from gateway.queue.shed import Shed

USUAL_PRIORITY = 0
MOST_FOR_ONE = 2
"""So many may go to make one place."""
_MOST_TRIED = 8
"""Workers looked at for one place, of which there may be hundreds."""


class Evictable(ABC):
    """`flight` says what is booked for it now, which a second attempt changes."""

    def __init__(self, priority: int, record: Record, flight: Callable[[], Flight | None]) -> None:
        self.priority = priority
        self.record = record
        self.number = 0
        self._flight = flight

    @property
    def worker(self) -> str | None:
        flight = self._flight()
        return None if flight is None or flight.ended else flight.worker

    @abstractmethod
    def take_back(self, shed: Shed) -> bool:
        """Answer it with `shed` in place of what it was sent for, and give its booking back, now or soon. False: it is
        too late for that.
        """


class Evictables:
    """Those of one queue. `going` were told to leave and still have their bookings."""

    def __init__(self) -> None:
        self.going: set[Evictable] = set()
        self._there: set[Evictable] = set()
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._there)

    def add(self, evictable: Evictable) -> None:
        self._numbers += 1
        evictable.number = self._numbers
        self._there.add(evictable)

    def remove(self, evictable: Evictable) -> None:
        """Its answer begins, or it is over. May be called twice."""
        self._there.discard(evictable)
        self.going.discard(evictable)

    def told(self, evictable: Evictable) -> None:
        """It was taken back; until `remove` its booking may still be there."""
        if evictable in self._there:
            self._there.remove(evictable)
            self.going.add(evictable)

    def chosen(self, priority: int, workers: Iterable[str], makes_place: Callable[[str, int], bool]) -> list[Evictable]:
        """Who is to go for one of `priority` that may be served by `workers`, all from one worker; empty: nobody, or it
        would not help. The lowest priority goes first, of these who was sent last, who has lost least.
        `makes_place(worker, n)`: whether there is room without `n` of that worker's.
        """
        by_worker: dict[str, list[Evictable]] = {}
        allowed = set(workers)
        for evictable in self._in_order():
            if evictable.priority <= priority:
                break
            worker = evictable.worker
            if worker in allowed and (worker in by_worker or len(by_worker) < _MOST_TRIED):
                by_worker.setdefault(worker, []).append(evictable)
        for n in range(1, MOST_FOR_ONE + 1):
            for worker, those in by_worker.items():
                if len(those) >= n and makes_place(worker, n):
                    return those[:n]
        return []

    def _in_order(self) -> Iterator[Evictable]:
        return iter(sorted(self._there, key=lambda each: (each.priority, each.number), reverse=True))
