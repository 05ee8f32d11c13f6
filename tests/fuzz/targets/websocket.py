"""Frames of a realtime session, read as they are served: by aiohttp's reader, then by what looks for a model."""

from __future__ import annotations

import asyncio
import json
from unittest.mock import Mock

import aiohttp
from aiohttp import WSMsgType
from aiohttp._websocket.reader import WebSocketDataQueue, WebSocketReader
from aiohttp.streams import EofStream

from gateway.proxy.realtime.ending import as_sent, ending
from gateway.proxy.realtime.naming import error_event, model_of
from tests.fuzz.cut import cut, seeds

_LARGEST_BYTES = 8 << 10


def _frame(opcode: int, said: bytes, *, last: bool = True, mask: bytes = b"\x01\x02\x03\x04") -> bytes:
    """Of a client."""
    masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(said))
    length = bytes([0x80 | len(said)]) if len(said) < 126 else b"\xfe" + len(said).to_bytes(2, "big")
    return bytes([0x80 * last | opcode]) + length + mask + masked


def _event(**fields: object) -> bytes:
    return json.dumps(fields).encode()


SEEDS = seeds(
    _frame(1, _event(type="session.update", model="m")) + _frame(2, bytes(300)),
    _frame(1, _event(type="session.update", session={"model": "m"})),
    _frame(1, _event(type="input_audio_buffer.append", audio="AAAA"), last=False) + _frame(0, b"}") + _frame(9, b"x"),
    _frame(8, b"\x03\xe8bye"),
    _frame(8, b""),
    _frame(1, b"\xff\xfe") + _frame(10, b""),
)
# fmt: off
WORDS = [
    b"\x81\x80", b"\x82\xfe\xff\xff", b"\x81\xff" + b"\xff" * 8, b"\x88\x82", b"\x00\x80", b"\xc1\x80",
    b"session.update", b'"model": ', b'"session": {',
]
# fmt: on

_loop = asyncio.new_event_loop()


def fuzz_one(data: bytes) -> None:
    whole, pieces = cut(data)
    one, many = _read([whole]), _read(pieces)
    assert one == many, "how the bytes are cut decides what is understood"


def _read(pieces: list[bytes]) -> list[object]:
    return _loop.run_until_complete(_messages(pieces))


async def _messages(pieces: list[bytes]) -> list[object]:
    protocol = Mock(_reading_paused=False)
    queue = WebSocketDataQueue(protocol, 1 << 20, loop=_loop)
    reader = WebSocketReader(queue, _LARGEST_BYTES, compress=False, decode_text=True)
    for piece in pieces:
        reader.feed_data(piece)
    told: list[object] = []
    source = Mock(spec=aiohttp.ClientWebSocketResponse)
    error = queue.exception()
    assert error is None or isinstance(error, aiohttp.WebSocketError), error
    queue.feed_eof()
    while True:
        try:
            message = await queue.read()
        except EofStream:
            break
        if message.type in (WSMsgType.PING, WSMsgType.PONG):
            continue
        close = ending(message, source)
        if close is None:
            assert len(message.data) <= _LARGEST_BYTES
            model = model_of(message)
            assert model is None or model
            if model is not None:
                error_event(f"The model `{model}` is not served.", None).encode()
            told.append((message.type, message.data, model))
            continue
        code, reason = as_sent(close)
        assert 1000 <= code < 5000
        assert len(reason) <= 123
        reason.decode()
        told.append(close)
    return told
