"""Which headers pass."""

from gateway.proxy.headers import request_headers, response_headers


def test_end_to_end_headers_keep_order_spelling_and_number() -> None:
    raw = [
        (b"X-Custom", b"1"),
        (b"authorization", b"Bearer secret"),
        (b"X-Custom", b"2"),
        (b"Accept-Encoding", b"br;q=1.0, gzip"),
        (b"Content-Encoding", b"gzip"),
        (b"x-latin", b"caf\xe9"),
    ]
    passed = list(request_headers(raw).items())
    assert [(k.encode(), v.encode("utf-8", "surrogateescape")) for k, v in passed] == raw


def test_hop_by_hop_headers_stay() -> None:
    raw = [
        (b"Host", b"gateway"),
        (b"Content-Length", b"3"),
        (b"Connection", b"keep-alive, X-Hop"),
        (b"connection", b"x-hop-2"),
        (b"Keep-Alive", b"timeout=5"),
        (b"X-Hop", b"1"),
        (b"x-HOP-2", b"1"),
        (b"TE", b"trailers"),
        (b"Trailer", b"x"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Upgrade", b"h2c"),
        (b"Proxy-Authorization", b"Basic x"),
        (b"Expect", b"100-continue"),
        (b"X-Stays", b"1"),
    ]
    assert dict(request_headers(raw)) == {"X-Stays": "1"}
    assert dict(response_headers(raw)) == {
        "Host": "gateway",
        "Content-Length": "3",
        "Expect": "100-continue",
        "X-Stays": "1",
    }


def test_a_client_cannot_steer_what_is_behind_us() -> None:
    names = [
        b"X-Prefiller-Host-Port",
        b"x-prefiller-url",
        b"x-encoder-hosts-ports",
        b"x-data-parallel-host-port",
        b"X-Data-Parallel-Rank",
        b"x-kv-cache-source-host-port",
        b"x-bypass-remote-prefill",
        b"x-warmroute-plan",
        b"X-Warmroute-Outcome",
    ]
    assert dict(request_headers([(name, b"evil:1") for name in names])) == {}


def test_one_request_id_goes_on() -> None:
    def ids(*values: bytes) -> list[tuple[str, str]]:
        raw = [(b"X-Request-ID" if i else b"x-request-id", value) for i, value in enumerate(values)]
        return list(request_headers([(b"A", b"1"), *raw, (b"B", b"2")]).items())

    assert ids(b"one") == [("A", "1"), ("x-request-id", "one"), ("B", "2")]
    assert dict(ids(b"one", b"two", b"three"))["X-Request-Id"] == "one"
    assert len(ids(b"one", b"two", b"three")) == 3
    assert dict(ids(b"", b"two"))["X-Request-Id"] == "two"


def test_set_cookie_is_not_folded() -> None:
    raw = [(b"Set-Cookie", b"a=1"), (b"Set-Cookie", b"b=2")]
    assert response_headers(raw).getall("set-cookie") == ["a=1", "b=2"]
