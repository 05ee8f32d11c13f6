"""Redis and Valkey fail in every way: requests are served all the while, it is said what is wrong, and it heals."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from gateway.config.schema import RedisConfig, ScorerConfig
from gateway.replicas import reader
from tests.support.gateway_world import engine, until
from tests.support.redis_server import KINDS, Kind, RedisServer, binary, free_port
from tests.support.replica_world import ReplicatedFleet, sharing

pytestmark = pytest.mark.hermetic
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    if binary(kind) is None:
        pytest.skip(f"no {kind}-server here")
    return kind


@asynccontextmanager
async def served(fleet: ReplicatedFleet) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Requests by way of every replica, all the while; none fails. What it gives waits until each has answered some
    more.
    """
    over = False
    counts = [0] * len(fleet.gateways)

    async def ask(i: int) -> None:
        while not over:
            await fleet.complete(i, [7 + (counts[i] * 31 + j) % 90 for j in range(40)])
            counts[i] += 1
            await asyncio.sleep(0.02)

    async def goes_on() -> None:
        before = list(counts)
        await until(lambda: all(now >= then + 5 for now, then in zip(counts, before, strict=True)))

    tasks = [asyncio.create_task(ask(i)) for i in range(len(fleet.gateways))]
    try:
        yield goes_on
    finally:
        over = True
        await asyncio.gather(*tasks)
    assert min(counts) > 0


async def readyz(fleet: ReplicatedFleet, i: int) -> str:
    port = fleet.gateways[i].admin_port
    async with fleet.http.get(f"http://127.0.0.1:{port}/readyz?verbose") as response:
        assert response.status == 200
        return await response.text()


async def failures(fleet: ReplicatedFleet, i: int, kind: str) -> float:
    port = fleet.gateways[i].admin_port
    async with fleet.http.get(f"http://127.0.0.1:{port}/metrics") as response:
        text = await response.text()
    found = re.search(rf'warmroute_replicas_failures_total{{kind="{kind}"}} (\S+)', text)
    assert found is not None
    return float(found[1])


def are_apart(fleet: ReplicatedFleet, word: str) -> bool:
    return all(any(word in problem for problem in fleet.problems(i)) for i in range(len(fleet.gateways)))


async def until_healed(fleet: ReplicatedFleet) -> None:
    await until(lambda: not any(fleet.problems(i) for i in range(len(fleet.gateways))), within_s=60)
    others = len(fleet.gateways) - 1
    await until(lambda: all(fleet.hears(gateway) >= others for gateway in fleet.gateways), within_s=60)


async def test_a_restart_of_redis(kind: Kind) -> None:
    async with (
        RedisServer(kind) as server,
        ReplicatedFleet(2, sharing(server, ttl_s=1.0), a=engine(), b=engine()) as fleet,
        served(fleet) as goes_on,
    ):
        server.kill()
        await until(lambda: are_apart(fleet, "no connection"))
        await goes_on()
        assert "redis.url" in await readyz(fleet, 0)
        await until(lambda: all(not g.core.replicas.reader.elsewhere.writers for g in fleet.gateways))
        await server.start()
        await until_healed(fleet)
        assert "replicas_apart" not in await readyz(fleet, 0)
        assert await failures(fleet, 0, "unreachable") >= 1


async def test_a_server_whose_clock_is_behind_takes_over(kind: Kind) -> None:
    """It numbers its stream by its own time: what it says is heard though the old one's numbers were higher."""
    async with (
        RedisServer(kind) as server,
        ReplicatedFleet(
            2, sharing(server, ttl_s=60.0), ScorerConfig(session_affinity="prefer"), a=engine(), b=engine()
        ) as fleet,
    ):
        await server.command("XADD", "{warmroute:default}:news", "9999999999999-0", "of", "the future")
        await until(lambda: all(g.core.replicas.reader._after == b"9999999999999-0" for g in fleet.gateways))
        server.kill()
        await until(lambda: are_apart(fleet, "no connection"))
        await server.start()
        await until(lambda: all(g.core.replicas.is_shared for g in fleet.gateways))
        sessions = fleet.gateways[1].core.planner.sessions  # Of these only news tell those that have begun.
        await fleet.complete(0, [7] * 40, **{"x-session-id": "s"})
        await until(lambda: len(sessions) == 1)


async def test_redis_is_not_there_at_the_start(kind: Kind) -> None:
    server = RedisServer(kind)
    async with ReplicatedFleet(2, sharing(server), wait=False, a=engine()) as fleet, served(fleet):
        await until(lambda: are_apart(fleet, "no connection"))
        async with server:
            await until_healed(fleet)


async def test_all_is_flushed(kind: Kind) -> None:
    async with (
        RedisServer(kind) as server,
        ReplicatedFleet(2, sharing(server, ttl_s=2.0), a=engine(), b=engine()) as fleet,
        served(fleet),
    ):
        await server.command("FLUSHALL")
        keys = re.compile(rb"\{warmroute:default\}:(load|writers)")
        await until_says(server, lambda found: sum(bool(keys.match(key)) for key in found) == 3, "KEYS", "*")
        for gateway in fleet.gateways:  # Both are due every few seconds.
            gateway.core.replicas.publisher._kept_at_s = 0.0
        kept = re.compile(rb"\{warmroute:default\}:learned")
        await until_says(server, lambda found: sum(bool(kept.match(key)) for key in found) == 2, "KEYS", "*")
        held = {name: each.faults for name, each in fleet.engines.items()}
        for faults in held.values():
            faults.headers_delay_s = 0.5
        await until(lambda: sum(fleet.others_at(1, name) for name in held) > 0)


async def until_says(server: RedisServer, is_so: Callable[[Any], object], *command: str, within_s: float = 60) -> None:
    """Until what the server answers to `command` is so."""
    async with asyncio.timeout(within_s):
        while not is_so(await server.command(*command)):  # noqa: ASYNC110 - it does not tell
            await asyncio.sleep(0.02)


async def test_answers_are_slow(kind: Kind) -> None:
    async with RedisServer(kind) as server:
        redis = sharing(server, ttl_s=1.0, op_timeout_ms=100.0)
        async with ReplicatedFleet(2, redis, a=engine(), b=engine()) as fleet, served(fleet):
            await server.command("CLIENT", "PAUSE", 2500, "ALL")
            await until(lambda: are_apart(fleet, "op_timeout_ms"))
            assert await failures(fleet, 0, "slow") >= 1
            await until_healed(fleet)


async def test_it_hangs_with_its_connections_open(kind: Kind) -> None:
    async with RedisServer(kind) as server:
        redis = sharing(server, ttl_s=1.0, op_timeout_ms=200.0)
        async with ReplicatedFleet(2, redis, a=engine(), b=engine()) as fleet, served(fleet):
            server.freeze()
            try:
                await until(lambda: are_apart(fleet, "op_timeout_ms"))
                await until(lambda: all(not g.core.replicas.reader.elsewhere.writers for g in fleet.gateways))
            finally:
                server.thaw()
            await until_healed(fleet)


async def test_no_request_waits_for_one_that_hangs(kind: Kind) -> None:
    async with RedisServer(kind) as server:
        redis = sharing(server, op_timeout_ms=3_600_000.0)  # A request that did would not come back.
        async with ReplicatedFleet(2, redis, a=engine(), b=engine()) as fleet, served(fleet) as goes_on:
            server.freeze()
            try:
                await goes_on()
                await goes_on()
            finally:
                server.thaw()


async def test_a_wrong_password_is_told_and_a_right_one_taken(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "password"
    file.write_text("sesam-wrong\n")
    async with RedisServer(kind, "--requirepass", "sesam-right") as server:
        redis = sharing(server, password_file=str(file))
        async with ReplicatedFleet(2, redis, wait=False, a=engine()) as fleet, served(fleet):
            await until(lambda: are_apart(fleet, "password"))
            text = await readyz(fleet, 0)
            assert "redis.password_file" in text
            file.write_text("sesam-right\n")
            await until_healed(fleet)
    told = caplog.text + text
    assert "sesam" not in told


async def test_no_password_where_one_is_wanted(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        RedisServer(kind, "--requirepass", "sesam") as server,
        ReplicatedFleet(1, sharing(server), wait=False, a=engine()) as fleet,
    ):
        await until(lambda: are_apart(fleet, "REDIS_PASSWORD"))
        monkeypatch.setenv("REDIS_PASSWORD", "sesam")
        await fleet.join()
        await until(lambda: fleet.hears(fleet.gateways[1]) >= 0)


async def test_its_memory_is_full(kind: Kind) -> None:
    async with RedisServer(kind) as server:
        redis = sharing(server, ttl_s=1.0)
        async with ReplicatedFleet(2, redis, a=engine(), b=engine()) as fleet, served(fleet):
            await server.command("CONFIG", "SET", "maxmemory", "1")
            await until(lambda: are_apart(fleet, "OOM"))
            assert await failures(fleet, 0, "full") >= 1
            await server.command("CONFIG", "SET", "maxmemory", "0")
            await until_healed(fleet)


async def test_it_becomes_a_replica(kind: Kind) -> None:
    async with RedisServer(kind) as master, RedisServer(kind) as server:
        redis = sharing(server, ttl_s=1.0)
        async with ReplicatedFleet(2, redis, a=engine(), b=engine()) as fleet, served(fleet):
            await server.command("REPLICAOF", "127.0.0.1", master.port)
            await until(lambda: are_apart(fleet, "takes no writes"))
            await server.command("REPLICAOF", "NO", "ONE")
            await until_healed(fleet)


async def test_its_acl_forbids(kind: Kind) -> None:
    async with RedisServer(kind) as server:
        redis = sharing(server, ttl_s=1.0)
        async with ReplicatedFleet(2, redis, a=engine(), b=engine()) as fleet, served(fleet):
            await server.command("ACL", "SETUSER", "default", "-xadd")
            await until(lambda: are_apart(fleet, "ACL"))
            await server.command("ACL", "SETUSER", "default", "+xadd")
            await until_healed(fleet)


async def test_the_documented_user_has_all_rights_it_needs(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "replicas.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ACL SETUSER .*$", page, re.MULTILINE)
    monkeypatch.setenv("REDIS_PASSWORD", "PASSWORD")
    async with RedisServer(kind) as server:
        await server.command(*line.split())
        redis = sharing(server, user="warmroute")
        async with ReplicatedFleet(2, redis, a=engine(), b=engine()) as fleet:
            async with served(fleet):
                await server.command("SADD", "{warmroute:default}:writers", "dead")
                for gateway in fleet.gateways:  # All it ever does, at once.
                    gateway.core.replicas.publisher._kept_at_s = 0.0
                    gateway.core.replicas.reader._prune_at_s = 0.0
                await until_says(server, lambda found: b"dead" not in found, "SMEMBERS", "{warmroute:default}:writers")
            await fleet.gateways[1].close()
            await until(lambda: fleet.hears(fleet.gateways[0]) == 0)
            assert fleet.problems(0) == []


async def test_a_failover_by_sentinel(kind: Kind) -> None:
    async with RedisServer(kind) as first, RedisServer(kind) as second:
        await second.command("REPLICAOF", "127.0.0.1", first.port)
        await until_says(first, lambda role: role[0] == b"master" and len(role[2]) == 1, "ROLE")
        watch = (
            f"sentinel monitor mymaster 127.0.0.1 {first.port} 1\n"
            "sentinel down-after-milliseconds mymaster 500\n"
            "sentinel failover-timeout mymaster 3000\n"
        )
        async with RedisServer(kind, sentinel=watch) as sentinel:
            await until_says(sentinel, bool, "SENTINEL", "REPLICAS", "mymaster")
            redis = sharing(sentinel, mode="sentinel", ttl_s=1.0)
            async with ReplicatedFleet(2, redis, a=engine(), b=engine()) as fleet, served(fleet):
                first.kill()
                await until(lambda: all(map(fleet.problems, range(2))))
                await until_healed(fleet)
                assert (await second.command("ROLE"))[0] == b"master"


async def test_a_cluster(kind: Kind) -> None:
    # The usual port of its bus, 10,000 above, may be none.
    async with RedisServer(kind, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as node:
        await node.command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await until_says(node, lambda told: b"cluster_state:ok" in told, "CLUSTER", "INFO")
        redis = sharing(node, mode="cluster", ttl_s=1.0)
        async with ReplicatedFleet(2, redis, a=engine(), b=engine()) as fleet, served(fleet):
            node.kill()
            await until(lambda: all(map(fleet.problems, range(2))))
            await node.start()  # It knows itself and its slots from its folder.
            await until_healed(fleet)


async def test_tls(tmp_path: Path) -> None:
    if binary("redis") is None:
        pytest.skip("no redis-server here")
    ca = trustme.CA()
    certificate = ca.issue_cert("127.0.0.1")
    files = [tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem")]
    ca.cert_pem.write_to_path(files[0])
    certificate.cert_chain_pems[0].write_to_path(files[1])
    certificate.private_key_pem.write_to_path(files[2])
    tls = free_port()
    options = ["--tls-port", str(tls), "--tls-auth-clients", "no"]
    for option, file in zip(("ca-cert-file", "cert-file", "key-file"), files, strict=True):
        options += [f"--tls-{option}", str(file)]
    async with RedisServer("redis", *options) as server:
        redis = sharing(server, url=f"rediss://127.0.0.1:{tls}", ca=str(files[0]))
        async with ReplicatedFleet(2, redis, a=engine()) as fleet:
            assert fleet.problems(0) == []
        unknown = sharing(server, url=f"rediss://127.0.0.1:{tls}")
        async with ReplicatedFleet(1, unknown, wait=False, a=engine()) as fleet:
            await until(lambda: are_apart(fleet, "no connection"))


async def test_a_unix_socket(tmp_path: Path) -> None:
    if binary("redis") is None:
        pytest.skip("no redis-server here")
    socket = tmp_path / "s"
    async with (
        RedisServer("redis", "--unixsocket", str(socket)) as server,
        ReplicatedFleet(2, sharing(server, url=f"unix://{socket}"), a=engine()) as fleet,
    ):
        assert fleet.problems(0) == []


async def test_what_is_no_message_harms_nobody(kind: Kind) -> None:
    tag = "{warmroute:default}"
    async with (
        RedisServer(kind) as server,
        ReplicatedFleet(2, sharing(server), a=engine(), b=engine()) as fleet,
        served(fleet),
    ):
        await server.command("SADD", f"{tag}:writers", "odd", "newer", b"\xff\xfe")
        for junk in (b"", b"\x01\xc1", b"\x01\x92\x01\x91\x97\xa1a\x00\xff\x00\x00\x00\x00", b"\x07later"):
            await server.command("SET", f"{tag}:load:odd", junk)
            await server.command("XADD", f"{tag}:news", "*", "w", "odd", "n", junk)
        await server.command("XADD", f"{tag}:news", "*", "nothing", "known")
        await until(lambda: are_apart(fleet, "another version"))
        assert "odd" not in fleet.gateways[0].core.replicas.reader.elsewhere.writers
        assert all(fleet.gateways[i].core.replicas.is_shared for i in range(2))


@pytest.mark.parametrize("key", ["news", "writers"])
async def test_a_key_of_ours_is_something_else(kind: Kind, key: str) -> None:
    name = f"{{warmroute:default}}:{key}"
    async with (
        RedisServer(kind) as server,
        ReplicatedFleet(2, sharing(server, ttl_s=1.0), a=engine(), b=engine()) as fleet,
        served(fleet),
    ):
        # At once, as a replica may make it anew between two commands.
        await server.command("EVAL", "redis.call('DEL', KEYS[1]) redis.call('RPUSH', KEYS[1], 'x')", 1, name)
        await until(lambda: are_apart(fleet, "redis.prefix"))
        assert await failures(fleet, 0, "wrong_type") >= 1
        await server.command("DEL", name)
        await until_healed(fleet)


async def test_what_answers_is_no_redis() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while await reader.read(4096):
                writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        url = f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with ReplicatedFleet(2, RedisConfig(url=url), wait=False, a=engine()) as fleet, served(fleet):
            await until(lambda: are_apart(fleet, "no Redis"))
            assert await failures(fleet, 0, "protocol") >= 1


async def test_a_killed_replica_has_no_load_after_its_ttl(kind: Kind, tmp_path: Path) -> None:
    async with RedisServer(kind) as server:
        redis = sharing(server, ttl_s=1.5)
        async with ReplicatedFleet(1, redis, a=engine(), b=engine()) as fleet:
            port = free_port()
            config = {
                "gateway": {"host": "127.0.0.1", "port": port, "admin_port": 0},
                "workers": [{"name": name, "url": each.url} for name, each in fleet.engines.items()],
                "redis": {"url": server.url, "ttl_s": 1.5, "op_timeout_ms": 3000},
            }
            file = tmp_path / "gateway.json"
            file.write_text(json.dumps(config))
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway", "gateway", "--config", str(file), cwd=ROOT
            )
            try:
                await until(lambda: fleet.hears(fleet.gateways[0]) == 1, within_s=60)
                await until_healthy(fleet, port)
                for each in fleet.engines.values():
                    each.faults.paths, each.faults.headers_delay_s = ("/v1/completions",), 20.0
                body = {"model": "tiny", "prompt": [5] * 64, "max_tokens": 2}
                url = f"http://127.0.0.1:{port}/v1/completions"
                asked = asyncio.create_task(fleet.http.post(url, json=body))
                await until(lambda: fleet.others_at(0, "a") + fleet.others_at(0, "b") == 1)
                process.kill()
                await until(lambda: fleet.others_at(0, "a") + fleet.others_at(0, "b") == 0)
                assert fleet.hears(fleet.gateways[0]) == 0
                await asyncio.gather(asked, return_exceptions=True)
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()


async def until_healthy(fleet: ReplicatedFleet, port: int) -> None:
    async with asyncio.timeout(20):
        while True:
            async with fleet.http.get(f"http://127.0.0.1:{port}/health") as response:
                if (await response.json()).get("usable") == len(fleet.engines):
                    return
            await asyncio.sleep(0.05)


async def test_replicas_with_unlike_workers_are_told(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    async with RedisServer(kind) as server, ReplicatedFleet(1, sharing(server), a=engine()) as fleet:
        monkeypatch.setattr(reader, "STRANGE_AFTER_S", 0.2)
        fleet.engines["elsewhere"] = fleet.engines["a"]
        await fleet.join()
        for seed in range(200):
            await fleet.complete(1, [7 + (seed * 31 + j) % 90 for j in range(40)])
            if "(elsewhere)" in await readyz(fleet, 0):
                break
        assert "(elsewhere)" in await readyz(fleet, 0)
        assert "not here" not in await readyz(fleet, 1)
