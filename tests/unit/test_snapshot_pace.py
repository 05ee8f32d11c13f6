"""How often snapshots are written, and how long they stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from gateway.engine.subscriber import EventIngest
from gateway.replicas.counts import Counts
from gateway.replicas.schema import SNAPSHOT_TTL_S, Keys
from gateway.replicas.snapshots import ROUND_S, Snapshots
from indexer import SavedRank
from indexer.saved_rank import SavedPlace

SAVED = SavedRank(1, 0.0, 0, None, {}, [], [SavedPlace(0, 0, 16, b"h" * 8, b"k" * 8, b"")])


class Ingest:
    def __init__(self, n: int) -> None:
        self.n = n

    def status(self) -> dict[tuple[str, int], None]:
        return dict.fromkeys((f"w{i}", 0) for i in range(self.n))

    def save(self, worker: str, rank: int, done: Callable[[SavedRank | None], None]) -> None:
        done(SAVED)


class Redis:
    """Where a write takes `write_s`."""

    def __init__(self, write_s: float) -> None:
        self.now_s = 0.0
        self.write_s = write_s
        self.ttls_s: dict[str, int] = {}

    async def set(self, key: str, value: bytes, *, ex: int, nx: bool = False) -> bool:
        if not nx:
            self.now_s += self.write_s / 2  # A piece, and the head.
            self.ttls_s[key] = ex
        return True


def run(n: int, write_s: float) -> tuple[Redis, float]:
    """One round, and how long it took."""
    redis, counts = Redis(write_s), Counts(CollectorRegistry())
    snapshots = Snapshots("me", Keys("p", "f"), cast(EventIngest, Ingest(n)), counts, lambda: redis.now_s)

    async def turns() -> None:
        for _ in range(n):
            await snapshots.turn(cast(Any, redis))
            redis.now_s += snapshots.pause_s

    asyncio.run(turns())
    return redis, redis.now_s


@pytest.mark.parametrize("n", [1, 8, 64, 512])
def test_all_ranks_are_written_within_a_round_and_a_fifth_more(n: int) -> None:
    redis, took_s = run(n, 0.02)
    assert ROUND_S <= took_s <= 1.2 * ROUND_S
    assert set(redis.ttls_s.values()) == {SNAPSHOT_TTL_S}


def test_a_fleet_that_takes_longer_than_that_has_a_fifth_of_the_time_and_is_kept_until_it_is_written_anew() -> None:
    redis, took_s = run(2000, 0.1)
    assert took_s == pytest.approx(5 * 2000 * 0.1, rel=0.01)
    *_, latest_s = redis.ttls_s.values()
    assert latest_s >= 2.9 * took_s
