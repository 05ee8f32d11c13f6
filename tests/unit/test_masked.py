"""Frames that are not masked end a WebSocket, however the bytes are cut."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.masked import Masked


class Sink:
    def __init__(self) -> None:
        self.got = b""
        self.ended = False

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self.got += data
        return False, b""

    def feed_eof(self) -> None:
        self.ended = True


def frame(payload: bytes, masked: bool, wide: int = 0) -> bytes:
    bit = 0x80 if masked else 0
    if wide == 8 or len(payload) > 0xFFFF:
        head = struct.pack("!BBQ", 0x82, bit | 127, len(payload))
    elif wide == 2 or len(payload) > 125:
        head = struct.pack("!BBH", 0x82, bit | 126, len(payload))
    else:
        head = struct.pack("!BB", 0x82, bit | len(payload))
    return head + (b"mask" if masked else b"") + payload


FRAMES = st.lists(
    st.tuples(st.binary(max_size=300), st.sampled_from([0, 2, 8]), st.integers(0, 9).map(bool)), max_size=8
)


@given(FRAMES, st.lists(st.integers(1, 40), min_size=1, max_size=50))
def test_what_is_masked_passes_and_the_first_that_is_not_ends_it(
    frames: list[tuple[bytes, int, bool]], cuts: list[int]
) -> None:
    data = b"".join(frame(payload, masked, wide) for payload, wide, masked in frames)
    good = b""
    refused = False
    for payload, wide, masked in frames:
        if not masked:
            refused = True
            break
        good += frame(payload, masked, wide)
    sink = Sink()
    guard = Masked(sink)
    at = i = 0
    while at < len(data):
        step = cuts[i % len(cuts)]
        guard.feed_data(data[at : at + step])
        at += step
        i += 1
    assert sink.got == good + (b"\x70\x80" if refused else b"")
    guard.feed_eof()
    assert sink.ended


def test_a_frame_of_the_greatest_length_waits() -> None:
    sink = Sink()
    guard = Masked(sink)
    guard.feed_data(b"\x82\xff" + b"\x7f" + b"\xff" * 7)
    guard.feed_data(b"x" * 1000)
    assert len(sink.got) == 1010
