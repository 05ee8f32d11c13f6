"""Scraper against fake engines over HTTP, and the whole engine side together."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bench.engine.config import FakeVllmConfig
from bench.engine.server import FakeVllm
from bench.engine.timing import preset
from gateway.engine.capabilities import Capabilities
from gateway.engine.feed import IngestSettings
from gateway.engine.scraper import Scraper, ScrapeSettings
from gateway.engine.subscriber import EventIngest
from indexer import PrefixIndex
from scorer.types import EngineStats

CONFIG = FakeVllmConfig(model="tiny", aliases=("tiny-alias",), lora_modules={"l1": "/loras/l1"}).with_engine(
    timing=preset("instant"), max_model_len=512, block_size=16, num_gpu_blocks=64
)
QUICK = ScrapeSettings(interval_s=0.02, timeout_s=0.5, models_interval_s=0.05, retry_max_s=0.05)


class Seen:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.stats: dict[str, EngineStats] = {}
        self.capabilities: dict[str, Capabilities] = {}
        self.log: list[str] = []

    def on_stats(self, worker: str, stats: EngineStats) -> None:
        self.stats[worker] = stats

    def on_capabilities(self, worker: str, capabilities: Capabilities) -> None:
        self.capabilities[worker] = capabilities
        self.log.append(f"capabilities {worker}")

    def on_restart(self, worker: str, process_start_s: float | None) -> None:
        self.log.append(f"restart {worker}")

    def on_sleep(self, worker: str, asleep: bool) -> None:
        self.log.append(f"{'asleep' if asleep else 'awake'} {worker}")

    def on_unreachable(self, worker: str, reason: str) -> None:
        self.log.append(f"unreachable {worker}: {reason}")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def scraper(session: aiohttp.ClientSession) -> AsyncIterator[Scraper]:
    scraper = Scraper(session, Seen(), QUICK)
    yield scraper
    await scraper.stop()


def seen_by(scraper: Scraper) -> Seen:
    assert isinstance(scraper._listener, Seen)
    return scraper._listener


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(15):
        while not true():  # noqa: ASYNC110 - the condition is somebody else's
            await asyncio.sleep(0.005)


def dead_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


async def test_a_worker_is_learned_and_read(scraper: Scraper, session: aiohttp.ClientSession) -> None:
    async with FakeVllm(replace(CONFIG, data_parallel_size=2, topic="kv@x")) as engine:
        scraper.add("w", engine.url + "/")
        seen = seen_by(scraper)
        await until(lambda: "w" in seen.capabilities)
        known = seen.capabilities["w"]
        assert known.models == ("tiny", "tiny-alias")
        assert [adapter.name for adapter in known.adapters] == ["l1"]
        assert (known.version, known.max_model_len, known.root) == ("0.32.0", 512, "tiny")
        assert (known.block_size, known.kv_blocks, known.prefix_caching) == (16, 128, True)
        assert known.event_sources is not None
        assert known.event_sources[0].endpoint == engine.events_endpoint
        assert known.event_sources[0].replay_endpoint == engine.replay_endpoint
        assert set(known.event_sources) == {0, 1}
        assert known.event_sources[1].topic == "kv@x"
        body = {"model": "tiny", "prompt": list(range(100, 150)), "max_tokens": 2}
        async with session.post(engine.url + "/v1/completions", json=body) as response:
            assert response.status == 200
        await until(lambda: seen.stats["w"].generation_tokens == 2)
        assert seen.stats["w"].prompt_tokens == 50
        assert scraper.status()["w"].reachable
        assert not scraper.status()["w"].stale
        assert await scraper.is_healthy("w")
        engine.kill_engine()
        assert not await scraper.is_healthy("w")


async def test_adapters_loaded_at_run_time_are_found(scraper: Scraper) -> None:
    async with FakeVllm(CONFIG) as engine:
        scraper.add("w", engine.url)
        seen = seen_by(scraper)
        await until(lambda: "w" in seen.capabilities)
        engine.add_adapter("l2", "/loras/l2")
        await until(lambda: len(seen.capabilities["w"].adapters) == 2)
        assert seen.capabilities["w"].adapters[1].path == "/loras/l2"
        engine.remove_adapter("l1")
        await until(lambda: [a.name for a in seen.capabilities["w"].adapters] == ["l2"])
        assert seen.log == ["capabilities w"] * 3


async def test_o2_a_worker_that_is_down_holds_up_nobody_and_is_picked_up_when_it_comes(scraper: Scraper) -> None:
    """O2: one unreachable worker (and one that accepts but never answers) among ten: the other eight are known at
    once, and the two when they come.
    """
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(3600), "127.0.0.1", 0)
    seen = seen_by(scraper)
    engines = [FakeVllm(CONFIG) for _ in range(8)]
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        scraper.add("down", late := dead_url())
        scraper.add("silent", f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}")
        for number, engine in enumerate(engines):
            scraper.add(f"w{number}", engine.url)
        await until(lambda: len(seen.capabilities) == 8)
        await until(lambda: sum(line.startswith("unreachable") for line in seen.log) == 2)
        assert scraper.status()["down"].reachable is False
        assert scraper.status()["down"].stale
        assert "no answer within" in str(scraper.status()["silent"].reason)
        async with FakeVllm(replace(CONFIG, port=int(late.rpartition(":")[2]))):
            await until(lambda: "down" in seen.capabilities)
            assert scraper.status()["down"].reachable
        await until(lambda: sum(line.startswith("unreachable down") for line in seen.log) == 2)
    finally:
        silent.close()
        await asyncio.gather(*(engine.stop() for engine in engines))


async def test_o3_a_restarted_gateway_discovers_every_model_again(session: aiohttp.ClientSession) -> None:
    """O3: three models on three workers; a new scraper knows all three, as the old one did."""
    names = ["m0", "m1", "m2"]
    engines = [FakeVllm(replace(CONFIG, model=name, aliases=())) for name in names]
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        for _ in range(2):
            seen = Seen()
            scraper = Scraper(session, seen, QUICK)
            for name, engine in zip(names, engines, strict=True):
                scraper.add(name, engine.url)
            await until(lambda seen=seen: len(seen.capabilities) == 3)
            assert [seen.capabilities[name].models for name in names] == [(name,) for name in names]
            await scraper.stop()
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


async def test_s13_late_answers_keep_the_last_numbers_and_show_their_age(scraper: Scraper) -> None:
    """S13: a scrape that pauses makes the numbers old, not zero, and the worker is not lost while it is only late."""
    async with FakeVllm(CONFIG) as engine:
        scraper.add("w", engine.url)
        seen = seen_by(scraper)
        await until(lambda: "w" in seen.capabilities)
        last = seen.stats["w"]
        engine.faults.paths = ("/metrics",)
        engine.faults.error_rate = 1.0
        await until(lambda: scraper.status()["w"].stale)
        status = scraper.status()["w"]
        assert status.stats is not None
        assert status.stats.block_size == last.block_size
        assert status.age_s is not None
        assert status.age_s > QUICK.interval_s
        assert "status 500" in str(status.reason)
        await until(lambda: any(line.startswith("unreachable w: /metrics") for line in seen.log))
        engine.faults.error_rate = 0.0
        await until(lambda: not scraper.status()["w"].stale)
        assert scraper.status()["w"].reason is None


async def test_a_restart_is_told_and_everything_learned_anew(scraper: Scraper) -> None:
    async with FakeVllm(CONFIG) as engine:
        scraper.add("w", engine.url)
        seen = seen_by(scraper)
        await until(lambda: seen.log == ["capabilities w"])
        await engine.restart()
        await until(lambda: seen.log[-1] == "capabilities w" and "restart w" in seen.log)
        assert seen.log.count("restart w") == 1


async def test_e13_sleep_is_seen_although_no_event_is_published(
    scraper: Scraper, session: aiohttp.ClientSession
) -> None:
    """E13: /sleep on an idle engine empties its cache and publishes nothing; the scrape sees it."""
    async with FakeVllm(CONFIG) as engine:
        scraper.add("w", engine.url)
        seen = seen_by(scraper)
        await until(lambda: "w" in seen.capabilities)
        await session.post(engine.url + "/sleep")
        await until(lambda: "asleep w" in seen.log)
        await session.post(engine.url + "/wake_up")
        await until(lambda: "awake w" in seen.log)


async def test_other_servers_are_read_as_far_as_they_go(scraper: Scraper) -> None:
    """No /version, no /kv_event_sources, odd /v1/models at first, half a metrics page: what there is counts."""
    cards: list[Any] = ["odd"]

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": cards})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=b"\xff\xfe garbage\nvllm:num_requests_running 2\nvllm:num_requests_wai")

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.get("/metrics", metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        scraper.add("w", f"http://127.0.0.1:{runner.addresses[0][1]}")
        seen = seen_by(scraper)
        await until(lambda: "/v1/models: not what was expected" in str(scraper.status()["w"].reason))
        assert seen.stats["w"].running == 2
        assert seen.stats["w"].waiting is None
        cards[:] = [{"id": "m"}]
        await until(lambda: "w" in seen.capabilities)
        known = seen.capabilities["w"]
        assert (known.models, known.version, known.event_sources) == (("m",), None, None)
        assert scraper.status()["w"].reason is None
    finally:
        await runner.cleanup()


async def test_a_failing_listener_and_a_removed_worker(session: aiohttp.ClientSession) -> None:
    class Failing(Seen):
        def on_stats(self, worker: str, stats: EngineStats) -> None:
            raise RuntimeError

    async with FakeVllm(CONFIG) as engine:
        seen = Failing()
        scraper = Scraper(session, seen, QUICK)
        scraper.add("w", engine.url)
        await until(lambda: "w" in seen.capabilities)
        assert scraper.counters["failed_callbacks"] > 0
        scraper.remove("w")
        scraper.remove("w")
        assert scraper.status() == {}
        assert not await scraper.is_healthy("w")
        await scraper.stop()


async def test_the_index_follows_a_fake_engine_through_evictions_ranks_and_a_restart(
    scraper: Scraper, session: aiohttp.ClientSession
) -> None:
    """Scrape -> event sources -> subscription -> index; two ranks, a pool that overflows, a restart in place."""
    index = PrefixIndex()
    ingest = EventIngest(index, settings=IngestSettings(verify_after_s=0.05))
    ingest.start()
    seen = seen_by(scraper)
    seen.on_restart = lambda worker, start_s: ingest.process_restarted(worker, "restarted", start_s)  # type: ignore[method-assign]
    try:
        async with FakeVllm(replace(CONFIG, data_parallel_size=2)) as engine:
            scraper.add("w", engine.url)
            await until(lambda: "w" in seen.capabilities)
            for rank, source in (seen.capabilities["w"].event_sources or {}).items():
                ingest.add("w", rank, source.endpoint, source.replay_endpoint)

            async def ask(prompt: list[int], rank: int) -> None:
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
                headers = {"X-data-parallel-rank": str(rank)}
                async with session.post(engine.url + "/v1/completions", json=body, headers=headers) as response:
                    assert response.status == 200

            prompts = [list(range(1000 * n, 1000 * n + 160)) for n in range(30)]
            for number, prompt in enumerate(prompts):
                await ask(prompt, number % 2)

            await until(lambda: held(index, prompts[-1]) == {1: 160} and held(index, prompts[-2]) == {0: 160})
            await until(lambda: not index.match(prompts[0]))
            await engine.restart()
            await until(lambda: not index.match(prompts[-1]) and not index.match(prompts[-2]))
            await ask(prompts[0], 0)
            await until(lambda: held(index, prompts[0]) == {0: 160})
            assert not any(status.partial for status in ingest.status().values())
    finally:
        ingest.stop()


def held(index: PrefixIndex, prompt: list[int]) -> dict[int, int]:
    """Tokens of `prompt` that each rank of "w" holds."""
    return {rank: match.gpu_tokens for (_, rank), match in index.match(prompt).items()}


async def test_an_outage_has_a_time_and_can_be_looked_at_at_once(session: aiohttp.ClientSession) -> None:
    """The caller's key goes with every request; without it the reason is told."""
    key = {"value": "wrong"}
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.headers.get("Authorization") != f"Bearer {key['value']}":
            return web.Response(status=401)
        if request.path == "/metrics":
            return web.Response(text="vllm:num_requests_running 1\n")
        return web.json_response({"data": [{"id": "m"}]}) if request.path == "/v1/models" else web.Response(status=404)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    slow = ScrapeSettings(interval_s=3600.0, retry_max_s=3600.0, failures=1)
    scraper = Scraper(session, Seen(), slow, headers={"Authorization": "Bearer right"})
    try:
        scraper.add("w", url)
        await until(lambda: scraper.reachable("w") is False)
        status = scraper.status()["w"]
        assert (status.reason, status.failed_s is not None) == ("/metrics: status 401", True)
        key["value"] = "right"
        scraper.read_now("w")
        await until(lambda: "w" in seen_by(scraper).capabilities)
        status = scraper.status()["w"]
        assert (status.reachable, status.reason, status.failed_s) == (True, None, None)
        scraper.read_now("nobody")
        assert scraper.reachable("nobody") is None
    finally:
        await scraper.stop()
        await runner.cleanup()
