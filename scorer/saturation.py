"""Whether a worker has as many requests waiting inside as it should, so that more would only lose their choice.

What counts is what the engine says of itself: a worker whose figures are missing or stale is open. Between two
readings, bookings that came and went (other replicas' too, where they say) are added. An engine that had requests
waiting while it ran the very same number of others for several readings has a ceiling there; it holds until the engine
runs more than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scorer.fleet import STALE_S, Worker
from scorer.types import EngineStats

_FLAT_READINGS = 3
_NOBODY: Mapping[str, int] = {}


class Reading:
    """A worker when it was last read. `line`: booked, without a first token; `ceiling`: how many it can run at once."""

    __slots__ = ("ceiling", "figures", "flat", "line", "requests", "worker")

    def __init__(self, worker: Worker, figures: EngineStats) -> None:
        self.worker = worker
        self.figures = figures
        self.flat = 0
        self.ceiling: float | None = None
        self.take(figures)

    def growth(self, gone: int = 0) -> int:
        """By how many the line has got longer since, if `gone` of it left now."""
        return _line(self.worker) - gone - self.line

    def take(self, stats: EngineStats) -> None:
        before, self.figures = self.figures, stats
        self.line, self.requests = _line(self.worker), _requests(self.worker)
        if before.process_start_s != stats.process_start_s:
            self.flat, self.ceiling = 0, None
        running = stats.running or 0.0
        if self.ceiling is not None and running > self.ceiling:
            self.ceiling = None
        if not waiting(stats) or not running:
            self.flat = 0
            return
        self.flat = self.flat + 1 if self.flat and before.running == running else 1
        if self.flat >= _FLAT_READINGS:
            self.ceiling = max(running, self.ceiling or 0.0)


class Saturation:
    """`bound`: so many requests may wait inside each rank of a worker."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._seen: dict[str, Reading] = {}

    def read(self, worker: Worker) -> Reading | None:
        """Take in its latest figures; to be called soon after they came."""
        stats = worker.stats
        if stats is None:
            return None
        seen = self._seen.get(worker.name)
        if seen is None or seen.worker is not worker:
            seen = self._seen[worker.name] = Reading(worker, stats)
        elif seen.figures is not stats:
            seen.take(stats)
        return seen

    def forget(self, name: str) -> None:
        self._seen.pop(name, None)

    def ceiling(self, worker: Worker) -> float | None:
        seen = self.read(worker)
        return None if seen is None else seen.ceiling

    def is_open(self, worker: Worker, now_s: float) -> bool:
        """Whether one more request may go there."""
        seen = self._fresh(worker, now_s)
        if seen is None:
            return True
        inside = waiting(seen.figures)
        if inside and inside + seen.growth() >= self._bound * len(worker.loads):
            return False
        return self._below_ceiling(seen, inside)

    def has_place(self, workers: Iterable[Worker], now_s: float, gone: Mapping[str, int] = _NOBODY) -> bool:
        """Whether one of those that wait for these workers may go, though others may follow and all go to the same one.

        Between two readings no more are let in than all bounds together have room for; where a worker has none waiting,
        as many as it runs if that is more. Others' requests take no more of a bound than there is. `gone`: how it were
        if so many of those booked at a worker, by name, that have no first token left now.
        """
        places, is_open = 0.0, False
        for worker in workers:
            seen = self._fresh(worker, now_s)
            if seen is None:
                return True
            bound = self._bound * len(worker.loads)
            left = gone.get(worker.name, 0)
            inside, growth = waiting(seen.figures), seen.growth(left)
            most = bound if inside else max(bound, seen.figures.running or 0.0)
            foreign = max(0.0, inside - seen.line)
            places += most - min(bound, foreign) - max(0.0, inside - foreign + growth)
            is_open = is_open or (inside + growth < most and self._below_ceiling(seen, inside, left))
        return is_open and places > 0

    def _fresh(self, worker: Worker, now_s: float) -> Reading | None:
        stats = worker.stats
        return None if stats is None or now_s - stats.scraped_at_s > STALE_S else self.read(worker)

    def _below_ceiling(self, seen: Reading, inside: float, left: int = 0) -> bool:
        if seen.ceiling is None:
            return True
        foreign = max(0.0, (seen.figures.running or 0.0) + inside - seen.requests)
        return _requests(seen.worker) - left + foreign < seen.ceiling + self._bound * len(seen.worker.loads)


def waiting(stats: EngineStats) -> float:
    """Those the engine has no room for yet; not those that wait for a transfer, where it tells them apart."""
    if stats.waiting_for_room is not None:
        return stats.waiting_for_room
    return stats.waiting or 0.0


def _line(worker: Worker) -> int:
    return sum(load.in_line for load in worker.loads.values())


def _requests(worker: Worker) -> int:
    return sum(load.in_line + load.streams for load in worker.loads.values())
