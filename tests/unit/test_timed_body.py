"""A body that must be out before a deadline, or not be out whole."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_args

import pytest
from multidict import CIMultiDict

from gateway.proxy import timed
from gateway.proxy.peer import Http, PoolSettings, Upstream, UpstreamError
from gateway.proxy.timed import TimedBody, TooLate
from gateway.proxy.upstream import new_upstream
from tests.support.proxy_world import Call, Stub, until


@asynccontextmanager
async def connected(url: str, http: Http) -> AsyncIterator[Upstream]:
    upstream = new_upstream(url, PoolSettings(connect_timeout_s=5, pool_idle_s=4, request_timeout_s=30, http=http))
    try:
        yield upstream
    finally:
        await upstream.close()


class Writer:
    """Keeps the pieces; `after` runs with each."""

    def __init__(self, after: Any = None) -> None:
        self.pieces: list[bytes] = []
        self._after = after

    async def write(self, piece: bytes) -> None:
        self.pieces.append(piece)
        if self._after is not None:
            self._after()

    def unsent_bytes(self) -> int:
        return 0


async def test_a_body_in_time_is_written_in_pieces_and_says_when() -> None:
    data = bytes(range(256)) * 1000
    body, writer = TimedBody(data, time.monotonic() + 60), Writer()
    assert (body.size, body.written_s, body.late, body.begun) == (len(data), None, False, False)
    before_s = time.monotonic()
    await body.write_to(writer.write, writer.unsent_bytes)
    assert b"".join(writer.pieces) == data
    assert max(map(len, writer.pieces)) <= timed._PIECE_BYTES
    assert body.begun
    assert body.written_s is not None
    assert before_s <= body.written_s <= time.monotonic()
    assert not body.late


async def test_after_the_deadline_not_a_byte_is_written() -> None:
    body, writer = TimedBody(b"x" * 10, time.monotonic()), Writer()
    with pytest.raises(TooLate):
        await body.write_to(writer.write, writer.unsent_bytes)
    assert writer.pieces == []
    assert (body.late, body.written_s) == (True, None)


async def test_a_deadline_between_two_pieces_keeps_the_rest_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def a_second_passes() -> None:
        nonlocal now_s
        now_s += 1

    monkeypatch.setattr("gateway.proxy.timed.time.monotonic", lambda: now_s)
    body, writer = TimedBody(b"x" * (5 * timed._PIECE_BYTES), 3.0), Writer(a_second_passes)
    with pytest.raises(TooLate):
        await body.write_to(writer.write, writer.unsent_bytes)
    assert len(writer.pieces) == 3
    assert (body.late, body.written_s) == (True, None)


@pytest.mark.parametrize("http", get_args(Http))
async def test_a_peer_that_does_not_read_gets_no_whole_request(http: Http) -> None:
    """What lies in our own buffer is not written yet."""
    done = asyncio.Event()

    async def takes_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await done.wait()
        writer.close()

    server = await asyncio.start_server(takes_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    body = TimedBody(b"x" * (32 << 20), time.monotonic() + 0.3)
    async with server, connected(f"http://127.0.0.1:{port}", http) as upstream:
        with pytest.raises(UpstreamError):
            await asyncio.wait_for(upstream.send("POST", "/", CIMultiDict(), body), 10)
        assert (body.late, body.written_s) == (True, None)
        done.set()


@pytest.mark.parametrize("http", get_args(Http))
async def test_a_peer_that_reads_gets_it_with_its_length(http: Http) -> None:
    async def answers(call: Call) -> None:
        await call.ok()

    data = b"y" * 300_000
    body = TimedBody(data, time.monotonic() + 60)
    async with Stub(answers) as stub, connected(stub.url, http) as upstream:
        async with await upstream.send("POST", "/", CIMultiDict(), body) as answer:
            assert answer.status == 200
        (call,) = stub.calls
        assert call.body == data
        assert call.header("Content-Length") == "300000"
        assert call.header("Transfer-Encoding") is None
        await until(lambda: body.written_s is not None)
