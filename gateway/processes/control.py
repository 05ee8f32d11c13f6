"""What supervisor and process say to each other over a pair of sockets, a word a line. Either learns by its end that
the other is gone, however that came.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Final

STARTED: Final = "started"
"""It answers on its admin socket."""
READY: Final = "ready"
"""It could serve as well as it ever will."""
ACCEPT: Final = "accept"
RELOAD: Final = "reload"
DRAIN: Final = "drain"
LEAVE: Final = "leave"
"""Drain, and give connections to who comes after."""
CUT: Final = "cut"
HAND_OVER: Final = "hand over"
"""To a hub: listen for engines no more, and leave to who comes after what you know of them."""
HANDED_OVER: Final = "handed over"
TAKE_OVER: Final = "take over"
"""To a hub: listen for engines, with what was left. Nobody else does any more."""


class Control:
    """One end. `words` ends when the other end has gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def of(cls, sock: socket.socket) -> Control:
        return cls(*await asyncio.open_unix_connection(sock=sock))

    def say(self, word: str) -> None:
        """Nothing where nobody hears it any more."""
        if not self._writer.is_closing():
            self._writer.write(word.encode() + b"\n")

    async def words(self) -> AsyncIterator[str]:
        try:
            while line := await self._reader.readline():
                yield line.decode().strip()
        except (OSError, ValueError):
            return

    def close(self) -> None:
        self._writer.close()
