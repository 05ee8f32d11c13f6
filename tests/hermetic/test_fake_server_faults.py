"""The fault switches do what their names say."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from bench.engine.config import FakeVllmConfig, Faults
from bench.engine.server import FakeVllm
from bench.engine.timing import preset

CONFIG = FakeVllmConfig(model="tiny").with_engine(timing=preset("instant"), max_model_len=512, num_gpu_blocks=64)
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 20}


@pytest.fixture
async def engine() -> AsyncIterator[FakeVllm]:
    async with FakeVllm(CONFIG) as server:
        yield server


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def status(http: aiohttp.ClientSession, engine: FakeVllm, **more: Any) -> int:
    async with http.post(engine.url + "/v1/completions", json={**BODY, **more}) as response:
        await response.read()
        return response.status


async def collect(response: aiohttp.ClientResponse, into: list[bytes]) -> None:
    async for line in response.content:
        into.append(line)  # noqa: PERF401 - what came before the cut is wanted


async def test_a_stalled_server_keeps_the_connection_and_answers_later(
    engine: FakeVllm, http: aiohttp.ClientSession
) -> None:
    engine.faults.stall = True
    engine.apply_faults()
    waiting = asyncio.create_task(status(http, engine))
    async with http.get(engine.url + "/health") as response:  # only /v1/ stalls by default
        assert response.status == 200
    done, _ = await asyncio.wait([waiting], timeout=0.1)
    assert not done
    engine.faults.stall = False
    engine.apply_faults()
    assert await waiting == 200


async def test_a_stall_freezes_a_running_stream(http: aiohttp.ClientSession) -> None:
    async with (
        FakeVllm(CONFIG.with_engine(timing=preset("cpu-fast"))) as engine,
        http.post(engine.url + "/v1/completions", json={**BODY, "stream": True, "max_tokens": 200}) as response,
    ):
        await response.content.readany()
        engine.faults.stall = True
        engine.apply_faults()
        rest = asyncio.create_task(response.read())
        done, _ = await asyncio.wait([rest], timeout=0.2)
        assert not done
        engine.faults.stall = False
        engine.apply_faults()
        assert (await rest).endswith(b"data: [DONE]\n\n")


async def test_death_after_k_chunks(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    engine.faults.die_after_chunks = 3
    received: list[bytes] = []
    async with http.post(engine.url + "/v1/completions", json={**BODY, "stream": True}) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await collect(response, received)
    assert sum(line.startswith(b"data: ") for line in received) == 3
    engine.faults.die_after_chunks = None
    assert await status(http, engine) == 200
    assert engine.drivers[0].engine.idle()


async def test_a_restart_cuts_open_streams(http: aiohttp.ClientSession) -> None:
    async with (
        FakeVllm(CONFIG.with_engine(timing=preset("cpu-fast"))) as engine,
        http.post(engine.url + "/v1/completions", json={**BODY, "stream": True, "max_tokens": 400}) as response,
    ):
        received: list[bytes] = [await response.content.readline()]
        await engine.restart()
        with pytest.raises(aiohttp.ClientPayloadError):
            await collect(response, received)
        assert b"data: [DONE]\n" not in received
        assert await status(http, engine) == 200


async def test_error_rate(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    engine.faults.error_rate = 0.5
    engine.faults.error_status = 503
    found = [await status(http, engine) for _ in range(40)]
    assert set(found) == {200, 503}
    assert 8 <= found.count(503) <= 32


async def test_reset_connection(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    engine.faults.reset_rate = 1.0
    with pytest.raises(aiohttp.ClientConnectionError):
        await status(http, engine)
    engine.faults.reset_rate = 0.0
    assert await status(http, engine) == 200


async def test_slow_headers(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    engine.faults.headers_delay_s = 0.1
    begin = asyncio.get_running_loop().time()
    assert await status(http, engine) == 200
    assert asyncio.get_running_loop().time() - begin >= 0.1


async def test_faults_over_http(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    async with http.post(engine.url + "/fake/faults", json={"error_rate": 1.0, "paths": ["/v1/"]}) as response:
        assert response.status == 200
    assert await status(http, engine) == 500
    async with http.post(engine.url + "/fake/faults", json={"nonsense": 1}) as response:
        assert response.status == 400
    started = engine.started
    async with http.post(engine.url + "/fake/restart") as response:
        assert response.status == 202
    async with asyncio.timeout(60):
        while engine.started == started or not engine.drivers:  # noqa: ASYNC110 - the restart signals nothing
            await asyncio.sleep(0.005)
    assert engine.faults.error_rate == 1.0


def test_faults_belong_to_one_server() -> None:
    first, second = FakeVllm(CONFIG), FakeVllm(CONFIG)
    first.faults.error_rate = 1.0
    assert second.faults.error_rate == 0.0
    with pytest.raises(ValueError, match="nonsense"):
        Faults().update({"nonsense": 1})


async def test_h2_idle_keepalive_closed_by_server(http: aiohttp.ClientSession) -> None:
    """H2: the server closes an idle keep-alive connection first; here after 0.1 s instead of uvicorn's 5 s."""
    short = FakeVllmConfig(model="tiny", keepalive_timeout_s=0.1)
    async with FakeVllm(short) as engine:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(60):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
