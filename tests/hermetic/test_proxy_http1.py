"""Connections that behave oddly, at both ends of the data plane; nothing is left of them."""

import asyncio
import json
import random
import ssl
from collections.abc import AsyncIterator

import pytest
import trustme

from gateway.http1 import listener
from gateway.http1.listener import Listener
from tests.support.proxy_world import Call, Stub, World, raw_request, until

pytestmark = pytest.mark.usefixtures("http_plane")

BODY = {"model": "m", "prompt": "hi"}
RAW = json.dumps(BODY).encode()


async def echoes(call: Call) -> None:
    await call.ok(json.dumps({"said": call.header("X-N"), "bytes": len(call.body)}).encode())


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    async with Stub(echoes) as upstream:
        yield upstream


@pytest.fixture
async def world(stub: Stub) -> AsyncIterator[World]:
    async with World({"a": stub.url}) as gateway:
        yield gateway
        await until(gateway.is_idle)


async def answers(reader: asyncio.StreamReader, n: int) -> list[tuple[int, bytes]]:
    """(status, body) of so many that tell their length."""
    out = []
    for _ in range(n):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        length = next(int(row[15:]) for row in head.lower().split(b"\r\n") if row.startswith(b"content-length:"))
        out.append((int(head.split()[1]), await reader.readexactly(length)))
    return out


async def ends(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the connection ends."""
    out = b""
    try:
        while piece := await asyncio.wait_for(reader.read(1 << 16), 60):
            out += piece
    except ConnectionError:
        pass
    return out


def is_fast(world: World) -> bool:
    return isinstance(world.server, Listener)


# ---- clients ---------------------------------------------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_order_one_at_a_time(world: World, stub: Stub) -> None:
    busy = 0

    async def slowly(call: Call) -> None:
        nonlocal busy
        busy += 1
        assert busy == 1
        await asyncio.sleep(0.01)
        busy -= 1
        await echoes(call)

    stub.script = slowly
    reader, writer = await world.connect()
    writer.write(b"".join(raw_request(RAW, f"X-N: {n}") for n in range(5)))
    said = [json.loads(body)["said"] for _, body in await answers(reader, 5)]
    assert said == ["0", "1", "2", "3", "4"]
    writer.close()


async def test_who_sends_far_ahead_is_not_read_for_a_while(stub: Stub) -> None:
    go_on = asyncio.Event()

    async def waits(call: Call) -> None:
        await go_on.wait()
        await echoes(call)

    stub.script = waits
    async with World({"a": stub.url}, http="fast") as world:
        reader, writer = await world.connect()
        writer.write(raw_request(RAW) * 10_000)
        assert isinstance(world.server, Listener)
        (connection,) = world.server.connections
        await until(lambda: connection.is_held)
        assert len(connection.ahead) < 1 << 20
        go_on.set()
        assert [status for status, _ in await answers(reader, 50)] == [200] * 50
        writer.transport.abort()
        await until(world.is_idle)
        assert len(stub.calls) < 10_000


async def test_a_body_of_tiny_chunks_is_read_by_turns(world: World, stub: Stub) -> None:
    """Of 25,000 chunks in one buffer; what follows on the connection is read too."""
    body = RAW[:-1] + b" " * 25_000 + b"}"
    reader, writer = await world.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
    writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(RAW) + RAW)
    said = [json.loads(answer)["bytes"] for status, answer in await answers(reader, 2) if status == 200]
    assert said == [len(body), len(RAW)]
    writer.close()


async def test_pages_and_prompts_on_one_connection(world: World) -> None:
    world.plane.pages = {"/x": _page}  # type: ignore[dict-item]
    reader, writer = await world.connect()
    page = raw_request(b"", line="GET /x HTTP/1.1")
    for requests, statuses in (
        ([raw_request(RAW), page], [200, 200]),
        ([page, raw_request(RAW), raw_request(RAW), page], [200] * 4),
    ):
        for request in requests:
            writer.write(request)
        assert [status for status, _ in await answers(reader, len(requests))] == statuses
    for piece in raw_request(RAW):
        writer.write(bytes([piece]))
    assert (await answers(reader, 1))[0][0] == 200
    writer.close()


def _page(request: object) -> object:
    from gateway.proxy.errors import json_response

    return json_response(b"{}")


async def test_a_half_closed_client_has_left(world: World, stub: Stub) -> None:
    async def waits(call: Call) -> None:
        await call.wait_hang_up()

    stub.script = waits
    _, writer = await world.connect()
    writer.write(raw_request(RAW))
    await until(lambda: stub.calls)
    writer.write_eof()
    await until(lambda: stub.calls[0].hung_up.is_set())
    await until(world.is_idle)
    (record,) = await world.records()
    assert (record["status"], record["cut"]) == (499, "client_left")
    writer.close()


async def test_heads_that_come_in_drops_are_given_up(monkeypatch: pytest.MonkeyPatch, stub: Stub) -> None:
    monkeypatch.setattr(listener, "_HEAD_S", 0.3)
    async with World({"a": stub.url}, http="fast") as world:
        reader, writer = await world.connect()
        ended = asyncio.create_task(ends(reader))
        for piece in raw_request(RAW):
            if ended.done() or writer.transport.is_closing():
                break
            writer.write(bytes([piece]))
            await asyncio.sleep(0.02)
        head, _, body = (await ended).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in head.lower()
        assert json.loads(body)["error"]["code"] == "request_timeout"
        writer.close()
        assert isinstance(world.server, Listener)
        server = world.server
        await until(lambda: not server.connections)
        assert stub.calls == []


async def test_empty_lines_after_a_body_are_no_request(monkeypatch: pytest.MonkeyPatch, stub: Stub) -> None:
    monkeypatch.setattr(listener, "_HEAD_S", 0.3)
    async with World({"a": stub.url}, http="fast") as world:
        reader, writer = await world.connect()
        writer.write(raw_request(RAW) + b"\r\n\r\n")
        assert (await answers(reader, 1))[0][0] == 200
        assert await ends(reader) == b""
        writer.close()


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch, stub: Stub) -> None:
    monkeypatch.setattr(listener, "CLIENT_KEEPALIVE_S", 1.0)
    async with World({"a": stub.url}, http="fast") as world:
        silent, used = await world.connect(), await world.connect()
        used[1].write(raw_request(RAW))
        assert (await answers(used[0], 1))[0][0] == 200
        for reader, writer in (silent, used):
            assert await ends(reader) == b""
            writer.close()


async def test_a_body_that_is_too_long_and_still_coming_does_not_take_the_answer_away(stub: Stub) -> None:
    async with World({"a": stub.url}, max_body_bytes=1000) as world:
        reader, writer = await world.connect()
        writer.write(raw_request(b"", f"Content-Length: {32 << 20}", length=False))
        for _ in range(64):
            writer.write(b"x" * 65536)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert head.startswith(b"HTTP/1.1 413")
        assert b"\r\nconnection: close\r\n" in head.lower()
        writer.transport.abort()
        await until(world.is_idle)
        assert stub.calls == []


async def test_an_old_client_may_keep_its_connection(world: World) -> None:
    reader, writer = await world.connect()
    for _ in range(2):
        writer.write(raw_request(RAW, "Connection: keep-alive", line="POST /v1/completions HTTP/1.0"))
        assert (await answers(reader, 1))[0][0] == 200
    writer.close()


async def test_a_head_request_gets_no_body(world: World) -> None:
    reader, writer = await world.connect()
    writer.write(raw_request(b"", "Connection: close", line="HEAD /v1/completions HTTP/1.1"))
    head, _, rest = (await ends(reader)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 405")
    assert rest == b""
    writer.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        raw_request(RAW, "Transfer-Encoding: chunked"),
        raw_request(RAW, f"Content-Length: {len(RAW)}", f"Content-Length: {len(RAW) + 1}", length=False),
        raw_request(b"", "Transfer-Encoding: gzip, chunked", length=False),
        raw_request(RAW, "X: a\nTransfer-Encoding: chunked"),
        raw_request(RAW, "X: 1\r\n folded"),
        raw_request(RAW, "X : 1"),
        b"POST /v1/completions HTTP/1.1\nHost: a\n\n",
    ],
)
async def test_smuggling_is_refused_and_ends_the_connection(world: World, stub: Stub, request_bytes: bytes) -> None:
    reader, writer = await world.connect()
    writer.write(request_bytes + raw_request(RAW, "X-N: smuggled"))
    answer = await ends(reader)
    writer.close()
    if not is_fast(world):
        return  # What aiohttp's parser lets through is its own affair.
    assert answer.count(b"HTTP/1.1 ") == 1
    assert int(answer.split()[1]) in (400, 501)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "malformed_request"
    assert stub.calls == []


@pytest.mark.parametrize("seed", range(2))
async def test_mutated_requests_leave_nothing_behind(world: World, stub: Stub, seed: int) -> None:
    rng = random.Random(seed)
    chunked = raw_request(b"", "Transfer-Encoding: chunked", length=False) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(RAW), RAW)

    async def attack(data: bytes) -> bytes:
        reader, writer = await world.connect()
        for at in range(0, len(data), step := rng.choice((1000, 1000, 37))):
            if writer.transport.is_closing():
                break
            writer.write(data[at : at + step])
            await asyncio.sleep(0)
        if rng.random() < 0.2:
            writer.transport.abort()
            return b""
        try:
            return await asyncio.wait_for(reader.read(), 0.3)
        except (TimeoutError, ConnectionError):
            return b""
        finally:
            writer.transport.abort()

    for _ in range(10):
        batch = []
        for _ in range(20):
            data = bytearray(rng.choice((raw_request(RAW), chunked)) * rng.choice((1, 1, 2)))
            for _ in range(rng.randrange(1, 4)):
                at = rng.randrange(len(data))
                data[at : at + rng.choice((0, 1, 1, 3))] = rng.choice(
                    (b"", b"\x00", b"\r\n", b"\n", b" ", b":", bytes([rng.randrange(256)]), rng.randbytes(9))
                )
            batch.append(attack(bytes(data)))
        for answer in await asyncio.gather(*batch):
            assert answer == b"" or answer.startswith(b"HTTP/")
    await until(world.is_idle)
    if isinstance(server := world.server, Listener):
        await until(lambda: not server.connections)
    assert (await world.post(BODY))[0] == 200


# ---- workers ---------------------------------------------------------------------------------------------------------


async def test_an_answer_that_comes_before_the_body_was_sent(world: World, stub: Stub) -> None:
    """The worker refuses by the head alone. Its answer is the client's, and what is left of the body goes nowhere."""
    raw = b'{"model":"m","prompt":"' + b"x" * (900 << 10) + b'"}'
    refused = asyncio.Event()

    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno")
        await writer.drain()
        refused.set()
        await asyncio.sleep(0.2)
        writer.transport.abort()

    server = await asyncio.start_server(refuses, "127.0.0.1", 0, limit=1 << 12)
    async with server:
        world.add("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        status, body, _ = await world.post(raw)
        assert refused.is_set()
        assert (status, body) == (401, b"no")
        await until(world.is_idle)
        upstream = world.upstreams.get("a")
        assert upstream is not None
        await until(lambda: not upstream.idle_connections)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x00" * 100,
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * (300 << 10) + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"",
    ],
)
async def test_garbage_of_a_worker_is_a_502(answer: bytes) -> None:
    async def says(call: Call) -> None:
        await call.send(answer)
        call.writer.close()

    async with Stub(says) as stub, World({"a": stub.url}, http="fast") as world:
        status, body, _ = await world.post(BODY)
        assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_unreachable")
        await until(world.is_idle)


async def test_a_worker_that_closes_while_it_is_sent_to(world: World, stub: Stub) -> None:
    raw = b'{"model":"m","prompt":"' + b"x" * (900 << 10) + b'"}'
    met = 0

    async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal met
        met += 1
        await reader.read(1000)
        writer.transport.abort()

    server = await asyncio.start_server(closes, "127.0.0.1", 0)
    async with server:
        world.add("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        status, body, _ = await world.post(raw)
        assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_unreachable")
        assert met == 2  # Once more, as the first connection may have been an old one.
    await until(world.is_idle)


async def test_a_worker_by_name_and_by_ipv6_address() -> None:
    async def ok(call: Call) -> None:
        await call.ok(json.dumps({"host": call.header("Host")}).encode())

    async with Stub(ok) as stub, World({"a": f"http://localhost:{stub.port}"}) as world:
        _, body, _ = await world.post(BODY)
        assert json.loads(body) == {"host": f"localhost:{stub.port}"}
    server = await asyncio.start_server(Stub(ok)._accept, "::1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, World({"a": f"http://[::1]:{port}"}) as world:
        _, body, _ = await world.post(BODY)
        assert json.loads(body) == {"host": f"[::1]:{port}"}


async def test_tls_at_both_ends(world: World) -> None:
    """Large bodies both ways, pages between, and a client that leaves."""
    large = b"y" * (2 << 20)

    async def answers_largely(call: Call) -> None:
        if call.body.startswith(b'{"wait"'):
            await call.begin_stream()
            await call.chunk(b"data: 1\n\n")
            await call.wait_hang_up()
        else:
            await call.ok(large + b"%d" % len(call.body))

    ca = trustme.CA()
    serving, trusting = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    ca.issue_cert("127.0.0.1").configure_cert(serving)
    ca.configure_trust(trusting)
    stub = Stub(answers_largely)
    engine = await asyncio.start_server(stub._accept, "127.0.0.1", 0, ssl=serving)
    world._settings.tls = trusting
    world.add("a", f"https://127.0.0.1:{engine.sockets[0].getsockname()[1]}")
    world.plane.pages = {"/x": _page}  # type: ignore[dict-item]
    front = world.plane.listener(world._settings.http, "127.0.0.1", 0, serving)
    await front.start()
    raw = b'{"model":"m","prompt":"' + b"x" * (800 << 10) + b'"}'
    async with engine:
        for _ in range(2):
            async with world.http.post(front.url + "/v1/completions", data=raw, ssl=trusting) as answer:
                assert (answer.status, await answer.read()) == (200, large + b"%d" % len(raw))
            async with world.http.get(front.url + "/x", ssl=trusting) as answer:
                assert answer.status == 200
        waiting = await world.http.post(
            front.url + "/v1/completions", data=b'{"wait":1,"prompt":"x","stream":true}', ssl=trusting
        )
        assert await waiting.content.readany() == b"data: 1\n\n"
        waiting.close()
        await until(stub.calls[-1].hung_up.is_set)
        await until(world.is_idle)
    await front.close()
