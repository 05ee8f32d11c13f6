"""Which workers' KV events are subscribed to, and whether they speak for what the worker holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from gateway.config.schema import EventsConfig
from gateway.engine.capabilities import EventSource
from gateway.engine.feed import FeedStatus, IngestSettings
from gateway.engine.intake import Intake, Link
from gateway.engine.silence import Silence
from gateway.engine.subscriber import EventIngest
from gateway.right_of_way import RightOfWay
from indexer import EventBatch
from scorer.fleet import Worker
from scorer.planner import Planner
from scorer.types import WorkerChange

_log = logging.getLogger(__name__)
EVENTS_UP = frozenset({"connected", "listening"})


class Publishing:
    """Create it inside a running event loop."""

    def __init__(
        self,
        events: EventsConfig,
        planner: Planner,
        link: Link | None = None,
        *,
        link_local: bool = False,
        right_of_way: RightOfWay | None = None,
    ) -> None:
        """`link`: to an indexer, which follows the engines in place of this process. `link_local`: engines may be at
        such addresses. `right_of_way`: the loop's, before the thread that follows them.
        """
        self._right_of_way = right_of_way
        self._link_local = link_local
        self._shared = events.mode == "bind"
        self._planner = planner
        self._loop = asyncio.get_running_loop()
        self._heard: set[tuple[str, int]] = set()
        """Whose events began to arrive, so that not every batch is looked at."""
        self._silence = Silence()
        self._told: set[tuple[str, int]] = set()
        """Ranks whose silence is in the log."""
        self._told_refused: set[str] = set()
        self._link = link
        self.own = self._own(events) if link is None else None
        """Where this process follows the engines itself."""
        intake: Intake | None = self.own or link
        assert intake is not None  # noqa: S101 - one of the two
        self.ingest: Intake = intake
        if link is not None:
            link.on_news, link.on_clear = self._news, self._index_cleared

    def _own(self, events: EventsConfig) -> EventIngest:
        return EventIngest(
            self._planner.index,
            bind_endpoint=events.bind_endpoint if self._shared else None,
            settings=IngestSettings(
                replay_timeout_s=events.replay_timeout_s,
                replay_attempts=events.replay_attempts,
                buffer_batches=events.buffer_batches,
                link_local=self._link_local,
            ),
            on_batch=self._batch_arrived,
            on_clear=self._index_cleared,
            right_of_way=self._right_of_way,
        )

    def subscribe(self, change: WorkerChange, sources: Mapping[int, EventSource]) -> None:
        """Where a key or discovery names an endpoint, it counts; further ranks follow on the ports after it (vLLM's
        own rule).
        """
        worker = change.worker
        for rank in sorted(sources) or [change.rank]:
            source = sources.get(rank)
            if change.events_endpoint is not None:
                self.ingest.add(
                    worker,
                    rank,
                    _port_after(change.events_endpoint, rank),
                    change.replay_endpoint and _port_after(change.replay_endpoint, rank),
                )
            elif self._shared and (source is None or source.engine_connects):
                self.ingest.add(
                    worker,
                    rank,
                    None,
                    source.replay_endpoint if source else None,
                    topic=source.topic or None if source else None,
                )
            elif source is not None and source.endpoint is not None and not source.engine_connects:
                self.ingest.add(worker, rank, source.endpoint, source.replay_endpoint)

    def forget(self, worker: str) -> None:
        self.ingest.remove(worker)
        self._heard = {(name, rank) for name, rank in self._heard if name != worker}
        self._told = {(name, rank) for name, rank in self._told if name != worker}
        self._told_refused.discard(worker)
        self._silence.forget(worker)

    def sent(self, worker: str, rank: int, new_tokens: int) -> None:
        """A prompt went there, of which so many tokens are not held there."""
        known = self._planner.fleet.workers.get(worker)
        size = None if known is None else known.block_size()
        self._silence.sent(worker, rank, new_tokens // size if size else 0)

    def unsent(self, worker: str, rank: int) -> None:
        """One of those did not run after all."""
        self._silence.unsent(worker, rank)

    def unannounced(self, feed: FeedStatus) -> int:
        """Prompts in a row that a connected rank said nothing of, though they must have made events there; 0: no sign
        of that.
        """
        return self._silence.prompts(feed, time.monotonic()) if feed.endpoint_state in EVENTS_UP else 0

    def speaks(self, feed: FeedStatus) -> bool:
        """Whether what is known of the rank is what it holds."""
        return is_speaking(feed) and not self.unannounced(feed)

    def restarted(self, worker: str, process_start_s: float | None) -> None:
        """Its process is another one: a new epoch."""
        self._silence.forget(worker)
        if any(name == worker for name, _ in self.ingest.status()):
            self.ingest.process_restarted(worker, "process start time", process_start_s)
        else:
            self._planner.index.clear(worker)

    def watch(self) -> None:
        """A worker's events count once those of all its ranks do: a silent rank would look empty."""
        feeds: dict[str, list[FeedStatus]] = {}
        for (name, _), feed in self.ingest.status().items():
            feeds.setdefault(name, []).append(feed)
        for worker in self._planner.fleet.workers.values():
            mine = feeds.get(worker.name, [])  # Their ranks are the batches' own, which may be other numbers.
            self._silence.look(mine, time.monotonic())
            self._tell_silence(mine)
            self._set(worker, len(mine) >= len(worker.loads) and all(map(self.speaks, mine)))
        self._tell_refused()

    def _tell_silence(self, feeds: list[FeedStatus]) -> None:
        for feed in feeds:
            key, prompts = (feed.worker, feed.rank), self.unannounced(feed)
            if prompts and key not in self._told:
                self._told.add(key)
                _log.warning("rank %d of %s announced nothing of %d new prompts", feed.rank, feed.worker, prompts)
            elif not prompts:
                self._told.discard(key)

    def _tell_refused(self) -> None:
        for worker, _ in self._planner.index.refused_events():
            if worker not in self._told_refused:
                self._told_refused.add(worker)
                _log.warning(
                    "%s announces blocks of a lower tier in finer pieces than its GPU's; they are not followed", worker
                )

    def _set(self, worker: Worker, publishing: bool) -> None:
        if worker.publishes_events == publishing:
            return
        worker.publishes_events = publishing
        if publishing:
            self._planner.holdings.approximate.clear(worker.name)  # From now on its own events speak for it.
        elif self._link is None or not self._link.is_stale:  # Which is told once, and not for each worker.
            _log.warning("the KV events of %s stopped; what it is sent is assumed to be cached instead", worker.name)

    def _batch_arrived(self, worker: str, rank: int, batch: EventBatch) -> None:
        """In the ingest thread."""
        self._news(worker, rank)

    def _news(self, worker: str, rank: int) -> None:
        if (worker, rank) not in self._heard:
            self._loop.call_soon_threadsafe(self._began, worker, rank)

    def _began(self, worker: str, rank: int) -> None:
        if worker in self._planner.fleet.workers and (worker, rank) not in self._heard:
            self._heard.add((worker, rank))
            self.watch()

    def _index_cleared(self, worker: str, rank: int, reason: str) -> None:
        """In the ingest thread."""
        self._loop.call_soon_threadsafe(self._planner.forget_blocks, worker, rank)


def is_speaking(feed: FeedStatus) -> bool:
    """Whether what is known of the rank is what it holds: its events arrive, or a replay has shown that there are
    none.
    """
    if feed.endpoint_state not in EVENTS_UP:
        return False
    return feed.batches > 0 or (feed.replay_endpoint is not None and feed.phase == "live" and not feed.partial)


def _port_after(endpoint: str, rank: int) -> str:
    if rank == 0 or not endpoint.startswith("tcp://"):
        return endpoint
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}"
