"""`warmroute gateway --processes N`: real processes in front of fake engines."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme

from bench.engine.server import FakeVllm
from tests.support.auth import bearer, made, write_keys
from tests.support.gateway_world import engine
from tests.support.processes_world import Held, Load, Processes, RawClient, eventually, total
from tests.support.redis_server import RedisServer, binary


def prompt(seed: int, n: int = 64) -> list[int]:
    """So many token ids that begin like no other."""
    return [5 + (seed * 7919 + i * 31) % 200 for i in range(n)]


async def test_requests_are_spread_and_counted_once() -> None:
    async with Processes(2) as them, AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(aiohttp.ClientSession()) for _ in range(8)]
        for turn in range(4):
            answers = await asyncio.gather(
                *(them.complete(http, prompt(8 * turn + i)) for i, http in enumerate(sessions))
            )
            assert [status for status, _ in answers] == [200] * 8
        made = await them.by_process()
        assert sum(made.values()) == 32
        assert min(made.values()) >= 8, made  # Eight connections, of which each process has about four.
        assert total(await them.metrics(), "warmroute_worker_chosen_total") == 32
        async with them.http.get(them.url + "/metrics") as main_port:
            assert "warmroute_process_up" in await main_port.text()
        log = await them.command.terminate()
        assert "by 2 processes" in log


async def test_processes_do_not_all_pick_the_same_idle_worker() -> None:
    names = ("a", "b", "c", "d")
    async with (
        Processes(2, "--health-scrape-interval-s=5", **{name: engine() for name in names}) as them,
        Held(them) as held,
    ):
        for i in range(4):
            await held.begin(prompt(i))

            async def all_know(i: int = i) -> bool:
                """Each process would send another one to a worker that has nothing, if there is one."""
                busy = await held.busy()
                if sum(busy.values()) < i + 1:
                    return False
                if i == 3:
                    return True
                chosen = [await would(them, number, prompt(99)) for number in range(2) for _ in range(3)]
                return not {each["decode"][0] for each in chosen} & busy.keys()

            await eventually(all_know)
        assert set((await held.busy()).values()) == {1}


async def would(them: Processes, number: int, ids: list[int]) -> dict[str, Any]:
    """What a process would do with it: the best way it sees."""
    body = {"model": "tiny", "prompt": ids, "max_tokens": 2}
    async with them.http.post(f"{them.admin}/debug/explain?process={number}", json=body) as answer:
        told: dict[str, Any] = await answer.json()
        assert answer.headers["x-warmroute-process"] == str(number)
        best: dict[str, Any] = told["considered"][0]
        return best


async def test_a_prefix_is_known_to_the_others_before_the_engine_tells() -> None:
    slow_machine = ("--health-scrape-interval-s=5", "--scorer-optimistic-ttl-s=300")
    async with Processes(2, *slow_machine, a=engine()) as them, Held(them) as held:
        await held.begin(prompt(1, 640))

        async def both_know() -> bool:
            found = [await would(them, number, prompt(1, 640)) for number in range(2)]
            return min(each["cached_tokens"] for each in found) >= 600

        await eventually(both_know)


async def test_what_is_killed_is_replaced_and_nobody_else_notices() -> None:
    async with Processes(2) as them, Load(them, 8) as load:
        last = total(await them.metrics(), "warmroute_requests_total")
        for victim in ("0", "1"):
            await load.more(40)
            n_broken = load.broken
            pid = await them.kill(victim)
            await them.replaced(victim, pid)
            assert load.broken - n_broken <= 8  # Each client has one request under way.
            now = total(await them.metrics(), "warmroute_requests_total")
            assert now >= last, "counters never go back"
            last = now
        n_broken = load.broken
        pid = await them.kill("hub")
        await load.more(40)
        await them.replaced("hub", pid)
        await load.more(40)
        assert load.broken == n_broken, "the hub has no client's connection"
        assert set(load.statuses) == {200}, load.statuses

        async def is_well() -> bool:
            body = await them.get("/readyz?verbose")
            kinds = {each["what"] for each in body["degraded"]}
            return body["ready"] and not kinds & {"indexer_lost", "replicas_apart", "process_lost"}

        await eventually(is_well)
        ends = await them.metrics()
        assert ends['warmroute_process_ends_total{why="ended"}'] == 3


async def test_a_killed_process_has_nothing_in_flight_for_the_others() -> None:
    async with Processes(2, "--health-scrape-interval-s=5") as them, Held(them) as held:
        for i in range(12):
            await held.begin(prompt(i))

        async def are(n: int) -> bool:
            return sum((await held.busy()).values()) == n

        await eventually(lambda: are(12))
        pid = await them.kill("1")
        await them.replaced("1", pid)
        await eventually(held.are_some_cut)
        n_left = held.n_left
        assert 0 < n_left < 12
        await eventually(lambda: are(n_left))
        metrics = await them.metrics()
        assert metrics["warmroute_requests_in_flight"] == n_left


async def restarted(them: Processes) -> None:
    before = await them.pids()
    them.command.process.send_signal(signal.SIGUSR2)

    async def all_new() -> bool:
        now = await them.pids()
        return now.keys() == before.keys() and not set(now.values()) & set(before.values())

    await eventually(all_new)


async def test_a_rolling_restart_costs_no_request() -> None:
    async with Processes(2) as them:
        idle = [await RawClient.of(them) for _ in range(6)]
        for i, client in enumerate(idle):
            assert await client.complete(prompt(i)) == 200
        async with Load(them, 6) as load:
            await load.more(30)
            counted = total(await them.metrics(), "warmroute_requests_total")
            await restarted(them)
            await them.all_ready()
            await load.more(30)
            assert load.broken == 0
            assert set(load.statuses) == {200}, load.statuses
            assert total(await them.metrics(), "warmroute_requests_total") >= counted + 30
        for i, client in enumerate(idle):
            assert await client.complete(prompt(i)) == 200, "an idle connection went on in another process"
            await client.close()
        log = await them.command.terminate()
        assert "all processes are new ones" in log


async def test_a_successor_that_is_killed_is_replaced_while_its_predecessor_still_drains() -> None:
    async with Processes(2, "--gateway-drain-timeout-s=300") as them, Held(them) as held:
        for i in range(8):
            await held.begin(prompt(i))
        before = await them.pid("0")
        async with them.http.post(them.admin + "/admin/restart") as answer:
            assert answer.status == 202
        await them.replaced("0", before)
        successor = await them.kill("0")
        await them.replaced("0", successor)
        assert before in [it["pid"] for it in await them.processes()], "it still drains"


async def test_a_head_that_is_half_there_when_its_process_leaves_is_waited_for() -> None:
    async with Processes(2) as them:
        clients = [await RawClient.of(them) for _ in range(6)]
        for i, client in enumerate(clients):
            assert await client.complete(prompt(i)) == 200
        body = json.dumps({"model": "tiny", "prompt": prompt(7), "max_tokens": 2}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        pids = await them.pids()
        for client in clients:
            client.send(head[:30])
        async with them.http.post(them.admin + "/admin/restart") as answer:
            assert answer.status == 202

        async def one_leaves() -> bool:
            return any(it["pid"] == pids["0"] and it["state"] != "serving" for it in await them.processes())

        await eventually(one_leaves)
        for client in clients:
            client.send(head[30:] + body)
        assert [await client.status() for client in clients] == [200] * len(clients)
        for client in clients:
            await client.close()


async def test_a_head_that_stays_half_there_is_answered_when_the_drain_is_over() -> None:
    async with Processes(2, "--gateway-drain-timeout-s=3") as them:
        clients = [await RawClient.of(them) for _ in range(4)]
        for i, client in enumerate(clients):
            assert await client.complete(prompt(i)) == 200
        for client in clients:
            client.send(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Le")
        await restarted(them)
        assert [await client.status() for client in clients] == [503] * len(clients)
        for client in clients:
            await client.ended()
            await client.close()


async def test_connections_that_cannot_be_given_away_bring_their_last_request() -> None:
    """aiohttp's, as those with TLS: their next answer says that they close."""
    async with Processes(2, "--gateway-http=aiohttp") as them, Load(them, 6) as load:
        await load.more(30)
        await restarted(them)
        await load.more(30)
        assert load.broken == 0
        assert set(load.statuses) == {200}


async def test_idle_connections_go_on_with_a_server_of_the_other_kind(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps({"gateway": {"http": "fast"}}))
    async with Processes(2, f"--config={file}") as them:
        clients = [await RawClient.of(them) for _ in range(6)]
        for i, client in enumerate(clients):
            assert await client.complete(prompt(i)) == 200
        file.write_text(json.dumps({"gateway": {"http": "aiohttp"}}))
        await restarted(them)
        await them.all_ready()  # Who went has given them all away by then.
        for i, client in enumerate(clients):
            assert await client.complete(prompt(i)) == 200
            await client.close()


async def test_idle_connections_without_tls_end_where_it_is_spoken_from_now_on(tmp_path: Path) -> None:
    file, cert, key = (tmp_path / name for name in ("gateway.yaml", "cert.pem", "key.pem"))
    ca = trustme.CA()
    leaf = ca.issue_cert("127.0.0.1")
    cert.write_bytes(b"".join(each.bytes() for each in leaf.cert_chain_pems))
    leaf.private_key_pem.write_to_path(str(key))
    trusting = ssl.create_default_context()
    ca.configure_trust(trusting)
    file.write_text(json.dumps({}))
    async with Processes(2, f"--config={file}") as them:
        clients = [await RawClient.of(them) for _ in range(6)]
        for i, client in enumerate(clients):
            assert await client.complete(prompt(i)) == 200
        file.write_text(json.dumps({"tls": {"cert": str(cert), "key": str(key)}}))
        await restarted(them)
        for client in clients:
            await client.ended()
            await client.close()
        url = them.url.replace("http:", "https:") + "/readyz"
        async with aiohttp.ClientSession() as http, http.get(url, ssl=trusting) as answer:
            assert answer.status == 200


async def test_with_redis_they_are_replicas_there() -> None:
    if binary("redis") is None:
        pytest.skip("no redis-server here")
    async with RedisServer() as server, Processes(2, f"--redis-url={server.url}") as them:
        status, _ = await them.complete(them.http, prompt(1))
        assert status == 200
        keys = await server.command("KEYS", "{warmroute:default}:load:*")
        assert len(keys) == 2
        assert (await them.metrics())["warmroute_replicas_known"] == 1


async def test_what_operators_change_is_changed_everywhere() -> None:
    async with Processes(2) as them, FakeVllm(engine()) as server:
        body = {"url": server.url, "name": "late"}
        async with them.http.post(them.admin + "/admin/workers", json=body) as answer:
            assert answer.status == 201
        async with them.http.put(them.admin + "/admin/log-level", json={"level": "warning"}) as answer:
            assert answer.status == 200
        for label in ("0", "1", "hub"):
            names = {it["name"] for it in (await them.get(f"/admin/workers?process={label}"))["workers"]}
            assert "late" in names
            assert (await them.get(f"/admin/log-level?process={label}"))["level"] == "warning"
        pid = await them.kill("1")
        await them.replaced("1", pid)

        async def has_it() -> bool:
            names = {it["name"] for it in (await them.get("/admin/workers?process=1"))["workers"]}
            return "late" in names and (await them.get("/admin/log-level?process=1"))["level"] == "warning"

        await eventually(has_it)
        async with them.http.delete(them.admin + "/admin/workers/late?force=true") as answer:
            assert answer.status == 200
        async with them.http.delete(them.admin + "/admin/workers/late") as answer:
            assert answer.status == 404
        for label in ("0", "1", "hub"):
            assert len((await them.get(f"/admin/workers?process={label}"))["workers"]) == 2
        async with them.http.post(them.admin + "/admin/index/reset?all=true") as answer:
            assert answer.status == 200
        async with them.http.get(them.admin + "/readyz?process=7") as answer:
            assert answer.status == 200  # It is the gateway's own.
        async with them.http.get(them.admin + "/debug/queue?process=7") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "no_process"


async def test_a_worker_that_was_removed_and_named_again_is_in_processes_that_come_later(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    async with FakeVllm(engine()) as early, FakeVllm(engine()) as late:

        def name(*workers: tuple[str, FakeVllm]) -> None:
            file.write_text(json.dumps({"workers": [{"name": name, "url": each.url} for name, each in workers]}))

        name(("early", early), ("late", late))
        async with Processes(2, f"--config={file}", has_engines=False) as them:

            async def reloaded(*names: str) -> None:
                them.command.process.send_signal(signal.SIGHUP)
                for label in ("0", "1", "hub"):
                    await eventually(lambda label=label: known(label, *names))

            async def known(label: str, *names: str) -> bool:
                workers = (await them.get(f"/admin/workers?process={label}"))["workers"]
                return names == tuple(it["name"] for it in workers)

            async def replaced() -> None:
                pid = await them.kill("1")
                await them.replaced("1", pid)

            await reloaded("early", "late")
            async with them.http.delete(them.admin + "/admin/workers/late?force=true") as answer:
                assert answer.status == 200
            await replaced()
            assert await known("1", "early"), "the configuration is as it was, and it was removed"
            name(("early", early))
            await reloaded("early")
            name(("early", early), ("late", late))
            await reloaded("early", "late")
            await replaced()
            assert await known("1", "early", "late")


async def test_limits_of_keys_hold_for_the_whole(tmp_path: Path) -> None:
    key, entry = made(requests_per_minute=10)
    file = tmp_path / "keys.json"
    write_keys(file, entry)
    async with Processes(2, f"--auth-keys-file={file}") as them, AsyncExitStack() as stack:
        statuses: list[int] = []
        began_s = time.monotonic()
        for i in range(30):
            http = await stack.enter_async_context(aiohttp.ClientSession(headers=bearer(key)))
            statuses.append((await them.complete(http, prompt(i)))[0])
        come_back = 1 + (time.monotonic() - began_s) / 6
        assert statuses[:10] == [200] * 10
        assert set(statuses) == {200, 429}
        assert statuses.count(200) <= 10 + come_back
        decided = await them.by_process()
        assert min(decided.values()) > 0, "both have let some in"


async def test_the_page_and_the_stream_say_whose_they_are() -> None:
    async with Processes(2) as them:
        assert (await them.get("/debug/state?process=1"))["head"]["face"] == "gateway, process 1 of 2"
        async with them.http.get(them.admin + "/debug/stream?process=1") as stream:
            assert stream.headers["x-warmroute-process"] == "1"
            line = await stream.content.readline()
            while not line.startswith(b"data:"):
                line = await stream.content.readline()
            assert json.loads(line[5:])["head"]["face"] == "gateway, process 1 of 2"
        async with them.http.get(them.admin + "/debug/record") as rows:
            assert rows.status == 200
            assert json.loads(await rows.content.readline())["lost_rows"] == 0
            await asyncio.sleep(0.5)
            async with AsyncExitStack() as stack:
                for i in range(4):
                    http = await stack.enter_async_context(aiohttp.ClientSession())
                    assert (await them.complete(http, prompt(5)))[0] == 200, i
            found = [json.loads(await rows.content.readline()) for _ in range(4)]
            assert len({tuple(row["hash_ids"][:1]) for row in found}) == 1, "equal beginnings have equal numbers"
