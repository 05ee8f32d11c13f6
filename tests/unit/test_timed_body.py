"""A body that must be out before a deadline, or not be out whole."""

import asyncio
import time
from typing import Any

import aiohttp
import pytest
from aiohttp.abc import AbstractStreamWriter

from gateway.proxy import timed
from gateway.proxy.timed import TimedBody, TooLate
from tests.support.proxy_world import Call, Stub, until


class Writer(AbstractStreamWriter):
    """Keeps the pieces; `after` runs with each."""

    def __init__(self, after: Any = None) -> None:
        self.pieces: list[bytes] = []
        self._after = after

    async def write(self, chunk: Any) -> None:
        self.pieces.append(bytes(chunk))
        if self._after is not None:
            self._after()

    async def write_eof(self, chunk: bytes = b"") -> None: ...
    async def drain(self) -> None: ...
    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None: ...
    def enable_chunking(self) -> None: ...
    async def write_headers(self, status_line: str, headers: Any) -> None: ...


async def test_a_body_in_time_is_written_in_pieces_and_says_when() -> None:
    data = bytes(range(256)) * 1000
    body, writer = TimedBody(data, time.monotonic() + 60), Writer()
    assert (body.size, body.written_s, body.late, body.begun) == (len(data), None, False, False)
    before_s = time.monotonic()
    await body.write(writer)
    assert b"".join(writer.pieces) == data
    assert max(map(len, writer.pieces)) <= timed._PIECE_BYTES
    assert body.begun
    assert body.written_s is not None
    assert before_s <= body.written_s <= time.monotonic()
    assert not body.late


async def test_after_the_deadline_not_a_byte_is_written() -> None:
    body, writer = TimedBody(b"x" * 10, time.monotonic()), Writer()
    with pytest.raises(TooLate):
        await body.write(writer)
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
        await body.write(writer)
    assert len(writer.pieces) == 3
    assert (body.late, body.written_s) == (True, None)


async def test_a_peer_that_does_not_read_gets_no_whole_request() -> None:
    """What lies in our own buffer is not written yet."""
    done = asyncio.Event()

    async def takes_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await done.wait()
        writer.close()

    server = await asyncio.start_server(takes_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    body = TimedBody(b"x" * (32 << 20), time.monotonic() + 0.3)
    async with server, aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectionError):
            await asyncio.wait_for(http.post(f"http://127.0.0.1:{port}/", data=body), 10)
        assert (body.late, body.written_s) == (True, None)
        done.set()


async def test_a_peer_that_reads_gets_it_with_its_length() -> None:
    async def answers(call: Call) -> None:
        await call.ok()

    data = b"y" * 300_000
    body = TimedBody(data, time.monotonic() + 60)
    async with Stub(answers) as stub, aiohttp.ClientSession() as http:
        async with http.post(stub.url, data=body) as response:
            assert response.status == 200
        (call,) = stub.calls
        assert call.body == data
        assert call.header("Content-Length") == "300000"
        assert call.header("Transfer-Encoding") is None
        await until(lambda: body.written_s is not None)
