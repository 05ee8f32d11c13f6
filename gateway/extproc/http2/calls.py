"""gRPC's calls on the streams of a connection: their headers, length-prefixed messages, and statuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol
from urllib.parse import quote

from gateway.extproc.http2 import frames
from gateway.extproc.http2.blocks import Fields
from gateway.extproc.http2.connection import Sending
from gateway.proxy.errors import log_unexpected

_log = logging.getLogger(__name__)

OK, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 8, 12, 13
"""gRPC's status codes."""
_PREFIX_BYTES = 5
_TYPE = "application/grpc"
_HEAD = frames.block(((":status", "200"), ("content-type", _TYPE)))
_DONE = frames.block((("grpc-status", "0"),))
_UNCOMPRESSED_ONLY = frames.block((("grpc-accept-encoding", "identity"),))
_TEXT_CHARS = 1000
_NOT_GRPC = frames.block(((":status", "415"),))


class Serving(Protocol):
    """Who answers a call."""

    def message(self, raw: bytes) -> None: ...

    def half_closed(self) -> None:
        """No message follows."""

    def lost(self) -> None:
        """The call is over, and nothing can be sent any more. Comes also after `finish` and `abort`, and once."""


class Call:
    """One call: a `connection.Handler` towards HTTP/2. `send` may be used until it is `over`; `flush` when it is used
    at other times than from within what `Serving` hears.
    """

    __slots__ = ("_begun", "_needed", "_part", "_sending", "fields", "flush", "most_bytes", "over", "serving")

    def __init__(self, sending: Sending, most_bytes: int, flush: Callable[[], None], fields: Fields = ()) -> None:
        """`fields`: the headers with which it was begun."""
        self.fields = fields
        self._sending = sending
        self._begun = False
        self._part = bytearray()  # Of a message; a list of pieces would take many times as much where they are small.
        self._needed = _PREFIX_BYTES
        self.most_bytes = most_bytes
        self.flush = flush
        self.over = False
        self.serving: Serving | None = None

    # ---- what comes --------------------------------------------------------------------------------------------------

    def data(self, payload: bytes) -> None:
        if self._part:
            self._part += payload
            if len(self._part) < self._needed:
                return
            payload = bytes(self._part)
        at, end = 0, len(payload)
        while not self.over and end - at >= _PREFIX_BYTES:
            size = int.from_bytes(payload[at + 1 : at + _PREFIX_BYTES], "big")
            if payload[at]:
                self.abort(UNIMPLEMENTED, "messages are not taken compressed", _UNCOMPRESSED_ONLY)
                return
            if size > self.most_bytes:
                self.abort(RESOURCE_EXHAUSTED, f"a message is longer than {self.most_bytes} bytes")
                return
            stop = at + _PREFIX_BYTES + size
            if stop > end:
                self._needed = stop - at
                break
            self._message(payload[at + _PREFIX_BYTES : stop])
            at = stop
        else:
            self._needed = _PREFIX_BYTES
        self._part = bytearray() if self.over else bytearray(payload[at:])

    def half_closed(self) -> None:
        if self._part and not self.over:
            self.abort(INTERNAL, "the call ended within a message")
            return
        if self.serving is not None:
            try:
                self.serving.half_closed()
            except Exception as exc:
                self._failed(exc)

    def lost(self) -> None:
        if not self.over:
            self._leave()

    def _message(self, raw: bytes) -> None:
        if self.serving is not None:
            try:
                self.serving.message(raw)
            except Exception as exc:
                self._failed(exc)

    def _failed(self, exc: Exception) -> None:
        log_unexpected(_log, "a call is broken off", exc)
        self.abort(INTERNAL, "internal error")

    # ---- what goes ---------------------------------------------------------------------------------------------------

    def send(self, raw: bytes) -> None:
        if self.over:
            return
        if not self._begun:
            self._begun = True
            self._sending.headers(_HEAD)
        self._sending.data(b"\x00" + len(raw).to_bytes(4, "big") + raw)

    def finish(self) -> None:
        """All is well, and said."""
        if not self.over:
            self._sending.end(_DONE if self._begun else _HEAD + _DONE)
            self._leave()

    def abort(self, status: int, text: str, more: bytes = b"") -> None:
        """`more`: a header block."""
        if not self.over:
            message = quote(text[:_TEXT_CHARS].strip(), safe=" ")
            told = frames.block((("grpc-status", str(status)), ("grpc-message", message))) + more
            self._sending.end(told if self._begun else _HEAD + told)
            self._leave()

    def _leave(self) -> None:
        self.over = True
        self._part = bytearray()
        serving, self.serving = self.serving, None
        if serving is not None:
            try:
                serving.lost()
            except Exception as exc:
                log_unexpected(_log, "the end of a call is not heard", exc)


Method = Callable[[Call], Serving]


class Calls:
    """Takes the streams of one connection for calls of `methods`, by path.

    A deadline (grpc-timeout) is the client's own to keep: it resets the stream. What is kept of a call is a message
    that is not whole, of up to `most_bytes`.
    """

    def __init__(self, methods: Mapping[str, Method], most_bytes: int, flush: Callable[[], None]) -> None:
        self._methods = methods
        self._most_bytes = most_bytes
        self._flush = flush

    def accept(self, sending: Sending, fields: Fields) -> Call:
        call = Call(sending, self._most_bytes, self._flush, fields)
        said = dict(fields)
        if said.get(":method") != "POST" or not _is_grpc(said.get("content-type", "")):
            call.over = True
            sending.end(_NOT_GRPC)
            return call
        path = said.get(":path", "")
        method = self._methods.get(path)
        if method is None:
            call.abort(UNIMPLEMENTED, f"there is no method {path[:200]}")
            return call
        try:
            call.serving = method(call)
        except Exception as exc:
            call._failed(exc)
        return call


def _is_grpc(content_type: str) -> bool:
    """Not application/grpc-web, which frames its trailers otherwise."""
    return content_type.partition(";")[0].partition("+")[0].strip() == _TYPE
