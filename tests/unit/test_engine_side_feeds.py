"""Whose a batch is: by topic, and by connection and rank."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.engine.feed import IngestSettings
from gateway.engine.feeds import MAX_RANKS, Feeds
from gateway.engine.refusal import address_of
from gateway.engine.source import Source
from gateway.engine.topics import Topics
from indexer import EventBatch


class Nobody:
    def message(self, source: Source, frames: list[bytes]) -> None: ...

    def greeted(self, source: Source) -> None: ...

    def refused(self, source: Source) -> None: ...


def source(worker: str = "w", rank: int = 0) -> Source:
    return Source(Nobody(), "tcp://127.0.0.1:1", bind=False, worker=worker, rank=rank)


def batch(rank: int | None) -> EventBatch:
    return EventBatch(1.0, [], rank)


@pytest.fixture
def feeds() -> Feeds:
    return Feeds(IngestSettings())


def test_a_batch_without_a_rank_is_the_declared_ones(feeds: Feeds) -> None:
    of = source()
    feed, squatter = feeds.declare(of, "w", 2, None)
    assert squatter is None
    assert feeds.of_batch(of, "w", 2, batch(None)) is feed
    assert feed.rank == 2


def test_an_untouched_feed_takes_the_rank_its_first_batch_names_and_a_touched_one_keeps_it(feeds: Feeds) -> None:
    of = source()
    feed, _ = feeds.declare(of, "w", 0, None)
    assert feeds.of_batch(of, "w", 0, batch(3)) is feed
    assert (feed.rank, feed.declared_rank) == (3, 0)
    feed.applied(batch(3), 1.0)
    other = feeds.of_batch(of, "w", 0, batch(1))
    assert other is not None
    assert other is not feed
    assert (other.rank, other.stream.can_replay) == (1, False)
    assert feeds.of_batch(of, "w", 0, batch(1)) is other
    feeds.drop(feed)
    feeds.drop(other)
    assert list(feeds) == []


@pytest.mark.parametrize("rank", [-1, MAX_RANKS, 2**60])
def test_impossible_ranks_are_no_ranks(feeds: Feeds, rank: int) -> None:
    of = source()
    feed, _ = feeds.declare(of, "w", 0, None)
    odd = batch(rank)
    assert feeds.of_batch(of, "w", 0, odd) is feed
    assert odd.data_parallel_rank is None
    assert feeds.counters["impossible_ranks"] == 1


def test_another_connections_rank_is_not_taken(feeds: Feeds) -> None:
    one, two = source(), source(rank=1)
    feeds.declare(one, "w", 0, None)
    feed, _ = feeds.declare(two, "w", 1, None)
    claim = batch(0)
    assert feeds.of_batch(two, "w", 1, claim) is feed
    assert (feed.rank, claim.data_parallel_rank) == (1, None)


def test_a_declaration_outranks_who_merely_said_so(feeds: Feeds) -> None:
    one, two = source(), source(rank=3)
    first, _ = feeds.declare(one, "w", 0, None)
    feeds.of_batch(one, "w", 0, batch(3))
    second, squatter = feeds.declare(two, "w", 3, None)
    assert squatter is first
    assert feeds.of_batch(two, "w", 3, batch(3)) is second
    assert feeds.of_batch(one, "w", 0, batch(3)) is None
    assert feeds.of_batch(one, "w", 0, batch(0)) is not first


def test_topics() -> None:
    topics = Topics()
    assert topics.find(b"kv@10.0.0.1:8000@m") is None
    topics.add("10.0.0.1:8000", 0, None)
    topics.add("10.0.0.1:8000", 1, "second")
    topics.add("x", 4, "kv@10.0.0.1:8000@other")
    assert topics.find(b"kv@10.0.0.1:8000@m") == ("10.0.0.1:8000", None)
    assert topics.find(b"10.0.0.1:8000") == ("10.0.0.1:8000", None)
    assert topics.find(b"second") == ("10.0.0.1:8000", 1)
    assert topics.find(b"kv@10.0.0.1:8000@other") == ("x", 4)
    assert topics.find(b"x@10.0.0.1:8000") is None, "two workers' names: no one's"
    assert topics.find(b"\xff\xfe") is None
    assert set(topics.unmatched) == {"x@10.0.0.1:8000", "\ufffd\ufffd"}
    topics.remove("10.0.0.1:8000", 1)
    assert topics.find(b"second") is None
    assert topics.find(b"kv@10.0.0.1:8000@m") == ("10.0.0.1:8000", None)
    topics.remove("10.0.0.1:8000", 0)
    topics.remove("10.0.0.1:8000", 0)
    assert topics.find(b"kv@10.0.0.1:8000@m") is None


def test_unmatched_topics_are_bounded() -> None:
    topics = Topics()
    for number in range(10_000):
        topics.find(b"%d" % number)
    assert len(topics.unmatched) <= 65
    assert sum(topics.unmatched.values()) == 10_000


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("tcp://127.0.0.1:5", ("127.0.0.1", 5)),
        ("tcp://[::1]:5", ("::1", 5)),
        ("ipc:///run/x", "/run/x"),
        ("ipc://@abstract", "\0abstract"),
        ("tcp://host:5", None),
        ("nonsense", None),
    ],
)
def test_addresses_to_probe(endpoint: str, address: Any) -> None:
    found = address_of(endpoint)
    assert (found and found[1]) == address
