"""One (worker, rank)'s events: its stream, the replay it waits for, and what is visible of it."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.engine.turns import Timer
from indexer import EventBatch, Replay, SavedRank, Stream
from indexer.events import AllBlocksCleared

if TYPE_CHECKING:
    from gateway.engine.source import Source

_RATE_WINDOW_S = 10.0


class IngestSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of event ingestion; the first three are configuration keys.

    `replay_timeout_s` is the longest silence of an engine that owes replayed batches. A subscription takes effect some
    time after the connection is up, so what was published in between is looked for `verify_after_s` later.
    What a replay that was given up left out is asked for again `mend_after_s` later, and then ever more seldom.
    `connect_timeout_s` bounds one connection attempt, `reopen_after_s` is the wait before a socket that could not be
    opened is tried again. `link_local`: endpoints may be at such addresses, and those of cloud metadata.
    """

    replay_timeout_s: float = 2.0
    replay_attempts: int = 3
    buffer_batches: int = 10_000
    replays_at_once: int = 8
    verify_after_s: float = 1.0
    mend_after_s: float = 2.0
    mend_at_most_s: float = 60.0
    connect_timeout_s: float = 5.0
    reopen_after_s: float = 5.0
    link_local: bool = False


class FeedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one (worker, rank)'s events. `last_batch_age_s` None: never a batch."""

    worker: str
    rank: int
    endpoint: str
    endpoint_state: str
    endpoint_error: str | None
    replay_endpoint: str | None
    phase: str
    partial: bool
    epoch: int
    next_seq: int
    gaps: int
    missing_batches: int
    batches: int
    events: int
    events_per_s: float
    last_batch_age_s: float | None
    counters: dict[str, int]


class Feed:
    """`worker` and `rank` name its holder in the index, `declared_rank` is the rank it was added as (None: it came with
    a batch). Only the ingest thread changes it, but for `is_closed`.
    """

    def __init__(
        self,
        source: Source,
        worker: str,
        rank: int,
        settings: IngestSettings,
        *,
        replay_endpoint: str | None = None,
        declared_rank: int | None = None,
    ) -> None:
        self.source = source
        self.worker = worker
        self.rank = rank
        self.declared_rank = declared_rank
        self.replay_endpoint = replay_endpoint
        self.counters: Counter[str] = Counter()
        self.is_closed = False
        self.saved: SavedRank | None = None
        """What another process knew, until the stream joins."""
        self.asked: Replay | None = None
        """The replay the stream waits for, whether it could be sent or not."""
        self.verify_timer: Timer | None = None
        self.mend_timer: Timer | None = None
        self.mendings = 0
        """Since all was there."""
        self.verify_after_replay = False
        self.batches = 0
        self.events = 0
        self.epoch_began_ts: float | None = None
        """The engine's clock at the first batch of this epoch."""
        self.last_batch_s: float | None = None
        self._rate = 0.0
        self._settings = settings
        self.stream = self._new_stream()

    def _new_stream(self) -> Stream:
        return Stream(
            can_replay=self.replay_endpoint is not None,
            buffer_batches=self._settings.buffer_batches,
            replay_attempts=self._settings.replay_attempts,
        )

    def begin_anew(self) -> None:
        """Forget that asking failed, if nothing was ever received: the stream may yet be read from its beginning."""
        stream = self.stream
        if stream.next_seq == 0 and self.asked is None and not stream.skips and not stream.is_due:
            before = self.stream
            self.stream = self._new_stream()
            self.stream.counters = before.counters
            self.stream.epoch = before.epoch

    def applied(self, batch: EventBatch, now_s: float) -> None:
        """`batch` went to the index."""
        if self.epoch_began_ts is None:
            self.epoch_began_ts = batch.ts
        n_events = len(batch.events)
        self._rate = self._rate_at(now_s) + n_events / _RATE_WINDOW_S
        self.last_batch_s = now_s
        self.batches += 1
        self.events += n_events
        if batch.malformed or batch.unknown:
            self.counters["malformed_events"] += batch.malformed
            self.counters["unknown_events"] += sum(batch.unknown.values())
        if n_events and isinstance(batch.events[0], AllBlocksCleared):
            self.counters["cleared_by_engine"] += 1

    def _rate_at(self, now_s: float) -> float:
        """Events per second, over about the last ten."""
        if self.last_batch_s is None:
            return 0.0
        return self._rate * math.exp(min(0.0, self.last_batch_s - now_s) / _RATE_WINDOW_S)

    @property
    def is_waiting(self) -> bool:
        return self.asked is not None

    @property
    def is_untouched(self) -> bool:
        """Nothing was ever received."""
        return self.batches == 0 and self.stream.next_seq == 0

    def status(self, now_s: float) -> FeedStatus:
        stream: dict[str, Any] = self.stream.stats()
        source = self.source
        counters = {
            **stream["counters"],
            **self.counters,
            "connects": source.connects,
            "disconnects": source.disconnects,
            "failed_handshakes": source.failed_handshakes,
        }
        return FeedStatus(
            worker=self.worker,
            rank=self.rank,
            endpoint=source.endpoint,
            endpoint_state=source.state,
            endpoint_error=source.error,
            replay_endpoint=self.replay_endpoint,
            phase=stream["phase"],
            partial=stream["partial"],
            epoch=stream["epoch"],
            next_seq=stream["next_seq"],
            gaps=counters.get("gaps", 0),
            missing_batches=counters.get("missing_batches", 0),
            batches=self.batches,
            events=self.events,
            events_per_s=self._rate_at(now_s),
            last_batch_age_s=None if self.last_batch_s is None else max(0.0, now_s - self.last_batch_s),
            counters=counters,
        )
