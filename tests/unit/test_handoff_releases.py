"""Giving back what a prefill worker holds, by a request that the decode worker must refuse."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.debug.handoffs import HandoffMetrics
from gateway.handoff import releases as module
from gateway.handoff.releases import Releases
from gateway.proxy.peer import PoolSettings
from gateway.proxy.upstream import UpstreamPool
from tests.support.proxy_world import Call, Stub, until

PARAMS = {"do_remote_prefill": True, "remote_request_id": "r1", "remote_block_ids": [[1, 2]], "unknown": 2**70}


class Giver:
    """Releases towards the decode workers of a test."""

    def __init__(self, **urls: str) -> None:
        self.registry = CollectorRegistry()
        self.upstreams = UpstreamPool(PoolSettings(connect_timeout_s=1, pool_idle_s=4, request_timeout_s=30))
        for name, url in urls.items():
            self.upstreams.set(name, url)
        self.releases = Releases(self.upstreams, HandoffMetrics(self.registry), lambda: list(urls))

    def release(self, **changes: Any) -> None:
        values = {
            "model": "m",
            "prefill": "p",
            "decode": "d1",
            "n_tokens": 100,
            "lease_ends_s": 1e12,
            "authorization": None,
            **changes,
        }
        self.releases.release(PARAMS, **values)

    def count(self, outcome: str) -> float:
        return self.registry.get_sample_value("warmroute_pd_releases_total", {"outcome": outcome}) or 0.0

    @property
    def stranded(self) -> dict[str, int]:
        return self.releases.stranded.tokens(0.0)


@asynccontextmanager
async def giver(**urls: str) -> AsyncIterator[Giver]:
    it = Giver(**urls)
    try:
        yield it
    finally:
        await it.releases.close()
        await it.upstreams.close()


async def refuses(call: Call) -> None:
    await call.ok(b'{"error":{}}', status="400 Bad Request")


async def test_the_engine_gets_the_params_in_a_request_it_cannot_serve() -> None:
    async with Stub(refuses) as d1, giver(d1=d1.url) as it:
        it.release(authorization="Bearer sk")
        assert it.stranded == {"p": 100}, "until it has worked"
        await until(lambda: it.count("ok") == 1)
        assert it.stranded == {}
        (call,) = d1.calls
        body = json.loads(call.body)
        assert call.line == "POST /v1/completions HTTP/1.1"
        assert call.header("Authorization") == "Bearer sk"
        assert body["kv_transfer_params"] == PARAMS
        assert (body["model"], body["prompt"], body["stream"]) == ("m", [0], False)
        assert body["max_tokens"] > 100_000_000


async def test_another_decode_worker_is_asked_when_the_planned_one_cannot_be() -> None:
    async with Stub(refuses) as d2, giver(d1="http://127.0.0.1:9", d2=d2.url) as it:
        it.release()
        await until(lambda: it.count("ok") == 1)
        assert len(d2.calls) == 1
    async with Stub(refuses) as d2, giver(d2=d2.url) as it:
        it.release(decode="gone")
        await until(lambda: it.stranded == {})


async def test_who_holds_it_is_not_asked_to_fetch_it() -> None:
    async with Stub(refuses) as p, giver(d1="http://127.0.0.1:9", p=p.url) as it:
        it.release()
        await until(lambda: it.count("failed") == 1)
        assert p.calls == []


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found", "500 Internal Server Error", "401 Unauthorized"])
async def test_an_engine_that_does_not_refuse_it_has_not_released_it(status: str) -> None:
    async def answers(call: Call) -> None:
        await call.ok(status=status)

    async with Stub(answers) as d1, giver(d1=d1.url) as it:
        it.release()
        await until(lambda: it.count("failed") == 1)
        assert it.stranded == {"p": 100}
        assert it.releases.stranded.tokens(2e12) == {}, "its lease ends it"


async def test_too_many_at_once_are_left_to_their_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_AT_ONCE", 5)
    go_on = asyncio.Event()

    async def waits(call: Call) -> None:
        await go_on.wait()
        await refuses(call)

    async with Stub(waits) as d1, giver(d1=d1.url) as it:
        for _ in range(8):
            it.release()
        assert it.count("dropped") == 3
        go_on.set()
        await until(lambda: it.count("ok") == 5)
        assert it.stranded == {"p": 300}


async def test_few_requests_at_a_time_go_to_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_S", 60.0)
    go_on = asyncio.Event()

    async def waits(call: Call) -> None:
        await go_on.wait()
        await refuses(call)

    async with Stub(waits) as d1, giver(d1=d1.url) as it:
        for _ in range(200):
            it.release()
        await until(lambda: len(d1.calls) == module._AT_ENGINE)
        go_on.set()
        await until(lambda: it.count("ok") == 200)


async def test_closing_waits_for_those_under_way_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.2)

    async def never(call: Call) -> None:
        await call.wait_hang_up()

    async with Stub(refuses) as d1, giver(d1=d1.url) as it:
        it.release()
        await it.releases.close()
        assert it.count("ok") == 1
    async with Stub(never) as d1, giver(d1=d1.url) as it:
        it.release()
        await until(lambda: len(d1.calls) == 1)
        await asyncio.wait_for(it.releases.close(), 10)
        assert it.count("ok") == 0
        assert it.stranded == {"p": 100}
