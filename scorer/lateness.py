"""How far predicted times to the first token were off, and whether they are good enough to refuse requests by."""

from __future__ import annotations

from collections import deque

MIN_SAMPLES = 50
MOST_ERROR = 0.30
_KEPT = 200
_YOUNG_S = 600.0
_LEAST_S = 0.01
_WORST = 10.0


class Lateness:
    """One model's latest samples, none older than ten minutes. `error` is the mean of |predicted - seen| / seen."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def note(self, predicted_s: float, seen_s: float, now_s: float) -> None:
        error = min(_WORST, abs(predicted_s - seen_s) / max(_LEAST_S, seen_s))
        self._samples.append((now_s, error))
        self._sum += error
        if len(self._samples) > _KEPT:
            self._drop()

    def samples(self, now_s: float) -> int:
        while self._samples and now_s - self._samples[0][0] > _YOUNG_S:
            self._drop()
        return len(self._samples)

    def error(self, now_s: float) -> float | None:
        n = self.samples(now_s)
        return max(0.0, self._sum) / n if n else None

    def armed(self, now_s: float) -> bool:
        """Whether enough is known, and it is right enough."""
        error = self.error(now_s)
        return error is not None and len(self._samples) >= MIN_SAMPLES and error < MOST_ERROR

    def _drop(self) -> None:
        self._sum -= self._samples.popleft()[1]
        if not self._samples:
            self._sum = 0.0
