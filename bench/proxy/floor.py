"""The least a proxy can do in Python: `python -m bench.proxy.floor PORT BACKEND_PORT...`.

Whole requests go to backends in turn over kept connections, and what they answer goes back, on uvloop; of a head
nothing is read but where its body ends. It chooses nothing, checks nothing, counts nothing and writes no log, so that
what it costs is the interpreter, the loop and the kernel.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Sequence
from itertools import cycle
from typing import cast

import uvloop

_LENGTH = b"content-length:"
_END_OF_HEAD = b"\r\n\r\n"
_END_OF_CHUNKS = b"0\r\n\r\n"


def length_bytes(message: bytes) -> int | None:
    """Of head and body, where the head is whole; -1: its body is chunked."""
    end = message.find(_END_OF_HEAD)
    if end < 0:
        return None
    at = message.lower().find(_LENGTH, 0, end)
    if at < 0:
        return -1 if message.startswith(b"HTTP/") else end + 4
    return end + 4 + int(message[at + len(_LENGTH) : message.index(b"\r\n", at)])


class Upstream(asyncio.Protocol):
    def __init__(self, idle: deque[Upstream]) -> None:
        self._idle = idle
        self._left_bytes: int | None = None
        self.client: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        assert self.client is not None  # noqa: S101 - it was asked something
        self.client.write(data)
        if self._left_bytes is None:
            self._left_bytes = length_bytes(data)  # Backends send a head in one piece.
        if self._left_bytes == -1:
            is_over = data.endswith(_END_OF_CHUNKS)
        else:
            self._left_bytes = (self._left_bytes or 0) - len(data)
            is_over = self._left_bytes == 0
        if is_over:
            self._left_bytes = self.client = None
            self._idle.append(self)


class Backend:
    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: deque[Upstream] = deque()

    async def connected(self) -> Upstream:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: Upstream(self._idle), "127.0.0.1", self._port))[1]

    def ask(self, client: asyncio.Transport, request: bytes) -> None:
        if self._idle:
            _send(self._idle.popleft(), client, request)
        else:
            asyncio.get_running_loop().create_task(self.connected()).add_done_callback(
                lambda done: _send(done.result(), client, request)
            )


def _send(upstream: Upstream, client: asyncio.Transport, request: bytes) -> None:
    upstream.client = client
    upstream.transport.write(request)


class Client(asyncio.Protocol):
    def __init__(self, turns: cycle[Backend]) -> None:
        self._turns = turns
        self._had = b""
        self._due_bytes: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._had += data
        if self._due_bytes is None:
            self._due_bytes = length_bytes(self._had)
        if self._due_bytes is not None and len(self._had) >= self._due_bytes:
            next(self._turns).ask(self._transport, self._had)
            self._had, self._due_bytes = b"", None


async def serve(port: int, backend_ports: Sequence[int]) -> None:
    turns = cycle([Backend(each) for each in backend_ports])
    server = await asyncio.get_running_loop().create_server(lambda: Client(turns), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), [int(each) for each in sys.argv[2:]]))
