"""HTTP/2 without sockets: hyper-h2 as a client, our connection as the server, and what either side heard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import h2.config
import h2.connection
import h2.events

from gateway.extproc.http2 import frames
from gateway.extproc.http2.blocks import Fields
from gateway.extproc.http2.connection import Connection, Sending

HEAD = [(":method", "POST"), (":scheme", "http"), (":path", "/a.B/C"), (":authority", "x"), ("te", "trailers")]
GRPC = [*HEAD, ("content-type", "application/grpc")]
ANSWER = frames.block(((":status", "200"),))
TRAILERS = frames.block((("grpc-status", "0"),))
BEGIN = frames.PREFACE + frames.settings({})

OnData = Callable[["Heard", bytes], None]
OnEnd = Callable[["Heard"], None]


class Heard:
    """A stream's handler that remembers, and does `on_data` and `on_half_closed`."""

    def __init__(
        self, sending: Sending, fields: Fields, on_data: OnData | None = None, on_end: OnEnd | None = None
    ) -> None:
        self.sending = sending
        self.fields = fields
        self.got = b""
        self.ended = False
        self.n_lost = 0
        self._on_data = on_data
        self._on_end = on_end

    def data(self, payload: bytes) -> None:
        assert payload
        assert not self.ended
        assert not self.n_lost
        self.got += payload
        if self._on_data is not None:
            self._on_data(self, payload)

    def half_closed(self) -> None:
        assert not self.ended
        assert not self.n_lost
        self.ended = True
        if self._on_end is not None:
            self._on_end(self)

    def lost(self) -> None:
        self.n_lost += 1


def echo(heard: Heard) -> None:
    """All that came, once the client has said all."""
    heard.sending.headers(ANSWER)
    heard.sending.data(heard.got)
    heard.sending.end(TRAILERS)


class Server:
    """Our connection, and the handlers of all streams it ever had."""

    def __init__(self, on_data: OnData | None = None, on_end: OnEnd | None = None) -> None:
        self.streams: dict[int, Heard] = {}
        self._on_data = on_data
        self._on_end = on_end
        self.connection = Connection(self.accept)

    def accept(self, sending: Sending, fields: Fields) -> Heard:
        heard = self.streams[sending.id] = Heard(sending, fields, self._on_data, self._on_end)
        return heard

    def written(self) -> bytes:
        out = b"".join(self.connection.out)
        self.connection.out.clear()
        return out

    def told(self, *raw: bytes) -> bytes:
        """What is written after these bytes came."""
        for each in raw:
            self.connection.receive(each)
        return self.written()


class Talk:
    """A server and hyper-h2, which checks what it is sent: windows, frame sizes, header blocks, states."""

    def __init__(
        self,
        server: Server | None = None,
        settings: Mapping[int, int] | None = None,
        *,
        connection: Connection | None = None,
    ) -> None:
        self.server = server or Server(on_end=echo)
        self.connection = connection or self.server.connection
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8", validate_outbound_headers=False)
        self.client = h2.connection.H2Connection(config)
        self.client.initiate_connection()
        if settings:
            self.client.update_settings(dict(settings))  # type: ignore[arg-type]
        self.events: list[Any] = []
        self.reads = True
        """Whether the client opens its windows again."""
        self.exchange()

    def exchange(self) -> list[Any]:
        """Until neither has more to say: the client's new events."""
        begin = len(self.events)
        while True:
            sent = self.client.data_to_send()
            if sent:
                self.connection.receive(sent)
            out = b"".join(self.connection.out)
            self.connection.out.clear()
            for event in self.client.receive_data(out) if out else ():
                self.events.append(event)
                if isinstance(event, h2.events.DataReceived) and self.reads:
                    self.client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if not sent and not out:
                return self.events[begin:]

    def ask(self, stream_id: int, body: bytes = b"", fields: Iterable[tuple[str, str]] = HEAD) -> None:
        self.client.send_headers(stream_id, list(fields), end_stream=not body)
        if body:
            self.send(stream_id, body)
            self.client.end_stream(stream_id)

    def send(self, stream_id: int, body: bytes) -> None:
        """As the server's windows allow."""
        view = memoryview(body)
        while view:
            room = min(self.client.local_flow_control_window(stream_id), self.client.max_outbound_frame_size)
            if not room:
                self.exchange()
                assert self.client.local_flow_control_window(stream_id), "the window stays closed"
                continue
            self.client.send_data(stream_id, bytes(view[:room]))
            view = view[room:]

    def body(self, stream_id: int) -> bytes:
        return b"".join(
            e.data for e in self.events if isinstance(e, h2.events.DataReceived) and e.stream_id == stream_id
        )

    def of(self, kind: type, stream_id: int | None = None) -> list[Any]:
        """Events of this kind that the client had."""
        return [e for e in self.events if isinstance(e, kind) and stream_id in (None, getattr(e, "stream_id", None))]


def frames_of(raw: bytes) -> list[tuple[int, int, int, bytes]]:
    """(kind, flags, stream, payload) of whole frames."""
    found = []
    while raw:
        length, kind, flags = int.from_bytes(raw[:3], "big"), raw[3], raw[4]
        found.append((kind, flags, frames.long_of(raw[5:9]), raw[9 : 9 + length]))
        assert len(raw) >= 9 + length, "a frame is cut"
        raw = raw[9 + length :]
    return found


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return frames.head(len(payload), kind, flags, stream_id) + payload


def request(stream_id: int, *, ends: bool = False, path: str = "/a.B/C") -> bytes:
    """HEADERS of a call that use no table."""
    fields = dict(GRPC) | {":path": path}
    return frames.headers(stream_id, frames.block(fields.items()), ends=ends)
