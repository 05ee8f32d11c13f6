"""A request body that is worth nothing after a deadline, and is then not sent to its end."""

from __future__ import annotations

import asyncio
import time

from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_writer import StreamWriter
from aiohttp.payload import Payload

_PIECE_BYTES = 64 << 10
_LOOK_AGAIN_S = 0.005


class TooLate(Exception):
    """The deadline came before the last byte was out."""


class TimedBody(Payload):
    """`begun`: the peer has asked for it, or was not waited for. `written_s`: when the last byte had left. `late`: it
    never will, and the peer has no whole request.

    The deadline is looked at before each piece and until our own buffer is empty: a connection may take its time to
    open, and a peer to read.
    """

    _autoclose = True

    def __init__(self, body: bytes, deadline_s: float) -> None:
        super().__init__(body)
        self._size = len(body)
        self._deadline_s = deadline_s
        self.begun = False
        self.written_s: float | None = None
        self.late = False

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        self.begun = True
        try:
            async with asyncio.timeout(max(0.0, self._deadline_s - time.monotonic())):
                await self._write(writer)
        except TimeoutError:
            self.late = True
            raise TooLate from None
        self.written_s = time.monotonic()

    async def _write(self, writer: AbstractStreamWriter) -> None:
        body = memoryview(self._value)
        for start in range(0, len(body), _PIECE_BYTES):
            self._check()
            await writer.write(bytes(body[start : start + _PIECE_BYTES]))
        transport = writer.transport if isinstance(writer, StreamWriter) else None
        while transport is not None and not transport.is_closing() and transport.get_write_buffer_size():
            self._check()
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _check(self) -> None:
        if time.monotonic() >= self._deadline_s:
            self.late = True
            raise TooLate
