"""The frames of HTTP/2 (RFC 9113) as bytes, and the header blocks of gRPC's answers (RFC 7541)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
LARGEST_WINDOW = LARGEST_ID = (1 << 31) - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

NO_ERROR = 0x0
PROTOCOL_ERROR = 0x1
INTERNAL_ERROR = 0x2
FLOW_CONTROL_ERROR = 0x3
STREAM_CLOSED = 0x5
FRAME_SIZE_ERROR = 0x6
REFUSED_STREAM = 0x7
CANCEL = 0x8
COMPRESSION_ERROR = 0x9
ENHANCE_YOUR_CALM = 0xB

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)
SMALLEST_FRAME, LARGEST_FRAME = 1 << 14, (1 << 24) - 1


class Fault(Exception):
    """Of the whole connection, by its code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


_HEAD = struct.Struct(">HBBBL")
_SETTING = struct.Struct(">HL")
_LONG = struct.Struct(">L")


def head(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def settings(values: Mapping[int, int]) -> bytes:
    payload = b"".join(_SETTING.pack(name, value) for name, value in values.items())
    return head(len(payload), SETTINGS, 0, 0) + payload


def settings_of(payload: bytes) -> Iterable[tuple[int, int]]:
    """`payload` must be a multiple of 6 bytes."""
    return _SETTING.iter_unpack(payload)


SETTINGS_ACK = head(0, SETTINGS, ACK, 0)


def ping_ack(payload: bytes) -> bytes:
    return head(8, PING, ACK, 0) + payload


def window_update(stream_id: int, n: int) -> bytes:
    return head(4, WINDOW_UPDATE, 0, stream_id) + _LONG.pack(n)


def rst_stream(stream_id: int, code: int) -> bytes:
    return head(4, RST_STREAM, 0, stream_id) + _LONG.pack(code)


def goaway(last_id: int, code: int, text: str = "") -> bytes:
    payload = _LONG.pack(last_id) + _LONG.pack(code) + text.encode()
    return head(len(payload), GOAWAY, 0, 0) + payload


def headers(stream_id: int, block: bytes, *, ends: bool) -> bytes:
    """`block` must fit into the smallest frame a peer may allow."""
    return head(len(block), HEADERS, END_HEADERS | (END_STREAM if ends else 0), stream_id) + block


def block(fields: Iterable[tuple[str, str]]) -> bytes:
    """Literals that use and change no table, so that a block is the same on each connection (RFC 7541, 6.2.2)."""
    return b"".join(b"\x00" + _string(name) + _string(value) for name, value in fields)


def _string(text: str) -> bytes:
    raw = text.encode("latin-1")
    size = len(raw)
    if size < 0x7F:
        return bytes((size,)) + raw
    out = bytearray((0x7F,))
    size -= 0x7F
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out) + raw


def long_of(payload: bytes) -> int:
    """The first 31 bits of a number of 32."""
    return int.from_bytes(payload[:4], "big") & LARGEST_WINDOW


def unpadded(payload: bytes) -> bytes:
    """Raises Fault."""
    if not payload or payload[0] >= len(payload):
        raise Fault(PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]
