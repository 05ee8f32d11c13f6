"""What other replicas of this router have to hear of its decisions, until somebody takes it along.

Loads are named, not copied: how they are is looked up when they are told, so that a burst on one rank is told once.
What is not fetched does not grow without bound; what there is no room for is counted and left out, which costs the
others a guess and nobody a request.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from indexer import Holder

MOST_BLOCKS = 65_536
"""Waiting to be told: prompts of a million tokens."""
MOST_SESSIONS = 4_096


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A request that brings blocks to a rank, by a number of this replica's own."""

    number: int
    holder: Holder
    keys: list[int]


class SessionAt(msgspec.Struct, frozen=True, gc=False):
    """A session was served there; `tokens` of it are there since. No `holder`: it is free again."""

    key: bytes
    holder: Holder | None
    tokens: int


class Told(msgspec.Struct, frozen=True, gc=False):
    """What was taken out. `over`: arrivals by their numbers, and whether their prompts were computed."""

    loads: frozenset[Holder]
    arrivals: list[Arrival]
    over: dict[int, bool]
    sessions: dict[bytes, SessionAt]

    def __bool__(self) -> bool:
        return bool(self.loads or self.arrivals or self.over or self.sessions)


class Journal:
    """`wake` is called when there is something others should know soon: it must be quick."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._loads: set[Holder] = set()
        self._arrivals: dict[int, Arrival] = {}
        self._over: dict[int, bool] = {}
        self._sessions: dict[bytes, SessionAt] = {}
        self._n_blocks = 0
        self._numbers = 0
        self.left_out = 0
        """Arrivals and sessions there was no room for."""

    def booked(self, holder: Holder) -> None:
        """The load there has changed."""
        self._loads.add(holder)
        self._wake()

    def observed(self, holder: Holder, *, is_growth: bool) -> None:
        """The same; an answer that merely got longer can wait."""
        self._loads.add(holder)
        if not is_growth:
            self._wake()

    def assumed(self, holder: Holder, keys: list[int]) -> int:
        """Blocks are on their way there: the number for `left`, 0 when there is no room to tell."""
        if self._n_blocks + len(keys) > MOST_BLOCKS:
            self.left_out += 1
            return 0
        self._numbers += 1
        self._n_blocks += len(keys)
        self._arrivals[self._numbers] = Arrival(self._numbers, holder, keys)
        self._wake()
        return self._numbers

    def left(self, number: int, prefilled: bool) -> None:
        """The request of that number is over."""
        arrival = None if prefilled else self._arrivals.pop(number, None)
        if arrival is not None:  # It never came, and nobody has heard of it.
            self._n_blocks -= len(arrival.keys)
        elif len(self._over) < MOST_BLOCKS:
            self._over[number] = prefilled
        else:
            self.left_out += 1

    def session(self, at: SessionAt) -> None:
        if at.key not in self._sessions and len(self._sessions) >= MOST_SESSIONS:
            self.left_out += 1
            return
        self._sessions[at.key] = at

    def take(self) -> Told:
        """All there is, which is no longer here then."""
        told = Told(frozenset(self._loads), list(self._arrivals.values()), self._over, self._sessions)
        self._loads, self._arrivals, self._over, self._sessions = set(), {}, {}, {}
        self._n_blocks = 0
        return told
