"""Workers that come, go, come back and change while the gateway serves."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway import core as core_module
from gateway.config import Config
from gateway.core import Core
from gateway.debug.health import degradations
from gateway.discovery import FileDiscovery
from scorer.types import ChangeKind, WorkerChange
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
    monkeypatch.setattr(core_module, "_KEEP_DRAINED_S", 0.2)
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
        assert {(await fleet.complete(f"m{i}"))[0] for i in range(6)} == {"a", "b"}


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
            core.apply(added(name, kind=ChangeKind.REMOVED))
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
