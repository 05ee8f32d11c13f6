"""Bytes of a proxy on the picker's own HTTP/2 and gRPC: the same is heard and said however they are cut."""

from __future__ import annotations

from gateway.extproc.http2 import frames
from gateway.extproc.http2.calls import Call, Calls
from gateway.extproc.http2.connection import Connection
from tests.fuzz.cut import cut, seeds

_MOST_BYTES = 4096
_PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_FIELDS = ((":method", "POST"), (":path", _PATH), ("content-type", "application/grpc"), ("te", "trailers"))
_HEADERS = frames.block(_FIELDS)
_START = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 100}) + frames.SETTINGS_ACK


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return frames.head(len(payload), kind, flags, stream_id) + payload


def _data(stream_id: int, *messages: bytes, ends: bool = False) -> bytes:
    payload = b"".join(b"\0" + len(message).to_bytes(4, "big") + message for message in messages)
    return _frame(frames.DATA, frames.END_STREAM * ends, stream_id, payload)


SEEDS = seeds(
    _START + frames.headers(1, _HEADERS, ends=False) + _data(1, b"abc", b"") + _data(1, b"d" * 300, ends=True),
    _START + frames.headers(1, _HEADERS, ends=False) + _data(1, b"a") + frames.rst_stream(1, frames.CANCEL)
    + frames.headers(3, _HEADERS, ends=False) + _data(3, b"b") + frames.window_update(3, 1000)
    + frames.window_update(0, 1000) + _frame(frames.PING, 0, 0, bytes(8)) + frames.headers(3, b"", ends=True),
    _START + _frame(frames.HEADERS, 0, 1, _HEADERS[:40]) + _frame(frames.CONTINUATION, 4, 1, _HEADERS[40:])
    + _frame(frames.DATA, frames.PADDED, 1, b"\x02\0\0\0\0\x01x\0\0") + frames.goaway(0, 0, "bye"),
    _START + _frame(frames.HEADERS, frames.WITH_PRIORITY | 4, 1, bytes(5) + b"\x82\x87\x84\x41\x8a\xa0")
    + _frame(frames.PRIORITY, 0, 1, bytes(5)) + frames.settings({frames.MAX_FRAME_SIZE: 1 << 14}),
)  # fmt: skip
# fmt: off
WORDS = [
    _HEADERS, frames.SETTINGS_ACK, frames.window_update(1, 1 << 30), frames.rst_stream(1, 8), b"\x00\x00\x00\x01",
    b"\x00\x00\x00\x03", b"\x00\x00\x08\x06\x00\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff",
    b"\x3f\xe1\x1f",
    _data(1, b"x"), _data(3, b"", ends=True), frames.headers(5, _HEADERS, ends=True), b"\x00\x00\x04\x00\x00",
    frames.settings({frames.INITIAL_WINDOW_SIZE: 0}), _frame(frames.CONTINUATION, 0, 1, b""),
]
# fmt: on


_END = bytes(64)
"""What does not begin as HTTP/2 is refused at once or when it is long enough: with this behind it, it is."""


class _Echo:
    """Says what it hears, and answers with it."""

    def __init__(self, call: Call, heard: list[tuple[object, ...]], number: int) -> None:
        self._call = call
        self._heard = heard
        self._number = number
        self.n_lost = 0

    def message(self, raw: bytes) -> None:
        self._heard.append((self._number, raw))
        self._call.send(raw)

    def half_closed(self) -> None:
        self._heard.append((self._number, "half closed"))
        self._call.finish()

    def lost(self) -> None:
        self._heard.append((self._number, "lost"))
        self.n_lost += 1


def fuzz_one(data: bytes) -> None:
    whole, pieces = cut(data)
    one, many = _talk([whole]), _talk(pieces)
    assert one == many, "how the bytes are cut decides what is understood"
    _frames_of(one[1])


def _talk(pieces: list[bytes]) -> tuple[list[tuple[object, ...]], bytes]:
    """(what was heard, what was said)"""
    heard: list[tuple[object, ...]] = []
    echoes: list[_Echo] = []

    def begun(call: Call) -> _Echo:
        echoes.append(_Echo(call, heard, len(echoes)))
        return echoes[-1]

    connection = Connection(Calls({_PATH: begun}, _MOST_BYTES, lambda: None).accept)
    for piece in (*pieces, _END):
        connection.receive(piece)
    connection.lose()
    assert not connection.streams
    assert [echo.n_lost for echo in echoes] == [1] * len(echoes), "an end is not heard, or twice"
    return heard, b"".join(connection.out)


def _frames_of(said: bytes) -> None:
    """Each is whole, and no longer than a peer must take."""
    at = 0
    while at < len(said):
        assert len(said) - at >= frames.HEAD_BYTES
        length = int.from_bytes(said[at : at + 3], "big")
        assert length <= 1 << 16
        at += frames.HEAD_BYTES + length
    assert at == len(said)
