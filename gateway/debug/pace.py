"""How fast answers come, second by second: times to the first token, and times between tokens."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence

KEPT_S = 120
_MOST_VALUES = 256
"""Of one second: beyond it every second one is kept, then every fourth, ..."""
SHARES = (0.5, 0.95)

Percentiles = tuple[float, ...]
"""One for each of `SHARES`."""


class _Second:
    __slots__ = ("_found", "_n", "_stride", "_values", "at_s")

    def __init__(self, at_s: int) -> None:
        self.at_s = at_s
        self._values = array("f")
        self._n = 0
        self._stride = 1
        self._found: Percentiles | None = None

    def add(self, value: float) -> None:
        if self._n % self._stride == 0:
            if len(self._values) >= _MOST_VALUES:
                self._values = self._values[::2]
                self._stride *= 2
            if self._n % self._stride == 0:
                self._values.append(value)
        self._n += 1

    def percentiles(self) -> Percentiles:
        """Of a second that is over."""
        if self._found is None:
            ordered = sorted(self._values)
            self._found = tuple(ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in SHARES)
        return self._found


class Series:
    """Values of the last `KEPT_S` seconds. To add one costs an append; percentiles are worked out when asked for."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=KEPT_S)

    def add(self, value: float, now_s: float) -> None:
        at_s = int(now_s)
        seconds = self._seconds
        if not seconds or seconds[-1].at_s != at_s:
            seconds.append(_Second(at_s))
        seconds[-1].add(value)

    def percentiles(self, now_s: float) -> Sequence[Percentiles | None]:
        """Of each whole second before `now_s`, the oldest first, `KEPT_S` of them; None where there was nothing."""
        first_s = int(now_s) - KEPT_S
        found: list[Percentiles | None] = [None] * KEPT_S
        for second in self._seconds:
            if 0 <= second.at_s - first_s < KEPT_S:
                found[second.at_s - first_s] = second.percentiles()
        return found


class Pace:
    """In seconds: `ttft`, from a request's body to the first byte of its streamed answer; `itl`, between two tokens of
    an answer, means of up to `REPORT_TOKENS` of them.
    """

    def __init__(self) -> None:
        self.ttft = Series()
        self.itl = Series()
