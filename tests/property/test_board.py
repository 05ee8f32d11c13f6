"""The board of a gateway's processes answers as a real Redis does, for all that replicas ask of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.processes.board import MOST_STREAM_BYTES, Board, BoardError
from gateway.processes.board_client import BoardClient
from gateway.processes.board_server import BoardServer
from gateway.processes.frames import frame
from gateway.replicas import codec
from gateway.replicas.schema import FIELD_WRITER, Keys
from tests.support.redis_server import RedisServer, binary

KEYS = ("s1", "s2")
SETS = ("m1", "m2")
STREAM = "news"
values = st.binary(max_size=8)
members = st.sampled_from(["w1", "w2", "w3"])
commands = st.one_of(
    st.tuples(st.just("set"), st.sampled_from(KEYS), values),
    st.tuples(st.just("mget"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)),
    st.tuples(st.just("delete"), st.sampled_from((*KEYS, *SETS, STREAM))),
    st.tuples(st.just("expire"), st.sampled_from((*KEYS, *SETS, STREAM)), st.sampled_from([0, 100])),
    st.tuples(st.just("sadd"), st.sampled_from(SETS), members),
    st.tuples(st.just("srem"), st.sampled_from(SETS), members),
    st.tuples(st.just("smembers"), st.sampled_from(SETS)),
    st.tuples(st.just("xadd"), st.just(STREAM), values),
    st.tuples(st.just("xrevrange"), st.just(STREAM), st.integers(1, 3)),
    st.tuples(st.just("xread"), st.just(STREAM), st.integers(0, 4), st.integers(1, 5)),
)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def redis(loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    if binary("redis") is None:
        pytest.skip("no redis-server here")
    server = RedisServer("redis")
    loop.run_until_complete(server.start())
    client = server.client()
    yield client
    loop.run_until_complete(client.aclose())
    server.kill()


class Through:
    """One client, whichever it is, and the numbers its stream gave: told by their place in the order.

    Redis may give a number again to a stream made anew within the millisecond: a stream's end takes its numbers along.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._ended = 0
        self._numbers: list[bytes] = []

    def _end(self, key: str) -> None:
        if key == STREAM:
            self._ended += len(self._numbers)
            self._numbers.clear()

    async def run(self, command: tuple[Any, ...]) -> Any:
        client, (name, *args) = self._client, command
        pipeline = client.pipeline(transaction=False)
        match name:
            case "set":
                pipeline.set(args[0], args[1], ex=100)
                return bool((await pipeline.execute())[0])
            case "delete":
                pipeline.delete(*args)
                self._end(args[0])
                return (await pipeline.execute())[0]
            case "expire":
                pipeline.expire(*args)
                if args[1] == 0:
                    self._end(args[0])
                return bool((await pipeline.execute())[0])
            case "sadd":
                pipeline.sadd(*args)
                return (await pipeline.execute())[0]
            case "xadd":
                pipeline.xadd(args[0], {b"w": "me", b"n": args[1]}, maxlen=1000, approximate=False)
                self._numbers.append((await pipeline.execute())[0])
                return self._ended + len(self._numbers)
            case "srem":
                return await client.srem(*args)
            case "mget":
                return await client.mget(*args)
            case "smembers":
                return set(await client.smembers(*args))
            case "xrevrange":
                return self._told(await client.xrevrange(args[0], count=args[1]))
            case "xread":
                after = self._numbers[-args[1]] if 0 < args[1] <= len(self._numbers) else b"0-0"
                found = await client.xread({args[0]: after}, count=args[2], block=1)
                pairs = found.items() if isinstance(found, dict) else found or ()
                return [self._told(entries) for _, entries in pairs]
        raise AssertionError(name)

    def _told(self, entries: Any) -> Any:
        return [(self._ended + self._numbers.index(number), dict(fields)) for number, fields in entries]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.lists(commands, max_size=25))
def test_it_answers_as_redis_does(
    loop: asyncio.AbstractEventLoop, redis: Any, tmp_path_factory: pytest.TempPathFactory, them: list[tuple[Any, ...]]
) -> None:
    async def compare() -> None:
        await redis.flushall()
        server = BoardServer(str(tmp_path_factory.mktemp("board") / "b"), Keys("p", "f"))
        await server.start()
        client = BoardClient(server._path, 10.0)
        ours, theirs = Through(client), Through(redis)
        try:
            for command in them:
                assert await ours.run(command) == await theirs.run(command), command
        finally:
            await client.aclose()
            await server.close()

    loop.run_until_complete(compare())


def test_what_is_over_its_time_is_gone() -> None:
    board = Board()
    board.run(["set", "a", b"x", 3.0], 10.0, 1)
    assert board.run(["mget", ["a"]], 12.9, 1) == [b"x"]
    assert board.run(["mget", ["a"]], 13.0, 1) == [None]
    board.run(["xadd", "s", {b"n": b"1"}, 10], 20.0, 5)
    board.run(["expire", "s", 60], 20.0, 5)
    board.sweep(81.0)
    assert board.run(["xrevrange", "s", 1], 81.0, 6) == []


def test_a_stream_keeps_so_many_and_numbers_grow_when_the_clock_goes_back() -> None:
    board = Board()
    numbers = [board.run(["xadd", "s", {b"n": b"%d" % i}, 3], 0.0, now_ms) for i, now_ms in enumerate([9, 9, 5, 7, 12])]
    assert numbers == [b"9-0", b"9-1", b"9-2", b"9-3", b"12-0"]
    assert [number for number, _ in board.run(["xread", "s", b"0-0", 10], 0.0, 12)] == numbers[2:]


def test_a_stream_has_a_bound_in_bytes_but_its_last_entry_is_kept() -> None:
    board = Board()
    for _ in range(5):
        board.run(["xadd", "s", {b"n": bytes(MOST_STREAM_BYTES // 2)}, 100], 0.0, 1)
    assert len(board.run(["xread", "s", b"0-0", 10], 0.0, 1)) == 2
    board.run(["xadd", "s", {b"n": bytes(MOST_STREAM_BYTES + 1)}, 100], 0.0, 1)
    assert len(board.run(["xread", "s", b"0-0", 10], 0.0, 1)) == 1


@pytest.mark.parametrize(
    "command", [["flushall"], ["set", "a"], ["xread", "s", b"x", 1], ["mget", 5], ["xadd", "s", 7, 1]]
)
def test_what_is_no_command_is_refused(command: list[Any]) -> None:
    with pytest.raises(BoardError):
        Board().run(command, 0.0, 0)


async def test_a_writer_whose_connection_ends_has_nothing_in_flight(tmp_path: Any) -> None:
    keys = Keys("p", "f")
    server = BoardServer(str(tmp_path / "b"), keys)
    await server.start()
    mine, other = BoardClient(server._path, 10.0), BoardClient(server._path, 10.0)
    again = BoardClient(server._path, 10.0)
    try:
        for client in (mine, again):  # A writer may be connected anew before the end of the old one is seen.
            pipeline = client.pipeline()
            pipeline.xadd(keys.news, {b"w": "me", b"n": b"news"}, maxlen=10)
            pipeline.set(keys.load("me"), b"all", px=3000)
            await pipeline.execute()
        await mine.aclose()
        told = (await other.xread({keys.news: b"0-0"}, count=9, block=1))[0][1]
        assert [fields[b"n"] for _, fields in told] == [b"news", b"news"]
        began_s = time.monotonic()
        waiting = asyncio.create_task(other.xread({keys.news: told[-1][0]}, count=9, block=30_000))
        await again.aclose()
        ((_, entries),) = await waiting
        assert codec.read_news(entries[0][1][b"n"]).bye
        assert time.monotonic() - began_s < 20.0, "nobody waits for a time to live"
        assert await other.mget([keys.load("me")]) == [None]
    finally:
        await other.aclose()
        await server.close()


_ENTRY = {FIELD_WRITER: b"x"}
_DEEP = b"\x91" * 100_000 + b"\xc0"
NONSENSE = [
    *map(frame, [None, 5, "x", {}, [0], [0, 5], [0, [5]], [0, [[]]], ["x", []], [None, [["mget"]]]]),
    *map(frame, [[0, [["xadd"]]], [0, [["xadd", "k", {}]]], [0, [["xadd", "k", {FIELD_WRITER: 1}, 10]]]]),
    *map(frame, [[0, [["xadd", "k", 5, 10]]], [0, [["xadd", "k", _ENTRY, "many"]]]]),
    len(_DEEP).to_bytes(4, "big") + _DEEP,
    b"\x00",
    b"\x00\x00\x00\x01\xc1",
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x03\xc1\xc1\xc1",
]


@pytest.mark.parametrize("sent", NONSENSE)
async def test_what_is_no_message_ends_that_connection_alone(
    sent: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = BoardServer(str(tmp_path / "b"), Keys("p", "f"))
    await server.start()
    good = BoardClient(server._path, 10.0)
    try:
        reader, writer = await asyncio.open_unix_connection(server._path)
        writer.write(sent)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 60)  # To its end.
        writer.close()
        assert await good.mget(["a"]) == [None]
    finally:
        await good.aclose()
        await server.close()
    assert "Traceback" not in caplog.text
