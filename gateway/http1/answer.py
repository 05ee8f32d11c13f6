"""One exchange with a worker: its answer, as far as it has come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gateway.proxy.peer import UpstreamAnswer

if TYPE_CHECKING:
    from gateway.http1.wire import Wire

_HOLD_ABOVE_BYTES = 256 << 10
"""When so much of a body waits for its reader, no more is read from the worker."""


class RawAnswer(UpstreamAnswer):
    """`status` is 0 until the head is here."""

    __slots__ = ("_error", "_held", "_is_over", "_loop", "_pieces", "_waiter", "_waiting_bytes", "_wire", "raw_headers",
                 "reason", "status")  # fmt: skip

    def __init__(self, wire: Wire, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.reason = ""
        self.raw_headers: Sequence[tuple[bytes, bytes]] = ()
        self._wire: Wire | None = wire
        self._loop = loop
        self._pieces: list[bytes] = []
        self._waiting_bytes = 0
        self._held = False
        self._is_over = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---- for who asked -----------------------------------------------------------------------------------------------

    async def head(self) -> None:
        """Wait for it. Raises UpstreamError or TimeoutError."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait()

    def header(self, name: str) -> str | None:
        wanted = name.lower().encode()
        for raw, value in self.raw_headers:
            if len(raw) == len(wanted) and raw.lower() == wanted:
                return value.decode("utf-8", "surrogateescape")
        return None

    async def readany(self) -> bytes:
        pieces = self._pieces
        while not pieces:
            if self._error is not None:
                raise self._error
            if self._is_over:
                return b""
            await self._wait()
        out = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._waiting_bytes = 0
        if self._held:
            self._held = False
            if self._wire is not None:
                self._wire.go_on()
        return out

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.cut()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # ---- for the connection ------------------------------------------------------------------------------------------

    def begun(self, status: int, reason: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.reason = reason
        self.raw_headers = headers
        self._wake()

    def fed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._waiting_bytes += len(piece)
        if self._waiting_bytes > _HOLD_ABOVE_BYTES and not self._held and self._wire is not None:
            self._held = True
            self._wire.hold()
        self._wake()

    def ended(self) -> None:
        self._is_over = True
        self._wire = None
        self._wake()

    def failed(self, error: Exception) -> None:
        """What has come before can still be read."""
        self._error = error
        self._wire = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
