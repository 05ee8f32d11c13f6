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
    raw = [(b"X-Prefiller-Host-Port", b"evil:1"), (b"x-warmroute-plan", b"v1"), (b"x-kv-cache-source-host-port", b"e")]
    assert dict(request_headers(raw)) == {}


def test_set_cookie_is_not_folded() -> None:
    raw = [(b"Set-Cookie", b"a=1"), (b"Set-Cookie", b"b=2")]
    assert response_headers(raw).getall("set-cookie") == ["a=1", "b=2"]
