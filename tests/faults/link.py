"""A TCP proxy of ours in front of a port, whose connections fail in the ways networks fail."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Literal

Mode = Literal["pass", "delay", "reset", "half-open", "one-way"]
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close sends RST
_CHUNK_BYTES = 64 << 10
DELAY_S = 0.15


class Link:
    """Modes, which hold for connections that are open too:

    delay      every piece takes `DELAY_S` longer, each way
    reset      connections are reset, new ones once they are accepted
    half-open  new ones are accepted and nobody hears of them; of those that are there nothing comes through any more;
               healing resets them all, as a firewall does that has forgotten them
    one-way    what clients send comes through, answers do not until it is healed
    """

    def __init__(self, name: str, port: int, target: int) -> None:
        self.name = name
        self.port = port
        self.mode: Mode = "pass"
        self._target = target
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._changed = asyncio.Condition()

    async def listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    def refuse(self) -> None:
        """New connections are refused until `listen`. Those that are there end as the target's do."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    async def turn(self, mode: Mode) -> None:
        before, self.mode = self.mode, mode
        if mode == "reset" or before == "half-open":
            for connection in list(self._connections):
                connection.reset()
        async with self._changed:
            self._changed.notify_all()

    async def close(self) -> None:
        self.refuse()
        for connection in list(self._connections):
            connection.reset()
        await asyncio.sleep(0)

    async def passable(self, *, is_answer: bool) -> None:
        """Wait until a piece may pass."""
        if self.mode == "delay":
            await asyncio.sleep(DELAY_S)
        async with self._changed:
            while self.mode == "half-open" or (self.mode == "one-way" and is_answer):
                await self._changed.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self, reader, writer)
        self._connections.add(connection)
        try:
            if self.mode == "reset":
                connection.reset()
            else:
                await connection.run(self._target)
        finally:
            self._connections.discard(connection)


class _Connection:
    def __init__(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._link = link
        self._reader = reader
        self._writers = [writer]
        self._task = asyncio.current_task()
        self._is_reset = False

    def reset(self) -> None:
        self._is_reset = True
        for writer in self._writers:
            _reset(writer)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    async def run(self, target: int) -> None:
        client = self._writers[0]
        pumps: list[asyncio.Task[None]] = []
        try:
            await self._link.passable(is_answer=False)
            reader, writer = await asyncio.open_connection("127.0.0.1", target)
            self._writers.append(writer)
            pumps = [
                asyncio.create_task(self._pump(self._reader, writer, is_answer=False)),
                asyncio.create_task(self._pump(reader, client, is_answer=True)),
            ]
            await asyncio.gather(*pumps)
        except (OSError, asyncio.CancelledError):
            # A link that is cut may cancel this task; who is asked to close is told so by the closing alone.
            for writer in self._writers:
                _reset(writer)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for writer in self._writers:
                writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        while True:
            piece = await reader.read(_CHUNK_BYTES)
            await self._link.passable(is_answer=is_answer)
            if not piece:
                with suppress(OSError):
                    writer.write_eof()
                return
            writer.write(piece)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    if not writer.transport.is_closing():
        sock = writer.get_extra_info("socket")
        if sock is not None:
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
