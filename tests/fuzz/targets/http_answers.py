"""What workers answer over HTTP/1.1: an answer or an error, the same however the bytes come, and never a wait."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.proxy.peer import UpstreamError
from tests.fuzz.cut import cut, seeds
from tests.support.http1_world import Worker, turns

SEEDS = seeds(
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX: y\r\n\r\n",
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n\r\nuntil the end",
    b"HTTP/1.0 204 No Content\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x81\x00",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\naHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nb",
)
# fmt: off
WORDS = [
    b"HTTP/1.1 ", b"\r\n\r\n", b"\r\n", b"\n", b"Content-Length: ", b"Transfer-Encoding: ", b"chunked", b"gzip",
    b"0\r\n\r\n", b"Connection: close", b"Connection: upgrade", b"Upgrade: h2c", b" 304 ", b" 103 ", b"\0", b"\xff",
    b"Content-Length: 18446744073709551616",
]
# fmt: on

_loop = asyncio.new_event_loop()


def fuzz_one(data: bytes) -> None:
    whole, pieces = cut(data)
    if not pieces:
        return
    one, many = (_loop.run_until_complete(_ask(each)) for each in ([whole], pieces))
    assert one == many, "how the bytes are cut decides what is understood"


async def _ask(pieces: list[bytes]) -> Any:
    """What was understood up to the point where the worker closes its connection."""
    worker = Worker()
    reading = asyncio.ensure_future(worker.read())
    for piece in pieces:
        if not worker.transport.is_closed:
            worker.wire.data_received(piece)
    await turns(2)
    if not worker.transport.is_closed:
        worker.wire.eof_received()
        worker.transport.close()
    await turns(4)
    assert reading.done(), "an answer that has ended is waited for"
    assert worker.lost == [worker.wire]
    assert len(worker.freed) <= 1
    error = reading.exception()
    if error is not None:
        assert isinstance(error, UpstreamError), error
        return None
    status, body, headers = reading.result()
    assert status
    return status, body, headers
