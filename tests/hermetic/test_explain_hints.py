"""`warmroute explain` with hint headers: obeyed where those of requests are, live and by a saved fleet."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config.schema import PdConfig, Worker
from gateway.debug import explain
from tests.support.fleets import prompt
from tests.support.gateway_world import Fleet, decode, engine, prefill, until
from tests.support.sidecar_world import Pod

pytestmark = pytest.mark.hermetic
PREFILLER = "x-prefiller-host-port"
LONG = prompt(3000)
HINTED = PdConfig(policy="header", allow=("10.9.0.9:8000",))


class Asked:
    """The command, against an admin address or a fleet that is saved there first."""

    def __init__(self, admin: str, folder: Path, capsys: pytest.CaptureFixture[str], *, saved: bool) -> None:
        self._admin = admin
        self._state = folder / "fleet.json"
        self._body = folder / "body.json"
        self._body.write_text(json.dumps({"model": "tiny", "prompt": LONG}))
        self._saved = saved
        self._capsys = capsys

    async def __call__(self, *headers: str) -> dict[str, Any]:
        code, out, err = await self.run("--json", *headers)
        assert code == 0, err
        answer: dict[str, Any] = json.loads(out)
        return answer

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        where = ["--admin", self._admin]
        if self._saved:
            assert await asyncio.to_thread(explain.main, [*where, "--save-state", str(self._state)]) == 0
            where = ["--state", str(self._state)]
        headers = [arg for name in arguments if ":" in name for arg in ("--header", name)]
        flags = [name for name in arguments if ":" not in name]
        self._capsys.readouterr()
        asked = [*where, "--body", str(self._body), *flags, *headers]
        code = await asyncio.to_thread(explain.main, asked)
        return code, *self._capsys.readouterr()


@pytest.mark.parametrize("saved", [False, True], ids=["live", "saved"])
async def test_a_hint_is_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: bool) -> None:
    async with Fleet(pd=HINTED, p=prefill(), q=prefill(), d=decode()) as fleet:
        await until(lambda: all(worker.block_size() for worker in fleet.core.fleet.workers.values()))
        asked = Asked(fleet.admin, tmp_path, capsys, saved=saved)
        p, q = (fleet.engines[name].url.removeprefix("http://") for name in "pq")
        plain = await asked()
        assert (plain["choice"], plain["pd_reason"], plain["notes"]) == ("local", "no_hint", [])
        for endpoint, name in ((p, "p"), (q, "q")):
            hinted = await asked(f"{PREFILLER}: {endpoint}")
            assert (hinted["choice"], hinted["pd_reason"]) == ("remote", "hint")
            assert hinted["considered"][0]["prefill"] == [name, 0]
        local = await asked(f"{PREFILLER}: {p}", "x-warmroute-plan: v1;id=x;choice=local;n=1;hd=0;hp=0")
        assert (local["choice"], local["pd_reason"]) == ("local", "plan")

        fleet.core.planner.pairs.set_incompatible(("p", "d"), "another version")
        broken = await asked(f"{PREFILLER}: {p}")
        assert (broken["choice"], broken["pd_reason"]) == ("local", "pair_incompatible")
        assert broken["broken_pairs"][0]["reason"] == "another version"
        _, table, _ = await asked.run(f"{PREFILLER}: {p}")
        assert "local (pair_incompatible)" in table
        assert "no handover from p to d: incompatible (another version)" in table
        other = await asked(f"{PREFILLER}: {p}, {q}")
        assert other["considered"][0]["prefill"] == ["q", 0]

        new = await asked(f"{PREFILLER}: 10.9.0.9:8000")
        assert new["choice"] == "local"
        assert "not known yet" in new["notes"][0]
        code, _, error = await asked.run(f"{PREFILLER}: 10.9.0.8:8000")
        assert code == 1
        assert "not allowed" in error
        assert set(fleet.core.fleet.workers) == {"p", "q", "d"}
        metrics = fleet.core.metrics.registry
        assert metrics.get_sample_value("warmroute_hints_total", {"header": PREFILLER, "outcome": "used"}) == 0


@pytest.mark.parametrize("saved", [False, True], ids=["live", "saved"])
async def test_where_hints_are_not_obeyed_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: bool
) -> None:
    async with Fleet(a=engine()) as fleet:
        asked = Asked(fleet.admin, tmp_path, capsys, saved=saved)
        answer = await asked(f"{PREFILLER}: 10.9.0.9:8000")
        assert answer["notes"] == [f"{PREFILLER}: not obeyed here: only by a sidecar, or with pd.policy: header"]
        _, table, _ = await asked.run(f"{PREFILLER}: 10.9.0.9:8000")
        assert table.splitlines()[-1] == answer["notes"][0]


async def test_a_sidecar_explains_for_its_own_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with Fleet(p=prefill()) as others:
        workers = (Worker(url=others.engines["p"].url, name="p", role="prefill"),)
        async with Pod(decode(), workers=workers) as pod:
            await until(lambda: len(pod.core.capabilities) == 2)
            await until(lambda: all(worker.block_size() for worker in pod.core.fleet.workers.values()))
            asked = Asked(pod.admin, tmp_path, capsys, saved=False)
            endpoint = others.engines["p"].url.removeprefix("http://")
            hinted = await asked(f"{PREFILLER}: {endpoint}")
            assert (hinted["choice"], hinted["pd_reason"]) == ("remote", "hint")
            assert hinted["considered"][0]["decode"] == [pod.sidecar.pod.names[0], 0]
            assert hinted["considered"][0]["prefill"] == ["p", 0]


async def test_sidecar_shows_its_workers_and_lets_them_be_drained() -> None:
    async with Fleet(p=prefill()) as others:
        workers = (Worker(url=others.engines["p"].url, name="p", role="prefill"),)
        async with Pod(decode(), workers=workers) as pod:
            await until(lambda: len(pod.core.capabilities) == 2)
            admin = pod.admin + "/admin/workers"
            async with pod.http.get(admin) as answer:
                assert {each["name"] for each in (await answer.json())["workers"]} == {"p", *pod.sidecar.pod.names}
            async with pod.http.post(admin + "/p/drain") as answer:
                assert answer.status == 202
            async with pod.http.get(admin + "/p") as answer:
                assert (await answer.json())["drained"]
            async with pod.http.post(admin, json={"url": "http://127.0.0.1:9"}) as answer:
                assert (answer.status, answer.headers["Allow"]) == (405, "GET")
            async with pod.http.delete(admin + "/p") as answer:
                assert (answer.status, answer.headers["Allow"]) == (405, "GET")
            async with pod.http.get(pod.url() + "/admin/workers") as answer:
                assert answer.status == 404  # Of the engine, which has no such page.
