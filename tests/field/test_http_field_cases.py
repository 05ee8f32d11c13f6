"""Faults of HTTP proxies that users met in the field (docs/field-cases.md), one test each."""

import asyncio
import json

import pytest

from gateway.proxy.relay import Answer
from tests.support.proxy_world import Call, Stub, World, raw_request, until

pytestmark = pytest.mark.usefixtures("http_plane")

BODY = {"model": "m", "prompt": [1] * 32, "stream": True}
RAW = json.dumps(BODY).encode()


async def test_s1_a_client_gone_before_the_headers_leaves_no_load() -> None:
    """S1: a client leaves while the answer's headers are awaited, 100 times. The load is 0 again after each."""

    async def thinks(call: Call) -> None:
        await call.wait_hang_up()

    async with Stub(thinks) as stub, World({"a": stub.url}) as world:
        for i in range(100):
            _, writer = await world.connect()
            writer.write(raw_request(RAW))
            await until(lambda i=i: len(stub.calls) == i + 1)  # type: ignore[misc]
            assert world.load() == {"a": 1}
            writer.transport.abort()
            await until(world.is_idle)
            await until(lambda: stub.calls[-1].hung_up.is_set())
        kv_tokens = [load.kv_tokens for load in world.fleet.workers["a"].loads.values()]
        assert kv_tokens == [0]


async def test_s4_a_cleanup_that_raises_still_gives_the_load_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """S4: the upstream breaks in the middle of its body, and closing it raises. The load is given back all the same."""

    async def breaks(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        call.reset()

    def close(self: Answer) -> None:
        raise RuntimeError("cannot close")

    monkeypatch.setattr(Answer, "close", close)
    async with Stub(breaks) as stub, World({"a": stub.url}) as world:
        for _ in range(3):
            reader, writer = await world.connect()
            writer.write(raw_request(RAW))
            await asyncio.wait_for(reader.read(), 60)
            writer.close()
            await until(world.is_idle)
        assert len(await world.records()) == 3


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":32,"completion_tokens":3,"total_tokens":35,'
USAGE += b'"prompt_tokens_details":{"cached_tokens":16}}}\n\n'
STREAM = b'data: {"choices":[{"text":"\xc3\xa4\xf0\x9f\x98\x80"}]}\n\n' + USAGE + b"data: [DONE]\n\n"


async def test_h1_usage_is_read_however_the_stream_is_cut() -> None:
    """H1: cuts between the usage event and [DONE], inside `data:`, inside UTF-8, between the line ends. Same numbers,
    same bytes.
    """
    cut = 0

    async def cuts(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(STREAM[:cut])
        await asyncio.sleep(0)
        await call.chunk(STREAM[cut:])
        await call.end_stream()

    async with Stub(cuts) as stub, World({"a": stub.url}) as world:
        places = [STREAM.index(USAGE) + 3, STREAM.index(b"\xc3") + 1, STREAM.index(b"\xf0") + 2]
        places += [STREAM.index(b"data: [DONE]"), STREAM.index(b"data: [DONE]") - 1, STREAM.index(b"cached_") + 3]
        places += range(1, len(STREAM) - 1, 7)
        for place in places:
            cut = place
            status, body, _ = await world.post(BODY)
            assert (status, body) == (200, STREAM)
        records = await world.records()
        assert {(r["cached_tokens"], r["output_tokens"]) for r in records} == {(16, 3)}
        assert len(records) == len(places)
        assert world.hits.workers["a"].actual_tokens == 16 * len(places)


async def test_h2_idle_keepalive_closed_by_server() -> None:
    """H2: a server that closes idle connections as the next request is written. The pool gives up idle connections
    before the server does, and a request that met a closed one is sent again on a fresh one: no sporadic 5xx.
    """

    async def closes_after(call: Call) -> None:
        await call.ok()
        if len(stub.calls) % 2:
            await call.reader.read(1)  # The next request meets a connection that is being closed.
            call.reset()

    async with Stub(closes_after) as stub, World({"a": stub.url}) as world:
        for _ in range(6):
            assert (await world.post(BODY))[0] == 200
        assert world.value("warmroute_retries_total", reason="disconnected") >= 2

    async def stays(call: Call) -> None:
        await call.ok()

    async with Stub(stays) as stub, World({"a": stub.url}, pool_idle_s=0.2) as world:
        await world.post(BODY)
        await world.post(BODY)
        assert stub.connections == 1
        upstream = world.upstreams.get("a")
        assert upstream is not None
        await until(lambda: not upstream.idle_connections)
        await world.post(BODY)
        assert stub.connections == 2


async def test_h4_nothing_is_sent_before_the_first_byte_and_nothing_is_repeated_after_it() -> None:
    """H4: an upstream that sends its status and dies is replaced unseen; one that sent its first frame is not."""

    async def only_headers(call: Call) -> None:
        await call.begin_stream()
        call.reset()

    async def one_frame(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n')
        await asyncio.sleep(0.05)
        call.reset()

    async def whole(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(STREAM)
        await call.end_stream()

    async with Stub(only_headers) as dies, Stub(whole) as lives:
        for policy in ("round-robin", "warmroute"):
            async with World({"dies": dies.url, "lives": lives.url}, policy=policy) as world:
                for _ in range(4):
                    status, body, _ = await world.post(BODY)
                    assert (status, body) == (200, STREAM)
    async with (
        Stub(one_frame) as dies,
        Stub(whole) as lives,
        World({"dies": dies.url, "lives": lives.url}) as world,
    ):
        world.down.add("lives")
        reader, writer = await world.connect()
        writer.write(raw_request(RAW))
        await reader.readuntil(b"assistant")
        world.down.clear()
        rest = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert b"upstream_broke" in rest
        assert not rest.endswith(b"0\r\n\r\n")
        assert lives.calls == []
        await until(world.is_idle)


async def test_h4_the_client_sees_no_status_while_the_first_byte_is_awaited() -> None:
    """H4: headers alone from upstream are not passed on, so that there is still something to fall back to."""
    go_on = asyncio.Event()

    async def slow(call: Call) -> None:
        await call.begin_stream()
        await go_on.wait()
        await call.chunk(STREAM)
        await call.end_stream()

    async with Stub(slow) as stub, World({"a": stub.url}) as world:
        reader, writer = await world.connect()
        writer.write(raw_request(RAW))
        await until(lambda: stub.calls)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.2)
        go_on.set()
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_h5_crlf_and_data_without_a_space_pass_through() -> None:
    """H5: `data:{..}` ended by CRLF CRLF. Every byte arrives, and the usage in it is read."""
    stream = (
        b'data:{"choices":[{"text":"a"}]}\r\n\r\n: ping\r\n\r\nevent: x\r\nid: 1\r\ndata:{"usage":{"prompt_tokens":32,'
    )
    stream += b'"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":16}}}\r\n\r\ndata:[DONE]\r\n\r\n'

    async def crlf(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(stream)
        await call.end_stream()

    async with Stub(crlf) as stub, World({"a": stub.url}) as world:
        _, body, _ = await world.post(BODY)
        assert body == stream
        (record,) = await world.records()
        assert (record["cached_tokens"], record["output_tokens"]) == (16, 1)
