"""Frames of WebSocket clients, which must be masked (RFC 6455, 5.1): a proxy on the way could else be made to take
what a client sends for an HTTP exchange. aiohttp's reader takes both kinds.
"""

from __future__ import annotations

from typing import Protocol

_MASKED = 0x80
_MASK_BYTES = 4
_EXTENDED_BYTES = {126: 2, 127: 8}
_NO_FRAME = b"\x70\x80"
"""Reserved bits that nobody has agreed on: the reader ends the connection with 1002, which is what is wanted."""


class Reader(Protocol):
    """aiohttp's."""

    def feed_data(self, data: bytes) -> tuple[bool, bytes]: ...
    def feed_eof(self) -> None: ...


class Masked:
    """Stands before `reader` and shows it only frames that are masked. The beginning of a header waits for its rest."""

    __slots__ = ("_held", "_left", "_reader", "_refused")

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._held = b""
        self._left = 0
        """Of the frame that is passing."""
        self._refused = False

    def feed_eof(self) -> None:
        self._reader.feed_eof()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        if self._refused:
            return True, b""
        data, self._held = self._held + data, b""
        at = 0
        while at + self._left < len(data):
            at += self._left
            self._left = 0
            if len(data) - at >= 2:
                second = data[at + 1]
                if not second & _MASKED:
                    self._refused = True
                    self._reader.feed_data(data[:at])
                    return self._reader.feed_data(_NO_FRAME)
                length = second & ~_MASKED
                n_more = _EXTENDED_BYTES.get(length, 0)
                if len(data) - at >= 2 + n_more:
                    if n_more:
                        length = int.from_bytes(data[at + 2 : at + 2 + n_more], "big")
                    self._left = 2 + n_more + _MASK_BYTES + length
                    continue
            data, self._held = data[:at], data[at:]
        self._left -= len(data) - at
        return self._reader.feed_data(data)
