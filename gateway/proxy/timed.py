"""A request body that is worth nothing after a deadline, and is then not sent to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_PIECE_BYTES = 64 << 10
_LOOK_AGAIN_S = 0.005


class TooLate(Exception):
    """The deadline came before the last byte was out."""


class TimedBody:
    """`begun`: the peer has asked for it, or was not waited for. `written_s`: when the last byte had left. `late`: it
    never will, and the peer has no whole request.

    The deadline is looked at before each piece and until our own buffer is empty: a connection may take its time to
    open, and a peer to read.
    """

    def __init__(self, body: bytes, deadline_s: float) -> None:
        self._body = body
        self.size = len(body)
        self._deadline_s = deadline_s
        self.begun = False
        self.written_s: float | None = None
        self.late = False

    async def write_to(self, write: Callable[[bytes], Awaitable[None]], unsent_bytes: Callable[[], int]) -> None:
        """`write` takes a piece when there is room for it, `unsent_bytes` tells what of them has not left. Raises
        TooLate.
        """
        self.begun = True
        try:
            async with asyncio.timeout(max(0.0, self._deadline_s - time.monotonic())):
                await self._write(write, unsent_bytes)
        except TimeoutError:
            self.late = True
            raise TooLate from None
        self.written_s = time.monotonic()

    async def _write(self, write: Callable[[bytes], Awaitable[None]], unsent_bytes: Callable[[], int]) -> None:
        body = memoryview(self._body)
        for start in range(0, len(body), _PIECE_BYTES):
            self._check()
            await write(bytes(body[start : start + _PIECE_BYTES]))
        wait_s = 0.0  # uvloop writes at the end of its turn.
        while unsent_bytes():
            self._check()
            await asyncio.sleep(wait_s)
            wait_s = _LOOK_AGAIN_S

    def _check(self) -> None:
        if time.monotonic() >= self._deadline_s:
            self.late = True
            raise TooLate
