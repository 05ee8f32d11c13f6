"""Simulated time: a heap of what happens when."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Runs actions in order of time, those of one instant in the order they were set. Background actions (scrapes,
    leases) alone do not keep it running.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.actions = 0
        """How many were run."""
        self._heap: list[tuple[float, int, bool, Action]] = []
        self._set = 0
        self._foreground = 0

    def at(self, when_s: float, action: Action, *, background: bool = False) -> None:
        """Run `action` at `when_s`. Raises ValueError for the past."""
        if not when_s >= self.now_s:
            raise ValueError(f"it is {self.now_s} s; nothing can be set to {when_s} s")
        self._set += 1
        self._foreground += not background
        heapq.heappush(self._heap, (when_s, self._set, background, action))

    def after(self, delay_s: float, action: Action, *, background: bool = False) -> None:
        self.at(self.now_s + delay_s, action, background=background)

    def run(self, until_s: float = float("inf")) -> None:
        """Until nothing but background actions is left, or `until_s` is reached."""
        heap = self._heap
        while self._foreground and heap[0][0] <= until_s:
            self.now_s, _, background, action = heapq.heappop(heap)
            self._foreground -= not background
            self.actions += 1
            action()
