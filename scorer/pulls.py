"""What a decode worker's engine counts of the KV it fetches, beside what was predicted.

A pull is learned from what is left of the time to a first token, which holds much that is no transfer, and by a factor
that is bounded. The engine times each transfer. Where its count is far from the prior and from what is predicted with
the factors learned, its mean takes the prior's place; factors are learned anew from there, and correct by whatever else
the first token waits for. Sums are halved now and then, so that they follow.
"""

from __future__ import annotations

from typing import Final

from scorer.calibrate import MIN_SAMPLES
from scorer.types import EngineStats

GROSS: Final = 2.0
"""Within so many times, one says the same as the other."""
_MOST: Final = 256


class Pulls:
    """Of one decode worker. `scale`: what the prior of a pull is multiplied by, 1 while nothing speaks against it.
    `news`: it has just been changed; for whoever tells.
    """

    __slots__ = ("_engine_n", "_engine_s", "_n", "_said_s", "_usual_s", "news", "scale")

    def __init__(self) -> None:
        self.scale = 1.0
        self.news = False
        self._engine_n = self._engine_s = 0.0
        self._n = self._usual_s = self._said_s = 0.0

    def scraped(self, before: EngineStats | None, now: EngineStats) -> None:
        """Take in what was counted between two scrapes of one process."""
        if before is None or before.process_start_s != now.process_start_s:
            return
        n, took_s = _more(before.nixl_transfers, now.nixl_transfers), _more(before.nixl_transfer_s, now.nixl_transfer_s)
        if n and took_s:
            self._engine_n += n
            self._engine_s += took_s
            if self._engine_n > _MOST:
                self._engine_n, self._engine_s = self._engine_n / 2, self._engine_s / 2

    def came(self, usual_s: float, said_s: float) -> None:
        """A pull has worked, of which the constants alone say `usual_s`, and the price would say `said_s`."""
        self._n += 1
        self._usual_s += usual_s
        self._said_s += said_s
        if self._n > _MOST:
            self._n, self._usual_s, self._said_s = self._n / 2, self._usual_s / 2, self._said_s / 2

    @property
    def engine_mean_s(self) -> float | None:
        """By the engine's count; None before it has counted enough."""
        return self._engine_s / self._engine_n if self._engine_n >= MIN_SAMPLES else None

    @property
    def usual_mean_s(self) -> float | None:
        """By the constants alone; None before there were enough."""
        return self._usual_s / self._n if self._n >= MIN_SAMPLES else None

    @property
    def said_mean_s(self) -> float | None:
        """With what was learned; None before there were enough."""
        return self._said_s / self._n if self._n >= MIN_SAMPLES else None

    @property
    def agrees(self) -> bool | None:
        """Whether what is predicted is what the engine counts; None before that is known."""
        engine_s, said_s = self.engine_mean_s, self.said_mean_s
        return None if engine_s is None or not said_s else _alike(engine_s, said_s)

    def check(self) -> bool:
        """Whether the engine's mean takes the prior's place from now on, because neither it nor the factors fit."""
        engine_s, usual_s = self.engine_mean_s, self.usual_mean_s
        if self.agrees is not False or engine_s is None or not usual_s or _alike(engine_s, self.scale * usual_s):
            return False
        self.scale = engine_s / usual_s
        self.news = True
        self._n = self._usual_s = self._said_s = 0.0
        return True


def _alike(a: float, b: float) -> bool:
    return a <= GROSS * b and b <= GROSS * a


def _more(before: float | None, now: float | None) -> float:
    return 0.0 if before is None or now is None else max(0.0, now - before)
