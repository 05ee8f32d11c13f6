"""The data plane between a client and scripted upstreams: what passes, byte for byte."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from tests.support.proxy_world import Call, Stub, World, raw_request

pytestmark = pytest.mark.usefixtures("http_plane")

BODY = b'{"model":"m","prompt":"hi"}'
EVENTS = [
    b'data: {"choices":[{"text":"h\xc3\xa4"}]}\n\n',
    b'data: {"choices":[{"text":"\xf0\x9f\x98\x80"}]}\r\n\r\n',
    b'data:{"choices":[],"usage":{"prompt_tokens":32,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":16}}}\n\n',
    b"data: [DONE]\n\n",
]


async def ok(call: Call) -> None:
    await call.ok(b'{"choices":[]}')


async def streams(call: Call) -> None:
    await call.begin_stream()
    for event in EVENTS:
        await call.chunk(event)
    await call.end_stream()


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    async with Stub(ok) as upstream:
        yield upstream


@pytest.fixture
async def world(stub: Stub) -> AsyncIterator[World]:
    async with World({"a": stub.url}) as gateway:
        yield gateway


async def exchange(world: World, request: bytes) -> tuple[bytes, bytes]:
    """(head, everything after it) of a raw exchange that ends with the connection."""
    reader, writer = await world.connect()
    writer.write(request)
    answer = await reader.read()
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return head, rest


async def test_bodies_go_on_unchanged(world: World, stub: Stub) -> None:
    body = (
        b'{ "model":"m",  "prompt":"\\u00e4 \xc3\xa4", "seed": 123456789012345678901234567890, "x": 1.10,\n'
        b' "tools":[{"type":"weird"}], "unknown": {"deep":[null]}, "dup":1, "dup":2, "logit_bias":{"1":1e-7} }\r\n'
    )
    status, _, _ = await world.post(body)
    assert status == 200
    assert stub.calls[0].body == body


@pytest.mark.parametrize("body", [b'{"model":"m","prompt":"\\ud800"}', b'{"model":"m","prompt":"x","t":NaN}'])
async def test_odd_json_that_engines_read_goes_on_unchanged(world: World, stub: Stub, body: bytes) -> None:
    assert (await world.post(body))[0] == 200
    assert stub.calls[0].body == body


async def test_request_headers_pass_but_for_the_connections_own(world: World, stub: Stub) -> None:
    request = raw_request(
        BODY,
        "Authorization: Bearer sk-1",
        "X-Two: 1",
        "x-two: 2",
        "Accept-Encoding: br, gzip;q=0.5",
        "User-Agent: curl/8",
        "X-Request-Id: my-id",
        "Connection: close, X-Hop",
        "X-Hop: 1",
        "TE: trailers",
        "Expect: 200-maybe",
        "X-Prefiller-Host-Port: evil:80",
    )
    await exchange(world, request)
    call = stub.calls[0]
    assert call.line == "POST /v1/completions HTTP/1.1"
    assert sorted((n.lower(), v) for n, v in call.headers) == [
        ("accept-encoding", "br, gzip;q=0.5"),
        ("authorization", "Bearer sk-1"),
        ("content-length", str(len(BODY))),
        ("content-type", "application/json"),
        ("host", stub.url.removeprefix("http://")),
        ("user-agent", "curl/8"),
        ("x-request-id", "my-id"),
        ("x-two", "1"),
        ("x-two", "2"),
    ]


async def test_nothing_is_added_to_a_request_but_its_id(world: World, stub: Stub) -> None:
    await exchange(world, raw_request(BODY, "Connection: close"))
    call = stub.calls[0]
    assert {n.lower() for n, _ in call.headers} == {"host", "content-type", "content-length", "x-request-id"}
    assert len(call.header("x-request-id") or "") == 32


async def test_response_headers_pass_but_for_the_connections_own(world: World, stub: Stub) -> None:
    async def script(call: Call) -> None:
        await call.ok(
            b"{}",
            "Set-Cookie: a=1",
            "Set-Cookie: b=2",
            "X-Request-Id: engine-id",
            "Server: uvicorn",
            "Date: Mon, 01 Jan 2024 00:00:00 GMT",
            "Keep-Alive: timeout=5",
            "Connection: X-Hop",
            "X-Hop: 1",
            status="418 I am a teapot",
        )

    stub.script = script
    head, rest = await exchange(world, raw_request(BODY, "Connection: close"))
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 418 I am a teapot"
    names = sorted(line.lower() for line in lines[1:] if not line.lower().startswith("x-warmroute"))
    assert names == [
        "connection: close",
        "content-length: 2",
        "content-type: application/json",
        "date: mon, 01 jan 2024 00:00:00 gmt",
        "server: uvicorn",
        "set-cookie: a=1",
        "set-cookie: b=2",
        "x-request-id: engine-id",
    ]
    assert rest == b"{}"


async def test_headers_that_are_no_utf8_harm_nobody(world: World, stub: Stub) -> None:
    async def script(call: Call) -> None:
        await call.ok(b"{}", "X-Latin: caf\udce9".encode("utf-8", "surrogateescape").decode("latin-1"))

    head, rest = await exchange(world, raw_request(BODY, "X-Latin: caf\xe9", "Connection: close"))
    assert head.startswith(b"HTTP/1.1 200")
    stub.script = script
    head, rest = await exchange(world, raw_request(BODY, "Connection: close"))
    assert (head.split(b"\r\n")[0], rest) == (b"HTTP/1.1 200 OK", b"{}")


async def test_compressed_answers_stay_compressed(world: World, stub: Stub) -> None:
    packed = b"\x1f\x8b not really gzip \x00\xff"

    async def script(call: Call) -> None:
        await call.ok(packed, "Content-Encoding: gzip")

    stub.script = script
    _, body, headers = await world.post(BODY)
    assert body == packed
    assert headers["Content-Encoding"] == "gzip"


async def test_compressed_requests_go_on_compressed(world: World, stub: Stub) -> None:
    packed = b"\x1f\x8b\x00 whatever"
    assert (await world.post(packed, **{"Content-Encoding": "gzip"}))[0] == 200
    assert stub.calls[0].body == packed
    assert stub.calls[0].header("content-encoding") == "gzip"


async def test_the_query_goes_along_as_it_is(world: World, stub: Stub) -> None:
    await world.post(BODY, "/v1/completions?a=%2F&b=1+2&c")
    # The client normalises before sending; what arrives is what the gateway was sent.
    await exchange(world, raw_request(BODY, "Connection: close", line="POST /v1/completions?x=%2f%20~&y HTTP/1.1"))
    assert stub.calls[1].line == "POST /v1/completions?x=%2f%20~&y HTTP/1.1"


async def test_absolute_form_targets_are_understood(world: World, stub: Stub) -> None:
    request = raw_request(BODY, "Connection: close", line="POST http://gw.example/v1/completions?q=1 HTTP/1.1")
    head, _ = await exchange(world, request)
    assert head.startswith(b"HTTP/1.1 200")
    assert stub.calls[0].line == "POST /v1/completions?q=1 HTTP/1.1"


async def test_chunked_requests_arrive_with_a_length(world: World, stub: Stub) -> None:
    request = raw_request(b"", "Transfer-Encoding: chunked", "Connection: close", length=False)
    half = len(BODY) // 2
    chunks = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (half, BODY[:half], len(BODY) - half, BODY[half:])
    head, _ = await exchange(world, request + chunks)
    assert head.startswith(b"HTTP/1.1 200")
    assert stub.calls[0].body == BODY
    assert stub.calls[0].header("transfer-encoding") is None


async def test_expect_100_continue_is_answered(world: World, stub: Stub) -> None:
    reader, writer = await world.connect()
    writer.write(raw_request(BODY, "Expect: 100-continue", "Connection: close").removesuffix(BODY))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(BODY)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    writer.close()
    assert stub.calls[0].header("expect") is None


async def test_streams_pass_byte_for_byte(world: World, stub: Stub) -> None:
    stub.script = streams
    status, body, headers = await world.post({"model": "m", "prompt": [1] * 32, "stream": True})
    assert (status, body) == (200, b"".join(EVENTS))
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert world.hits.workers["a"].actual_tokens == 16
    assert world.is_idle()


async def test_chunks_are_passed_on_as_they_come(world: World, stub: Stub) -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin_stream()
        for piece in (b"data: \xf0\x9f", b"\x98\x80\n", b"\n"):
            await call.chunk(piece)
            await go_on.wait()
            go_on.clear()
        await call.end_stream()

    stub.script = script
    async with world.http.post(world.url + "/v1/completions", data=BODY) as response:
        for piece in (b"data: \xf0\x9f", b"\x98\x80\n", b"\n"):
            assert await asyncio.wait_for(response.content.readany(), 60) == piece
            go_on.set()
        assert await response.content.read() == b""


async def test_an_http_1_0_client_gets_its_stream_unframed(world: World, stub: Stub) -> None:
    stub.script = streams
    head, rest = await exchange(world, raw_request(BODY, line="POST /v1/completions HTTP/1.0"))
    assert b"chunked" not in head.lower()
    assert rest == b"".join(EVENTS)


async def test_an_answer_that_ends_with_its_connection(world: World, stub: Stub) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + b'{"a":' + b"1" * 70_000 + b"}")
        call.writer.close()

    stub.script = script
    status, body, _ = await world.post(BODY)
    assert (status, len(body)) == (200, 70_006)


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_answers_without_a_body(world: World, stub: Stub, status: str) -> None:
    async def script(call: Call) -> None:
        await call.send(f"HTTP/1.1 {status}\r\nX-A: 1\r\n\r\n".encode())

    stub.script = script
    for _ in range(2):  # The second shows that the connection was left in order.
        code, body, headers = await world.post(BODY)
        assert (code, body, headers["X-A"]) == (int(status[:3]), b"", "1")
        assert "Content-Type" not in headers
    assert stub.connections == 1


@pytest.mark.parametrize(
    "status", ["400 Bad Request", "401 Unauthorized", "404 Not Found", "422 X", "429 Slow", "500 Oops"]
)
async def test_an_engines_own_errors_pass(world: World, stub: Stub, status: str) -> None:
    async def script(call: Call) -> None:
        await call.ok(b'{"error":{"message":"engine says no","code":7}}', "Retry-After: 9", status=status)

    stub.script = script
    code, body, headers = await world.post(BODY)
    assert (code, body) == (int(status[:3]), b'{"error":{"message":"engine says no","code":7}}')
    assert headers["Retry-After"] == "9"
    assert len(stub.calls) == 1
    assert world.is_idle()


async def test_redirects_are_the_clients_business(world: World, stub: Stub) -> None:
    async def script(call: Call) -> None:
        await call.ok(b"", "Location: http://127.0.0.1:9/evil", status="307 Temporary Redirect")

    stub.script = script
    async with world.http.post(world.url + "/v1/completions", data=BODY, allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (307, "http://127.0.0.1:9/evil")


async def test_a_request_id_that_is_no_utf_8_is_answered(stub: Stub) -> None:
    async with World({"a": stub.url}) as world:
        reader, writer = await world.connect()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Request-Id: caf\xe9\r\n"
            b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
        )
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"id=caf%E9;" in answer
        writer.close()


async def test_the_receipt_headers(stub: Stub) -> None:
    async with World({"a": stub.url}) as world:
        _, _, headers = await world.post(BODY, **{"X-Request-Id": "mine"})
        assert headers["x-warmroute-worker"] == "a"
        assert headers["x-warmroute-cached-tokens"] == "0"
        assert float(headers["x-warmroute-overhead-ms"]) > 0
        assert headers["X-Request-Id"] == "mine"
    async with World({"a": stub.url}, response_headers=False) as world:
        _, _, headers = await world.post(BODY)
        assert [name for name in headers if name.startswith("x-warmroute")] == []


async def test_a_worker_with_ranks_is_told_which(stub: Stub) -> None:
    async with World({"a": stub.url}, ranks=3, policy="round-robin") as world:
        for _ in range(3):
            await world.post(BODY, **{"X-data-parallel-rank": "99"})
    assert sorted(call.header("x-data-parallel-rank") or "" for call in stub.calls) == ["0", "1", "2"]
    assert all(len([n for n, _ in call.headers if n.lower() == "x-data-parallel-rank"]) == 1 for call in stub.calls)


async def test_multipart_goes_on_untouched(world: World, stub: Stub) -> None:
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b\r\n\r\n\x00\xff\r\n--b--\r\n'
    status, _, _ = await world.post(
        form, "/v1/audio/transcriptions", **{"Content-Type": "multipart/form-data; boundary=b"}
    )
    assert status == 200
    assert stub.calls[0].body == form
    assert stub.calls[0].header("content-type") == "multipart/form-data; boundary=b"


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/v1/responses", "/v1/messages", "/score", "/v2/rerank", "/classify", "/pooling", "/tokenize"],
)
async def test_other_inference_paths_are_served(world: World, stub: Stub, path: str) -> None:
    assert (await world.post({"model": "m", "input": "x"}, path))[0] == 200
    assert stub.calls[0].line == f"POST {path} HTTP/1.1"
    assert world.is_idle()


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v1/nope", "/sleep", "/reset_prefix_cache", "/v1/load_lora_adapter", "/debug/cache", "/docs",
     "//v1/completions", "/v1/completions/", "/v1/../metrics", "/server_info", "/inference/v1/abort_requests"],
)  # fmt: skip
async def test_what_is_not_listed_is_not_forwarded(world: World, stub: Stub, path: str) -> None:
    head, rest = await exchange(world, raw_request(BODY, "Connection: close", line=f"POST {path} HTTP/1.1"))
    assert head.startswith(b"HTTP/1.1 404")
    assert json.loads(rest)["error"]["code"] == "unknown_url"
    assert stub.calls == []


async def test_a_wrong_method_is_told_the_right_one(world: World, stub: Stub) -> None:
    async with world.http.get(world.url + "/v1/chat/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "OPTIONS, POST")
        assert (await response.json())["error"]["code"] == "method_not_allowed"
    assert stub.calls == []


async def test_cors_preflights_are_the_engines(world: World, stub: Stub) -> None:
    async def script(call: Call) -> None:
        await call.ok(b"OK", "Access-Control-Allow-Origin: *")

    stub.script = script
    async with world.http.options(world.url + "/v1/chat/completions") as response:
        assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (200, "*")
    assert stub.calls[0].line == "OPTIONS /v1/chat/completions HTTP/1.1"


async def test_one_log_line_per_request_and_no_prompt_in_it(world: World, stub: Stub) -> None:
    stub.script = streams
    await world.post(
        {"model": "m", "prompt": "my secret prompt", "stream": True},
        "/v1/completions?key=sk-secret",
        Authorization="Bearer sk-secret",
        **{"X-Request-Id": 'id "quoted"'},
    )
    await world.post(b"{")
    first, second = await world.records()
    assert (first["status"], first["worker"], first["cached_tokens"], first["output_tokens"]) == (200, "a", 16, 2)
    assert (first["path"], first["request_id"]) == ("/v1/completions", 'id "quoted"')
    assert first["ttft_ms"] >= first["overhead_ms"] > 0
    assert (second["status"], second["error"]) == (400, "invalid_json")
    assert "secret" not in world.log.getvalue()
