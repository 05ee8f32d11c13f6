"""KV events of the whole fleet into the index, in one thread.

Each engine's batches go through a `Stream` of their own (order, gaps, epochs; `indexer/stream.py`); this module owns
the sockets and the clock, reports to the streams what happened, and carries out what they answer:

    SUB (source.py) --batch--> Stream --Apply--> index.apply, on_batch
    monitor --handshake------> Stream --Clear--> index.clear, on_clear
    DEALER (replays.py) -----> Stream --Replay-> DEALER

A stream belongs to a connection and the rank its batches name. On a shared socket, which engines connect to, the topic
takes the connection's place.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec
import zmq

from gateway.engine.feed import Feed, FeedStatus, IngestSettings
from gateway.engine.feeds import Feeds
from gateway.engine.replays import Replays
from gateway.engine.source import Source
from gateway.engine.topics import Topics
from gateway.engine.turns import Turns
from gateway.right_of_way import RightOfWay
from indexer import (
    Apply,
    Clear,
    EventBatch,
    EventDecodeError,
    FrameError,
    Holder,
    Join,
    PrefixIndex,
    Replay,
    SavedRank,
    decode_batch,
    parse_frames,
)
from indexer.stream import END_OF_REPLAY, Action, Phase

log = logging.getLogger(__name__)

_MAX_SOCKETS = 65_536
_IO_THREADS = 2
_DEFAULT = IngestSettings()

OnBatch = Callable[[str, int, EventBatch], None]
OnClear = Callable[[str, int, str], None]


class _Declared(msgspec.Struct, frozen=True):
    """One `add`. Two with the same content are the same."""

    endpoint: str | None
    replay_endpoint: str | None
    topic: str | None
    bind: bool


class EventIngest:
    """Subscribes to every (worker, rank) it is told of, and keeps `index` true to what they publish.

    `bind_endpoint` opens one socket for all workers that are added without an endpoint of their own. `on_batch` and
    `on_clear` are called from the ingest thread, after the index has it; before each message that thread gives way to
    who has the `right_of_way`. Every method may be called from any thread.
    """

    def __init__(
        self,
        index: PrefixIndex,
        now: Callable[[], float] = time.monotonic,
        *,
        bind_endpoint: str | None = None,
        settings: IngestSettings = _DEFAULT,
        on_batch: OnBatch | None = None,
        on_clear: OnClear | None = None,
        right_of_way: RightOfWay | None = None,
    ) -> None:
        self._index = index
        self._now = now
        self._settings = settings
        self._on_batch = on_batch
        self._on_clear = on_clear
        self._lock = threading.Lock()
        """Held while a batch is applied, so that after `remove` none is."""
        self._declared: dict[Holder, _Declared] = {}
        self._followed: set[str] = set()
        self._to_resume: dict[Holder, SavedRank] = {}
        self._sources: dict[Holder, Source] = {}
        self._feeds = Feeds(settings)
        self._topics = Topics()
        self._shared = Source(self, bind_endpoint, bind=True) if bind_endpoint is not None else None
        self._greeting_shared = False
        self._listens = True
        self._counters: Counter[str] = Counter()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(_IO_THREADS)
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._turns = Turns(now, None if right_of_way is None else right_of_way.give)
        self._replays = Replays(self._context, self._turns, settings, self._replayed, self._replay_ended)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    # ---- from any thread --------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Before `start`: do not open `bind_endpoint` until `take_over`, as another process listens there."""
        self._listens = False

    def hand_over(self, done: Callable[[dict[Holder, SavedRank]], None]) -> None:
        """Close `bind_endpoint`. `done` is called from the ingest thread with what is known of those who came in there
        and cannot be asked for what they have told.
        """
        self._turns.post(lambda: done(self._handed_over()))

    def take_over(self, saved: Mapping[Holder, SavedRank]) -> None:
        """Open `bind_endpoint`, and go on from what another process has handed over: for each rank, if its next batch
        shows that nothing is missing.
        """
        self._turns.post(lambda: self._taken_over(saved))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close every socket and wait for the thread."""
        if self._thread.is_alive():
            self._turns.stop()
            self._thread.join()
        else:
            self._context.destroy(linger=0)

    def add(
        self,
        worker: str,
        rank: int,
        endpoint: str | None,
        replay_endpoint: str | None = None,
        *,
        topic: str | None = None,
        bind: bool = False,
    ) -> None:
        """Follow rank `rank` of `worker`. Adding the same again changes nothing; other endpoints replace the old ones.

        `endpoint` is connected to, or with `bind` opened for that one engine to connect to. None: its messages come in
        at `bind_endpoint`, under `topic` (or one with the worker's name in it). Raises ValueError without a
        `bind_endpoint`.
        """
        if endpoint is None and self._shared is None:
            raise ValueError(f"{worker} rank {rank} has no event endpoint, and there is no bind_endpoint either")
        declared = _Declared(endpoint, replay_endpoint, topic, bind)
        with self._lock:
            before = self._declared.get((worker, rank))
            if before == declared:
                return
            self._declared[worker, rank] = declared
            self._followed.add(worker)
        if before is not None:
            self._turns.post(lambda: self._drop(worker, rank))
        self._turns.post(lambda: self._open(worker, rank, declared))

    def begin_with(self, worker: str, saved: Mapping[int, SavedRank]) -> None:
        """What is known of ranks that are added next: they go on from there, if the engine's history confirms it."""
        for rank, each in saved.items():
            self._to_resume[worker, rank] = each

    def save(self, worker: str, rank: int, done: Callable[[SavedRank | None], None]) -> None:
        """`done` is called from the ingest thread with what is known of the rank; None where that has gaps."""
        self._turns.post(lambda: done(self._saved(worker, rank)))

    def remove(self, worker: str) -> None:
        """Stop following `worker` and clear it in the index. Once this returns nothing of it is applied any more."""
        with self._lock:
            ranks = [rank for name, rank in self._declared if name == worker]
            for rank in ranks:
                del self._declared[worker, rank]
            self._followed.discard(worker)
            for feed in self._feeds.of_worker(worker):
                feed.is_closed = True
            self._index.clear(worker)
        for rank in ranks:
            self._turns.post(lambda rank=rank: self._drop(worker, rank))  # type: ignore[misc]

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def process_restarted(self, worker: str, reason: str, process_start_s: float | None = None) -> None:
        """`worker` is a new process, started at `process_start_s` (its own Unix clock): what it held is gone."""
        self._turns.post(lambda: self._restarted(worker, reason, process_start_s))

    def forget(self, worker: str, reason: str) -> None:
        """`worker`'s cache was emptied, whatever its events still say of before: it is cleared, and none of that comes
        back.
        """
        self._index.clear(worker)
        self._turns.post(lambda: self._forgotten(worker, reason))

    def status(self) -> dict[Holder, FeedStatus]:
        """One entry per (worker, rank) that is followed or was heard of."""
        now_s = self._now()
        return {(feed.worker, feed.rank): feed.status(now_s) for feed in self._feeds if not feed.is_closed}

    def counters(self) -> dict[str, int]:
        """Counts that belong to no single worker."""
        sources = list(self._sources.values()) + ([self._shared] if self._shared else [])
        return {
            **self._counters,
            **self._feeds.counters,
            **{f"replay_{name}": n for name, n in list(self._replays.counters.items())},
            **{f"unexpected_{name}": n for name, n in list(self._turns.errors.items())},
            "connects": sum(source.connects for source in sources),
            "disconnects": sum(source.disconnects for source in sources),
            "failed_handshakes": sum(source.failed_handshakes for source in sources),
        }

    def replay_levels(self) -> dict[str, int]:
        """Replays under way and waiting for their turn."""
        return {"running": self._replays.running, "waiting": self._replays.waiting}

    def unmatched_topics(self) -> dict[str, int]:
        """Messages at the shared socket that belong to no worker, by topic."""
        return dict(self._topics.unmatched)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._shared is not None and self._listens:
            self._shared.open(self._context, self._turns, self._settings)
        try:
            self._turns.run()
        finally:
            self._context.destroy(linger=0)

    def _open(self, worker: str, rank: int, declared: _Declared) -> None:
        if declared.endpoint is not None:
            source = Source(self, declared.endpoint, bind=declared.bind, worker=worker, rank=rank)
        else:
            assert self._shared is not None  # noqa: S101 - `add` refused it otherwise
            source = self._shared
        with self._lock:
            if self._declared.get((worker, rank)) is not declared:
                return  # removed or replaced in the meantime
            feed, squatter = self._feeds.declare(source, worker, rank, declared.replay_endpoint)
        if squatter is not None:
            self._close(squatter)
        saved = self._to_resume.pop((worker, rank), None)
        if saved is not None:
            self._resume(feed, saved)
        if source is self._shared:
            self._topics.add(worker, rank, declared.topic)
            self._greet(feed)
        else:
            self._sources[worker, rank] = source
            source.open(self._context, self._turns, self._settings)

    def _saved(self, worker: str, rank: int) -> SavedRank | None:
        for feed in self._feeds.of_worker(worker):
            position = feed.stream.position()
            if feed.rank == rank and not feed.is_closed and position is not None:
                found = self._index.save(worker, rank)
                return None if found is None else SavedRank(*position, feed.epoch_began_ts, *found)
        return None

    def _resume(self, feed: Feed, saved: SavedRank) -> None:
        if not feed.stream.can_replay or not feed.is_untouched:
            return  # Nobody could say whether something is missing.
        if not self._restore(feed, saved):
            return
        log.info(
            "%s rank %d: %d blocks of a snapshot, if the engine confirms it", feed.worker, feed.rank, saved.n_blocks
        )
        feed.stream.resume(saved.next_seq, saved.last_ts, saved.last_hash)
        feed.epoch_began_ts = saved.epoch_ts

    def _restore(self, feed: Feed, saved: SavedRank) -> bool:
        try:
            self._index.restore(feed.worker, feed.rank, saved)
        except ValueError:
            feed.counters["snapshots_refused"] += 1
            self._index.clear(feed.worker, feed.rank)
            return False
        feed.counters["snapshots_resumed"] += 1
        return True

    def _handed_over(self) -> dict[Holder, SavedRank]:
        if self._shared is None:
            return {}
        self._listens = False
        self._shared.read_all()
        self._shared.close()
        found = {}
        for feed in self._feeds.of_source(self._shared):
            if feed.declared_rank is None or feed.stream.can_replay:
                continue
            saved = self._saved(feed.worker, feed.rank)
            if saved is not None:
                found[feed.worker, feed.declared_rank] = saved
        return found

    def _taken_over(self, saved: Mapping[Holder, SavedRank]) -> None:
        if self._shared is None or self._listens:
            return
        self._listens = True
        for feed in self._feeds.of_source(self._shared):
            each = None if feed.declared_rank is None else saved.get((feed.worker, feed.declared_rank))
            if each is not None and feed.is_untouched:
                feed.stream.join(each.next_seq, each.last_ts, each.last_hash)
                feed.saved = each if feed.stream.is_due else None
        self._shared.open(self._context, self._turns, self._settings)

    def _drop(self, worker: str, rank: int) -> None:
        source = self._sources.pop((worker, rank), None)
        if source is not None:
            source.close()
            gone = self._feeds.of_source(source)
        else:
            self._topics.remove(worker, rank)
            shared = [feed for feed in self._feeds.of_worker(worker) if feed.source is self._shared]
            gone = [feed for feed in shared if feed.declared_rank == rank or feed.is_closed]
        for feed in gone:
            self._feeds.drop(feed)
            self._close(feed)

    def _close(self, feed: Feed) -> None:
        self._stop_asking(feed)
        with self._lock:
            feed.is_closed = True
            self._index.clear(feed.worker, feed.rank)

    def _restarted(self, worker: str, reason: str, process_start_s: float | None) -> None:
        for feed in self._feeds.of_worker(worker):
            began_s = feed.epoch_began_ts
            if process_start_s is not None and began_s is not None and began_s >= process_start_s:
                feed.counters["restarts_already_known"] += 1
            else:
                self._carry_out(feed, feed.stream.restarted(reason))

    def _forgotten(self, worker: str, reason: str) -> None:
        for feed in self._feeds.of_worker(worker):
            self._carry_out(feed, feed.stream.forgotten(reason))

    # ---- what sources report ----------------------------------------------------------------------------------------

    def message(self, source: Source, frames: list[bytes]) -> None:
        try:
            seq, payload = parse_frames(frames)
        except FrameError:
            seq = END_OF_REPLAY
        if seq == END_OF_REPLAY:
            self._counters["bad_frames"] += 1
            return
        worker, rank = source.worker, source.rank
        if worker is None:
            found = self._topics.find(frames[0])
            if found is None:
                self._counters["unmatched_messages"] += 1
                return
            worker, rank = found
        try:
            batch = decode_batch(payload)
        except EventDecodeError:
            self._counters["undecodable_batches"] += 1
            lost = self._feeds.declared(worker, rank or 0)
            if lost is not None:
                self._carry_out(lost, lost.stream.undecodable(seq))
            return
        feed = self._feeds.of_batch(source, worker, rank or 0, batch)
        if feed is not None:
            self._carry_out(feed, feed.stream.live(seq, payload, batch))

    def greeted(self, source: Source) -> None:
        if source is not self._shared:
            for feed in self._feeds.of_source(source):
                self._greet(feed)
        elif not self._greeting_shared:
            # which engine connected is not known: all are looked at, once for a crowd that comes together
            self._greeting_shared = True
            self._turns.after(self._settings.verify_after_s, self._greet_shared)

    def refused(self, source: Source) -> None:
        for feed in self._feeds.of_source(source):
            self._carry_out(feed, feed.stream.restarted("connection refused"))

    def _greet_shared(self) -> None:
        self._greeting_shared = False
        if self._shared is not None:
            for feed in self._feeds.of_source(self._shared):
                self._greet(feed)

    def _greet(self, feed: Feed) -> None:
        """The connection is up: ask for what was missed, and soon after for what was lost while subscribing."""
        feed.begin_anew()
        if feed.verify_timer is not None:
            feed.verify_timer.cancel()
        feed.verify_after_replay = False
        if not feed.stream.can_replay:
            return
        feed.verify_timer = self._turns.after(self._settings.verify_after_s, lambda: self._verify(feed))
        if feed.asked is not None:
            self._replays.ask(feed)
        else:
            self._carry_out(feed, feed.stream.connected())

    def _verify(self, feed: Feed) -> None:
        feed.verify_timer = None
        if feed.asked is not None:
            feed.verify_after_replay = True
        elif not feed.is_closed:
            feed.counters["verifications"] += 1
            self._carry_out(feed, feed.stream.connected())

    def _mend_later(self, feed: Feed) -> None:
        """A replay was given up, perhaps because the engine could not be reached: the more often, the later again."""
        settings = self._settings
        if feed.mend_timer is None and feed.stream.partial:
            wait_s = min(settings.mend_at_most_s, settings.mend_after_s * 2.0 ** min(feed.mendings, 16))
            feed.mend_timer = self._turns.after(wait_s, lambda: self._mend(feed))

    def _mend(self, feed: Feed) -> None:
        feed.mend_timer = None
        if feed.is_closed:
            return
        feed.mendings += 1
        actions = feed.stream.mend()
        if actions:
            self._carry_out(feed, actions)
        else:
            self._mend_later(feed)

    # ---- what streams answer ----------------------------------------------------------------------------------------

    def _carry_out(self, feed: Feed, actions: list[Action]) -> None:
        for action in actions:
            if feed.is_closed:
                return
            if isinstance(action, Apply):
                self._apply(feed, action.batch)
            elif isinstance(action, Clear):
                self._clear(feed, action.reason)
            elif isinstance(action, Join):
                self._join(feed)
            else:
                self._ask(feed, action)
        if feed.saved is not None and not feed.stream.is_due:
            feed.saved = None
            log.warning(
                "%s rank %d: what it held before the restart is not known any more, as it told something meanwhile",
                feed.worker, feed.rank,
            )  # fmt: skip
        if feed.asked is not None and feed.stream.phase is not Phase.REPLAYING:
            self._stop_asking(feed)

    def _join(self, feed: Feed) -> None:
        saved, feed.saved = feed.saved, None
        if saved is not None and self._restore(feed, saved):
            feed.epoch_began_ts = saved.epoch_ts
            log.info("%s rank %d: %d blocks as before the restart", feed.worker, feed.rank, saved.n_blocks)

    def _apply(self, feed: Feed, batch: EventBatch) -> None:
        with self._lock:
            if feed.is_closed or feed.worker not in self._followed:
                return
            try:
                self._index.apply(feed.worker, feed.rank, batch)
            except Exception as error:
                feed.counters["failed_batches"] += 1
                feed.stream.partial = True
                if feed.counters["failed_batches"] == 1:
                    log.exception("%s rank %d: a batch could not be applied (%s)", feed.worker, feed.rank, error)
        feed.applied(batch, self._now())
        if self._on_batch is not None:
            try:
                self._on_batch(feed.worker, feed.rank, batch)
            except Exception:
                self._callback_failed()

    def _clear(self, feed: Feed, reason: str) -> None:
        with self._lock:
            if feed.is_closed:
                return
            self._index.clear(feed.worker, feed.rank)
        feed.epoch_began_ts = None
        feed.counters["clears"] += 1
        log.info("%s rank %d: cleared, %s", feed.worker, feed.rank, reason)
        if self._on_clear is not None:
            try:
                self._on_clear(feed.worker, feed.rank, reason)
            except Exception:
                self._callback_failed()

    def _callback_failed(self) -> None:
        self._counters["failed_callbacks"] += 1
        if self._counters["failed_callbacks"] == 1:
            log.exception("a KV-event callback failed; further failures are only counted")

    def _ask(self, feed: Feed, replay: Replay) -> None:
        feed.asked = replay
        if feed.source.is_up:
            self._replays.ask(feed)
        else:  # nobody would answer; `_greet` asks when the connection is up again
            self._replays.cancel(feed)

    def _stop_asking(self, feed: Feed) -> None:
        feed.asked = None
        self._replays.cancel(feed)

    def _replayed(self, feed: Feed, replay: Replay, seq: int, payload: bytes) -> None:
        try:
            batch = decode_batch(payload)
        except EventDecodeError:
            self._counters["undecodable_batches"] += 1
            return
        if self._feeds.of_batch(feed.source, feed.worker, feed.declared_rank or 0, batch) is not feed:
            feed.counters["foreign_replayed_batches"] += 1
            return
        self._carry_out(feed, feed.stream.replayed(replay.id, seq, payload, batch))

    def _replay_ended(self, feed: Feed, replay: Replay, complete: bool) -> None:
        feed.asked = None
        if complete:
            self._carry_out(feed, feed.stream.replay_done(replay.id))
            feed.mendings = feed.mendings if feed.stream.partial else 0
        else:
            self._carry_out(feed, feed.stream.replay_failed(replay.id))
            self._mend_later(feed)
        if feed.verify_after_replay and not feed.is_waiting:
            feed.verify_after_replay = False
            if complete:
                self._verify(feed)
