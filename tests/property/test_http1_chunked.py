"""Bodies in chunks, cut anywhere, against a reader that has all of it at once."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http1.chunked import BadChunk, Chunked

extensions = st.sampled_from([b"", b"", b";a", b";a=b", b';a="b c"', b"; odd\ttext"])
trailers = st.lists(st.sampled_from([b"X-A: 1\r\n", b"Content-Length: 5\r\n", b"Host:\r\n"]), max_size=2)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """(as it is framed, what it says)"""
    out, said = [], []
    for data in draw(st.lists(st.binary(min_size=1, max_size=40), max_size=5)):
        size = b"%x" % len(data) if draw(st.booleans()) else b"%04X" % len(data)
        out.append(size + draw(extensions) + b"\r\n" + data + b"\r\n")
        said.append(data)
    return b"".join(out) + b"0" + draw(extensions) + b"\r\n" + b"".join(draw(trailers)) + b"\r\n", b"".join(said)


def naive(data: bytes) -> tuple[bytes, bytes] | None:
    """(body, what follows) of the whole; None: it is not right, or not whole."""
    out = b""
    while True:
        found = re.match(rb"([0-9a-fA-F]{1,12})(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n", data)
        if found is None:
            return None
        data, size = data[found.end() :], int(found.group(1), 16)
        if size == 0:
            break
        if len(data) < size + 2 or data[size : size + 2] != b"\r\n":
            return None
        out, data = out + data[:size], data[size + 2 :]
    found = re.match(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n)*\r\n", data)
    return None if found is None else (out, data[found.end() :])


def read(data: bytes, cuts: list[int]) -> tuple[bytes, bytes] | None:
    chunked, out, rest = Chunked(), [], b""
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    try:
        for start, end in pairwise(places):
            piece = data[start:end]
            if chunked.is_over:
                rest += piece
                continue
            rest = chunked.feed(piece, out)
            while rest and not chunked.is_over:  # It gave others their turn.
                rest = chunked.feed(rest, out)
    except BadChunk:
        return None
    return (b"".join(out), rest) if chunked.is_over else None


def test_tiny_chunks_are_taken_in_lots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http1.chunked._AT_ONCE", 3)
    chunked, out, data = Chunked(), [], b"1\r\na\r\n" * 8 + b"0\r\n\r\nafter"
    left = []
    while not chunked.is_over:
        data = chunked.feed(data, out)
        left.append(len(data))
    assert (b"".join(out), data) == (b"a" * 8, b"after")
    assert len(left) > 2


@pytest.mark.parametrize("at_once", [1, 2, 2000])
@given(body=bodies(), after=st.binary(max_size=10), cuts=st.lists(st.integers(0, 300), max_size=12))
def test_every_cut_and_lot_gives_the_same(
    at_once: int, body: tuple[bytes, bytes], after: bytes, cuts: list[int]
) -> None:
    framed, said = body
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.http1.chunked._AT_ONCE", at_once)
        assert read(framed + after, cuts) == (said, after)


@given(bodies(), st.binary(max_size=10), st.lists(st.integers(0, 300), max_size=12))
def test_every_cut_gives_the_same(body: tuple[bytes, bytes], after: bytes, cuts: list[int]) -> None:
    framed, said = body
    assert naive(framed + after) == (said, after)
    assert read(framed + after, cuts) == (said, after)
    assert read(framed + after, list(range(len(framed) + len(after)))) == (said, after)


@given(bodies(), st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=2)), min_size=1, max_size=3),
       st.lists(st.integers(0, 300), max_size=6))  # fmt: skip
def test_what_is_mutated_is_read_as_the_naive_reader_does(
    body: tuple[bytes, bytes], changes: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    data = bytearray(body[0])
    for at, new in changes:
        data[at % len(data) : at % len(data) + 1] = new
        if not data:
            return
    assert read(bytes(data), cuts) == naive(bytes(data))


@pytest.mark.parametrize(
    "data",
    [b"5\nhello\r\n0\r\n\r\n", b"5\r\nhello\n0\r\n\r\n", b"5\r\nhelloX\r\n", b" 5\r\nhello\r\n", b"5 \r\nhello\r\n",
     b"0x5\r\nhello\r\n", b"-5\r\n", b"+5\r\n", b"\r\n", b"g\r\n", b"5\x00\r\n", b"1" * 13 + b"\r\n", b"5;\x00\r\n",
     b"0\r\nX : 1\r\n\r\n", b"0\r\n folded\r\n\r\n", b"0\r\nX: a\nY: b\r\n\r\n", b"5;" + b"x" * 5000,
     b"0\r\n" + b"X: 1\r\n" * 4000],
)  # fmt: skip
def test_refused(data: bytes) -> None:
    with pytest.raises(BadChunk):
        Chunked().feed(data, [])
