"""gRPC's calls on our HTTP/2, with hyper-h2 as the client: messages, statuses, and who hears the end."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import h2.events
import pytest

from gateway.extproc.http2 import frames
from gateway.extproc.http2.calls import INTERNAL, Call, Calls
from gateway.extproc.http2.connection import Connection
from tests.support.http2_talk import BEGIN, GRPC, HEAD, Talk, frame, request

MOST_BYTES = 1000
PROMPT = "prompt " * 2


class Answering:
    """Echoes messages; what it hears is in `heard`. `raises` names what it fails at."""

    def __init__(self, call: Call, raises: str = "") -> None:
        self.call = call
        self.raises = raises
        self.heard: list[bytes | str] = []
        self._fail_at("accept")

    def _fail_at(self, where: str) -> None:
        if where == self.raises:
            raise RuntimeError(PROMPT)

    def message(self, raw: bytes) -> None:
        self.heard.append(raw)
        self._fail_at("message")
        if raw == b"finish":
            self.call.finish()
        elif raw == b"abort":
            self.call.abort(INTERNAL, "50 % of\nthis is ü")
        else:
            self.call.send(raw)

    def half_closed(self) -> None:
        self.heard.append("half-closed")
        self._fail_at("half_closed")
        self.call.finish()

    def lost(self) -> None:
        self.heard.append("lost")
        self._fail_at("lost")


class World:
    def __init__(self, raises: str = "", most_bytes: int = MOST_BYTES) -> None:
        self.served: list[Answering] = []
        self.n_flushed = 0
        self._raises = raises
        calls = Calls({"/a.B/C": self._serve}, most_bytes, self._flush)
        self.talk = Talk(connection=Connection(calls.accept))

    def _serve(self, call: Call) -> Answering:
        self.served.append(Answering(call, self._raises))
        return self.served[-1]

    def _flush(self) -> None:
        self.n_flushed += 1

    def call(self, body: bytes, fields: Any = GRPC, stream_id: int = 1) -> tuple[list[bytes], dict[str, str]]:
        """(messages, headers and trailers) of a call that says `body`."""
        self.talk.ask(stream_id, body, fields)
        return self.answer(stream_id)

    def answer(self, stream_id: int = 1) -> tuple[list[bytes], dict[str, str]]:
        self.talk.exchange()
        told = self.talk.of(h2.events.ResponseReceived, stream_id) + self.talk.of(h2.events.TrailersReceived, stream_id)
        return messages_of(self.talk.body(stream_id)), {name: value for event in told for name, value in event.headers}


def message(raw: bytes, compressed: int = 0) -> bytes:
    return bytes((compressed,)) + len(raw).to_bytes(4, "big") + raw


def messages_of(raw: bytes) -> list[bytes]:
    found = []
    while raw:
        assert raw[0] == 0
        size = int.from_bytes(raw[1:5], "big")
        assert len(raw) >= 5 + size
        found.append(raw[5 : 5 + size])
        raw = raw[5 + size :]
    return found


def test_messages_are_answered_in_order() -> None:
    world = World()
    said = [b"a", b"", b"x" * MOST_BYTES, b"b"]
    assert world.call(b"".join(map(message, said))) == (
        said,
        {":status": "200", "content-type": "application/grpc", "grpc-status": "0"},
    )
    assert world.served[0].heard == [*said, "half-closed", "lost"]


@pytest.mark.parametrize(
    ("raw", "status", "text"),
    [
        (message(b"x" * (MOST_BYTES + 1)), "8", "a message is longer than 1000 bytes"),
        (b"\0\xff\xff\xff\xff", "8", "a message is longer than 1000 bytes"),
        (message(b"x", compressed=1), "12", "messages are not taken compressed"),
        (message(b"xyz")[:-1], "13", "the call ended within a message"),
        (b"\0\0", "13", "the call ended within a message"),
    ],
)
def test_messages_that_cannot_be_taken_abort_the_call(raw: bytes, status: str, text: str) -> None:
    world = World()
    got, told = world.call(message(b"first") + raw + (message(b"never") if status != "13" else b""))
    assert got == [b"first"]
    assert (told["grpc-status"], told["grpc-message"]) == (status, text)
    assert told.get("grpc-accept-encoding") == ("identity" if status == "12" else None)
    assert world.served[0].heard == [b"first", "lost"]
    assert not world.talk.connection.streams


def test_a_status_is_told_without_messages_too_and_its_text_is_escaped() -> None:
    world = World()
    got, told = world.call(message(b"abort"))
    assert got == []
    assert told["grpc-status"] == "13"
    assert told["grpc-message"] == "50 %25 of%0Athis is %C3%BC"
    assert len(world.talk.of(h2.events.StreamEnded)) == 1


def test_a_call_that_we_end_first_hears_no_more() -> None:
    world = World()
    assert world.call(message(b"finish") + message(b"late"))[0] == []
    assert world.served[0].heard == [b"finish", "lost"]


@pytest.mark.parametrize("raises", ["accept", "message", "half_closed", "lost"])
def test_a_bug_breaks_off_its_call_alone(raises: str, caplog: pytest.LogCaptureFixture) -> None:
    world = World(raises)
    _, told = world.call(message(b"x"))
    assert told["grpc-status"] == ("0" if raises == "lost" else "13")
    assert not world.talk.connection.streams
    assert not world.talk.connection.closed
    for each in world.served:
        assert each.heard.count("lost") == 1
    assert PROMPT not in caplog.text
    world._raises = ""
    assert world.call(message(b"y"), stream_id=3)[0] == [b"y"]


@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto", "application/grpc; charset=utf-8"])
def test_types_that_are_taken(kind: str) -> None:
    fields = [*HEAD, ("content-type", kind), ("grpc-timeout", "5S"), ("grpc-encoding", "gzip"), ("user-agent", "x")]
    assert World().call(message(b"x"), fields)[0] == [b"x"]


@pytest.mark.parametrize(
    "fields",
    [
        [(":method", "GET"), *GRPC[1:]],
        GRPC[1:],
        HEAD,
        [*HEAD, ("content-type", "application/json")],
        [*HEAD, ("content-type", "application/grpc-web+proto")],
        [*HEAD, ("Content-Type", "application/grpc")],
        [],
    ],
)
def test_what_is_no_call_is_415(fields: Any) -> None:
    world = World()
    raw = frames.headers(1, frames.block(fields), ends=False)
    world.talk.connection.receive(raw + frame(frames.DATA, 0, 1, message(b"x")))
    out = b"".join(world.talk.connection.out)
    assert b"415" in out
    assert not world.served
    assert not world.talk.connection.streams
    assert not world.talk.connection.closed


@pytest.mark.parametrize("path", ["", "/", "/a.B/D", "/grpc.health.v1.Health/Watch", "ü" * 5000])
def test_methods_that_are_not_there_are_unimplemented(path: str) -> None:
    world = World()
    _, told = world.call(b"", [(":path", path) if name == ":path" else (name, value) for name, value in GRPC])
    assert told["grpc-status"] == "12"
    assert unquote(told["grpc-message"]).startswith("there is no method")
    assert not world.talk.connection.streams


def test_a_client_that_resets_or_leaves_is_heard_of_once() -> None:
    world = World()
    for stream_id in (1, 3):
        world.talk.client.send_headers(stream_id, GRPC)
        world.talk.client.send_data(stream_id, message(b"x") + b"\0\0")
    world.talk.exchange()
    world.talk.client.reset_stream(1)
    world.talk.exchange()
    assert [each.heard for each in world.served] == [[b"x", "lost"], [b"x"]]
    world.talk.connection.lose()
    world.talk.connection.lose()
    assert [each.heard for each in world.served] == [[b"x", "lost"]] * 2
    for each in world.served:
        each.call.send(b"late")
        each.call.finish()
        each.call.abort(INTERNAL, "late")
    assert world.talk.connection.out == []


def test_a_half_close_while_the_answer_waits_for_a_window() -> None:
    world = World(most_bytes=1 << 20)
    world.talk.reads = False
    world.talk.client.send_headers(1, GRPC)
    for _ in range(3):
        world.talk.send(1, message(b"x" * 60_000))
    world.talk.client.end_stream(1)
    world.talk.exchange()
    assert world.served[0].heard[-2:] == ["half-closed", "lost"]
    assert len(world.talk.connection.streams) == 1
    world.talk.reads = True
    world.talk.client.acknowledge_received_data(65_535, 1)
    got, told = world.answer()
    assert got == [b"x" * 60_000] * 3
    assert told["grpc-status"] == "0"
    assert not world.talk.connection.streams


def test_a_message_in_the_smallest_pieces_takes_no_more_than_its_length() -> None:
    """DATA of two bytes each: a list of them took twenty times as much."""
    import tracemalloc

    world = World(most_bytes=1 << 20)
    connection = world.talk.connection
    connection.receive(request(1) + frame(frames.DATA, 0, 1, b"\0" + (100_000).to_bytes(4, "big")))
    piece = frame(frames.DATA, 0, 1, b"ab") * 1000
    tracemalloc.start()
    try:
        for _ in range(49):
            connection.receive(piece)
        connection.out.clear()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 200_000


def test_a_preface_is_due_once() -> None:
    world = World()
    world.talk.connection.receive(BEGIN)
    assert world.talk.connection.closed
