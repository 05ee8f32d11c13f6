"""The index's changes as numbered deltas: collected for a few milliseconds, encoded once, kept for a while."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping

from gateway.engine.feed import FeedStatus
from gateway.indexservice.history import History
from gateway.indexservice.wire import feed_of, of_changes
from gateway.pb import indexer_pb2 as pb
from gateway.publishing import EVENTS_UP
from indexer import Change, Holder, PrefixIndex

_log = logging.getLogger(__name__)
_COLLECT_S = 0.005
_TICK_S = 1.0
_BLOCKS_PER_DELTA = 32_768


class Publisher:
    """In a running event loop: `start`, later `close`. `feeds` is how each rank's events arrive, as of the last tick.

    Every holder's blocks are summed up once in `digest_interval_s`, so that a copy that went wrong finds out.
    """

    def __init__(
        self,
        index: PrefixIndex,
        status: Callable[[], Mapping[Holder, FeedStatus]],
        *,
        history_bytes: int,
        digest_interval_s: float,
    ) -> None:
        self.instance = _new_instance()
        self.history = History(history_bytes)
        self.feeds: dict[Holder, pb.Feed] = {}
        self.blocks = 0
        """Told so far."""
        self.overflows = 0
        self.journal = index.keep_journal(self._wake_up)
        self._status = status
        self._digest_interval_s = digest_interval_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._digests: Iterator[Holder] = iter(())
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.look()
        self._task = self._loop.create_task(self._tick(), name="index publisher")

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def flush(self) -> list[Holder]:
        """Put what has changed into the history. The holders there are after the last of it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        taken = self.journal.take()
        if taken.is_lost:
            self.overflows += 1
            _log.warning("more has changed at once than can be told; every copy begins anew")
            self.history.forget()
            self.instance = _new_instance()
            return taken.holders
        for changes in _cut(taken.changes):
            self._append(of_changes(self.history.sequence + 1, changes))
        return taken.holders

    def look(self) -> None:
        """Tell how events arrive, where that is news."""
        now = {holder: feed_of(status) for holder, status in self._status().items()}
        news = [(holder, feed) for holder, feed in now.items() if self.feeds.get(holder) != feed]
        over = [holder for holder in self.feeds if holder not in now]
        self.feeds = now
        if not news and not over:
            return
        self.flush()
        delta = pb.Delta(sequence=self.history.sequence + 1)
        for (worker, rank), feed in news:
            delta.changes.add(worker=worker, rank=rank, feed=feed)
        for worker, rank in over:
            delta.changes.add(worker=worker, rank=rank, gone=True)
        self._append(delta)

    def _append(self, delta: pb.Delta) -> None:
        self.history.append(pb.Update(deltas=[delta]).SerializeToString())

    def _wake_up(self) -> None:
        """In whatever thread changes the index."""
        self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_COLLECT_S, self.flush)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self.look()
                self._note_digests()
            except Exception:
                _log.exception("unexpected; going on")

    def _note_digests(self) -> None:
        holders = self.journal.holders()
        if not holders:
            return
        for holder in self._next(math.ceil(len(holders) * _TICK_S / self._digest_interval_s)):
            self.journal.note_digest(holder)

    def _next(self, n: int) -> Iterable[Holder]:
        found = []
        for _ in range(n):
            holder = next(self._digests, None)
            if holder is None:
                self._digests = iter(self.journal.holders())
                break
            found.append(holder)
        return found


def knowledge(feed: pb.Feed | None) -> pb.Knowledge:
    """What is known of a rank whose events arrive like that."""
    if feed is None or (not feed.batches and feed.phase != "live"):
        return pb.UNHEARD
    if feed.endpoint_state not in EVENTS_UP:
        return pb.STALE
    return pb.GAP if feed.partial or feed.phase == "replaying" else pb.KNOWN


def _cut(changes: list[Change]) -> Iterator[list[Change]]:
    part: list[Change] = []
    n = 0
    for change in changes:
        part.append(change)
        n += len(change.removed) + len(change.stored)
        if n >= _BLOCKS_PER_DELTA:
            yield part
            part, n = [], 0
    if part:
        yield part


def _new_instance() -> str:
    return secrets.token_hex(8)
