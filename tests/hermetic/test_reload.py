"""A running gateway whose configuration changes: the file watched, SIGHUP, a bad file, the log level."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from bench.engine.server import FakeVllm
from gateway.config import Config, load_config
from gateway.config.schema import EppConfig, LoggingConfig, QueueConfig, Worker
from gateway.epp.run import Epp
from gateway.reload import Source
from gateway.sidecar.run import Sidecar
from scorer.types import Role
from tests.support.command import Command, EppCommand
from tests.support.gateway_world import Fleet, engine, prefill, until
from tests.support.sidecar_world import Pod, free_port


def write(path: Path, config: Any) -> None:
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump(config))
    os.replace(new, path)


async def eventually(condition: Callable[[], Any], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not await condition():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.05)


async def get(command: Command, path: str) -> Any:
    async with command.http.get(command.admin + path) as response:
        return json.loads(await response.text())


async def test_workers_objectives_and_level_change_while_it_serves(tmp_path: Path) -> None:
    file = tmp_path / "warmroute.yaml"
    async with FakeVllm(engine()) as a, FakeVllm(engine()) as b:
        base = {"workers": [{"url": a.url, "name": "a"}], "logging": {"level": "warning"}}
        write(file, base)
        async with Command("gateway", "--config", str(file)) as gateway:

            async def workers() -> set[str]:
                """Those that get requests."""
                rows = (await get(gateway, "/admin/workers"))["workers"]
                return {row["name"] for row in rows if row["state"] != "draining"}

            async def degraded() -> set[str]:
                return {row["what"] for row in (await get(gateway, "/readyz?verbose"))["degraded"]}

            assert await workers() == {"a"}
            write(file, {**base, "workers": [{"url": b.url, "name": "b"}], "scorer": {"slo_ttft_ms": 700}})
            gateway.process.send_signal(signal.SIGHUP)
            await eventually(lambda: _is(workers(), {"b"}))
            config = await get(gateway, "/debug/config")
            assert config["scorer"]["slo_ttft_ms"] == 700
            assert [worker["name"] for worker in config["workers"]] == ["b"]

            write(file, {**base, "workers": [{"url": "ftp://b"}]})
            gateway.process.send_signal(signal.SIGHUP)
            await eventually(lambda: _has(degraded(), "config_rejected"))
            assert await workers() == {"b"}

            write(file, {**base, "index": {"budget_bytes": 1 << 30}})
            gateway.process.send_signal(signal.SIGHUP)
            await eventually(lambda: _has(degraded(), "config_needs_restart"))
            assert "config_rejected" not in await degraded()
            await eventually(lambda: _is(workers(), {"a"}))

            log = await gateway.terminate()
        assert "the configuration is not taken" in log
        assert "these keys need a restart: index.budget_bytes" in log


async def _is(value: Any, wanted: Any) -> bool:
    return bool(await value == wanted)


async def _has(value: Any, wanted: Any) -> bool:
    return wanted in await value


async def test_a_changed_file_is_seen_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.service._UPKEEP_S", 0.05)
    file = tmp_path / "warmroute.yaml"
    async with Fleet(a=engine(), b=engine()) as fleet:
        named = [{"url": server.url, "name": name} for name, server in fleet.engines.items()]
        write(file, {"workers": named})
        given = load_config(str(file))
        fleet.gateway.follow_config(given, Source(read=lambda: load_config(str(file)), file=str(file)))
        changed = {"workers": [named[0]], "gateway": {"max_concurrency": 3}, "health": {"eject_after_s": 9}}
        write(file, changed)
        await until(lambda: fleet.core.fleet.workers["b"].draining)
        assert fleet.gateway.plane.max_concurrency == 3
        assert fleet.core.health.settings.eject_after_s == 9
        assert {(await fleet.complete(f"x{i}"))[0] for i in range(3)} == {"a"}
        write(file, {**changed, "workers": [named[0], {**named[1], "weight": 0.5}]})
        await until(lambda: not fleet.core.fleet.workers["b"].draining)
        assert fleet.core.fleet.workers["b"].weight == 0.5


async def test_a_sidecar_takes_new_prefill_workers_and_no_queue() -> None:
    async with FakeVllm(prefill()) as p, Pod() as pod:
        sidecar: Sidecar = pod.sidecar
        given = sidecar.config
        changed = msgspec.structs.replace(
            given,
            workers=(Worker(url=p.url, name="p"),),
            queue=msgspec.structs.replace(given.queue, enabled=True),
        )
        reloading = sidecar.follow_config(given, Source(read=lambda: changed, file=None))
        await reloading.reload()
        await until(lambda: "p" in pod.core.fleet.workers)
        assert pod.core.fleet.workers["p"].role is Role.PREFILL
        assert pod.core.queue.settings.enabled is False
        assert reloading.pending == []


async def test_a_picker_takes_new_workers_by_address_and_no_key_of_the_sidecar() -> None:
    own = EppConfig(host="127.0.0.1", port=0, health_port=0, metrics_port=0, admin_port=0, tls="off")
    given = Config(epp=own, logging=LoggingConfig(level="error"))
    async with FakeVllm(engine()) as a, Epp(given) as epp:
        named = (Worker(url=a.url.replace("127.0.0.1", "localhost"), name="a"),)
        sidecar = msgspec.structs.replace(given.sidecar, port=1)
        changed = msgspec.structs.replace(given, workers=named, sidecar=sidecar)
        reloading = epp.follow_config(given, Source(read=lambda: changed, file=None))
        await reloading.reload()
        await until(lambda: "a" in epp.core.fleet.workers)
        assert epp.core.fleet.workers["a"].url == a.url  # A proxy is told addresses.
        assert reloading.pending == []


async def test_a_picker_takes_new_objectives_and_rewrites_and_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    file = tmp_path / "warmroute.yaml"
    own = {"host": "127.0.0.1", "port": 0, "health_port": 0, "metrics_port": 0, "admin_port": 0, "tls": "off"}

    def put(**epp: Any) -> None:
        write(file, {"epp": {**own, **epp}, "logging": {"level": "error"}})

    put(objectives=["batch=-1"], rewrites=["nick=tiny"])
    given = load_config(str(file))
    async with Epp(given) as epp:
        epp.objectives.replace({"found": 3})
        reloading = epp.follow_config(given, Source(read=lambda: load_config(str(file)), file=str(file)))

        def now() -> tuple[list[int | None], list[str]]:
            """What requests are looked at with."""
            priorities = [epp.picker._objectives.priority(name) for name in ("batch", "urgent", "found")]
            return priorities, [epp.picker._rewrites.target(name, random.Random(1)) for name in ("nick", "nack")]

        assert now() == ([-1, None, 3], ["tiny", "nack"])
        put(objectives=["urgent=5", "found=1"], rewrites=["nack=tiny"])
        await reloading.reload()
        assert now() == ([None, 5, 3], ["nick", "tiny"])
        assert (reloading.pending, epp.config.epp.objectives) == ([], ("urgent=5", "found=1"))
        for bad in ({"objectives": ["urgent=9", "x"]}, {"objectives": ["urgent=9"], "rewrites": ["x"]}):
            put(**bad)
            await reloading.reload()
            assert now() == ([None, 5, 3], ["nick", "tiny"])
            assert reloading.problem is not None
            assert next(iter(bad)) in reloading.problem or "rewrites" in reloading.problem
        put()
        await reloading.reload()
        assert (now(), reloading.problem) == (([None, None, 3], ["nick", "nack"]), None)


async def test_a_longer_wait_for_room_is_not_cut_short_by_the_pickers_first_deadline() -> None:
    own = EppConfig(host="127.0.0.1", port=0, health_port=0, metrics_port=0, admin_port=0, tls="off")
    given = Config(
        epp=msgspec.structs.replace(own, decision_deadline_s=2.0),
        queue=QueueConfig(max_wait_s=30.0),
        logging=LoggingConfig(level="error"),
    )
    async with Epp(given) as epp:
        assert epp.server.decision_timeout_s > 30
        changed = msgspec.structs.replace(given, queue=QueueConfig(max_wait_s=300.0))
        reloading = epp.follow_config(given, Source(read=lambda: changed, file=None))
        await reloading.reload()
        assert epp.core.queue.settings.max_wait_s == 300
        assert epp.server.decision_timeout_s > 302


async def test_sighup_gives_a_picker_new_objectives(tmp_path: Path) -> None:
    file = tmp_path / "warmroute.yaml"
    pages = free_port()
    own = {"health_port": 0, "metrics_port": pages, "tls": "off"}
    async with FakeVllm(engine()) as a:
        base = {"workers": [{"url": a.url, "name": "a"}]}
        write(file, {**base, "epp": own})
        async with EppCommand(pages, "epp", "--config", str(file)) as epp:

            async def model() -> str:
                asked = {"model": "nick", "prompt": "hi"}
                async with epp.http.post(epp.admin + "/debug/explain", json=asked) as response:
                    return str((await response.json()).get("model"))

            assert await model() == "None"
            write(file, {**base, "epp": {**own, "rewrites": ["nick=tiny"]}})
            epp.process.send_signal(signal.SIGHUP)
            await eventually(lambda: _is(model(), "tiny"))


async def test_the_log_level_changes_through_the_admin_port() -> None:
    async with Fleet(a=engine()) as fleet:
        url = fleet.admin + "/admin/log-level"
        assert await fleet.get(url) == (200, {"level": "error"})
        assert not fleet.gateway.access.enabled
        async with fleet.http.put(url, json={"level": "debug"}) as response:
            assert (response.status, await response.json()) == (200, {"level": "debug"})
        assert fleet.gateway.access.enabled
        for bad in ({"level": "loud"}, {}, {"level": "info", "more": 1}, "info"):
            async with fleet.http.put(url, json=bad) as response:
                assert response.status == 400
                assert "one of debug, info, warning, error" in (await response.json())["error"]["message"]
        async with fleet.http.put(url, json={"level": "error"}, headers={"Origin": "http://evil.example"}) as response:
            assert response.status == 403
        async with fleet.http.post(url, json={"level": "error"}) as response:
            assert response.status == 405
        assert await fleet.get(url) == (200, {"level": "debug"})
        async with fleet.http.put(url, json={"level": "error"}) as response:
            assert response.status == 200
        assert (await fleet.get(fleet.url + "/admin/log-level"))[0] == 404  # Not on the data plane.
