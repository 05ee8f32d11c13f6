"""Which prefill worker can hand over to which decode worker: a breaker for each pair.

    closed --failures in a row--> open --back-off over--> half open --one probe worked--> closed
                                   ^                         |
                                   +------ probe failed -----+   (and the back-off doubles, up to its bound)

Both servers of a broken pair may be well with others: a peer that came back under its old address leaves transfer state
behind that only fails between the two, and engines of different versions refuse each other's handshake.
"""

from __future__ import annotations

import msgspec

FAILURES = 2
BACKOFF_MIN_S = 5.0
BACKOFF_MAX_S = 300.0
_MOST_PAIRS = 65_536

Names = tuple[str, str]
"""(prefill worker, decode worker)"""


class Pair(msgspec.Struct):
    """`failures` are in a row; open while `retry_at_s` is set. `incompatible` says what keeps them apart for good.
    `met`: a handoff has worked; `under_way`: so many have neither worked nor failed yet.
    """

    handoffs: int = 0
    failed: int = 0
    met: bool = False
    under_way: int = 0
    failures: int = 0
    retry_at_s: float | None = None
    backoff_s: float = BACKOFF_MIN_S
    probing: bool = False
    incompatible: str | None = None
    last_failure: str | None = None

    def state(self, now_s: float) -> str:
        if self.incompatible is not None:
            return "incompatible"
        if self.retry_at_s is None:
            return "closed"
        return "half_open" if self.probing or now_s >= self.retry_at_s else "open"


class Pairs:
    """The breakers of all pairs that were ever used or compared."""

    def __init__(self) -> None:
        self.pairs: dict[Names, Pair] = {}

    def incompatible(self, names: Names) -> str | None:
        pair = self.pairs.get(names)
        return None if pair is None else pair.incompatible

    def allows(self, names: Names, now_s: float) -> bool:
        """Whether a handoff may be tried. Where this is the probe of a half-open pair, say so with `start`."""
        pair = self.pairs.get(names)
        if pair is None:
            return True
        if pair.incompatible is not None or pair.probing:
            return False
        return pair.retry_at_s is None or now_s >= pair.retry_at_s

    def have_met(self, names: Names) -> bool:
        """Whether they have handed something over, or are about to: engines that have shake hands no more."""
        pair = self.pairs.get(names)
        return pair is not None and (pair.met or pair.under_way > 0)

    def start(self, names: Names) -> None:
        """A handoff begins. It ends with one of `worked`, `broke` and `gave_up`."""
        pair = self._pair(names)
        pair.handoffs += 1
        pair.under_way += 1
        pair.probing = pair.retry_at_s is not None

    def worked(self, names: Names) -> None:
        pair = self._ended(names)
        pair.met = True
        pair.failures, pair.retry_at_s, pair.probing, pair.backoff_s = 0, None, False, BACKOFF_MIN_S

    def broke(self, names: Names, now_s: float, why: str | None = None) -> None:
        pair = self._ended(names)
        pair.last_failure = why
        pair.failed += 1
        pair.failures += 1
        if pair.probing:
            pair.backoff_s = min(BACKOFF_MAX_S, 2 * pair.backoff_s)
        if pair.probing or pair.failures >= FAILURES:
            pair.retry_at_s = now_s + pair.backoff_s
        pair.probing = False

    def gave_up(self, names: Names) -> None:
        """It ended without showing anything about the pair; a probe may be tried again."""
        self._ended(names).probing = False

    def set_incompatible(self, names: Names, why: str | None) -> None:
        if why is not None or names in self.pairs:
            self._pair(names).incompatible = why

    def forget(self, worker: str) -> None:
        """The worker is gone or a new process: what its pairs did says nothing any more."""
        for names in [names for names in self.pairs if worker in names]:
            del self.pairs[names]

    def _ended(self, names: Names) -> Pair:
        pair = self._pair(names)
        pair.under_way = max(0, pair.under_way - 1)  # What is found out later was given up before.
        return pair

    def _pair(self, names: Names) -> Pair:
        pair = self.pairs.get(names)
        if pair is None:
            if len(self.pairs) >= _MOST_PAIRS:
                del self.pairs[next(iter(self.pairs))]
            pair = self.pairs[names] = Pair()
        return pair
