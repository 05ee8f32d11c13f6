"""`/admin/workers`: added, drained and removed while the gateway serves."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gateway import workers_command
from gateway.config.schema import ScorerConfig
from gateway.discovery import FileDiscovery, Source
from gateway.engine.health import End
from gateway.errors import UserError
from scorer.types import ChangeKind, WorkerChange
from tests.support.gateway_world import Fleet, engine, until


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """Workers a and b in the configuration; the engine `spare` that is in none."""
    async with Fleet(a=engine(), b=engine(), spare=engine()) as started:
        started.core.take(Source.STATIC, WorkerChange(kind=ChangeKind.REMOVED, worker="spare"))
        yield started


async def call(fleet: Fleet, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    async with fleet.http.request(method, f"{fleet.admin}/admin/workers{path}", json=body, headers=headers) as response:
        return response.status, await response.json()


async def listed(fleet: Fleet) -> dict[str, dict[str, Any]]:
    status, answer = await call(fleet, "GET", "")
    assert status == 200
    return {row["name"]: row for row in answer["workers"]}


async def test_the_list_says_what_is_known_of_each(fleet: Fleet) -> None:
    row = (await listed(fleet))["a"]
    assert row == {
        "name": "a",
        "url": fleet.engines["a"].url,
        "source": "static",
        "role": "both",
        "state": "healthy",
        "reason": "new",
        "models": ["tiny"],
        "adapters": [],
        "ranks": 1,
        "requests": 0,
        "handing_over": 0,
        "drained": False,
        "leaving": False,
        "weight": 1.0,
        "labels": {},
    }
    assert await call(fleet, "GET", "/a") == (200, row)
    assert await call(fleet, "GET", "/" + quote(fleet.engines["a"].url, safe="")) == (200, row)


async def test_a_worker_is_added_serves_and_goes(fleet: Fleet) -> None:
    worker = {"url": fleet.engines["spare"].url, "name": "new", "weight": 2.0, "labels": {"gpu": "h200"}}
    status, row = await call(fleet, "POST", "", worker)
    assert (status, row["source"], row["weight"], row["labels"]) == (201, "api", 2.0, {"gpu": "h200"})
    assert (await call(fleet, "POST", "", worker))[0] == 200  # The same again.
    await until(lambda: fleet.core.capabilities.get("new"))
    assert {(await fleet.complete(f"{i} " * 50))[0] for i in range(20)} >= {"new"}
    status, row = await call(fleet, "POST", "", {**worker, "weight": 1.0})
    assert (status, row["weight"]) == (200, 1.0)
    assert fleet.core.fleet.workers["new"].weight == 1.0
    assert (await call(fleet, "DELETE", "/new"))[0] == 202
    await until(lambda: "new" not in fleet.core.fleet.workers)
    assert "new" not in await listed(fleet)
    assert {(await fleet.complete(f"m{i}"))[0] for i in range(4)} <= {"a", "b"}


async def test_a_bare_url_is_a_worker_too(fleet: Fleet) -> None:
    url = fleet.engines["spare"].url
    status, row = await call(fleet, "POST", "", url)
    assert (status, row["name"]) == (201, url.removeprefix("http://"))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"name": "x"}, "url: is missing"),
        ({"url": "ftp://h:1"}, "expected an http:// or https:// URL"),
        ({"url": "file:///etc/passwd"}, "expected an http:// or https:// URL"),
        ({"url": "http://user:pw@h:1"}, "expected an http:// or https:// URL"),
        ({"url": "http://h:1", "rank": 3}, "rank: unknown key"),
        ({"url": "http://[1:2]:80"}, "url: '1:2' does not appear to be an IPv4 or IPv6 address"),
        ({"url": "http://gpu..svc:8000"}, "url: its host is no name that can be looked up"),
        ({"url": "http://.gpu:8000"}, "url: its host is no name that can be looked up"),
        ({"url": "http://" + "x" * 64 + ":8000"}, "url: its host is no name that can be looked up"),
        ({"url": "http://\u202e:1"}, "url: its host is no name that can be looked up"),
        ({"url": "http://h:0"}, "url: 0 is no port"),
        ({"url": "http://h:1", "name": "x" * 300}, "name: expected a text of at most 253 characters"),
        ({"url": "http://h:1", "name": "a\r\nx-evil: 1"}, "without control characters"),
        ({"url": "http://h:1", "name": "a\n"}, "without control characters"),
        ({"url": "http://h:1", "name": ""}, "without control characters"),
        ({"url": "http://h:1", "weight": -1}, "weight: expected a number >= 0.01"),
        ({"url": "http://h:1", "role": "king"}, "role: expected one of both, prefill, decode"),
        ([], "expected a URL or an object"),
    ],
)
async def test_what_is_no_worker_is_refused(fleet: Fleet, body: Any, says: str) -> None:
    status, answer = await call(fleet, "POST", "", body)
    assert (status, answer["error"]["code"]) == (400, "invalid_worker")
    assert says in answer["error"]["message"]
    assert "pw" not in answer["error"]["message"]
    assert set(await listed(fleet)) == {"a", "b"}


async def test_what_is_nested_too_deep_is_refused(fleet: Fleet) -> None:
    for body in (b"[" * 100_000, b'{"url":"http://h:1","labels":' + b"[" * 5000 + b"]" * 5000 + b"}"):
        async with fleet.http.post(f"{fleet.admin}/admin/workers", data=body) as response:
            assert response.status == 400, await response.text()


async def test_a_host_that_cannot_be_looked_up_breaks_nothing(fleet: Fleet) -> None:
    """As discovery may find it; the configuration and this page refuse it."""
    fleet.core.take(Source.DNS, WorkerChange(kind=ChangeKind.ADDED, worker="odd", url="http://gpu..svc:8000"))
    await until(lambda: fleet.core.scraper.reachable("odd") is False)
    assert (await fleet.get(f"{fleet.url}/v1/models"))[0] == 200
    assert (await fleet.get(f"{fleet.url}/v1/responses/resp_x"))[1]["error"]["code"] in {
        "no_worker",
        "no_worker_available",
    }
    status, answer, _ = await fleet.post(f"{fleet.admin}/admin/index/reset?all=true&engine=true")
    assert status == 502
    assert set(answer["workers"]) == {"a", "b", "odd"}


async def test_names_and_urls_belong_to_one_worker(fleet: Fleet) -> None:
    a, spare = fleet.engines["a"].url, fleet.engines["spare"].url
    for body, code in (
        ({"url": a, "name": "a"}, "worker_exists"),
        ({"url": spare, "name": "a"}, "worker_exists"),
        ({"url": a, "name": "other"}, "worker_url_exists"),
        ({"url": a + "/", "name": "other"}, "worker_url_exists"),
    ):
        status, answer = await call(fleet, "POST", "", body)
        assert (status, answer["error"]["code"]) == (409, code), body
    await call(fleet, "POST", "", {"url": spare, "name": "new"})
    status, answer = await call(fleet, "POST", "", {"url": spare + "/v", "name": "new"})
    assert (status, answer["error"]["code"]) == (409, "worker_exists")


async def test_what_is_not_there_is_said(fleet: Fleet) -> None:
    for method, path in (("DELETE", "/nobody"), ("POST", "/nobody/drain"), ("GET", "/nobody")):
        status, answer = await call(fleet, method, path)
        assert (status, answer["error"]["code"]) == (404, "unknown_worker")
        assert "a, b" in answer["error"]["message"]
    assert (await call(fleet, "PUT", "/a"))[0] == 405
    assert (await call(fleet, "PATCH", ""))[0] == 405
    assert (await call(fleet, "GET", "/a/drain"))[0] == 405
    assert (await call(fleet, "DELETE", "/a?timeout_s=soon"))[0] == 400
    assert (await call(fleet, "DELETE", "/a?force=maybe"))[0] == 400


async def test_a_web_page_changes_nothing(fleet: Fleet) -> None:
    for method, path in (("POST", ""), ("POST", "/a/drain"), ("DELETE", "/a")):
        status, answer = await call(fleet, method, path, Origin="http://evil.example")
        assert (status, answer["error"]["code"]) == (403, "cross_origin")
    assert not (await listed(fleet))["a"]["drained"]
    assert (await call(fleet, "POST", "/a/undrain", Origin=fleet.admin))[0] == 200  # A page of the gateway's own.


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_web_page_cannot_even_make_work_here(fleet: Fleet, site: str) -> None:
    """Browsers send a GET without being asked whether they may: a recording, or a look at every block."""
    for mode in ("no-cors", "cors", "websocket"):
        told = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode}
        for path in ("/debug/record", "/debug/cache?digests", "/debug/stream", "/metrics"):
            async with fleet.http.get(fleet.admin + path, headers=told) as response:
                assert response.status == 403, path
                assert (await response.json())["error"]["code"] == "cross_origin"
        status, answer = await call(fleet, "POST", "/a/drain", **told)  # Some leave Origin out.
        assert (status, answer["error"]["code"]) == (403, "cross_origin")
    assert not fleet.gateway.core.recorder.active
    for headers in (
        {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"},  # A link.
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
        {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"},
    ):
        async with fleet.http.get(fleet.admin + "/debug", headers=headers) as response:
            assert response.status == 200, headers


async def test_what_is_no_url_of_a_page_is_refused(fleet: Fleet) -> None:
    host, port = fleet.admin.removeprefix("http://").split(":")
    for target in ("/sleep", "/reset_prefix_cache", "/debug/config", "/admin/workers", "localhost:1"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        status = int((await asyncio.wait_for(reader.readline(), 60)).split()[1])
        writer.close()
        assert 400 <= status < 500, target


async def test_a_name_that_was_made_to_lead_here_reaches_nothing(fleet: Fleet) -> None:
    """DNS rebinding: the page of a site whose name means this machine now is of the same origin as the admin port."""
    for host in ("evil.example", "evil.example:18001", "127.0.0.1.evil.example", "localhost.evil.example:1"):
        for method, path in (("GET", ""), ("POST", "/a/drain"), ("DELETE", "/a")):
            status, answer = await call(fleet, method, path, Host=host, Origin=f"http://{host}")
            assert (status, answer["error"]["code"]) == (403, "unknown_host"), (method, host)
    for host in ("localhost", "localhost:8001", "127.0.0.1:1", "[::1]:8001", "10.0.0.7", "gateway.localhost:80"):
        assert (await call(fleet, "GET", "", Host=host))[0] == 200, host


async def test_it_is_not_on_the_main_port(fleet: Fleet) -> None:
    async with fleet.http.get(fleet.url + "/admin/workers") as response:
        assert response.status == 404
    status, _, _ = await fleet.post(fleet.url + "/admin/workers", {"url": fleet.engines["spare"].url})
    assert status == 404


async def test_drained_for_an_update_and_taken_up_again(fleet: Fleet) -> None:
    """A rolling update: nothing new goes there, what runs ends, and it stays in the list until it is wanted again."""
    core = fleet.core
    for server in fleet.engines.values():
        server.faults.headers_delay_s = 0.3
    running = [asyncio.create_task(fleet.complete(f"{i}")) for i in range(4)]
    await until(lambda: core.planner.in_flight() == 4)
    status, row = await call(fleet, "POST", "/a/drain")
    assert (status, row["state"], row["drained"], row["leaving"]) == (202, "draining", True, False)
    assert (await call(fleet, "POST", "/a/drain"))[0] == 202
    assert {worker for worker, _ in await asyncio.gather(*running)} == {"a", "b"}
    for server in fleet.engines.values():
        server.faults.headers_delay_s = 0.0
    assert {(await fleet.complete(f"n{i}"))[0] for i in range(4)} == {"b"}
    await until(lambda: fleet.core.fleet.workers["a"].loads[0].requests == 0)
    core.leaving._idle_s["a"] = -1e9  # It has been idle for ages.
    core._remove_drained()
    assert "a" in core.fleet.workers
    status, row = await call(fleet, "POST", "/a/undrain")
    assert (status, row["state"], row["drained"]) == (200, "healthy", False)
    await fleet.all_serve("a", "b")


async def test_a_worker_that_is_busy_goes_when_it_is_done_and_not_before(fleet: Fleet) -> None:
    fleet.engines["a"].faults.headers_delay_s = 1.0
    await call(fleet, "POST", "/b/drain")
    running = asyncio.create_task(fleet.complete("x"))
    await until(lambda: fleet.core.planner.in_flight() == 1)
    status, row = await call(fleet, "DELETE", "/a")
    assert (status, row["state"], row["leaving"], row["requests"]) == (202, "draining", True, 1)
    assert (await call(fleet, "POST", "/a/undrain"))[1]["error"]["code"] == "worker_leaving"
    assert "a" in await listed(fleet)
    assert (await running)[0] == "a"
    await until(lambda: "a" not in fleet.core.fleet.workers)


@pytest.mark.parametrize(("how", "status"), [("?force=true", 200), ("?timeout_s=0", 202)])
async def test_who_cannot_wait_need_not_and_cuts_nobody(fleet: Fleet, how: str, status: int) -> None:
    fleet.engines["a"].faults.headers_delay_s = 4.0
    await call(fleet, "POST", "/b/drain")
    running = asyncio.create_task(fleet.complete("x"))
    await until(lambda: fleet.core.planner.in_flight() == 1)
    answered, row = await call(fleet, "DELETE", f"/a{how}")
    assert (answered, row["state"]) == (status, "removed" if status == 200 else "draining")
    await until(lambda: "a" not in fleet.core.fleet.workers, within_s=3.5)
    assert not running.done()
    assert (await running)[0] == "a"
    assert fleet.core.planner.in_flight() == 0


async def test_what_a_file_names_is_not_removed_but_drained(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(f"- {{url: {fleet.engines['spare'].url}, name: filed}}\n")
    fleet.core.follow(FileDiscovery(str(path), poll_s=0.02))
    await until(lambda: "filed" in fleet.core.fleet.workers)
    for how in ("", "?force=true"):
        status, answer = await call(fleet, "DELETE", "/filed" + how)
        assert (status, answer["error"]["code"]) == (409, "worker_listed")
        assert "/admin/workers/filed/drain" in answer["error"]["message"]
    assert (await call(fleet, "POST", "/filed/drain"))[0] == 202
    path.write_text(f"- {{url: {fleet.engines['spare'].url}, name: filed, weight: 3}}\n")
    await until(lambda: fleet.core.fleet.workers["filed"].weight == 3)
    assert fleet.core.fleet.workers["filed"].draining  # The drain outlives the change.
    path.write_text("[]\n")
    await until(lambda: (fleet.core.roster.source("filed"), fleet.core.roster.is_held("filed")) == (None, False))
    assert fleet.core.fleet.workers["filed"].draining


async def test_what_was_added_here_is_the_files_once_that_names_it(fleet: Fleet, tmp_path: Path) -> None:
    """The durable way: add it now, write it into the file for the next start."""
    await call(fleet, "POST", "", {"url": fleet.engines["spare"].url, "name": "new"})
    path = tmp_path / "workers.yaml"
    path.write_text(f"- {{url: {fleet.engines['spare'].url}, name: new}}\n")
    fleet.core.follow(FileDiscovery(str(path), poll_s=0.02))
    await until(lambda: fleet.core.roster.source("new") is Source.FILE)
    assert (await call(fleet, "POST", "", {"url": fleet.engines["spare"].url, "name": "new"}))[0] == 409
    path.write_text("[]\n")
    await until(lambda: fleet.core.fleet.workers["new"].draining)
    assert (await call(fleet, "POST", "", {"url": fleet.engines["spare"].url, "name": "new"}))[0] == 201
    assert not fleet.core.fleet.workers["new"].draining


@pytest.mark.parametrize("seed", range(3))
async def test_no_request_fails_for_changes_of_the_fleet(seed: int, tmp_path: Path) -> None:
    """Adds, removals, drains, a workers file and ejections in any order; worker `home` stays."""
    rng = random.Random(seed)
    path = tmp_path / "workers.yaml"
    path.write_text("[]\n")
    names = ["p", "q", "r"]
    async with Fleet(home=engine(), p=engine(), q=engine(), r=engine()) as fleet:
        core = fleet.core
        for name in names:
            core.take(Source.STATIC, WorkerChange(kind=ChangeKind.REMOVED, worker=name))
        core.follow(FileDiscovery(str(path), poll_s=0.01))
        for server in fleet.engines.values():
            server.faults.headers_delay_s = 0.02

        async def ask(i: int) -> None:
            await asyncio.sleep(i * 0.01)
            await fleet.complete(f"{i % 7} " * 40, stream=False)

        async def change_something() -> None:
            name = rng.choice(names)
            what = rng.choice(["add", "add", "delete", "force", "drain", "undrain", "file", "file", "eject"])
            if what == "add":
                await call(fleet, "POST", "", {"url": fleet.engines[name].url, "name": name})
            elif what in ("delete", "force"):
                status, _ = await call(fleet, "DELETE", f"/{name}?force={'true' if what == 'force' else 'false'}")
                assert status in (200, 202, 404, 409)
            elif what in ("drain", "undrain"):
                status, _ = await call(fleet, "POST", f"/{name}/{what}")
                assert status in (200, 202, 404, 409)
            elif what == "file":
                listed = [n for n in names if rng.random() < 0.5]
                path.write_text("".join(f"- {{url: {fleet.engines[n].url}, name: {n}}}\n" for n in listed) or "[]\n")
            elif name in core.fleet.workers:
                for _ in range(3):
                    ticket = core.health.request_started(name, asyncio.get_running_loop().time(), 0.0)
                    core.health.request_ended(ticket, End.CONNECT, asyncio.get_running_loop().time())
            await asyncio.sleep(rng.random() * 0.04)

        asked = [asyncio.create_task(ask(i)) for i in range(150)]
        for _ in range(60):
            await change_something()
        await asyncio.gather(*asked)
        assert core.planner.in_flight() == 0
        assert {sum(load.requests for load in w.loads.values()) for w in core.fleet.workers.values()} == {0}


async def command(fleet: Fleet, *args: str) -> int:
    return await asyncio.to_thread(workers_command.main, [*args, "--admin", fleet.admin])


async def test_the_command_does_all_of_it(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    url = fleet.engines["spare"].url
    assert await command(fleet, "add", url, "--name", "new", "--weight", "0.5", "--label", "gpu=l4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["labels"] == {"gpu": "l4"}
    await until(lambda: "new" in fleet.core.capabilities)
    assert await command(fleet, "list") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["name", "url", "source", "role", "state", "requests", "weight", "models"]
    assert rows[-1] == ["new", url, "api", "both", "healthy", "0", "0.5", "tiny"]
    assert await command(fleet, "drain", "new", "--wait") == 0
    assert "draining" in capsys.readouterr().out
    assert await command(fleet, "undrain", "new") == 0
    assert await command(fleet, "remove", "new", "--wait") == 0
    assert "removed" in capsys.readouterr().out
    assert "new" not in fleet.core.fleet.workers


async def test_the_commands_exit_codes(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command(fleet, "remove", "nobody") == 1
    assert "No worker is named nobody; there are: a, b" in capsys.readouterr().err
    fleet.engines["a"].faults.headers_delay_s = fleet.engines["b"].faults.headers_delay_s = 1.0
    running = [asyncio.create_task(fleet.complete(f"{i}")) for i in range(4)]
    await until(lambda: fleet.core.planner.in_flight() == 4)
    assert await command(fleet, "drain", "a", "--wait", "--timeout-s", "0.1") == 3
    await asyncio.gather(*running)
    with pytest.raises(UserError, match="no gateway answers"):
        await asyncio.to_thread(workers_command.main, ["list", "--admin", "http://127.0.0.1:9"])
    for args, says in (
        ([], "say what to do"),
        (["lst"], "invalid choice"),
        (["add"], "required"),
        (["drain", "a", "--timeout-s", "1"], "--wait"),
    ):
        with pytest.raises(UserError, match=says):
            workers_command.main(args)


async def test_a_session_stays_with_its_worker_and_is_told_so() -> None:
    scorer = ScorerConfig(policy="round-robin", session_affinity="strict", session_header="x-chat")
    async with Fleet(scorer=scorer, a=engine(), b=engine()) as fleet:
        seen = []
        for _ in range(6):
            body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
            async with fleet.http.post(fleet.url + "/v1/completions", json=body, headers={"X-Chat": "s"}) as response:
                seen.append((response.headers["x-warmroute-worker"], response.headers["x-warmroute-session"]))
        assert [what for _, what in seen] == ["new"] + ["kept"] * 5
        assert len({worker for worker, _ in seen}) == 1
        await call(fleet, "POST", f"/{seen[0][0]}/drain")
        async with fleet.http.post(fleet.url + "/v1/completions", json=body, headers={"X-Chat": "s"}) as response:
            assert response.headers["x-warmroute-session"] == "moved_unavailable"
        async with fleet.http.post(
            fleet.admin + "/debug/explain", json={"model": "tiny", "prompt": "x"}, headers={"X-Chat": "s"}
        ) as response:
            assert (await response.json())["session"] == "kept"
        _, metrics = await fleet.get(fleet.url + "/metrics")
        assert 'warmroute_session_decisions_total{outcome="kept"} 5.0' in metrics
        assert "warmroute_sessions 1.0" in metrics
        assert "x-warmroute-session" not in (await fleet.post(fleet.url + "/v1/completions", body))[2]


async def test_what_a_drain_is_and_who_is_named_twice_is_told(fleet: Fleet) -> None:
    await call(fleet, "POST", "/a/drain")
    url = fleet.engines["b"].url
    fleet.core.take(Source.FILE, WorkerChange(kind=ChangeKind.ADDED, worker="b-again", url=url))
    _, page = await fleet.get(fleet.url + "/readyz?verbose")
    told = {(row["what"], row["detail"]) for row in page["degraded"]}
    assert ("worker_draining", "an operator has drained it") in told
    assert ("discovery", f"b, b-again are one server ({url}), whose load is counted apart") in told


async def test_explain_shows_weights(fleet: Fleet) -> None:
    await call(fleet, "POST", "", {"url": fleet.engines["spare"].url, "name": "slow", "weight": 0.5})
    await until(lambda: "slow" in fleet.core.capabilities)
    _, page, _ = await fleet.post(fleet.admin + "/debug/explain", {"model": "tiny", "prompt": "x " * 4000})
    assert page["weights"] == {"a": 1.0, "b": 1.0, "slow": 0.5}
    comp_s = {row["decode"][0]: row["price"]["comp_s"] for row in page["considered"]}
    assert comp_s["slow"] == pytest.approx(2 * comp_s["a"])


@pytest.mark.parametrize("host", ["169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]"])
async def test_a_worker_where_clouds_keep_metadata_is_refused(host: str) -> None:
    async with Fleet(a=engine()) as fleet:
        status, answer, _ = await fleet.post(fleet.admin + "/admin/workers", {"url": f"http://{host}:80", "name": "x"})
        assert (status, answer["error"]["code"]) == (400, "invalid_worker")
        assert set(fleet.core.fleet.workers) == {"a"}
        assert fleet.core.roster.source("x") is None
        assert fleet.core.upstreams.get("x") is None
        url = fleet.engines["a"].url.replace("127.0.0.1", "localhost")
        for key in ("events", "replay"):
            given = {"url": url, "name": "x", "events": "tcp://10.0.0.1:5557", key: f"tcp://{host}:5557"}
            status, answer, _ = await fleet.post(fleet.admin + "/admin/workers", given)
            assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_worker", "events")
            assert set(fleet.core.fleet.workers) == {"a"}
