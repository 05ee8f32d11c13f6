"""Our HTTP/2 connection against hyper-h2's client, and against clients that break RFC 9113."""

from __future__ import annotations

import time

import h2.events
import hpack
import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from gateway.extproc.http2 import blocks, frames
from gateway.extproc.http2 import connection as connection_module
from tests.support.http2_talk import ANSWER, BEGIN, HEAD, TRAILERS, Heard, Server, Talk, echo, frame, frames_of, request

LONG = (5).to_bytes(4, "big")
BLOCK = frames.block(HEAD)


def reset_of(raw: bytes) -> list[tuple[int, int]]:
    """(stream, code) of RST_STREAMs."""
    return [(stream, int.from_bytes(payload, "big")) for kind, _, stream, payload in frames_of(raw) if kind == 3]


def goodbyes(raw: bytes) -> list[tuple[int, int]]:
    """(last stream, code) of GOAWAYs."""
    return [
        (frames.long_of(payload), int.from_bytes(payload[4:8], "big"))
        for kind, _, _, payload in frames_of(raw)
        if kind == frames.GOAWAY
    ]


# ---- what works ------------------------------------------------------------------------------------------------------


def test_many_streams_at_a_time() -> None:
    talk = Talk()
    ids = range(1, 401, 2)
    for stream_id in ids:
        talk.client.send_headers(stream_id, HEAD)
    for part in range(3):
        for stream_id in ids:
            talk.client.send_data(stream_id, b"%d.%d " % (stream_id, part), pad_length=part * 7 or None)
        talk.exchange()
    for stream_id in reversed(ids):
        talk.client.end_stream(stream_id)
    talk.exchange()
    for stream_id in ids:
        assert talk.body(stream_id) == b"%d.0 %d.1 %d.2 " % (stream_id, stream_id, stream_id)
        assert len(talk.of(h2.events.TrailersReceived, stream_id)) == 1
        assert len(talk.of(h2.events.StreamEnded, stream_id)) == 1
    assert not talk.connection.streams


@pytest.mark.parametrize("window", [1, 100, 65_535, 1 << 20, frames.LARGEST_WINDOW])
@pytest.mark.parametrize("frame_bytes", [frames.SMALLEST_FRAME, frames.LARGEST_FRAME])
def test_a_body_arrives_whatever_the_client_allows_at_a_time(window: int, frame_bytes: int) -> None:
    body = bytes(range(256)) * (4 if window < 1000 else 2000)
    talk = Talk(settings={SettingCodes.INITIAL_WINDOW_SIZE: window, SettingCodes.MAX_FRAME_SIZE: frame_bytes})
    talk.ask(1, body)
    talk.exchange()
    assert talk.body(1) == body
    assert len(talk.of(h2.events.StreamEnded, 1)) == 1
    assert max(len(e.data) for e in talk.of(h2.events.DataReceived)) <= min(frame_bytes, 1 << 16)


def test_trailers_of_the_client_end_its_half() -> None:
    talk = Talk()
    talk.client.send_headers(1, HEAD)
    talk.client.send_data(1, b"x")
    talk.client.send_headers(1, [("x-checksum", "1")], end_stream=True)
    talk.exchange()
    assert talk.body(1) == b"x"


def test_priorities_continuations_and_unknown_frames_change_nothing() -> None:
    server = Server()
    parts = [BLOCK[:1], b"", BLOCK[1:7], BLOCK[7:]]
    server.told(
        BEGIN,
        frame(frames.PRIORITY, 0, 9, b"\0\0\0\0\5"),
        frame(0xBE, 0xFF, 7, b"grease"),
        frame(frames.HEADERS, frames.WITH_PRIORITY | frames.PADDED, 1, b"\3\0\0\0\0\5" + parts[0] + b"\0\0\0"),
        *(frame(frames.CONTINUATION, 0, 1, part) for part in parts[1:-1]),
        frame(frames.CONTINUATION, frames.END_HEADERS, 1, parts[-1]),
        frame(frames.DATA, frames.PADDED, 1, b"\4ab\0\0\0\0"),
        frame(frames.DATA, frames.PADDED, 1, b"\0"),
        frame(frames.DATA, 0, 1, b"c"),
        frame(frames.GOAWAY, 0, 0, bytes(8) + b"good-bye"),
        frame(frames.DATA, frames.END_STREAM, 1),
    )
    assert server.streams[1].fields == tuple(HEAD)
    assert (server.streams[1].got, server.streams[1].ended) == (b"abc", True)
    assert not server.connection.closed


def test_a_client_without_a_header_table_is_told_that_we_use_none() -> None:
    """RFC 7541, 4.2: its decoder refuses the first block otherwise (Envoy's `hpack_table_size: 0`)."""
    talk = Talk(settings={SettingCodes.HEADER_TABLE_SIZE: 0})
    assert talk.client.decoder.max_allowed_table_size == 0
    for stream_id in (1, 3):
        talk.ask(stream_id, b"x")
        talk.exchange()
        assert talk.body(stream_id) == b"x"


def test_trailers_that_waited_come_after_that_too() -> None:
    """The first block is the one that is written first, not the one that was made first."""
    talk = Talk(Server(), {SettingCodes.HEADER_TABLE_SIZE: 0, SettingCodes.INITIAL_WINDOW_SIZE: 0})
    talk.ask(1)
    talk.ask(3)
    talk.exchange()
    first, second = (talk.server.streams[i].sending for i in (1, 3))
    first.data(b"x")  # Without headers: hyper-h2 would not have it, and is not shown it.
    first.end(TRAILERS)
    second.end(ANSWER)
    talk.exchange()
    assert len(talk.of(h2.events.ResponseReceived, 3)) == 1


def test_what_is_sent_after_the_end_is_not_sent() -> None:
    talk = Talk(Server(), {SettingCodes.INITIAL_WINDOW_SIZE: 1})
    talk.ask(1)
    talk.exchange()
    sending = talk.server.streams[1].sending
    sending.headers(ANSWER)
    sending.data(b"ab")
    sending.end(TRAILERS)
    sending.data(b"c")  # While "b" waits.
    sending.end(TRAILERS)
    talk.exchange()
    sending.data(b"d")
    sending.headers(ANSWER)
    sending.reset(frames.CANCEL)
    talk.exchange()
    assert talk.body(1) == b"ab"
    assert len(talk.of(h2.events.StreamEnded)) == 1


def test_a_client_that_has_not_said_all_need_not_once_we_have() -> None:
    talk = Talk(Server(on_data=lambda heard, _: echo(heard)))
    talk.client.send_headers(1, HEAD)
    talk.client.send_data(1, b"x")
    talk.exchange()
    (reset,) = talk.of(h2.events.StreamReset)
    assert reset.error_code == ErrorCodes.NO_ERROR
    late = frame(frames.DATA, 0, 1, b"y" * 100) + frame(frames.RST_STREAM, 0, 1, LONG) + frame(8, 0, 1, LONG)
    assert talk.server.told(late, frames.headers(1, BLOCK, ends=True)) == b""
    assert not talk.connection.closed


def test_a_connection_that_is_retired_serves_what_still_comes() -> None:
    server = Server(on_end=echo)
    server.told(BEGIN, request(1))
    server.connection.retire()
    server.connection.retire()
    assert goodbyes(server.written()) == [(frames.LARGEST_ID, 0)]
    out = server.told(request(3, ends=True), frame(frames.DATA, frames.END_STREAM, 1, b"x"))
    assert [stream for kind, flags, stream, _ in frames_of(out) if kind == frames.HEADERS and flags & 1] == [3, 1]
    server.connection.close()
    assert goodbyes(server.written()) == [(3, 0)]


# ---- windows ---------------------------------------------------------------------------------------------------------


def test_a_window_may_be_negative() -> None:
    """A client that makes INITIAL_WINDOW_SIZE smaller while bodies are under way."""
    talk = Talk(Server())
    talk.reads = False
    talk.ask(1)
    talk.exchange()
    sending = talk.server.streams[1].sending
    sending.headers(ANSWER)
    sending.data(b"a" * 60_000)
    talk.exchange()
    talk.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1000})
    talk.exchange()
    assert sending.window == 1000 - 60_000
    sending.data(b"")
    sending.data(b"b" * 500)
    sending.end(TRAILERS)
    talk.exchange()
    assert len(talk.body(1)) == 60_000
    talk.client.acknowledge_received_data(60_000, 1)
    talk.exchange()
    talk.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 100_000})
    talk.exchange()
    assert talk.body(1) == b"a" * 60_000 + b"b" * 500
    assert len(talk.of(h2.events.StreamEnded)) == 1


def test_streams_that_wait_for_the_connection_go_on_by_turns() -> None:
    """None of them has all of a window that opens bit by bit."""
    server = Server()
    server.told(BEGIN, *(request(i, ends=True) for i in (1, 3, 5)))
    for heard in server.streams.values():
        heard.sending.data(b"x" * 65_000)
    server.written()
    server.told(*(frame(frames.WINDOW_UPDATE, 0, i, (1 << 20).to_bytes(4, "big")) for i in (1, 3, 5)))
    for i in (1, 3, 5):
        server.streams[i].sending.data(b"y" * 65_000)
    got = []
    for _ in range(6):
        out = server.told(frame(frames.WINDOW_UPDATE, 0, 0, (100).to_bytes(4, "big")))
        got += [stream for kind, _, stream, _ in frames_of(out) if kind == frames.DATA]
    assert sorted(got) == [1, 1, 3, 3, 5, 5]


def test_a_stream_that_waits_for_its_own_window_keeps_nobody() -> None:
    server = Server()
    server.told(frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 10}), request(1), request(3))
    server.streams[1].sending.data(b"x" * 100)
    server.streams[3].sending.data(b"y" * 10)
    assert [(s, len(p)) for k, _, s, p in frames_of(server.written()) if k == 0] == [(1, 10), (3, 10)]
    assert not server.connection._blocked


def test_a_client_that_does_not_read_is_not_read_from() -> None:
    """It may send one window, and no more until it takes what that was answered with."""
    talk = Talk(Server(on_data=lambda heard, payload: heard.sending.data(payload)))
    talk.reads = False
    talk.client.send_headers(1, HEAD)
    talk.exchange()
    talk.server.streams[1].sending.headers(ANSWER)
    talk.exchange()
    sent = 0
    while room := min(talk.client.local_flow_control_window(1), 16_384):
        talk.client.send_data(1, b"x" * room)
        sent += room
        talk.exchange()
        assert sent < 4 << 20, "it is read from without end"
    waiting = sum(map(len, talk.server.streams[1].sending.waiting))
    assert waiting == sent - 65_535
    assert waiting <= connection_module._STREAM_WINDOW_BYTES
    talk.reads = True
    talk.client.acknowledge_received_data(65_535, 1)
    talk.exchange()
    assert len(talk.body(1)) == sent
    talk.send(1, b"y" * (3 << 20))
    talk.exchange()
    assert len(talk.body(1)) == sent + (3 << 20)


def test_more_than_a_window_that_stays_closed_resets_the_stream() -> None:
    server = Server(on_data=lambda heard, _: heard.sending.data(b"answer"))
    server.told(frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0}), request(1), request(3))
    out = b"".join(server.told(frame(frames.DATA, 0, 1, bytes(1 << 16))) for _ in range(17))
    assert reset_of(out) == [(1, frames.FLOW_CONTROL_ERROR)]
    assert server.streams[1].n_lost == 1
    assert list(server.connection.streams) == [3]


def test_a_large_answer_is_cut_into_frames_in_no_time() -> None:
    """Cutting pieces off the front by copying the rest took 30 s for 64 MB."""
    server = Server()
    server.told(frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: frames.LARGEST_WINDOW}), request(1))
    server.told(frame(frames.WINDOW_UPDATE, 0, 0, (1 << 30).to_bytes(4, "big")))
    begun = time.process_time()
    server.streams[1].sending.data(bytes(64 << 20))
    assert time.process_time() - begun < 2
    assert sum(len(part) for part in server.connection.out) == (64 << 20) + 9 * (1 << 12)


# ---- header blocks ---------------------------------------------------------------------------------------------------


def test_equal_blocks_are_decoded_once_without_a_table() -> None:
    server = Server()
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    server.told(BEGIN, frames.headers(1, encoder.encode(HEAD), ends=True))
    block = encoder.encode(HEAD)
    for i in range(3, 99, 2):
        server.told(frames.headers(i, block, ends=True))
    assert {heard.fields for heard in server.streams.values()} == {tuple(HEAD)}
    assert len(server.connection._blocks._known) == 2


def test_a_table_that_comes_back_makes_equal_blocks_unequal() -> None:
    """A block may then enter into the table what later ones refer to."""
    server = Server()
    entering = b"\x40\x01a\x01b"
    for i, block in enumerate(
        [
            b"\x20" + entering,
            entering,  # Known from now on: there is no table.
            b"\x3f\xe1\x1f",  # 4096 again, as it may be until SETTINGS are acknowledged.
            entering,
            b"\xbe",
            b"\x20" + entering,
            entering,
        ]
    ):
        assert goodbyes(server.told(*[BEGIN][: not i], frames.headers(2 * i + 1, block, ends=True))) == []
    assert [heard.fields for heard in server.streams.values()] == [
        (("a", "b"),),
        (("a", "b"),),
        (),
        (("a", "b"),),
        (("a", "b"),),
        (("a", "b"),),
        (("a", "b"),),
    ]


def test_what_is_known_of_header_blocks_is_bounded() -> None:
    server = Server()
    server.told(BEGIN, frames.headers(1, b"\x20" + BLOCK, ends=True))
    for i in range(3, 2003, 2):
        server.told(frames.headers(i, frames.block((("x", f"{i}"),)), ends=True))
        server.streams[i].sending.end(ANSWER)
    assert len(server.connection._blocks._known) <= blocks._MOST_KNOWN
    server.connection._blocks._known.clear()
    server.told(frames.headers(2003, frames.block((("x", "y" * 3000),)), ends=True))
    server.told(frames.headers(2005, b"\x82" * 1000, ends=True))
    assert len(server.streams[2005].fields) == 1000
    assert not server.connection._blocks._known


@pytest.mark.parametrize("value", [b"\xff\xfe", "ü".encode(), b"a\x00b", b"\xf0\x28\x8c\x28"])
def test_values_that_are_no_text_are_read_all_the_same(value: bytes) -> None:
    server = Server()
    server.told(BEGIN, frames.headers(1, b"\x00\x01x" + bytes((len(value),)) + value, ends=True))
    assert server.streams[1].fields == (("x", value.decode("latin-1")),)


# ---- what breaks the connection, and nothing else --------------------------------------------------------------------

P, F, S, C = frames.PROTOCOL_ERROR, frames.FLOW_CONTROL_ERROR, frames.FRAME_SIZE_ERROR, frames.COMPRESSION_ERROR
OPEN = BEGIN + request(1) + request(5)
FAULTS: dict[str, tuple[bytes, int]] = {
    "no SETTINGS first": (frames.PREFACE + frame(frames.PING, 0, 0, bytes(8)), P),
    "HTTP/1.1": (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", P),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), P),
    "too long a frame": (OPEN + frames.head((1 << 16) + 1, frames.DATA, 0, 1), S),
    "DATA on stream 0": (OPEN + frame(frames.DATA, 0, 0, b"x"), P),
    "DATA on an idle stream": (OPEN + frame(frames.DATA, 0, 7, b"x"), P),
    "DATA on an even stream": (OPEN + frame(frames.DATA, 0, 2, b"x"), P),
    "DATA with too much padding": (OPEN + frame(frames.DATA, frames.PADDED, 1, b"\x02xy"[:2]), P),
    "DATA padded and empty": (OPEN + frame(frames.DATA, frames.PADDED, 1), P),
    "HEADERS on stream 0": (OPEN + frames.headers(0, BLOCK, ends=True), P),
    "HEADERS on an even stream": (OPEN + frames.headers(8, BLOCK, ends=True), P),
    "streams that go backwards": (OPEN + request(3), P),
    "HEADERS with too much padding": (OPEN + frame(frames.HEADERS, frames.PADDED, 7, b"\x09" + BLOCK[:9]), P),
    "HEADERS shorter than a priority": (OPEN + frame(frames.HEADERS, frames.WITH_PRIORITY, 7, b"\0\0"), S),
    "a frame among headers": (OPEN + frame(frames.HEADERS, 0, 7, BLOCK) + frame(frames.PING, 0, 0, bytes(8)), P),
    "unknown among headers": (OPEN + frame(frames.HEADERS, 0, 7, BLOCK) + frame(0xBE, 0, 7), P),
    "CONTINUATION of another": (OPEN + frame(frames.HEADERS, 0, 7, BLOCK) + frame(frames.CONTINUATION, 4, 9), P),
    "CONTINUATION of nothing": (OPEN + frame(frames.CONTINUATION, frames.END_HEADERS, 1, BLOCK), P),
    "headers that are cut": (OPEN + frames.headers(7, BLOCK[:-1], ends=True), C),
    "an index of nothing": (OPEN + frames.headers(7, b"\xfe", ends=True), C),
    "an endless integer": (OPEN + frames.headers(7, b"\x7f" + b"\xff" * 60_000, ends=True), C),
    "bad Huffman": (OPEN + frames.headers(7, b"\x00\x01a\x84\xff\xff\xff\xff", ends=True), C),
    "headers that grow": (OPEN + frames.headers(7, b"\x82" * 10_000, ends=True), C),
    "a table larger than ever allowed": (OPEN + frames.headers(7, b"\x3f\xe2\x1f" + BLOCK, ends=True), C),
    "RST_STREAM too short": (OPEN + frame(frames.RST_STREAM, 0, 1, b"x"), S),
    "RST_STREAM of an idle stream": (OPEN + frame(frames.RST_STREAM, 0, 7, LONG), P),
    "RST_STREAM of stream 0": (OPEN + frame(frames.RST_STREAM, 0, 0, LONG), P),
    "SETTINGS of a stream": (OPEN + frame(frames.SETTINGS, 0, 1), S),
    "SETTINGS of 5 bytes": (OPEN + frame(frames.SETTINGS, 0, 0, bytes(5)), S),
    "SETTINGS ACK with more": (OPEN + frame(frames.SETTINGS, frames.ACK, 0, bytes(6)), S),
    "INITIAL_WINDOW_SIZE": (OPEN + frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 31}), F),
    "MAX_FRAME_SIZE too small": (OPEN + frames.settings({frames.MAX_FRAME_SIZE: 16_383}), P),
    "MAX_FRAME_SIZE too large": (OPEN + frames.settings({frames.MAX_FRAME_SIZE: 1 << 24}), P),
    "ENABLE_PUSH": (OPEN + frames.settings({frames.ENABLE_PUSH: 2}), P),
    "PUSH_PROMISE": (OPEN + frame(frames.PUSH_PROMISE, 4, 1, LONG + BLOCK), P),
    "PING of 7 bytes": (OPEN + frame(frames.PING, 0, 0, bytes(7)), S),
    "PING of a stream": (OPEN + frame(frames.PING, 0, 1, bytes(8)), S),
    "GOAWAY too short": (OPEN + frame(frames.GOAWAY, 0, 0, bytes(7)), S),
    "WINDOW_UPDATE of 0": (OPEN + frame(frames.WINDOW_UPDATE, 0, 0, bytes(4)), P),
    "WINDOW_UPDATE too short": (OPEN + frame(frames.WINDOW_UPDATE, 0, 0, b"x"), S),
    "WINDOW_UPDATE of an idle stream": (OPEN + frame(frames.WINDOW_UPDATE, 0, 7, LONG), P),
    "the connection's window over 2^31-1": (OPEN + frame(frames.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), F),
    "PRIORITY of 4 bytes": (OPEN + frame(frames.PRIORITY, 0, 1, bytes(4)), S),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_connection_says_good_bye(name: str) -> None:
    raw, code = FAULTS[name]
    server = Server()
    out = server.told(raw, request(99))
    assert goodbyes(out) == [(5 if raw.startswith(OPEN) else 0, code)]
    assert frames_of(out)[-1][0] == frames.GOAWAY
    assert server.connection.closed
    assert not server.connection.streams
    assert [heard.n_lost for heard in server.streams.values()] == [1] * len(server.streams)
    server.connection.lose()
    server.connection.close()
    assert server.written() == b""
    assert {heard.n_lost for heard in server.streams.values()} <= {1}


STREAM_FAULTS: dict[str, tuple[bytes, int]] = {
    "DATA after the end": (frame(frames.DATA, frames.END_STREAM, 1) + frame(frames.DATA, 0, 1, b"x"), 5),
    "HEADERS in the middle": (frames.headers(1, BLOCK, ends=False), P),
    "trailers after the end": (frame(frames.DATA, 1, 1) + frames.headers(1, BLOCK, ends=True), P),
    "WINDOW_UPDATE of 0": (frame(frames.WINDOW_UPDATE, 0, 1, bytes(4)), P),
    "a window over 2^31-1": (frame(frames.WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"), F),
}


@pytest.mark.parametrize("name", STREAM_FAULTS)
def test_a_fault_of_a_stream_resets_it_alone(name: str) -> None:
    raw, code = STREAM_FAULTS[name]
    server = Server()
    out = server.told(OPEN, raw, frame(frames.DATA, 0, 5, b"z"), frame(frames.DATA, 0, 1, b"late"))
    assert reset_of(out) == [(1, code)]
    assert goodbyes(out) == []
    assert (server.streams[1].n_lost, server.streams[5].n_lost) == (1, 0)
    assert server.streams[5].got == b"z"


def test_settings_that_overflow_a_window_reset_its_stream() -> None:
    server = Server()
    server.told(OPEN, frame(frames.WINDOW_UPDATE, 0, 1, (1 << 30).to_bytes(4, "big")))
    out = server.told(frames.settings({frames.INITIAL_WINDOW_SIZE: frames.LARGEST_WINDOW}))
    assert reset_of(out) == [(1, F)]
    assert list(server.connection.streams) == [5]


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("answered", ["nothing", "headers", "a part"])
def test_a_reset_is_heard_in_every_state(ends: bool, answered: str) -> None:
    server = Server()
    server.told(frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 1}), request(1, ends=ends))
    heard = server.streams[1]
    if answered != "nothing":
        heard.sending.headers(ANSWER)
    if answered == "a part":
        heard.sending.data(b"ab")
        heard.sending.end(TRAILERS)  # Waits.
    server.written()
    assert server.told(frame(frames.RST_STREAM, 0, 1, LONG)) == b""
    assert heard.n_lost == 1
    heard.sending.data(b"x")
    heard.sending.end(TRAILERS)
    assert server.told(frame(frames.WINDOW_UPDATE, 0, 0, LONG), frame(frames.RST_STREAM, 0, 1, LONG)) == b""
    assert not server.connection.streams
    assert not heard.sending.waiting


def test_the_last_stream_there_can_be() -> None:
    server = Server(on_end=echo)
    last = frames.LARGEST_ID
    out = server.told(BEGIN, request(last, ends=True), request(1, ends=True))
    assert goodbyes(out) == [(last, 0)]
    assert server.streams[last].ended
    assert frames_of(out)[-1][:3] == (frames.HEADERS, 5, last)
    server.connection.close()
    assert goodbyes(server.written()) == [(last, 0)]


def test_a_connection_whose_numbers_run_out_is_retired_in_time() -> None:
    server = Server(on_end=echo)
    before = frames.LARGEST_ID - (1 << 24)
    assert goodbyes(server.told(BEGIN, request(1, ends=True), request(before, ends=True))) == []
    assert goodbyes(server.told(request(before + 2, ends=True))) == [(frames.LARGEST_ID, 0)]
    assert goodbyes(server.told(request(before + 4, ends=True))) == []
    assert server.streams[before + 4].ended


def test_streams_over_the_limit_are_refused_and_their_rest_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_MOST_STREAMS", 2)
    server = Server()
    out = server.told(OPEN, request(7), frame(frames.DATA, 0, 7, b"x"), frame(frames.WINDOW_UPDATE, 0, 7, LONG))
    assert reset_of(out) == [(7, frames.REFUSED_STREAM)]
    out = server.told(frame(frames.RST_STREAM, 0, 1, LONG), request(9))
    assert reset_of(out) == []
    assert list(server.connection.streams) == [5, 9]


# ---- floods ----------------------------------------------------------------------------------------------------------


def test_empty_continuations_are_not_gathered_without_end() -> None:
    server = Server()
    out = server.told(BEGIN, frame(frames.HEADERS, 0, 1), frame(frames.CONTINUATION, 0, 1) * 10_000)
    assert goodbyes(out) == [(0, frames.ENHANCE_YOUR_CALM)]


def test_streams_opened_and_reset_leave_nothing_and_cost_little() -> None:
    """CVE-2023-44487."""
    server = Server()
    server.told(BEGIN, frames.headers(1, b"\x20" + BLOCK, ends=False))
    block = BLOCK
    begun = time.process_time()
    n = 20_000
    for i in range(3, 3 + 2 * n, 2):
        server.connection.receive(frames.headers(i, block, ends=False) + frame(frames.RST_STREAM, 0, i, LONG))
    cost_us = (time.process_time() - begun) / n * 1e6
    assert cost_us < 100
    assert list(server.connection.streams) == [1]
    assert server.written() == b""
    assert {server.streams[i].n_lost for i in server.streams if i > 1} == {1}


def test_pings_and_settings_are_each_answered_once() -> None:
    server = Server()
    server.told(BEGIN)
    ping, settings = frame(frames.PING, 0, 0, b"12345678"), frames.settings({frames.MAX_CONCURRENT_STREAMS: 1})
    out = frames_of(server.told((ping + settings + frame(frames.PING, frames.ACK, 0, bytes(8))) * 1000))
    assert out == [(frames.PING, 1, 0, b"12345678"), (frames.SETTINGS, 1, 0, b"")] * 1000


def test_one_frame_with_many_settings_costs_as_much_as_one_setting() -> None:
    """10,000 changes of the window times all streams took a minute."""
    server = Server()
    server.told(BEGIN, *(request(i) for i in range(1, 8001, 2)))
    entries = b"".join(frames._SETTING.pack(frames.INITIAL_WINDOW_SIZE, i % 2) for i in range(10_000))
    begun = time.process_time()
    server.told(frame(frames.SETTINGS, 0, 0, entries))
    assert time.process_time() - begun < 1
    assert {stream.window for stream in server.connection.streams.values()} == {1}


def test_small_openings_of_the_window_do_not_each_look_at_all_who_wait() -> None:
    server = Server()
    server.told(
        frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 20}),
        *(request(i) for i in range(1, 8001, 2)),
    )
    for heard in server.streams.values():
        heard.sending.data(b"x" * 1000)
    assert len(server.connection._blocked) > 3900
    begun = time.process_time()
    server.told(frame(frames.WINDOW_UPDATE, 0, 0, (1).to_bytes(4, "big")) * 5000)
    assert time.process_time() - begun < 2


def test_bytes_one_by_one_are_not_joined_again_and_again() -> None:
    server = Server()
    server.told(BEGIN, request(1))
    raw = frame(frames.DATA, 0, 1, bytes(1 << 16))
    begun = time.process_time()
    for i in range(len(raw)):
        server.connection.receive(raw[i : i + 1])
    assert time.process_time() - begun < 2
    assert server.streams[1].got == bytes(1 << 16)


def test_nothing_raises_out_of_a_handler_that_does_anything_at_once() -> None:
    """Streams that others end while they are told something."""
    server: Server

    def reset_all(heard: Heard, _: bytes) -> None:
        for stream in list(server.connection.streams.values()):
            stream.reset(frames.CANCEL)

    server = Server(on_data=reset_all)
    out = server.told(OPEN, frame(frames.DATA, frames.END_STREAM, 1, b"x"))
    assert reset_of(out) == [(1, frames.CANCEL), (5, frames.CANCEL)]
    assert not server.streams[1].ended
