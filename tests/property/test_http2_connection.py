"""Our HTTP/2 with bytes cut anywhere, mutated, and with windows that change while bodies are under way."""

from __future__ import annotations

from itertools import pairwise

import h2.events
import hpack
from h2.settings import SettingCodes
from hypothesis import given
from hypothesis import strategies as st

from gateway.extproc.http2 import frames
from gateway.extproc.http2.blocks import Fields
from gateway.extproc.http2.calls import INTERNAL, Call, Calls
from gateway.extproc.http2.connection import Connection, Sending
from tests.support.http2_talk import ANSWER, GRPC, TRAILERS, Server, Talk, frame, frames_of

cuts = st.lists(st.integers(0, 4000), max_size=30)


def pieces(data: bytes, at: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in at} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(places)]


# ---- calls over recorded clients -------------------------------------------------------------------------------------


class Echo:
    def __init__(self, call: Call, log: list[object]) -> None:
        self.call = call
        self.log = log
        self.n_lost = 0

    def message(self, raw: bytes) -> None:
        assert not self.n_lost
        self.log.append(raw)
        self.call.send(raw)
        if raw.startswith(b"abort"):
            self.call.abort(INTERNAL, "on purpose")

    def half_closed(self) -> None:
        assert not self.n_lost
        self.log.append("half-closed")
        self.call.finish()

    def lost(self) -> None:
        self.n_lost += 1
        self.log.append("lost")


class Served:
    """A connection of echoing calls, told `raw` piece by piece."""

    def __init__(self) -> None:
        self.calls: list[Echo] = []
        self.sendings: list[Sending] = []
        self.log: list[object] = []
        calls = Calls({"/a.B/C": self._serve}, 50_000, lambda: None)

        def accept(sending: Sending, fields: Fields) -> Call:
            self.sendings.append(sending)
            self.log.append((sending.id, fields))
            return calls.accept(sending, fields)

        self.connection = Connection(accept)
        self.out = b""

    def _serve(self, call: Call) -> Echo:
        self.calls.append(Echo(call, self.log))
        return self.calls[-1]

    def told(self, parts: list[bytes]) -> Served:
        for part in parts:
            self.connection.receive(part)
            self.out += b"".join(self.connection.out)
            self.connection.out.clear()
        return self

    def is_over(self) -> None:
        """Nothing is left of anything once the connection is lost."""
        self.connection.lose()
        assert [call.n_lost for call in self.calls] == [1] * len(self.calls)
        assert not self.connection.streams
        assert not self.connection._blocked
        assert all(sending.ended and not sending.waiting for sending in self.sendings)
        frames_of(self.out)  # Whole frames alone.


@st.composite
def recorded(draw: st.DrawFn) -> bytes:
    """What a client sends that does everything that is allowed."""
    n = draw(st.integers(1, 8))
    encoder = hpack.Encoder()
    raw = frames.PREFACE
    raw += frames.settings(draw(st.dictionaries(st.sampled_from([3, 6, 99]), st.integers(0, 1 << 20), max_size=2)))
    ids = [2 * i + 1 for i in range(n)]
    left: dict[int, bytes] = {}
    ended: set[int] = set()
    resized = False
    number = st.integers(0, 1 << 14)
    for _ in range(draw(st.integers(1, 30))):
        do = draw(
            st.sampled_from(["open"] * 3 + ["data"] * 6 + ["end", "trailers", "reset", "ping", "settings", "table"])
        )
        live = [i for i in left if i not in ended]
        if do == "open" and ids:
            stream_id = ids.pop(0)
            block = encoder.encode([*GRPC, ("x-request-id", str(draw(st.integers(0, 3))))])
            at = sorted(draw(st.lists(st.integers(0, len(block)), max_size=2)))
            parts, resized = pieces(block, at), False
            raw += frame(frames.HEADERS, 0 if parts[1:] else frames.END_HEADERS, stream_id, parts[0])
            for i, part in enumerate(parts[1:], 2):
                raw += frame(frames.CONTINUATION, frames.END_HEADERS if i == len(parts) else 0, stream_id, part)
            sizes = draw(st.lists(st.one_of(st.integers(0, 40), number), min_size=1, max_size=3))
            said = b"".join(b"\0" + size.to_bytes(4, "big") + b"m" * size for size in sizes)
            left[stream_id] = said + (b"\0\0\0\0\5abort" if draw(st.booleans()) else b"")
        elif do == "data" and live:
            stream_id = draw(st.sampled_from(live))
            size = draw(st.one_of(st.integers(0, 12), number))
            payload, left[stream_id] = left[stream_id][:size], left[stream_id][size:]
            if draw(st.booleans()):
                pad = draw(st.integers(0, 20))
                raw += frame(frames.DATA, frames.PADDED, stream_id, bytes((pad,)) + payload + bytes(pad))
            else:
                raw += frame(frames.DATA, 0, stream_id, payload)
        elif do in ("end", "trailers") and live:
            stream_id = draw(st.sampled_from(live))
            ended.add(stream_id)
            if do == "end":
                raw += frame(frames.DATA, frames.END_STREAM, stream_id, left[stream_id][: 1 << 14])
            else:
                resized = False
                raw += frames.headers(stream_id, encoder.encode([("x-t", "1")]), ends=True)
        elif do == "reset" and live:
            raw += frame(frames.RST_STREAM, 0, draw(st.sampled_from(live)), b"\0\0\0\x08")
        elif do == "ping":
            raw += frame(frames.PING, 0, 0, b"12345678")
        elif do == "settings":
            raw += frames.settings({frames.INITIAL_WINDOW_SIZE: draw(st.integers(0, 40_000))})
            for stream_id in live:
                raw += frame(frames.WINDOW_UPDATE, 0, stream_id, draw(st.integers(1, 9000)).to_bytes(4, "big"))
        elif do == "table" and not resized:  # hpack's encoder says only one change between two blocks.
            resized = True
            encoder.header_table_size = draw(st.sampled_from([0, 0, 64, 4096]))
    return raw


@given(recorded(), cuts)
def test_however_bytes_are_cut_the_same_is_heard_and_answered(raw: bytes, at: list[int]) -> None:
    whole, cut = Served().told([raw]), Served().told(pieces(raw, at))
    assert whole.log == cut.log
    assert frames_of(whole.out) == frames_of(cut.out)
    whole.is_over()
    cut.is_over()


@given(recorded(), cuts)
def test_headers_are_what_a_decoder_without_a_memory_says(raw: bytes, at: list[int]) -> None:
    decoder, block, expected = hpack.Decoder(), b"", []
    for kind, flags, _, payload in frames_of(raw[len(frames.PREFACE) :]):
        if kind in (frames.HEADERS, frames.CONTINUATION):
            block += payload
            if flags & frames.END_HEADERS:
                expected.append(tuple(tuple(field) for field in decoder.decode(block)))
                block = b""
    served = Served().told(pieces(raw, at))
    heard = [entry[1] for entry in served.log if isinstance(entry, tuple)]
    assert heard == [fields for fields in expected if fields[0][0] != "x-t"]
    assert not served.connection.closed


@given(
    recorded(),
    st.lists(
        st.tuples(st.integers(0, 4000), st.sampled_from(["flip", "drop", "twice"]), st.integers(1, 255)), max_size=5
    ),
    cuts,
)
def test_mutated_clients_raise_nothing_and_leave_nothing(
    raw: bytes, changes: list[tuple[int, str, int]], at: list[int]
) -> None:
    data = bytearray(raw)
    for place, how, value in changes:
        place = len(frames.PREFACE) + place % max(1, len(data) - len(frames.PREFACE))
        if how == "flip":
            data[place : place + 1] = bytes(byte ^ value for byte in data[place : place + 1])
        elif how == "drop":
            del data[place : place + value]
        else:
            data[place:place] = data[place : place + value]
    Served().told(pieces(bytes(data), at)).is_over()


@st.composite
def frames_of_any_kind(draw: st.DrawFn) -> bytes:
    kind, flags = draw(st.integers(0, 11)), draw(st.sampled_from([0, 1, 4, 5, 8, 13, 0x20, 0x2D, 0xFF]))
    stream_id = draw(st.sampled_from([0, 1, 1, 1, 2, 3, 5, (1 << 31) - 1, (1 << 32) - 1]))
    block = frames.block(GRPC)
    payload = draw(
        st.one_of(
            st.binary(max_size=20),
            st.sampled_from([block, b"\x02" + block + b"\0\0", block[:9], block[9:], b"\0\0\0\0\3abc", b"\xff" * 6]),
            st.builds(lambda n: n.to_bytes(4, "big"), st.integers(0, (1 << 32) - 1)),
            st.builds(
                lambda k, n: k.to_bytes(2, "big") + n.to_bytes(4, "big"), st.integers(0, 8), st.integers(0, 1 << 31)
            ),
        )
    )
    return frame(kind, flags, stream_id, payload)


@given(st.lists(frames_of_any_kind(), max_size=40), cuts)
def test_frames_in_any_order_raise_nothing_and_leave_nothing(sent: list[bytes], at: list[int]) -> None:
    Served().told(pieces(frames.PREFACE + frames.settings({}) + b"".join(sent), at)).is_over()


@given(st.binary(max_size=300), st.booleans(), cuts)
def test_random_bytes_raise_nothing(raw: bytes, with_preface: bool, at: list[int]) -> None:
    Served().told(pieces(frames.PREFACE * with_preface + raw, at)).is_over()


# ---- windows, with hyper-h2 as the judge -----------------------------------------------------------------------------

sizes = st.one_of(st.integers(0, 20), st.integers(0, 40_000), st.just(70_000))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 3), sizes),
        st.tuples(st.just("take"), st.integers(0, 3), sizes),
        st.tuples(st.just("window"), st.just(0), st.one_of(st.integers(0, 100), st.integers(0, 100_000))),
        st.tuples(st.just("frame"), st.just(0), st.sampled_from([1 << 14, 1 << 15, (1 << 24) - 1])),
        st.tuples(st.just("end"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("reset"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("whole"), st.just(0), sizes),
    ),
    max_size=40,
)


@given(st.integers(0, 1000), steps)
def test_every_byte_arrives_in_order_within_windows_that_change(window: int, todo: list[tuple[str, int, int]]) -> None:
    """hyper-h2 ends the connection if we send more than it allows."""
    server = Server()
    talk = Talk(server, {SettingCodes.INITIAL_WINDOW_SIZE: window})
    talk.reads = False
    ids = [1, 3, 5, 7]
    untaken = dict.fromkeys(ids, 0)
    seen = 0
    for stream_id in ids:
        talk.ask(stream_id)
    talk.exchange()
    sent = dict.fromkeys(ids, b"")
    ended: set[int] = set()
    reset: set[int] = set()
    for stream_id in ids:
        server.streams[stream_id].sending.headers(ANSWER)

    def heard() -> None:
        nonlocal seen
        talk.exchange()
        for event in talk.events[seen:]:
            if isinstance(event, h2.events.DataReceived):
                untaken[event.stream_id] += event.flow_controlled_length
        seen = len(talk.events)

    def take(stream_id: int, n: int) -> None:
        n = min(n, untaken[stream_id])
        untaken[stream_id] -= n
        if n:
            talk.client.acknowledge_received_data(n, stream_id)

    for do, which, n in todo:
        stream_id = ids[which]
        sending = server.streams[stream_id].sending
        if do == "send" and stream_id not in ended | reset:
            payload = bytes(((which + len(sent[stream_id])) % 251,)) * n
            sending.data(payload)
            sent[stream_id] += payload
        elif do == "take":
            take(stream_id, n)
        elif do == "window":
            talk.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: n})
        elif do == "frame":
            talk.client.update_settings({SettingCodes.MAX_FRAME_SIZE: n})
        elif do == "end" and stream_id not in ended | reset:
            sending.end(TRAILERS)
            ended.add(stream_id)
        elif do == "reset" and stream_id in server.connection.streams:
            talk.client.reset_stream(stream_id)
            reset.add(stream_id)
        elif do == "whole" and n:
            talk.client.increment_flow_control_window(n)
        heard()
    talk.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
    talk.client.increment_flow_control_window(1 << 20)
    heard()
    while any(untaken.values()):
        for stream_id in ids:
            take(stream_id, 1 << 20)
        heard()
    for stream_id in ids:
        if stream_id in reset:
            assert sent[stream_id].startswith(talk.body(stream_id))
        else:
            assert talk.body(stream_id) == sent[stream_id]
            assert len(talk.of(h2.events.StreamEnded, stream_id)) == (stream_id in ended)
    assert not talk.of(h2.events.ConnectionTerminated)
    assert set(server.connection.streams) == set(ids) - ended - reset
    assert [server.streams[i].n_lost for i in ids] == [int(i in reset) for i in ids]
