"""The queue in front of fake engines that run few requests at once and say so."""

import asyncio
import random
from collections import Counter
from typing import Any

import aiohttp
import pytest

from bench.engine.config import FakeVllmConfig
from bench.engine.timing import preset
from gateway.config.schema import QueueConfig, TenancyConfig
from gateway.proxy.routes import ROUTES
from gateway.service import Service
from tests.support.gateway_world import Fleet, engine, until

SETTINGS = QueueConfig(waiting_per_worker=1)


def narrow(at_once: int = 2) -> FakeVllmConfig:
    """An engine that runs so many requests at once, 4 ms a token each."""
    return engine().with_engine(max_num_seqs=at_once, timing=preset("cpu-fast"))


async def ask(fleet: Fleet, prompt: str, *, tokens: int = 20, **headers: str) -> tuple[int, Any, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    async with fleet.http.post(fleet.url + "/v1/completions", json=body, headers=headers) as response:
        return response.status, await response.json(), response.headers


async def saturate(fleet: Fleet, n: int = 12, tokens: int = 400) -> list[asyncio.Task[Any]]:
    """Keep the engines busy until requests wait."""
    tasks = [asyncio.create_task(ask(fleet, f"busy {i}", tokens=tokens)) for i in range(n)]
    await until(lambda: any(((worker.stats and worker.stats.waiting) or 0) > 1 for worker in workers(fleet)))
    return tasks


def workers(fleet: Fleet) -> list[Any]:
    return list(fleet.core.fleet.workers.values())


def is_idle(service: Service) -> bool:
    loads = [load for worker in service.core.fleet.workers.values() for load in worker.loads.values()]
    return (
        not any(load.requests or load.kv_tokens for load in loads)
        and service.core.planner.in_flight() == 0
        and service.core.queue.n_waiting == 0
    )


async def test_no_wake_up_is_lost_whoever_leaves_when() -> None:
    rng = random.Random(7)
    async with Fleet(queue=SETTINGS, a=narrow(1), b=narrow(2)) as fleet:
        busy = await saturate(fleet, tokens=60)
        outcomes: Counter[object] = Counter()

        async def client(i: int) -> None:
            await asyncio.sleep(rng.uniform(0, 0.5))
            patience_s = rng.choice([0.05, 0.3, 240.0, 240.0, 240.0])
            try:
                async with asyncio.timeout(patience_s):
                    outcomes[(await ask(fleet, f"prompt {i}", tokens=rng.randint(1, 12)))[0]] += 1
            except TimeoutError:
                outcomes["left"] += 1

        async with asyncio.timeout(240):
            await asyncio.gather(*(client(i) for i in range(120)))
            await asyncio.gather(*busy)
        assert set(outcomes) <= {200, "left"}
        assert outcomes[200] >= 60
        lane = fleet.core.queue.lanes["tiny"]
        assert lane.held > 20
        await until(lambda: is_idle(fleet.gateway))
        assert (len(lane), lane.queue.tokens, lane.queue.tenants()) == (0, 0, {})


async def test_engines_are_kept_busy_and_not_buried() -> None:
    """Late binding costs no throughput: what waits inside is small, and there is something as long as anybody waits."""
    async with Fleet(queue=SETTINGS, a=narrow(2)) as fleet:
        busy = await saturate(fleet, n=6, tokens=100)
        tasks = [asyncio.create_task(ask(fleet, f"one {i}", tokens=20)) for i in range(40)]
        await until(lambda: fleet.core.queue.n_waiting > 30)
        await asyncio.gather(*busy)
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, sum(load.requests for load in workers(fleet)[0].loads.values()))
            await asyncio.sleep(0.005)
        assert {(await task)[0] for task in tasks} == {200}
        assert most <= 6


async def test_a_flood_of_one_tenant_holds_another_up_by_no_more_than_its_turns() -> None:
    async with Fleet(queue=SETTINGS, tenancy=TenancyConfig(header="x-tenant"), a=narrow(2)) as fleet:
        busy = await saturate(fleet, n=6, tokens=200)
        order: list[str] = []

        async def client(i: int, tenant: str) -> None:
            assert (await ask(fleet, f"{tenant} {i}", tokens=10, **{"x-tenant": tenant}))[0] == 200
            order.append(tenant)

        flood = [asyncio.create_task(client(i, "flood")) for i in range(40)]
        await until(lambda: fleet.core.queue.n_waiting >= 35)
        few = [asyncio.create_task(client(i, "few")) for i in range(5)]
        await asyncio.gather(*busy, *flood, *few)
        assert max(i for i, tenant in enumerate(order) if tenant == "few") <= 18


async def test_p19_a_burst_is_queued_and_shed_and_no_storm_of_503() -> None:
    """P19: a burst far beyond what the fleet takes is served in turn or told when to come back."""
    settings = QueueConfig(waiting_per_worker=1, max_requests=30)
    async with Fleet(queue=settings, a=narrow(), b=narrow()) as fleet:
        busy = await saturate(fleet, tokens=100)
        answers = await asyncio.gather(*(ask(fleet, f"burst {i}", tokens=4) for i in range(300)))
        statuses = Counter(status for status, _, _ in answers)
        assert set(statuses) == {200, 429}
        assert statuses[200] >= 30
        for status, body, headers in answers:
            if status == 429:
                assert body["error"]["code"] == headers["x-warmroute-shed"] == "queue_full"
                assert 1 <= int(headers["Retry-After"]) <= 60
        await asyncio.gather(*busy)
        await until(lambda: is_idle(fleet.gateway))


async def test_a_drain_serves_who_waits_and_tells_the_rest() -> None:
    async with Fleet(queue=SETTINGS, a=narrow(1)) as fleet:
        busy = await saturate(fleet, n=4, tokens=60)
        waiting = [asyncio.create_task(ask(fleet, f"waits {i}", tokens=2)) for i in range(4)]
        await until(lambda: fleet.core.queue.n_waiting >= 3)
        assert await fleet.gateway.drain(30) == 0
        assert {(await task)[0] for task in (*waiting, *busy)} == {200}
    async with Fleet(queue=SETTINGS, a=narrow(1)) as fleet:
        busy = await saturate(fleet, n=4, tokens=2000)
        task = asyncio.create_task(ask(fleet, "waits", tokens=2))
        await until(lambda: fleet.core.queue.n_waiting == 1)
        assert await fleet.gateway.drain(0.1) == 5
        await fleet.gateway.close()
        status, body, headers = await task
        assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "draining", "1")
        cut = await asyncio.gather(*busy, return_exceptions=True)
        assert all(isinstance(each, aiohttp.ClientError) for each in cut)
        fleet.gateway.core.queue.close()


async def test_pages_and_metrics_tell_of_it_without_names_of_tenants() -> None:
    settings = QueueConfig(waiting_per_worker=1, max_requests=8)
    tenancy = TenancyConfig(header="x-tenant")
    async with Fleet(queue=settings, tenancy=tenancy, a=narrow(1)) as fleet:
        busy = await saturate(fleet, n=4, tokens=2000)
        waiting = [
            asyncio.create_task(ask(fleet, f"waits {i}", tokens=2, **{"x-tenant": f"acme{i}"})) for i in range(8)
        ]
        await until(lambda: fleet.core.queue.n_waiting == 8)
        assert (await ask(fleet, "one more", **{"x-tenant": "zeta"}))[0] == 429
        _, page = await fleet.get(fleet.admin + "/debug/queue")
        lane = page["models"]["tiny"]
        assert (page["waiting"], lane["waiting"], lane["shed"]["queue_full"]) == (8, 8, 1)
        assert lane["oldest_s"] > 0
        assert len(lane["tenants"]) == 8
        assert lane["predictions"]["armed"] is False
        assert page["workers"]["a"]["has_room"] is False
        _, text = await fleet.get(fleet.url + "/metrics")
        assert 'warmroute_queue_requests{model="tiny"} 8.0' in text
        assert 'warmroute_requests_rejected_total{reason="queue_full"} 1.0' in text
        _, ready = await fleet.get(fleet.url + "/readyz?verbose")
        (told,) = [each for each in ready["degraded"] if each["what"] == "queue_filling"]
        assert told["model"] == "tiny"
        assert "8 of 8 requests" in told["detail"]
        assert (await fleet.get(fleet.admin + "/debug/queue?x"))[0] == 200
        assert (await fleet.get(fleet.url + "/debug/queue"))[0] == 404
        for said in (str(page), text, str(ready)):
            assert "acme" not in said
        for task in (*busy, *waiting):
            task.cancel()


async def test_unknown_models_make_no_lanes() -> None:
    async with Fleet(queue=SETTINGS, a=narrow(1)) as fleet:
        busy = await saturate(fleet, n=4, tokens=500)
        held = asyncio.create_task(ask(fleet, "held", tokens=1))
        await until(lambda: fleet.core.queue.n_waiting == 1)
        for i in range(20):
            status, _, _ = await fleet.post(fleet.url + "/v1/completions", {"model": f"m{i}", "prompt": "x"})
            assert status == 404
        assert set(fleet.core.queue.lanes) == {"tiny"}
        for task in (*busy, held):
            task.cancel()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_o6_a_callers_salt_gives_no_isolation_ours_does(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """O6: the salt is made of the authenticated tenant; one that sends another's salt, or finds ours out, hits nothing
    of theirs, while each tenant hits its own.
    """
    monkeypatch.setenv("CACHE_SALT_SECRET", "one secret for all gateways")
    text = "the quick brown fox jumps over the lazy dog " * 40
    prompt = {
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
    }.get(path, {"messages": [{"role": "user", "content": text}]})
    kind = ROUTES[path].tokens or ""
    tenancy = TenancyConfig(header="x-tenant", salt="derive", required=True)
    async with Fleet(tenancy=tenancy, a=engine()) as fleet:
        hits = {"all": 0}

        async def hit(tenant: str, **fields: Any) -> int:
            body = {"model": "tiny", "max_tokens": 2, **prompt, **fields}
            async with fleet.http.post(fleet.url + path, json=body, headers={"x-tenant": tenant}) as response:
                assert response.status == 200, await response.text()
                await response.read()
            before, hits["all"] = hits["all"], fleet.engines["a"].stats()[0].prefix_hits
            return hits["all"] - before

        def sent_salt() -> str:
            salt = fleet.engines["a"].requests[-1].body["cache_salt"]
            assert isinstance(salt, str)
            return salt

        assert await hit("a", cache_salt="shared") == 0
        theirs = sent_salt()
        assert theirs != "shared"
        assert await hit("b", cache_salt="shared") == 0
        assert await hit("b", cache_salt=theirs) == 0
        assert await hit("b") == 0
        assert sent_salt() != theirs
        assert await hit("a", cache_salt="shared") > 0
        assert sent_salt() == theirs
        sent = fleet.engines["a"].requests[-1]
        explained = {"model": "tiny", "max_tokens": 2, **prompt, "cache_salt": "shared"}
        async with fleet.http.post(
            fleet.admin + "/debug/explain", json=explained, headers={"x-tenant": "a"}, params={"kind": kind}
        ) as response:
            assert (await response.json())["considered"][0]["cached_tokens"] > 0
        assert "x-tenant" not in {name.lower() for name in sent.headers}
        status, body, _ = await fleet.post(fleet.url + path, {"model": "tiny", "max_tokens": 2, **prompt})
        assert (status, body["error"]["code"]) == (401, "no_identity")
