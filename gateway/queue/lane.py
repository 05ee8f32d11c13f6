"""What one model's queue is made of, and how many it has refused."""

from __future__ import annotations

import asyncio
from collections import Counter

from scorer.lateness import Lateness
from scorer.queue import Entry, FairQueue, Rate


class Waiting(Entry):
    """An entry with the future its request waits for."""

    __slots__ = ("by_age", "future", "lane", "within")

    by_age: bool
    """It was let go for having waited longest, past others of higher priority."""
    future: asyncio.Future[None]
    lane: Lane
    within: frozenset[str] | None
    """The only workers that may serve it; None: any."""


class Lane:
    """One model's."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.queue = FairQueue()
        self.leaving = Rate()
        self.lateness = Lateness()
        self.held = 0
        """Requests that had to wait."""
        self.sheds: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.queue)

    def oldest_s(self, now_s: float) -> float:
        oldest = self.queue.oldest()
        return 0.0 if oldest is None else max(0.0, now_s - oldest.since_s)

    def wait_s(self, ahead: int, now_s: float) -> float | None:
        """How long until `ahead` have left and one more; None before anybody has."""
        per_s = self.leaving.per_s(now_s)
        return (ahead + 1) / per_s if per_s else None
