"""Bounds: bodies, concurrency, slow readers, and how the server leaves."""

import asyncio
import json
import resource

import pytest

from gateway.proxy.server import raise_file_limit
from tests.support.proxy_world import Call, Stub, World, raw_request, until

pytestmark = pytest.mark.usefixtures("http_plane")

BODY = {"model": "m", "prompt": "hi"}


async def ok(call: Call) -> None:
    await call.ok(b'{"choices":[]}')


async def answer_of(world: World, request: bytes) -> bytes:
    reader, writer = await world.connect()
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_limit_is_413(announced: bool) -> None:
    big = b'{"model":"m","prompt":"' + b"x" * 2000 + b'"}'
    async with Stub(ok) as stub, World({"a": stub.url}, max_body_bytes=1000) as world:
        if announced:
            request = raw_request(big)
        else:
            request = raw_request(b"", "Transfer-Encoding: chunked", length=False)
            request += b"%x\r\n%b\r\n0\r\n\r\n" % (len(big), big)
        head, _, rest = (await answer_of(world, request)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413")
        assert json.loads(rest)["error"]["code"] == "request_too_large"
        assert stub.calls == []
        assert (await world.post(b'{"model":"m","prompt":"' + b"x" * 900 + b'"}'))[0] == 200
        await until(world.is_idle)


async def test_a_413_does_not_invite_the_body() -> None:
    async with Stub(ok) as stub, World({"a": stub.url}, max_body_bytes=1000) as world:
        request = raw_request(b"", "Expect: 100-continue", "Content-Length: 5000", length=False)
        answer = await answer_of(world, request)
        assert answer.startswith(b"HTTP/1.1 413")


async def test_a_large_body_arrives_whole() -> None:
    body = b'{"model":"m","prompt":"' + b"y" * (3 << 20) + b'"}'
    async with Stub(ok) as stub, World({"a": stub.url}, max_body_bytes=4 << 20) as world:
        assert (await world.post(body))[0] == 200
        assert stub.calls[0].body == body


async def test_the_concurrency_limit_holds_to_the_end_of_the_body() -> None:
    go_on = asyncio.Event()

    async def talks(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        await go_on.wait()
        await call.end_stream()

    async with Stub(talks) as stub, World({"a": stub.url}, max_concurrency=2) as world:
        running = [await world.http.post(world.url + "/v1/completions", json=BODY) for _ in range(2)]
        for response in running:
            assert await response.content.readany() == b"data: 1\n\n"
        for _ in range(3):
            status, body, headers = await world.post(BODY)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert json.loads(body)["error"]["code"] == "overloaded"
        assert len(stub.calls) == 2
        assert world.value("warmroute_requests_rejected_total", reason="over_concurrency") == 3
        go_on.set()
        for response in running:
            await response.read()
        await until(world.is_idle)
        assert (await world.post(BODY))[0] == 200


async def test_a_client_that_reads_nothing_holds_back_the_worker() -> None:
    sent = 0

    async def floods(call: Call) -> None:
        nonlocal sent
        await call.begin_stream()
        piece = b"data: " + b"x" * 65_000 + b"\n\n"
        while sent < 400 << 20:
            await call.chunk(piece)
            sent += len(piece)

    async with Stub(floods) as stub, World({"a": stub.url}) as world:
        _, writer = await world.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(raw_request(json.dumps({**BODY, "stream": True}).encode()))
        before = -1
        async with asyncio.timeout(30):
            while sent == 0 or sent != before:  # Until nothing moves any more.
                before = sent
                await asyncio.sleep(0.3)
        # What is under way sits in the buffers of four sockets and two processes' streams, not in ours.
        assert sent < 64 << 20
        writer.transport.abort()
        await until(world.is_idle)


async def test_drain_lets_running_requests_end_and_takes_no_new_connections() -> None:
    go_on = asyncio.Event()

    async def talks(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        await go_on.wait()
        await call.chunk(b"data: 2\n\n")
        await call.end_stream()

    async with Stub(talks) as stub, World({"a": stub.url}) as world:
        idle_reader, idle_writer = await world.connect()
        async with world.http.post(world.url + "/v1/completions", json=BODY) as response:
            assert await response.content.readany() == b"data: 1\n\n"
            world.plane.draining = True
            await world.server.stop_accepting()
            drained = asyncio.create_task(world.plane.drain(10))
            with pytest.raises(OSError, match=r"refused|Connect call failed"):
                await world.connect()
            idle_writer.write(raw_request(json.dumps(BODY).encode()))
            assert b"connection: close" in (await idle_reader.readuntil(b"\r\n\r\n")).lower()
            assert not drained.done()
            go_on.set()
            assert await response.content.read() == b"data: 2\n\n"
            assert (await asyncio.wait_for(idle_reader.read(), 60)).endswith(b"0\r\n\r\n")
        assert await asyncio.wait_for(drained, 60) == 0
        idle_writer.close()


async def test_what_does_not_end_in_time_is_cut() -> None:
    async def talks(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        await call.wait_hang_up()

    async with Stub(talks) as stub, World({"a": stub.url}) as world:
        reader, writer = await world.connect()
        writer.write(raw_request(json.dumps(BODY).encode()))
        await reader.readuntil(b"data: 1\n\n")
        await world.server.stop_accepting()
        assert await world.plane.drain(0.1) == 1
        await world.server.close()
        rest = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert not rest.endswith(b"0\r\n\r\n")
        await until(lambda: stub.calls[0].hung_up.is_set())
        await until(world.is_idle)
        (record,) = await world.records()
        assert record["cut"] == "drained"


async def test_requests_on_one_connection_one_after_the_other() -> None:
    async with Stub(ok) as stub, World({"a": stub.url}) as world:
        reader, writer = await world.connect()
        for i in range(3):
            writer.write(raw_request(json.dumps({**BODY, "i": i}).encode()))
        for _ in range(3):
            await reader.readuntil(b'{"choices":[]}')
        writer.close()
        assert [json.loads(call.body)["i"] for call in stub.calls] == [0, 1, 2]
        assert stub.connections == 1


async def test_bad_http_is_a_400_for_its_sender_alone() -> None:
    async with Stub(ok) as stub, World({"a": stub.url}) as world:
        smuggled = raw_request(b"x", "Transfer-Encoding: chunked")
        for request in (b"\x16\x03\x01 tls?\r\n\r\n", b"GET\r\n\r\n", smuggled, b"POST / HTTP/1.1\r\nA b: c\r\n\r\n"):
            assert (await answer_of(world, request)).split(b" ")[1] == b"400"
        assert stub.calls == []
        assert (await world.post(BODY))[0] == 200


def test_the_limit_on_open_files_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[0]), before[1]))
        assert raise_file_limit() == before[1] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
