"""Ranks that should have announced something and did not.

A prompt with at least one block that its rank does not hold makes an event there. One such prompt proves little: it may
be cached after all, or still wait. Several in a row, over a while, without a single batch mean that this rank's events
do not come, however well its connection is: data-parallel ranks that share a port, a publisher that has died, a model
whose blocks are never announced.
"""

from __future__ import annotations

import msgspec

from gateway.engine.feed import FeedStatus

PROMPTS = 8
AFTER_S = 10.0


class _Unheard(msgspec.Struct):
    """`prompts` sent since `since_s` (monotonic seconds), when the rank had announced `batches`."""

    batches: int
    prompts: int
    since_s: float


class Silence:
    """By worker and rank. A rank that was never sent a new block is not silent."""

    def __init__(self) -> None:
        self._unheard: dict[tuple[str, int], _Unheard] = {}
        self._sent: dict[tuple[str, int], int] = {}

    def sent(self, worker: str, rank: int, new_blocks: int) -> None:
        """A prompt went there, of which it lacks so many whole blocks."""
        if new_blocks > 0:
            self._sent[worker, rank] = self._sent.get((worker, rank), 0) + 1

    def unsent(self, worker: str, rank: int) -> None:
        """One of them did not run: it was refused, or its client left."""
        if self._sent.get((worker, rank), 0) > 0:
            self._sent[worker, rank] -= 1
            return
        feeds = [number for name, number in self._unheard if name == worker]
        known = self._unheard.get((worker, feeds[0] if len(feeds) == 1 else rank))
        if known is not None and known.prompts:
            known.prompts -= 1

    def look(self, feeds: list[FeedStatus], now_s: float) -> None:
        """Take in what all feeds of one worker have received by now."""
        for feed in feeds:
            prompts = sum(self._sent.pop((feed.worker, rank), 0) for rank in self._ranks_of(feed, feeds))
            known = self._unheard.get((feed.worker, feed.rank))
            if known is None or known.batches != feed.batches:
                self._unheard[feed.worker, feed.rank] = _Unheard(feed.batches, 0, now_s)  # Perhaps of these prompts.
                continue
            if prompts and not known.prompts:
                known.since_s = now_s
            known.prompts += prompts

    def prompts(self, feed: FeedStatus, now_s: float) -> int:
        """How many prompts it left unannounced; 0 while that may be chance."""
        known = self._unheard.get((feed.worker, feed.rank))
        if known is None or known.batches != feed.batches or known.prompts < PROMPTS or now_s < known.since_s + AFTER_S:
            return 0
        return known.prompts

    def forget(self, worker: str) -> None:
        for table in (self._unheard, self._sent):
            for key in [key for key in table if key[0] == worker]:
                del table[key]

    def _ranks_of(self, feed: FeedStatus, feeds: list[FeedStatus]) -> list[int]:
        """Ranks by the number we send to. A single feed is all of its worker's, whatever number its batches name."""
        if len(feeds) > 1:
            return [feed.rank]
        return [rank for worker, rank in self._sent if worker == feed.worker]
