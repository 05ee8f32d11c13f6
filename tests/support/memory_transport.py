"""A transport that keeps what is written, for protocols without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


class MemoryTransport(asyncio.Transport):
    """`lost` is told to the protocol as a real transport does: later, once."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__({"peername": ("192.0.2.1", 5000), "sockname": ("192.0.2.2", 8000)})
        self.protocol = protocol
        self.written = bytearray()
        self.is_paused = False
        self.is_closed = False
        self.ended = False
        self.unsent_bytes = 0
        protocol.connection_made(self)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self.protocol = protocol

    def write(self, data: Any) -> None:
        if not self.is_closed:
            self.written += data

    def writelines(self, pieces: Iterable[Any]) -> None:
        self.write(b"".join(pieces))

    def write_eof(self) -> None:
        self.ended = True

    def can_write_eof(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close
