"""Workers that come, go, come back and change while the gateway serves."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from gateway import core as core_module
from gateway import leaving
from gateway.config import Config
from gateway.config.schema import Worker
from gateway.core import Core
from gateway.debug.health import DEGRADATIONS, degradations, health
from gateway.discovery import DnsDiscovery, FileDiscovery, Source
from gateway.engine.capabilities import Capabilities, EventSource
from gateway.engine.health import State
from scorer.cost import CostModel
from scorer.types import ChangeKind, EngineStats, WorkerChange
from tests.support.gateway_world import Fleet, engine, until


@pytest.fixture
async def core() -> AsyncIterator[Core]:
    made = Core(Config())
    await made.start()
    yield made
    await made.close()


def added(name: str, url: str = "http://127.0.0.1:9", kind: ChangeKind = ChangeKind.ADDED) -> WorkerChange:
    return WorkerChange(kind=kind, worker=name, url=url)


async def test_changes_about_workers_nobody_knows_are_ignored(core: Core) -> None:
    core.apply(added("a", kind=ChangeKind.REMOVED))
    core.apply(added("a", kind=ChangeKind.DRAINING))
    core.apply(WorkerChange(kind=ChangeKind.ADDED, worker="b"))
    assert core.fleet.workers == {}
    assert [row.what for row in degradations(core)] == ["no_workers"]


async def test_a_worker_that_is_gone_leaves_nothing(core: Core) -> None:
    core.apply(added("a"))
    assert core.upstreams.get("a") is not None
    core.apply(added("a", kind=ChangeKind.REMOVED))
    assert (core.fleet.workers, core.upstreams.get("a"), core.hits.workers, core.scraper.status()) == ({}, None, {}, {})
    with pytest.raises(KeyError):
        core.health.state("a")
    core.apply(added("a"))
    assert core.available("a")


async def test_a_bad_change_harms_no_other(core: Core, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        source = Source.STATIC
        problem = None

        async def changes(self) -> AsyncIterator[WorkerChange]:
            yield WorkerChange(kind=ChangeKind.ADDED, worker="bad", url="http://[::bad")
            yield added("good")
            raise RuntimeError("lost the cluster")

    core.follow(Broken())
    await until(lambda: core.ended_discoveries)
    assert "good" in core.fleet.workers
    assert ("discovery", "Broken ended: lost the cluster") in {(row.what, row.detail) for row in degradations(core)}


async def test_a_draining_worker_ends_its_work_is_kept_a_while_and_then_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaving, "KEEP_DRAINED_S", 0.2)
    async with Fleet(a=engine(), b=engine()) as fleet:
        core = fleet.core
        fleet.engines["a"].faults.headers_delay_s = fleet.engines["b"].faults.headers_delay_s = 0.5
        running = [asyncio.create_task(fleet.complete(f"{i}")) for i in range(4)]
        await until(lambda: core.planner.in_flight() == 4)
        core.apply(added("a", fleet.engines["a"].url, ChangeKind.DRAINING))
        assert {worker for worker, _ in await asyncio.gather(*running)} == {"a", "b"}
        assert {(await fleet.complete(f"n{i}"))[0] for i in range(2)} == {"b"}
        await until(lambda: "a" not in core.fleet.workers)
        core.apply(added("a", fleet.engines["a"].url))
        await until(lambda: "a" in core.capabilities)
        await fleet.all_serve("a", "b")


async def test_a_draining_worker_may_come_back_with_what_it_held() -> None:
    async with Fleet(a=engine()) as fleet:
        await fleet.complete("the quick brown fox " * 40)
        await until(lambda: fleet.core.index.stats()["entries"])
        entries = fleet.core.index.stats()["entries"]
        url = fleet.engines["a"].url
        fleet.core.apply(added("a", url, ChangeKind.DRAINING))
        status, answer, _ = await fleet.post(fleet.url + "/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "no_worker")
        fleet.core.apply(added("a", url))
        _, usage = await fleet.complete("the quick brown fox " * 40)
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0
        assert fleet.core.index.stats()["entries"] >= entries


async def test_another_server_under_the_same_name_starts_from_nothing() -> None:
    async with Fleet(a=engine(), spare=engine(model="other")) as fleet:
        core = fleet.core
        core.apply(added("spare", kind=ChangeKind.REMOVED))
        await fleet.complete("the quick brown fox " * 40)
        await until(lambda: core.index.stats()["entries"])
        core.apply(added("a", fleet.engines["spare"].url, ChangeKind.CHANGED))
        assert core.index.stats()["entries"] == 0 or core.index.stats()["retired_holders"]
        await until(lambda: core.fleet.models() == {"other": ["a"]})
        assert (await fleet.complete("x", model="other"))[0] == "a"
        status, _, _ = await fleet.post(fleet.url + "/v1/completions", {"model": "tiny", "prompt": "x"})
        assert status == 404


async def test_a_workers_file_is_followed(tmp_path: Path) -> None:
    async with Fleet(a=engine(), b=engine()) as fleet:
        core = fleet.core
        for name in ("a", "b"):
            core.take(Source.STATIC, added(name, kind=ChangeKind.REMOVED))
        path = tmp_path / "workers.yaml"
        path.write_text(f"- {{url: {fleet.engines['a'].url}, name: a}}\n")
        core.follow(FileDiscovery(str(path), poll_s=0.05))
        await until(lambda: set(core.capabilities) == {"a"})
        path.write_text(f"- {{url: {fleet.engines['b'].url}, name: b}}\n")
        await until(lambda: "b" in core.capabilities and core.fleet.workers["a"].draining)
        assert {(await fleet.complete(f"{i}"))[0] for i in range(3)} == {"b"}
        path.write_text("- {nonsense: 1}\n")
        await until(lambda: any(row.what == "discovery" for row in degradations(core)))
        assert (await fleet.complete("x"))[0] == "b"


async def test_the_addresses_of_a_name_are_followed() -> None:
    async with Fleet(a=engine()) as fleet:
        core, port = fleet.core, fleet.engines["a"].url.rpartition(":")[2]
        core.take(Source.STATIC, added("a", kind=ChangeKind.REMOVED))
        entry = Worker(url=f"http://localhost:{port}", weight=0.5)
        core.follow(DnsDiscovery([entry, Worker(url="http://no-such-name.invalid")], interval_s=1))
        name = f"127.0.0.1:{port}"
        await until(lambda: name in core.capabilities)
        assert (await fleet.complete("x"))[0] == name
        assert core.fleet.workers[name].weight == 0.5
        details = [row.detail for row in degradations(core) if row.what == "discovery"]
        assert details == ["no-such-name.invalid has no address"]
        _, answer = await fleet.get(fleet.admin + "/admin/workers")
        assert [(row["name"], row["source"]) for row in answer["workers"]] == [(name, "dns")]


async def test_another_engine_tokenises_while_the_first_is_down() -> None:
    """One dead worker must not turn cache routing off for the whole fleet."""
    async with Fleet(a=engine(), b=engine(), c=engine()) as fleet:
        core = fleet.core
        await fleet.complete("one " * 50)
        (home,) = {model.home for model in core._tokenizers._models.values()}
        await fleet.engines[home].stop()
        for i in range(6):
            assert (await fleet.complete(f"{i} " * 50))[0] != home
        await until(lambda: core.scraper.reachable(home) is False)
        await fleet.complete("last " * 50)
        status = core.tokens.status()["tiny"]
        assert status["served"] == {"engine": 8}
        assert (status["engine"]["failures"], status["engine"]["breaker"]) == (0, "closed")


async def test_an_engine_that_is_slow_to_tokenise_is_asked_last_for_a_while() -> None:
    async with Fleet(a=engine(), b=engine()) as fleet:
        core = fleet.core
        model = core._tokenizers._models["tiny"]
        slow = fleet.engines[model.home].faults
        slow.paths, slow.headers_delay_s = ("/tokenize",), 60.0
        for i in range(4):
            await fleet.complete(f"{i} " * 50)
        assert core.tokens.status()["tiny"]["served"] == {"estimate": 1, "engine": 3}


async def test_engines_with_another_root_do_not_stand_in_for_each_other() -> None:
    async with Fleet(a=engine(root="/models/one"), b=engine(root="/models/other")) as fleet:
        core = fleet.core
        model = core._tokenizers._models["tiny"]
        assert model.others == []
        await fleet.engines[model.home].stop()
        await until(lambda: core.scraper.reachable(model.home) is False)
        await fleet.complete("x")
        assert core.tokens.status()["tiny"]["served"] == {"estimate": 1}


async def test_nothing_is_usable_when_every_worker_is_dead() -> None:
    async with Fleet(a=engine(), b=engine()) as fleet:
        for server in fleet.engines.values():
            await server.stop()
        await until(lambda: not any(fleet.core.scraper.reachable(name) for name in fleet.engines))
        status, page = await fleet.get(fleet.url + "/health")
        assert (status, page["usable"]) == (503, 0)
        assert {row["state"] for row in page["workers"].values()} <= {"down", "ejected", "half open"}
        assert (await fleet.get(fleet.url + "/readyz"))[0] == 503
        text = (await fleet.get(fleet.url + "/metrics"))[1]
        assert set(re.findall(r"warmroute_worker_available\{.*\} (.*)", text)) == {"0.0"}
        assert 'warmroute_degraded{what="worker_down"} 1.0' in text
        assert 'warmroute_degraded{what="worker_asleep"} 0.0' in text
        assert set(re.findall(r'warmroute_degraded\{what="(\w+)"', text)) == set(DEGRADATIONS)
        assert 'warmroute_token_source{model="tiny",source="engine"}' in text
        assert "replays_running" not in text


async def test_a_worker_down_from_the_start_is_not_usable(core: Core) -> None:
    core.apply(added("a"))
    await until(lambda: core.scraper.reachable("a") is False)
    assert health(core)["usable"] == 0


@asynccontextmanager
async def engine_with_a_key(key: str) -> AsyncIterator[str]:
    """URL of a server as `vllm serve --api-key`: /v1 wants the key. Here /tokenize does, too."""

    async def answer(request: web.Request) -> web.Response:
        if request.path in ("/v1/models", "/tokenize") and request.headers.get("Authorization") != f"Bearer {key}":
            return web.Response(status=401)
        if request.path == "/metrics":
            return web.Response(text="vllm:num_requests_running 1\n")
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "tiny"}]})
        return web.json_response({"tokens": [1, 2]}) if request.path == "/tokenize" else web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_engines_that_want_an_api_key_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINES_KEY", " sk-engines\n")
    core = Core(Config(engine_api_key_env="ENGINES_KEY"))
    try:
        await core.start()
        async with engine_with_a_key("sk-engines") as url:
            core.apply(added("a", url))
            await until(lambda: "a" in core.capabilities)
            (tokens,) = await core.tokens.tokens_for("completions", {"prompt": "x"}, "tiny")
            assert (tokens.source, list(tokens.as_array())) == ("engine", [1, 2])
    finally:
        await core.close()


async def test_a_missing_api_key_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    core = Core(Config())
    try:
        await core.start()
        async with engine_with_a_key("sk-engines") as url:
            core.apply(added("a", url))
            await until(lambda: core.scraper.status()["a"].reason)
            found = {row.what: row.detail for row in degradations(core)}
            assert "/v1/models: status 401" in found["models_unknown"]
            assert health(core)["usable"] == 0
    finally:
        await core.close()


async def test_a_failed_probe_is_no_further_outage() -> None:
    async with Fleet(a=engine(), b=engine()) as fleet:
        core = fleet.core
        await fleet.engines["a"].stop()
        for state in (State.EJECTED, State.HALF_OPEN, State.EJECTED):
            await until(lambda state=state: core.health.state("a").state is state)  # type: ignore[misc]
        await asyncio.sleep(0)
        text = (await fleet.get(fleet.url + "/metrics"))[1]
        assert 'warmroute_ejections_total{worker="a"} 1.0' in text


async def test_a_frozen_engine_is_out_although_its_request_may_be_silent_for_long() -> None:
    async with Fleet(a=engine(), b=engine()) as fleet:
        core = fleet.core
        # Only the silence is to be judged, not the scrapes that fail a second later.
        core.scraper._settings = msgspec.structs.replace(core.scraper._settings, failures=1000)
        ticket = core.health.request_started("a", time.monotonic(), quiet_s=10_000.0)
        fleet.engines["a"].faults.paths = ("/",)
        fleet.engines["a"].faults.stall = True
        fleet.engines["a"].apply_faults()
        await until(lambda: core.health.state("a").state is not State.HEALTHY)
        assert "not a byte" in core.health.state("a").reason
        assert ticket.worker.name == "a"


@pytest.mark.parametrize("change", [{"kv_usage": 0.5}, {"running": 2.0}, {"waiting": 1.0}, {"prefill_time_sum_s": 3.0}])
def test_an_engine_whose_numbers_move_works(change: dict[str, float]) -> None:
    before = EngineStats(scraped_at_s=1.0, kv_usage=0.4, running=1.0, waiting=0.0, prefill_time_sum_s=2.0)
    assert not core_module._worked(before, EngineStats(scraped_at_s=2.0, **_fields(before)))
    assert core_module._worked(before, EngineStats(scraped_at_s=2.0, **{**_fields(before), **change}))


def _fields(stats: EngineStats) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in core_module._PROGRESS}


def test_the_pace_is_the_engines_own_prefill_time_over_the_prior() -> None:
    cost = CostModel()
    predicted_s = cost.comp_s(2000, 0)
    for factor, pace in ((0.5, 1.0), (8.0, 8.0), (1e9, 100.0)):
        stats = EngineStats(
            scraped_at_s=0.0,
            prompt_tokens=20_000.0,
            prefill_time_count=10.0,
            prefill_time_sum_s=10 * factor * predicted_s,
        )
        assert core_module._pace(stats, cost, 1.0) == pytest.approx(pace)
    assert core_module._pace(EngineStats(scraped_at_s=0.0), cost, 1.0) == 1.0


async def test_a_silent_rank_does_not_look_empty() -> None:
    """E22: one rank of two publishes. The worker's events do not count until both do, and the silent one is named."""
    async with Fleet(a=engine(data_parallel_size=2, replay_endpoint=None)) as fleet:
        core, worker = fleet.core, fleet.core.fleet.workers["a"]

        async def heard(rank: int) -> None:
            """Asked until it is: what is published before the subscription has arrived is lost."""
            number = 0
            async with asyncio.timeout(60):
                while ("a", rank) not in core.publishing._heard:
                    body = {"model": "tiny", "prompt": f"{number} the quick brown fox " * 40, "max_tokens": 1}
                    headers = {"X-data-parallel-rank": str(rank)}
                    async with fleet.http.post(
                        fleet.engines["a"].url + "/v1/completions", json=body, headers=headers
                    ) as response:
                        assert response.status == 200
                    number += 1
                    await asyncio.sleep(0.05)

        await heard(0)
        core.publishing.watch()
        assert not worker.publishes_events
        core.hits.predicted("a", 1, 0)
        silent = [row.detail for row in degradations(core) if row.what == "events_silent"]
        assert ["rank 1" in detail for detail in silent] == [True]
        assert "events_catching_up" not in {row.what for row in degradations(core)}
        await heard(1)
        await until(lambda: worker.publishes_events)
        assert "events_silent" not in {row.what for row in degradations(core)}


async def test_a_rank_that_says_it_published_nothing_yet_counts_as_empty() -> None:
    async with Fleet(a=engine(data_parallel_size=2)) as fleet:
        await until(lambda: fleet.core.fleet.workers["a"].publishes_events)
        assert not any(feed.batches for feed in fleet.core.ingest.status().values())


async def test_a_fleet_without_workers_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    core = Core(Config())
    try:
        for _ in range(3):
            core._watch_emptiness()
        assert ["no worker is configured" in message for message in caplog.messages] == [True]
        core.apply(added("a"))
        core._watch_emptiness()
        core.apply(added("a", kind=ChangeKind.REMOVED))
        core._watch_emptiness()
        assert len(caplog.messages) == 2
    finally:
        await core.close()


@pytest.mark.parametrize(
    ("sources", "ranks"),
    [(None, [2]), ({}, [2]), ({2: EventSource()}, [2]), ({0: EventSource(), 1: EventSource()}, [0, 1])],
    ids=["old", "off", "says it", "says others"],
)
async def test_the_rank_that_discovery_names_is_that_of_an_engine_that_says_none(
    core: Core, sources: dict[int, EventSource] | None, ranks: list[int]
) -> None:
    core.apply(msgspec.structs.replace(added("a"), rank=2, events_endpoint="tcp://127.0.0.1:5557"))
    core.on_capabilities("a", Capabilities(models=("m",), event_sources=sources))
    assert sorted(core.fleet.workers["a"].loads) == ranks
    await until(lambda: len(core.ingest.status()) == len(ranks))
    assert {(rank, feed.endpoint) for (_, rank), feed in core.ingest.status().items()} == {
        (rank, f"tcp://127.0.0.1:{5557 + rank}") for rank in ranks
    }
