"""The gateway's own event ingestion and index, watched from outside: what arrived, and how following goes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import msgspec

from gateway.doctor.fetch import os_reason
from gateway.engine.capabilities import EventSource
from gateway.engine.feed import FeedStatus, IngestSettings
from gateway.engine.subscriber import EventIngest
from indexer import EventBatch, PrefixIndex
from indexer.events import BlockStored

_POLL_S = 0.02
_SUBSCRIBED_AFTER_S = 0.3
"""A subscription reaches the publisher some time after the handshake; without a replay nothing tells when."""
_REMEMBERED_EVENTS = 512
_INDEX_BYTES = 256 << 20


class Heard:
    """What one (worker, rank) announced. `stored` are its latest BlockStored events."""

    def __init__(self) -> None:
        self.batches = 0
        self.malformed = 0
        self.unknown: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.block_sizes: set[int] = set()
        self.stored: deque[BlockStored] = deque(maxlen=_REMEMBERED_EVENTS)

    def take(self, batch: EventBatch) -> None:
        self.batches += 1
        self.malformed += batch.malformed
        self.unknown.update(batch.unknown)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.stored.append(event)
                self.kinds[event.kv_cache_spec_kind or "unnamed"] += 1
                if event.block_size:
                    self.block_sizes.add(event.block_size)


class HeardCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A `Heard` at one moment."""

    batches: int = 0
    malformed: int = 0
    unknown: dict[str, int] = {}
    kinds: dict[str, int] = {}
    block_sizes: tuple[int, ...] = ()
    stored: list[BlockStored] = []


class Tap:
    """One EventIngest with an index of its own. With `listen_at`, engines connect there and are told apart by topic."""

    def __init__(self, timeout_s: float, listen_at: str | None = None) -> None:
        self.index = PrefixIndex(budget_bytes=_INDEX_BYTES)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._heard: dict[tuple[str, int], Heard] = {}
        settings = IngestSettings(
            replay_timeout_s=timeout_s / 2,
            replay_attempts=1,
            verify_after_s=_SUBSCRIBED_AFTER_S,
            connect_timeout_s=timeout_s,
        )
        self._shared = listen_at is not None
        self._ingest = EventIngest(self.index, bind_endpoint=listen_at, settings=settings, on_batch=self._batch)
        self._ingest.start()

    async def close(self) -> None:
        await asyncio.to_thread(self._ingest.stop)

    def follow(self, worker: str, rank: int, source: EventSource) -> None:
        if self._shared:
            self._ingest.add(worker, rank, None, source.replay_endpoint, topic=source.topic or None)
        else:
            self._ingest.add(worker, rank, source.endpoint, source.replay_endpoint, bind=source.engine_connects)

    def status(self, worker: str) -> dict[int, FeedStatus]:
        return {rank: status for (name, rank), status in self._ingest.status().items() if name == worker}

    def bad_messages(self) -> int:
        """Messages that were no event batch at all; of which worker is not known on a shared address."""
        counters = self._ingest.counters()
        return counters.get("bad_frames", 0) + counters.get("undecodable_batches", 0)

    def rank_conflicts(self) -> int:
        """Batches that named a rank which another connection is declared for."""
        return self._ingest.counters().get("rank_conflicts", 0)

    def heard(self, worker: str, rank: int) -> HeardCopy:
        with self._lock:
            heard = self._heard.get((worker, rank)) or Heard()
            return HeardCopy(
                batches=heard.batches,
                malformed=heard.malformed,
                unknown=dict(heard.unknown),
                kinds=dict(heard.kinds),
                block_sizes=tuple(sorted(heard.block_sizes)),
                stored=list(heard.stored),
            )

    def matches(self, worker: str, ids: Sequence[int]) -> dict[int, int]:
        """How many tokens of `ids` each rank of `worker` holds on the GPU."""
        found = self.index.match(ids)
        return {rank: match.gpu_tokens for (name, rank), match in found.items() if name == worker and match.gpu_tokens}

    async def ready(self, worker: str) -> None:
        """Wait until every connection that can come up is up, and its history read as far as it can be."""
        settled = await until(
            lambda: all(is_up(s) or s.endpoint_state == "failed" for s in self.status(worker).values()), self._timeout_s
        )
        if settled and not any(status.replay_endpoint for status in self.status(worker).values()):
            await asyncio.sleep(_SUBSCRIBED_AFTER_S)
        await until(lambda: all(_is_read(status) for status in self.status(worker).values()), 3 * self._timeout_s)

    def _batch(self, worker: str, rank: int, batch: EventBatch) -> None:
        with self._lock:
            self._heard.setdefault((worker, rank), Heard()).take(batch)


def is_up(status: FeedStatus) -> bool:
    """Whether there is a connection to an engine (on a shared address: to any of them)."""
    if status.endpoint_state == "listening":
        return status.counters.get("connects", 0) > 0
    return status.endpoint_state == "connected"


def _is_read(status: FeedStatus) -> bool:
    """Whether nothing more will come of replays: they are done, failed, or cannot be had."""
    if status.replay_endpoint is None or not is_up(status):
        return True
    done = status.counters.get("verifications", 0) or status.counters.get("replay_failures", 0)
    return status.phase != "replaying" and bool(done)


async def until(true: Callable[[], bool], within_s: float) -> bool:
    """Wait for a condition; whether it came true in time."""
    deadline_s = time.monotonic() + within_s
    while not true():
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True


async def connect_error(endpoint: str, timeout_s: float) -> str | None:
    """Why a plain connection to a ZeroMQ endpoint fails; None when it is accepted."""
    try:
        async with asyncio.timeout(timeout_s):
            if endpoint.startswith("ipc://"):
                _, writer = await asyncio.open_unix_connection(endpoint.removeprefix("ipc://"))
            else:
                where = urlsplit(endpoint)
                _, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.close()
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return os_reason(error)
    except ValueError as error:
        return str(error)
    return None
