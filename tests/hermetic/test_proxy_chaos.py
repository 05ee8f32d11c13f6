"""Everything at once: whatever happens to requests, in the end nothing is left booked."""

import asyncio
import json
import random

import pytest

from tests.support.proxy_world import Call, Stub, World, raw_request, until

pytestmark = pytest.mark.usefixtures("http_plane")


def misbehaving(rng: random.Random) -> Stub:
    async def script(call: Call) -> None:
        await asyncio.sleep(rng.random() * 0.01)
        fate = rng.randrange(9)
        if fate == 0:
            call.reset()
        elif fate == 1:
            await call.ok(b'{"error":{}}', status=f"{rng.choice((400, 429, 500, 503))} No")
        elif fate == 2:
            await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort")
            call.writer.close()
        elif fate == 3:
            await call.send(b"not http at all\r\n\r\n")
            call.writer.close()
        elif fate == 4:
            await call.wait_hang_up()
        elif fate == 5:
            await call.ok()
            call.writer.close()
        else:
            await call.begin_stream()
            for _ in range(rng.randrange(5)):
                await call.chunk(b'data: {"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":1}}}\n\n')
                await asyncio.sleep(rng.random() * 0.005)
            if fate == 6:
                call.reset()
            else:
                await call.end_stream()

    return Stub(script)


async def client(world: World, rng: random.Random) -> None:
    body = {"model": rng.choice(("m", "m", "m", "zz")), "prompt": [rng.randrange(9) for _ in range(64)], "stream": True}
    raw = json.dumps(body).encode() if rng.random() < 0.9 else b"{"
    request = raw_request(raw, *(("Connection: close",) if rng.random() < 0.5 else ()))
    reader, writer = await world.connect()
    writer.write(request[: rng.randrange(len(request))] if rng.random() < 0.1 else request)
    try:
        async with asyncio.timeout(rng.random() * 0.2):
            await reader.read()
    except (TimeoutError, ConnectionError):
        pass
    if rng.random() < 0.5:
        writer.transport.abort()
    writer.close()


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_left_booked(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)
    async with (
        misbehaving(rng) as one,
        misbehaving(rng) as two,
        World({"one": one.url, "two": two.url, "gone": "http://127.0.0.1:9"}, request_timeout_s=1.0) as world,
    ):
        for _ in range(10):
            await asyncio.gather(*(client(world, rng) for _ in range(20)))
        await until(world.is_idle)
        for worker in world.fleet.workers.values():
            for load in worker.loads.values():
                assert (load.requests, load.kv_tokens, load.streams, load.prefills) == (0, 0, 0, {})
        assert world.plane.in_flight == 0
        records = await world.records()
        assert {record["status"] for record in records} >= {200, 400, 404, 499}
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
