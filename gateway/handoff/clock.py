"""How long an answer was on its way, told by its Date header.

A lease runs from when the prefill engine has finished. What delays the answer (a proxy, a full pipe, our own loop)
takes from it, and cannot be seen from here but by the server's clock. Clocks differ; by how much shows in the answers
that came fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

_RESOLUTION_S = 1.0
_KEPT_S = 600.0
_MOST_WORKERS = 4096


class AnswerClock:
    """The smallest difference between our clock and each worker's, of the last ten minutes or so."""

    def __init__(self, unix: Callable[[], float] | None = None) -> None:
        """`unix`: seconds since 1970 on a clock that never steps (when the machine's does, no answer was late)."""
        self._unix = unix or _steady_unix()
        self._least: dict[str, tuple[float, float]] = {}

    def seen(self, worker: str, date: str | None) -> None:
        """Any answer of the worker: the fastest show how the clocks differ."""
        self.delay_s(worker, date)

    def delay_s(self, worker: str, date: str | None, unix_s: float | None = None) -> float:
        """At least so long ago was the answer written that says `date` and came at `unix_s` (None: now)."""
        unix_s = self._unix() if unix_s is None else unix_s
        apart_s = _apart_s(date, unix_s)
        if apart_s is None:
            return 0.0
        least_s, since_s = self._least.get(worker, (apart_s, unix_s))
        if apart_s <= least_s or unix_s - since_s > _KEPT_S:
            if worker not in self._least and len(self._least) >= _MOST_WORKERS:
                del self._least[next(iter(self._least))]
            self._least[worker] = apart_s, unix_s
            return 0.0
        return max(0.0, apart_s - least_s - _RESOLUTION_S)


def _steady_unix() -> Callable[[], float]:
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()


def _apart_s(date: str | None, unix_s: float) -> float | None:
    if date is None:
        return None
    try:
        return unix_s - parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
