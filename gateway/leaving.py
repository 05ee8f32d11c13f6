"""Workers on their way out: when they are idle, and for how long they are kept then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from scorer.fleet import Worker
from scorer.planner import Planner

KEEP_DRAINED_S = 60.0
"""A draining worker without work is kept for a while, with what is known of it, since many come back."""


class Leaving:
    """`is_kept(worker)`: it was drained to come back, and stays however long that takes."""

    def __init__(self, planner: Planner, is_kept: Callable[[str], bool]) -> None:
        self._planner = planner
        self._is_kept = is_kept
        self._idle_s: dict[str, float] = {}
        """Since when they are idle."""
        self._until_s: dict[str, float] = {}
        """Those that are to go as soon as they are idle, and at this time at the latest."""

    def send_off(self, worker: str, until_s: float | None) -> None:
        """Its going is wanted: not kept once it is idle, and not longer than this (None: as long as it takes)."""
        self._until_s[worker] = math.inf if until_s is None else until_s

    def is_leaving(self, worker: str) -> bool:
        return worker in self._until_s

    def stays(self, worker: str) -> None:
        """It serves again, or is gone."""
        self._idle_s.pop(worker, None)
        self._until_s.pop(worker, None)

    def due(self, now_s: float) -> Iterator[str]:
        """Those whose time is over."""
        for worker in list(self._planner.fleet.workers.values()):
            name = worker.name
            if not worker.draining:
                self._idle_s.pop(name, None)
                continue
            until_s = self._until_s.get(name)
            if until_s is not None and now_s >= until_s:
                yield name
            elif self.is_busy(worker):
                self._idle_s.pop(name, None)
            elif until_s is not None or self._has_been_idle(name, now_s):
                yield name

    def _has_been_idle(self, name: str, now_s: float) -> bool:
        since_s = self._idle_s.setdefault(name, now_s)
        return now_s - since_s > KEEP_DRAINED_S and not self._is_kept(name)

    def is_busy(self, worker: Worker) -> bool:
        """Whether a request still needs it: runs there, or is to fetch its prompt from there."""
        return any(load.requests for load in worker.loads.values()) or self._planner.handing_over(worker.name) > 0
