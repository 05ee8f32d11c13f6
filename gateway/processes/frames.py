"""Messages over a Unix socket: four bytes of length, then msgpack."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

MOST_BYTES = 16 << 20
_LENGTH_BYTES = 4
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def frame(message: Any) -> bytes:
    data = _encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class Reader(Protocol):
    """asyncio's and aiohttp's."""

    async def readexactly(self, n: int, /) -> bytes: ...


async def read_frame(reader: Reader) -> Any:
    """Raises ConnectionError at the end, and for what is no frame."""
    try:
        n_bytes = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if n_bytes > MOST_BYTES:
            raise ConnectionAbortedError("a frame too long")
        return _decode(await reader.readexactly(n_bytes))
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the other side has gone") from None
    except msgspec.DecodeError:
        raise ConnectionAbortedError("no frame") from None
