"""A gateway's copy of an indexer's index where the indexer does odd things: a scripted server of the contract."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from gateway.config.schema import IndexServiceConfig
from gateway.indexservice import link
from gateway.indexservice.addresses import Addresses
from gateway.indexservice.link import ReplicaLink
from gateway.indexservice.server import SERVICE
from gateway.indexservice.wire import packed
from gateway.pb import indexer_pb2 as pb
from indexer import Replica
from tests.support.gateway_world import until

Script = Callable[[pb.WatchRequest], AsyncIterator[pb.Update]]


def section(worker: str, *keys: int, feed: pb.Feed | None = None) -> pb.Section:
    return pb.Section(worker=worker, first=True, last=True, blocks=[blocks(*keys)], feed=feed)


def blocks(*keys: int) -> pb.Blocks:
    return pb.Blocks(block_size=16, keys=packed(keys), runs=[len(keys) << 2])


def stored(worker: str, *keys: int) -> pb.Change:
    return pb.Change(worker=worker, stored=blocks(*keys))


@asynccontextmanager
async def copy_of(
    script: Script, prepare: Callable[[ReplicaLink], None] = lambda follower: None
) -> AsyncIterator[tuple[Replica, ReplicaLink]]:
    async def watch(request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.Update]:
        async for update in script(request):
            yield update

    handler = grpc.unary_stream_rpc_method_handler(watch, pb.WatchRequest.FromString, pb.Update.SerializeToString)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Watch": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    replica = Replica()
    addresses = Addresses(IndexServiceConfig(addresses=(f"127.0.0.1:{port}",)), random.Random(1))
    follower = ReplicaLink(addresses, replica)
    prepare(follower)
    follower.start()
    try:
        yield replica, follower
    finally:
        await asyncio.to_thread(follower.stop)
        await server.stop(None)


async def test_a_snapshot_that_broke_off_is_begun_anew_and_not_taken_for_all_there_is() -> None:
    """Else what had not been told of yet would be missing, and nobody would know until the digests."""
    asked: list[str] = []

    async def script(request: pb.WatchRequest) -> AsyncIterator[pb.Update]:
        asked.append(request.instance)
        yield pb.Update(begin=pb.Begin(instance="run", sequence=7))
        yield pb.Update(sections=[section("a", 1, 2)])
        if len(asked) == 1:
            return
        yield pb.Update(sections=[section("b", 1, 2, 3)])
        yield pb.Update(end=pb.End(sequence=7))
        await asyncio.Event().wait()

    async with copy_of(script) as (replica, follower):
        await until(lambda: follower.is_live)
        assert asked == ["", ""]
        assert (replica.blocks("a"), replica.blocks("b")) == (2, 3)


async def test_a_whole_copy_goes_on_where_it_was() -> None:
    asked: list[tuple[str, int]] = []

    async def script(request: pb.WatchRequest) -> AsyncIterator[pb.Update]:
        asked.append((request.instance, request.sequence))
        if request.instance:
            yield pb.Update(begin=pb.Begin(instance="run", sequence=7, resumed=True))
            await asyncio.Event().wait()
        yield pb.Update(begin=pb.Begin(instance="run", sequence=7))
        yield pb.Update(sections=[section("a", 1, 2)])
        yield pb.Update(end=pb.End(sequence=7))

    async with copy_of(script) as (replica, follower):
        await until(lambda: len(asked) == 2 and follower.is_live)
        assert asked == [("", 0), ("run", 7)]
        assert replica.blocks("a") == 2


async def test_after_a_delta_that_is_missing_all_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what was in it."""
    monkeypatch.setattr(link, "_APART_S", (0.01, 0.01))
    asked: list[tuple[str, int]] = []

    async def script(request: pb.WatchRequest) -> AsyncIterator[pb.Update]:
        asked.append((request.instance, request.sequence))
        keys = (1, 2) if len(asked) == 1 else (3, 4, 5, 6)
        yield pb.Update(begin=pb.Begin(instance="run", sequence=7))
        yield pb.Update(sections=[section("a", *keys)])
        yield pb.Update(end=pb.End(sequence=7))
        if len(asked) == 1:
            yield pb.Update(deltas=[pb.Delta(sequence=9, changes=[stored("a", 9)])])
        await asyncio.Event().wait()

    async with copy_of(script) as (replica, follower):
        await until(lambda: len(asked) == 2 and follower.is_live)
        assert asked[1][0] == ""
        assert follower.counters()["copy_gaps"] == 1
        assert replica.blocks("a") == 4


async def test_who_is_not_in_a_snapshot_is_not_there() -> None:
    """Such a worker went while nobody was followed, or is unknown to the next indexer."""
    asked: list[str] = []

    async def script(request: pb.WatchRequest) -> AsyncIterator[pb.Update]:
        asked.append(request.instance)
        here = ("a", "b") if len(asked) == 1 else ("b",)
        yield pb.Update(begin=pb.Begin(instance=f"run {len(asked)}", sequence=7))
        for worker in here:
            yield pb.Update(sections=[section(worker, 1, 2, feed=pb.Feed(endpoint_state="connected", phase="live"))])
        yield pb.Update(end=pb.End(sequence=7))
        if len(asked) > 1:
            await asyncio.Event().wait()

    async with copy_of(script) as (replica, follower):
        await until(lambda: len(asked) == 2 and follower.is_live and not replica.blocks("a"))
        assert replica.blocks("b") == 2
        assert list(follower.status()) == [("b", 0)]


async def test_of_an_indexer_that_hangs_it_is_said_that_it_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(request: pb.WatchRequest) -> AsyncIterator[pb.Update]:
        yield pb.Update(begin=pb.Begin(instance="run", sequence=7))
        yield pb.Update(end=pb.End(sequence=7))
        await asyncio.Event().wait()

    async with copy_of(script) as (_, follower):
        await until(lambda: follower.is_live)
        monkeypatch.setattr(link, "SILENT_S", 0.0)
        follower.status()
        monkeypatch.setattr(link, "SILENT_S", 4.0)
        await until(lambda: follower.counters().get("copy_lost", 0) == 1 and follower.is_live)
    (told,) = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
    assert "it said nothing" in told


async def test_a_copy_that_is_busy_taking_in_what_was_said_does_not_take_its_indexer_for_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine a large section takes long; to hang up then, and begin anew, would never end."""
    monkeypatch.setattr(link, "SILENT_S", 0.0)
    done = asyncio.Event()

    async def script(request: pb.WatchRequest) -> AsyncIterator[pb.Update]:
        yield pb.Update(begin=pb.Begin(instance="run", sequence=7))
        yield pb.Update(sections=[section("a", 1, 2)])
        yield pb.Update(end=pb.End(sequence=7))
        await done.wait()

    def busy(follower: ReplicaLink) -> None:
        take = follower._take

        def slowly(update: pb.Update) -> None:
            follower.status()  # As the event loop does all the time.
            take(update)

        monkeypatch.setattr(follower, "_take", slowly)

    async with copy_of(script, busy) as (_, follower):
        await until(lambda: follower.is_live)
        assert follower.counters().get("copy_lost", 0) == 0
        follower.status()  # Now it is silent.
        await until(lambda: follower.counters().get("copy_lost", 0) == 1)
        done.set()


async def test_it_gives_way_before_each_section_and_each_change() -> None:
    given: list[int] = []

    async def script(request: pb.WatchRequest) -> AsyncIterator[pb.Update]:
        yield pb.Update(begin=pb.Begin(instance="run", sequence=7))
        yield pb.Update(sections=[section("a", 1), section("b", 1, 2)])
        yield pb.Update(end=pb.End(sequence=7))
        change = pb.Change(worker="a", cleared=True)
        yield pb.Update(deltas=[pb.Delta(sequence=8, changes=[change, change])])
        await asyncio.Event().wait()

    def watched(follower: ReplicaLink) -> None:
        follower._right_of_way.give = lambda: given.append(follower.sequence)  # type: ignore[method-assign]

    async with copy_of(script, watched) as (_, follower):
        await until(lambda: follower.sequence == 8)
        assert given == [7] * 4
