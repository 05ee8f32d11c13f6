"""KV that a prefill worker holds for a decode request that will not come, until it is released or its lease is over."""

from __future__ import annotations

from itertools import count

_MOST_HELD = 16_384


class Stranded:
    """Tokens by prefill worker."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[str, int, float]] = {}
        self._numbers = count(1)
        self.total_tokens = 0
        """All that were ever stranded, released later or not."""

    def add(self, worker: str, n_tokens: int, until_s: float) -> int:
        """Returns the number to `release` them by."""
        number = next(self._numbers)
        if len(self._held) >= _MOST_HELD:
            del self._held[next(iter(self._held))]
        self._held[number] = worker, n_tokens, until_s
        self.total_tokens += n_tokens
        return number

    def release(self, number: int) -> None:
        self._held.pop(number, None)

    def forget(self, worker: str) -> None:
        """The worker is gone or a new process."""
        for number in [number for number, (name, _, _) in self._held.items() if name == worker]:
            del self._held[number]

    def tokens(self, now_s: float) -> dict[str, int]:
        """What is held now, by worker."""
        for number in [number for number, (_, _, until_s) in self._held.items() if until_s <= now_s]:
            del self._held[number]
        out: dict[str, int] = {}
        for worker, n_tokens, _ in self._held.values():
            out[worker] = out.get(worker, 0) + n_tokens
        return out
