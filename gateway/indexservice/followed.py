"""What an `Intake` is whose workers an indexer knows, however the indexer is asked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from gateway.engine.intake import OnClear, OnNews
from gateway.indexservice.addresses import Addresses

_GRACE_S = 2.0
"""So long another indexer may be looked for before what is known counts as stale."""


class Followed:
    def __init__(self, addresses: Addresses, now: Callable[[], float] = time.monotonic) -> None:
        self.on_news: OnNews = lambda worker, rank: None
        self.on_clear: OnClear = lambda worker, rank, reason: None
        self.problem: str | None = None
        """Why no indexer is followed now."""
        self.is_live = False
        """Whether an indexer is followed now."""
        self._addresses = addresses
        self._now = now
        self._counters: Counter[str] = Counter()
        self._live_until_s = now()
        """When it was last so."""

    def add(
        self,
        worker: str,
        rank: int,
        endpoint: str | None,
        replay_endpoint: str | None = None,
        *,
        topic: str | None = None,
    ) -> None:
        """Nothing: whom an indexer follows is for its own configuration to say."""

    def remove(self, worker: str) -> None:
        """Nothing, as above."""

    def process_restarted(self, worker: str, reason: str, process_start_s: float | None = None) -> None:
        """Nothing: the indexer sees it too, and when it says so is when what it said before is void."""

    @property
    def is_stale(self) -> bool:
        """Whether what is known is of before."""
        return not self.is_live and self._now() - self._live_until_s > _GRACE_S

    @property
    def address(self) -> str:
        return self._addresses.current
