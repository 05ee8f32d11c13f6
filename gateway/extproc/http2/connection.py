"""One HTTP/2 connection of a client, without I/O: bytes in, streams' events and bytes out (RFC 9113)."""

# Theory of operation
#
# `receive` takes bytes as they come; what they mean is told to the handlers of the streams at once, and what is to be
# written gathers in `out`. A frame is looked at when it is whole; of one that is not, only its parts are kept, none
# longer than `_FRAME_BYTES`.
#
# We ask the client for no header table (HEADER_TABLE_SIZE 0), so that equal header blocks mean equal headers. Our own
# use none, which the first of them says.
#
# What comes is given to whoever handles the stream at once, who bounds what is kept of it and may `reset`; the window
# is then opened again, but not while answers wait for the client's own: who does not read is not read from. What passes
# its windows and not its socket waits there, in which case the listener stops reading. So a client makes us keep,
# beside what handlers do: for a stream what one window (`_STREAM_WINDOW_BYTES`) is answered with, for a connection
# `_MOST_STREAMS` streams, one frame, one header block and those that are known (some MB at most).
#
# Nothing bounds how many streams a client opens and resets (CVE-2023-44487): a proxy whose clients leave does so all
# day, and each costs no more than one that is used. Nothing of a stream is kept after it.
#
# Faults of one stream reset it; faults of the connection end it with GOAWAY, and every handler is told.

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

from gateway.extproc.http2 import frames
from gateway.extproc.http2.blocks import Fields, HeaderBlocks
from gateway.extproc.http2.frames import Fault

_FRAME_BYTES = 1 << 16
"""Of frames we take; the answer's parts of a large body are as long."""
_STREAM_WINDOW_BYTES = 1 << 20
_WINDOW_BYTES = 1 << 26
_MOST_STREAMS = 1 << 14
_BLOCK_BYTES = 1 << 16
"""Of one request's headers, compressed; and of what they become."""
_RETIRED_ID = frames.LARGEST_ID - (1 << 24)
"""From there on it is time for another connection: a thousand streams a second use up their numbers in two weeks."""
_TLS = b"\x16"
"""The first byte of a TLS handshake."""
_EMPTY_TABLE = b"\x20"
"""A header block's first byte that says so (RFC 7541, 6.3)."""
_FIRST_WINDOW_BYTES = (1 << 16) - 1
"""Before anybody says otherwise (RFC 9113, 6.9.2)."""


class Handler(Protocol):
    """Of one stream. None of these may raise."""

    def data(self, payload: bytes) -> None: ...

    def half_closed(self) -> None:
        """The client has said all."""

    def lost(self) -> None:
        """The stream is over before we ended it. Nothing more can be sent."""


class Sending:
    """Our half of one stream, and what is known of the client's."""

    __slots__ = ("_connection", "ended", "half_closed", "handler", "id", "last", "taken", "waiting", "window")

    def __init__(self, connection: Connection, stream_id: int, window: int) -> None:
        self._connection = connection
        self.id = stream_id
        self.window = window
        self.handler: Handler | None = None
        self.taken = 0
        """Bytes that came since the window was last opened."""
        self.waiting: deque[memoryview] = deque()
        self.last: bytes | None = None
        """The block of the trailers, once they are to be sent."""
        self.half_closed = False
        self.ended = False

    def headers(self, block: bytes) -> None:
        """Before any data."""
        if not self.ended:
            self._connection.head(self, block, ends=False)

    def data(self, payload: bytes) -> None:
        """Sent as far as the client's windows allow, the rest when they do."""
        if not self.ended and self.last is None:
            self._connection.send(self, payload)

    def end(self, block: bytes) -> None:
        """Trailers, after which nothing is sent."""
        if not self.ended and self.last is None:
            self.last = block
            if not self.waiting:
                self._connection.finish(self)

    def reset(self, code: int) -> None:
        if not self.ended:
            self._connection.out.append(frames.rst_stream(self.id, code))
            self._connection.forget(self)


Accept = Callable[[Sending, Fields], Handler]


class Connection:
    """`accept` is given every new stream with its headers. `out`: parts of frames to write. `closed`: nothing more is
    read; write `out` and hang up.
    """

    def __init__(self, accept: Accept) -> None:
        self._accept = accept
        self.closed = False
        self.out: list[bytes | memoryview] = [
            frames.settings(
                {
                    frames.HEADER_TABLE_SIZE: 0,
                    frames.MAX_CONCURRENT_STREAMS: _MOST_STREAMS,
                    frames.INITIAL_WINDOW_SIZE: _STREAM_WINDOW_BYTES,
                    frames.MAX_FRAME_SIZE: _FRAME_BYTES,
                    frames.MAX_HEADER_LIST_SIZE: _BLOCK_BYTES,
                }
            ),
            frames.window_update(0, _WINDOW_BYTES - _FIRST_WINDOW_BYTES),
        ]
        self.streams: dict[int, Sending] = {}
        self.begun = False
        self.fault = ""
        """Of the client, for which it is closed."""
        self._last_id = 0
        self._parts: list[bytes] = []
        self._size = 0
        self._needed = len(frames.PREFACE) + frames.HEAD_BYTES
        self._preface_due = True
        self._settings_due = True
        self._taken = 0
        self._window = _FIRST_WINDOW_BYTES
        self._stream_window = _FIRST_WINDOW_BYTES
        self._most_frame = frames.SMALLEST_FRAME
        self._blocked: OrderedDict[int, Sending] = OrderedDict()
        """Those that wait for the connection's window, whoever waits longest first."""
        self._first = _EMPTY_TABLE
        self._retired = False
        self._blocks = HeaderBlocks(_BLOCK_BYTES)
        self._block: tuple[int, bool, list[bytes]] | None = None
        """Of a HEADERS frame whose CONTINUATIONs are awaited: stream, whether it ends it, and the parts."""
        self._block_size = 0

    # ---- what comes --------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        if self.closed:
            return
        if self._size:
            self._parts.append(data)
            self._size += len(data)
            if self._size < self._needed:
                return
            data = b"".join(self._parts)
        try:
            left = self._frames(data)
        except Fault as fault:
            self.fault = str(fault)
            self.close(fault.code, self.fault)
            return
        self._parts = [left] if left else []
        self._size = len(left)

    def _frames(self, data: bytes) -> bytes:
        """All whole frames of `data`; what is left of it. Raises Fault."""
        at = self._preface(data) if self._preface_due else 0
        end = len(data)
        while end - at >= frames.HEAD_BYTES and not self._preface_due:
            length = int.from_bytes(data[at : at + 3], "big")
            if length > _FRAME_BYTES:
                raise Fault(frames.FRAME_SIZE_ERROR, "a frame is longer than we said they may be")
            kind, flags = data[at + 3], data[at + 4]
            stop = at + frames.HEAD_BYTES + length
            if stop > end:
                self._needed = stop - at
                return data[at:]
            stream_id = frames.long_of(data[at + 5 : at + 9])
            payload = data[at + frames.HEAD_BYTES : stop]
            at = stop
            if self._block is not None and kind != frames.CONTINUATION:
                raise Fault(frames.PROTOCOL_ERROR, "headers are not whole, and another frame comes")
            if self._settings_due and kind != frames.SETTINGS:
                raise Fault(frames.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            read = _READ.get(kind)
            if read is not None:  # What is unknown is to be ignored.
                read(self, stream_id, flags, payload)
                if self.closed:
                    return b""
        if not self._preface_due:
            self._needed = frames.HEAD_BYTES
        return data[at:]

    def _preface(self, data: bytes) -> int:
        known = frames.PREFACE
        if data[: len(known)] != known[: len(data)]:
            what = "this is TLS, and plain HTTP/2 is expected" if data[:1] == _TLS else "this is not HTTP/2"
            raise Fault(frames.PROTOCOL_ERROR, what)
        if len(data) < len(known):
            self._needed = len(known)
            return 0
        self._preface_due = False
        return len(known)

    def _data(self, stream_id: int, flags: int, payload: bytes) -> None:
        size = len(payload)
        self._taken += size
        if self._taken > _WINDOW_BYTES // 2:
            self.out.append(frames.window_update(0, self._taken))
            self._taken = 0
        stream = self.streams.get(stream_id)
        if stream is None:
            self._only_of_closed(stream_id)
            return
        if stream.half_closed:
            self._drop(stream, frames.STREAM_CLOSED)
            return
        if flags & frames.PADDED:
            payload = frames.unpadded(payload)
        stream.taken += size
        if stream.taken > _STREAM_WINDOW_BYTES:
            self._drop(stream, frames.FLOW_CONTROL_ERROR)
            return
        stream.half_closed = bool(flags & frames.END_STREAM)
        handler = stream.handler
        if handler is not None:
            if payload:
                handler.data(payload)
            if stream.half_closed and not stream.ended:
                handler.half_closed()
        if not stream.ended:
            self._open(stream)

    def _open(self, stream: Sending) -> None:
        """Let more come, unless the client leaves our answers where they are."""
        if stream.taken > _STREAM_WINDOW_BYTES // 2 and not stream.waiting and not stream.half_closed:
            self.out.append(frames.window_update(stream.id, stream.taken))
            stream.taken = 0

    def _headers(self, stream_id: int, flags: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise Fault(frames.PROTOCOL_ERROR, "a stream of an even number")
        if flags & frames.PADDED:
            payload = frames.unpadded(payload)
        if flags & frames.WITH_PRIORITY:
            if len(payload) < 5:
                raise Fault(frames.FRAME_SIZE_ERROR, "HEADERS are too short for their priority")
            payload = payload[5:]
        ends = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._block_of(stream_id, ends, payload)
        else:
            self._block, self._block_size = (stream_id, ends, [payload]), len(payload)

    def _continuation(self, stream_id: int, flags: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != stream_id:
            raise Fault(frames.PROTOCOL_ERROR, "CONTINUATION of nothing")
        _, ends, parts = self._block
        parts.append(payload)
        # Empty ones count too: any number of them could be sent.
        self._block_size += len(payload) + frames.HEAD_BYTES
        if self._block_size > _BLOCK_BYTES:
            raise Fault(frames.ENHANCE_YOUR_CALM, "headers are too long")
        if flags & frames.END_HEADERS:
            self._block = None
            self._block_of(stream_id, ends, b"".join(parts))

    def _block_of(self, stream_id: int, ends: bool, block: bytes) -> None:
        fields = self._blocks.fields(block)
        stream = self.streams.get(stream_id)
        if stream is not None:
            if not ends or stream.half_closed:
                self._drop(stream, frames.PROTOCOL_ERROR)
                return
            stream.half_closed = True
            if stream.handler is not None:
                stream.handler.half_closed()
            return
        if stream_id <= self._last_id:
            if not ends:
                raise Fault(frames.PROTOCOL_ERROR, "the numbers of streams go backwards")
            return  # Trailers of a stream that we have ended.
        self._last_id = stream_id
        if stream_id > _RETIRED_ID:
            self.retire()
        if len(self.streams) >= _MOST_STREAMS:
            self.out.append(frames.rst_stream(stream_id, frames.REFUSED_STREAM))
            return
        stream = self.streams[stream_id] = Sending(self, stream_id, self._stream_window)
        stream.half_closed = ends
        stream.handler = self._accept(stream, fields)
        if ends and not stream.ended:
            stream.handler.half_closed()

    def _reset(self, stream_id: int, _: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Fault(frames.FRAME_SIZE_ERROR, "RST_STREAM of another length than 4")
        stream = self.streams.get(stream_id)
        if stream is None:
            self._only_of_closed(stream_id)
            return
        self.forget(stream)
        if stream.handler is not None:
            stream.handler.lost()

    def _settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id or len(payload) % 6 or (flags & frames.ACK and payload):
            raise Fault(frames.FRAME_SIZE_ERROR, "SETTINGS of a wrong length, or of a stream")
        self._settings_due = False
        self.begun = True
        if flags & frames.ACK:
            return
        self.out.append(frames.SETTINGS_ACK)  # Before what they allow: some clients reckon with them from then on.
        for name, value in dict(frames.settings_of(payload)).items():
            if name == frames.INITIAL_WINDOW_SIZE:
                if value > frames.LARGEST_WINDOW:
                    raise Fault(frames.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is too large")
                more, self._stream_window = value - self._stream_window, value
                for stream in list(self.streams.values()):
                    self._widen(stream, more)
            elif name == frames.MAX_FRAME_SIZE:
                if not frames.SMALLEST_FRAME <= value <= frames.LARGEST_FRAME:
                    raise Fault(frames.PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of bounds")
                self._most_frame = min(value, _FRAME_BYTES)
            elif name == frames.ENABLE_PUSH and value > 1:
                raise Fault(frames.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")

    def _ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id or len(payload) != 8:
            raise Fault(frames.FRAME_SIZE_ERROR, "PING of another length than 8, or of a stream")
        if not flags & frames.ACK:
            self.out.append(frames.ping_ack(payload))

    def _window_update(self, stream_id: int, _: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Fault(frames.FRAME_SIZE_ERROR, "WINDOW_UPDATE of another length than 4")
        more = frames.long_of(payload)
        if stream_id == 0:
            self._window += more
            if not more or self._window > frames.LARGEST_WINDOW:
                raise Fault(frames.FLOW_CONTROL_ERROR if more else frames.PROTOCOL_ERROR, "a wrong WINDOW_UPDATE")
            while self._blocked and self._window > 0:
                _, blocked = self._blocked.popitem(last=False)
                self._go_on(blocked)
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self._only_of_closed(stream_id)
        elif not more:
            self._drop(stream, frames.PROTOCOL_ERROR)
        else:
            self._widen(stream, more)

    def _priority(self, stream_id: int, _: int, payload: bytes) -> None:
        if not stream_id or len(payload) != 5:
            raise Fault(frames.FRAME_SIZE_ERROR, "PRIORITY of another length than 5, or of no stream")

    def _goaway(self, stream_id: int, _: int, payload: bytes) -> None:
        if stream_id or len(payload) < 8:
            raise Fault(frames.FRAME_SIZE_ERROR, "GOAWAY is too short, or of a stream")

    def _push_promise(self, *_: object) -> None:
        raise Fault(frames.PROTOCOL_ERROR, "PUSH_PROMISE of a client")

    def _only_of_closed(self, stream_id: int) -> None:
        """Frames of streams we have ended may still be under way."""
        if not stream_id & 1 or stream_id > self._last_id:
            raise Fault(frames.PROTOCOL_ERROR, "a frame of a stream that was never opened")

    def _drop(self, stream: Sending, code: int) -> None:
        stream.reset(code)
        if stream.handler is not None:
            stream.handler.lost()

    # ---- what goes ---------------------------------------------------------------------------------------------------

    def head(self, stream: Sending, block: bytes, *, ends: bool) -> None:
        self.out.append(frames.headers(stream.id, self._first + block, ends=ends))
        self._first = b""

    def send(self, stream: Sending, payload: bytes) -> None:
        size = len(payload)
        if size <= self._most_frame and size <= stream.window and size <= self._window and not stream.waiting:
            stream.window -= size
            self._window -= size
            self.out += (frames.head(size, frames.DATA, 0, stream.id), payload)
            return
        stream.waiting.append(memoryview(payload))
        self._go_on(stream)

    def _go_on(self, stream: Sending) -> None:
        """As much of what waits as the windows allow."""
        waiting, out = stream.waiting, self.out
        while waiting:
            room = min(stream.window, self._window, self._most_frame)
            if room <= 0:
                if self._window <= 0:
                    self._blocked[stream.id] = stream
                return
            payload = waiting.popleft()
            if len(payload) > room:
                waiting.appendleft(payload[room:])
                payload = payload[:room]
            stream.window -= len(payload)
            self._window -= len(payload)
            out += (frames.head(len(payload), frames.DATA, 0, stream.id), payload)
        self._blocked.pop(stream.id, None)
        if stream.last is None:
            self._open(stream)
        else:
            self.finish(stream)

    def _widen(self, stream: Sending, more: int) -> None:
        stream.window += more
        if stream.window > frames.LARGEST_WINDOW:
            self._drop(stream, frames.FLOW_CONTROL_ERROR)
        elif stream.waiting:
            self._go_on(stream)

    def finish(self, stream: Sending) -> None:
        """Our half is all sent. If the client's is not, it need not be."""
        if stream.last is not None:
            self.head(stream, stream.last, ends=True)
        if not stream.half_closed:
            self.out.append(frames.rst_stream(stream.id, frames.NO_ERROR))
        self.forget(stream)

    def forget(self, stream: Sending) -> None:
        stream.ended = True
        stream.waiting.clear()
        self.streams.pop(stream.id, None)
        self._blocked.pop(stream.id, None)

    def retire(self) -> None:
        """Ask the client to open its next streams on another connection. Those it opens here are served as before."""
        if not self.closed and not self._retired:
            self._retired = True
            self.out.append(frames.goaway(frames.LARGEST_ID, frames.NO_ERROR))

    def close(self, code: int = frames.NO_ERROR, text: str = "") -> None:
        """Say good-bye; every stream that runs is lost."""
        if not self.closed:
            self.closed = True
            self.out.append(frames.goaway(self._last_id, code, text))
            self.lose()

    def lose(self) -> None:
        """The client is gone, or is to be."""
        self.closed = True
        self._parts = []
        for stream in list(self.streams.values()):
            self.forget(stream)
            if stream.handler is not None:
                stream.handler.lost()


_READ: dict[int, Callable[[Connection, int, int, bytes], None]] = {
    frames.DATA: Connection._data,
    frames.HEADERS: Connection._headers,
    frames.PRIORITY: Connection._priority,
    frames.RST_STREAM: Connection._reset,
    frames.SETTINGS: Connection._settings,
    frames.PUSH_PROMISE: Connection._push_promise,
    frames.PING: Connection._ping,
    frames.GOAWAY: Connection._goaway,
    frames.WINDOW_UPDATE: Connection._window_update,
    frames.CONTINUATION: Connection._continuation,
}
