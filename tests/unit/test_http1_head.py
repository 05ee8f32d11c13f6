"""The grammar of a request's head, and what is refused so that nobody behind or before us reads another request."""

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.http1.head import (
    LONGEST_HEAD_BYTES,
    LONGEST_LINE_BYTES,
    MOST_HEADERS,
    BadHead,
    check_beginning,
    parse_head,
)
from gateway.http1.last_head import LastHead
from gateway.proxy.headers import request_headers

LINE = b"POST /v1/completions HTTP/1.1"
HOST = b"Host: a"


def head(*rows: bytes, line: bytes = LINE, host: bytes | None = HOST) -> bytes:
    return b"\r\n".join([line, *([] if host is None else [host]), *rows])


def test_what_is_read() -> None:
    read = parse_head(
        head(
            b"Content-Length: 12",
            b"X-Two:1",
            b"x-two: \t2 \t",
            b"X-Empty:",
            b"X-Latin: caf\xe9",
            b"Expect: 100-Continue",
        )
    )
    assert (read.method, read.target, read.minor, read.length) == ("POST", "/v1/completions", 1, 12)
    assert (read.keep_alive, read.expects) == (True, True)
    assert read.headers == [
        (b"Host", b"a"), (b"Content-Length", b"12"), (b"X-Two", b"1"), (b"x-two", b"2"), (b"X-Empty", b""),
        (b"X-Latin", b"caf\xe9"), (b"Expect", b"100-Continue"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "rows", "keeps"),
    [
        (LINE, (), True),
        (LINE, (b"Connection: close",), False),
        (LINE, (b"Connection: X-Hop, Close",), False),
        (LINE, (b"Connection: X-Hop", b"connection:close"), False),
        (LINE, (b"Connection: enclosed",), True),
        (b"POST / HTTP/1.0", (), False),
        (b"POST / HTTP/1.0", (b"Connection: Keep-Alive",), True),
        (b"POST / HTTP/1.0", (b"Connection: keep-alive, close",), False),
    ],
)
def test_how_long_a_connection_lasts(line: bytes, rows: tuple[bytes, ...], keeps: bool) -> None:
    assert parse_head(head(*rows, line=line)).keep_alive is keeps


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        (b"/v1/x?a=%2F&b", "/v1/x?a=%2F&b"),
        (b"http://gw.example/v1/x?q=1", "/v1/x?q=1"),
        (b"HTTPS://gw.example:443/v1/x", "/v1/x"),
        (b"http://gw.example", "http://gw.example"),  # No path of ours: aiohttp's to answer.
        (b"http://user@gw.example/v1/x", "http://user@gw.example/v1/x"),
        (b"gw.example:443", "gw.example:443"),
        (b"*", "*"),
    ],
)
def test_targets(target: bytes, shown: str) -> None:
    assert parse_head(head(line=b"POST " + target + b" HTTP/1.1")).target == shown


CHUNKED = b"Transfer-Encoding: chunked"
REFUSED = [
    # Two framings, or one that two readers may take differently.
    (head(b"Content-Length: 5", CHUNKED), 400),
    (head(CHUNKED, b"Content-Length: 5"), 400),
    (head(b"Content-Length: 5", b"Content-Length: 6"), 400),
    (head(b"Content-Length: 5", b"Content-Length: 5"), 400),
    (head(b"Content-Length: 5, 5"), 400),
    (head(b"Content-Length: +5"), 400),
    (head(b"Content-Length: -5"), 400),
    (head(b"Content-Length: 0x5"), 400),
    (head(b"Content-Length: 5 "b"5"), 400),
    (head(b"Content-Length:"), 400),
    (head(b"Content-Length: 1_0"), 400),
    (head(b"Content-Length: \xb2"), 400),
    (head(b"Content-Length: " + b"9" * 30), 400),
    (head(b"Transfer-Encoding: chunked, chunked"), 501),
    (head(CHUNKED, CHUNKED), 400),
    (head(b"Transfer-Encoding: gzip, chunked"), 501),
    (head(b"Transfer-Encoding: chunked, gzip"), 501),
    (head(b"Transfer-Encoding: xchunked"), 501),
    (head(b"Transfer-Encoding: chunked;q=1"), 501),
    (head(b"Transfer-Encoding: \x0bchunked"), 400),
    (head(b"Transfer-Encoding:"), 501),
    (head(b"Transfer-Encoding: identity"), 501),
    (head(CHUNKED, line=b"POST / HTTP/1.0"), 400),
    # Names and values.
    (head(b"Content-Length : 5"), 400),
    (head(b"Transfer-Encoding : chunked"), 400),
    (head(b" Content-Length: 5"), 400),
    (head(b"X: 1", b" folded"), 400),
    (head(b"X: 1", b"\tfolded"), 400),
    (head(b"X"), 400),
    (head(b": 1"), 400),
    (head(b"X\x00: 1"), 400),
    (head(b"X(: 1"), 400),
    (head(b"X\xe4: 1"), 400),
    (head(b"X: 1\x00"), 400),
    (head(b"X: 1\x7f"), 400),
    (head(b"X: a\nTransfer-Encoding: chunked"), 400),
    (head(b"X: a\rTransfer-Encoding: chunked"), 400),
    (head(b"X: a\r\rY: b"), 400),
    (b"\n".join([LINE, HOST]), 400),
    # Hosts.
    (head(host=None), 400),
    (head(b"Host: b"), 400),
    (head(host=b"Host: a b"), 400),
    (head(host=b"Host: a/b"), 400),
    (head(host=b"Host: a@b"), 400),
    # Request lines.
    (head(line=b""), 400),
    (head(line=b"POST /"), 400),
    (head(line=b"POST  / HTTP/1.1"), 400),
    (head(line=b"POST / HTTP/1.1 "), 400),
    (head(line=b" POST / HTTP/1.1"), 400),
    (head(line=b"POST\t/ HTTP/1.1"), 400),
    (head(line=b"POST / x HTTP/1.1"), 400),
    (head(line=b"PO(ST / HTTP/1.1"), 400),
    (head(line=b"POST /\x00 HTTP/1.1"), 400),
    (head(line=b"POST /\x7f HTTP/1.1"), 400),
    (head(line=b"POST /\xc3\xa4 HTTP/1.1"), 400),
    (head(line=b"POST /a#b HTTP/1.1"), 400),
    (head(line=b"POST / http/1.1"), 400),
    (head(line=b"POST / HTTP/1.10"), 400),
    (head(line=b"POST / HTTP/01.1"), 400),
    (head(line=b"POST / HTTP/1.2"), 505),
    (head(line=b"POST / HTTP/0.9"), 505),
    (b"PRI * HTTP/2.0", 505),
    # Sizes.
    (head(line=b"POST /" + b"x" * LONGEST_LINE_BYTES + b" HTTP/1.1"), 431),
    (head(*[b"X: 1"] * MOST_HEADERS), 431),
    (head(*[b"X: " + b"y" * 1024] * (LONGEST_HEAD_BYTES // 1024)), 431),
]  # fmt: skip


@pytest.mark.parametrize(("data", "status"), REFUSED, ids=range(len(REFUSED)))
def test_smuggling_and_other_malformed_heads_are_refused(data: bytes, status: int) -> None:
    with pytest.raises(BadHead) as caught:
        parse_head(data)
    assert caught.value.status == status


@pytest.mark.parametrize(
    "data",
    [b"P", b"POST", b"POST /x", b"POST /x HTTP/1.1", b"POST /x HTTP/1.1\r", b"POST /x HTTP/1.1\r\nHo", b"OPTIONS * H"],
)
def test_a_beginning_may_still_become_a_head(data: bytes) -> None:
    check_beginning(data, 0)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00", 400),
        (b"\x00", 400),
        (b"POST /x\x00", 400),
        (b"POST / HTTP/1.1\nHost: a", 400),
        (b"POST / HTTP/1.1\r\nHost: a\n", 400),
        (b"x" * 40, 400),
        (b"POST /" + b"x" * LONGEST_LINE_BYTES, 431),
        (b"POST / HTTP/1.1\r\nX: " + b"x" * LONGEST_HEAD_BYTES, 431),
    ],
)
def test_what_cannot_become_a_head_is_known_at_once(data: bytes, status: int) -> None:
    with pytest.raises(BadHead) as caught:
        check_beginning(data, 0)
    assert caught.value.status == status


# ---- beside llhttp ---------------------------------------------------------------------------------------------------

names = st.sampled_from([b"Content-Length", b"Transfer-Encoding", b"Connection", b"X-A", b"Expect", b"TE", b"Upgrade"])
values = st.one_of(
    st.sampled_from([b"5", b"0", b"chunked", b"close", b"keep-alive", b"gzip, chunked", b"h2c", b"100-continue"]),
    st.binary(max_size=8),
)
separators = st.sampled_from([b": ", b":", b" :", b":\t", b"=", b": \r\n "])
ends = st.sampled_from([b"\r\n"] * 12 + [b"\n", b"\r", b"\r\r\n"])
lines = st.sampled_from(
    [LINE] * 6
    + [b"GET / HTTP/1.0", b"POST /x HTTP/2.0", b"POST http://a/b HTTP/1.1", b"POST /\x80 HTTP/1.1", b"post / HTTP/1.1"]
)


class Heard:
    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.url = b""
        self.whole = False
        self.keep_alive: bool | None = None
        self.parser = httptools.HttpRequestParser(self)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.whole = True
        self.keep_alive = self.parser.should_keep_alive()  # Afterwards it speaks of the next request.


@example(line=LINE, rows=[(b"Connection", b": ", b"close", b"\r\n")], cut=400)
@example(
    line=b"GET / HTTP/1.0",
    rows=[(b"Connection", b": ", option, b"\r\n") for option in (b"close", b"keep-alive")],
    cut=400,
)
@given(line=lines, rows=st.lists(st.tuples(names, separators, values, ends), max_size=5), cut=st.integers(0, 400))
def test_what_is_accepted_means_the_same_to_llhttp(
    line: bytes, rows: list[tuple[bytes, bytes, bytes, bytes]], cut: int
) -> None:
    """Whatever is let through, a parser that half of the world's proxies use reads in the same way."""
    data = line + b"\r\nHost: a\r\n" + b"".join(b"".join(row) for row in rows)
    data = data[: max(cut, 30)].removesuffix(b"\r\n")
    try:
        ours = parse_head(data)
    except BadHead:
        return
    heard = Heard()
    parser = heard.parser
    try:
        parser.feed_data(data + b"\r\n\r\n")
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserInvalidMethodError:
        return  # It knows a list of methods; ours are checked by the routes.
    assert heard.whole
    assert [(name, value.strip(b" \t")) for name, value in heard.headers] == ours.headers
    assert parser.get_method().decode() == ours.method
    assert parser.get_http_version() == f"1.{ours.minor}"
    if any(name.lower() == b"upgrade" for name, _ in ours.headers):
        return
    if heard.keep_alive != ours.keep_alive:
        # HTTP/1.0 that says both: llhttp keeps the connection, RFC 9112 9.3 lets "close" win.
        said = [value.strip() for name, value in ours.headers if name.lower() == b"connection"]
        assert (ours.minor, ours.keep_alive) == (0, False)
        assert {b"close", b"keep-alive"} <= set(said)


# ---- the head before -------------------------------------------------------------------------------------------------

lengths = st.sampled_from(
    [b"0", b"7", b"12", b"012", b"12345678901234567890", b"", b"1 ", b" 1", b"+1", b"1, 1", b"\xb2"]
)
rows_before = st.lists(st.sampled_from([b"X-A: 1", b"Authorization: Bearer 12", b"X: content-length: 3"]), max_size=2)


@given(
    rows_before, rows_before, st.lists(st.tuples(lengths, st.sampled_from([b"", b"X-B: 2"])), min_size=2, max_size=5)
)
def test_a_head_read_by_the_one_before_it_is_the_same_head(
    before: list[bytes], after: list[bytes], each: list[tuple[bytes, bytes]]
) -> None:
    last = LastHead()
    for length, more in each:
        data = head(*before, b"content-LENGTH: " + length, *after, *([more] if more else []))
        try:
            wanted = parse_head(data)
        except BadHead:
            with pytest.raises(BadHead):
                last.read(data)
            continue
        last.read(data)
        assert last.head == wanted
        assert last.passing == request_headers(wanted.headers)


def test_a_head_like_the_one_before_it_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    last = LastHead()
    last.read(head(b"Content-Length: 5", b"x-warmroute-leg: prefill"))
    monkeypatch.setattr("gateway.http1.last_head.parse_head", None)
    last.read(head(b"Content-Length: 17", b"x-warmroute-leg: prefill"))
    assert (last.head.length, last.is_leg, last.head.headers[1]) == (17, True, (b"Content-Length", b"17"))
    with pytest.raises(TypeError):
        last.read(head(b"Content-Length: 17", b"x-warmroute-leg: prefilL"))
