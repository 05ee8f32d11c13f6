"""The fleet: Redis, eight engines, an indexer, three gateways, a fourth one that shares with nobody, and a link of ours
in every connection between them.

    clients -> gateway 0..2 -> [http 0..7] -> engine 0..7
               |    |                          |
               |    +-> [redis 0..2] -> Redis  +-> [events, replay 0..7] -> indexer, hub of gateway 3
               +------> [index 0..2] -> indexer

Gateway 3 follows the engines itself: its hub does for its data planes what Redis and the indexer do for the others.
Every process can be killed by itself. The indexer reads the engines' metrics without a link between, so that what is
cut is its events alone.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import yaml
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.pb import indexer_pb2 as pb
from tests.faults.broken import Broken
from tests.faults.link import Link
from tests.faults.process import Process, fixed_port, until
from tests.faults.truth import MODEL
from tests.soak.watched import BOOKED
from tests.support.indexer_world import ask
from tests.support.redis_server import binary
from tests.support.stacked import Stacked

N_ENGINES = 8
N_PLANES = (1, 1, 2)
"""Data planes of each gateway that shares."""
N_GATEWAYS = len(N_PLANES)
N_PLANES_ALONE = 2
HUB = "hub"
PASSWORD = "of-the-fault-suite"
USER = "warmroute"
_RIGHTS = (
    "~{warmroute:default}:*", "-@all", "+xadd", "+xread", "+xrevrange", "+expire", "+set", "+del", "+sadd", "+srem",
    "+smembers", "+mget", "+select",
)  # fmt: skip
Digests = dict[str, tuple[int, int]]


class Engine(Process):
    def __init__(self, number: int, folder: Path, broken: Broken, seed: int) -> None:
        self.direct, self.events, self.replay, self.control = (fixed_port() for _ in range(4))
        name = f"engine{number}"
        self.http_link = Link(name, fixed_port(), self.direct)
        self.event_links = [Link(name, fixed_port(), port) for port in (self.events, self.replay)]
        ports = [self.direct, self.events, self.replay, self.control, *(link.port for link in self.event_links)]
        super().__init__(
            name,
            [sys.executable, "-m", "tests.faults.engine", str(seed + number), *map(str, ports)],
            folder,
            broken,
            self._answers,
            [self.http_link, *self.event_links],
        )

    async def held(self) -> dict[str, Any]:
        held: dict[str, Any] = await _get(f"http://127.0.0.1:{self.control}/held")
        return held

    async def asked(self, path: str, body: dict[str, Any]) -> None:
        """Once it is done."""
        await _post(f"http://127.0.0.1:{self.control}{path}", body)

    async def faults(self, **switches: Any) -> None:
        await _post(f"http://127.0.0.1:{self.direct}/fake/faults", switches)

    async def announce(self) -> None:
        """Have it compute something new, past all gateways."""
        body = {"model": MODEL, "prompt": secrets.token_hex(100), "max_tokens": 1}
        await _post(f"http://127.0.0.1:{self.direct}/v1/completions", body)

    async def _answers(self) -> bool:
        return await _status(f"http://127.0.0.1:{self.direct}/health") == 200 and bool(
            await _status(f"http://127.0.0.1:{self.control}/held")
        )


class Indexer(Process):
    def __init__(self, engines: list[Engine], folder: Path, broken: Broken) -> None:
        self.port, metrics_port = fixed_port(), fixed_port()
        self.watch_links = [Link("indexer", fixed_port(), self.port) for _ in range(N_GATEWAYS)]
        config = {
            "workers": [{"url": f"http://127.0.0.1:{it.direct}", "name": it.name} for it in engines],
            "indexer": {"host": "127.0.0.1", "port": self.port, "metrics_port": metrics_port, "admin_port": 0,
                        "digest_interval_s": 5.0},
            "logging": {"level": "warning"},
        }  # fmt: skip
        super().__init__(
            "indexer", _command("indexer", config, folder), folder, broken, self._is_serving, self.watch_links
        )

    async def digests(self) -> list[Digests]:
        stats = await self._stats()
        return [{it.worker: (it.digest.blocks, it.digest.keys_sum) for it in stats.holders if it.digest.blocks}]

    async def troubles(self) -> list[str]:
        """Feeds that are not as they should be, for who looks for what went wrong."""
        stats = await self._stats()
        feeds = {it.worker: it.feed for it in stats.holders}
        return [
            f"{name}: {it.phase}, partial {it.partial}, {it.endpoint_state}, epoch {it.epoch}, gaps {it.gaps}, "
            f"missing {it.missing_batches}"
            for name, it in feeds.items()
            if it.partial or it.phase != "live" or it.endpoint_state != "connected"
        ]

    async def partial(self) -> set[str]:
        """Engines of whose events some are missing."""
        return {it.worker for it in (await self._stats()).holders if it.feed.partial}

    async def _stats(self) -> pb.StatsResponse:
        stats: pb.StatsResponse = await ask(f"127.0.0.1:{self.port}", "Stats", pb.StatsRequest())
        return stats

    async def _is_serving(self) -> bool:
        try:
            return (await self._stats()).ready
        except grpc.aio.AioRpcError:
            return False


class Gateway(Process):
    """Shared load and a copy of the index are part of its readiness here, not of its `/readyz`. Each of its `n_planes`
    data planes is a replica by itself. `index`, `redis`: None where it shares with no other gateway; `known`: how many
    replicas each of its own hears.
    """

    def __init__(
        self,
        number: int,
        n_planes: int,
        engines: list[Engine],
        folder: Path,
        broken: Broken,
        *,
        index: Link | None = None,
        redis: Link | None = None,
        known: int,
    ) -> None:
        self.n_planes = n_planes
        self.known = known
        self.port, self.admin_port = fixed_port(), fixed_port()
        self.url, self.admin = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.admin_port}"
        self.in_rotation = False
        config: dict[str, Any] = {
            "gateway": {
                "host": "127.0.0.1",
                "port": self.port,
                "admin_port": self.admin_port,
                "drain_timeout_s": 2.0,
                "processes": self.n_planes,
            },
            "workers": [{"url": f"http://127.0.0.1:{it.http_link.port}", "name": it.name} for it in engines],
            # A busy test machine is no slow engine, and no slow Redis.
            "tokens": {"engine_budget_ms": 2000.0},
            "logging": {"level": "warning"},
        }
        if index is not None:
            config["index"] = {"source": "service", "service": {"addresses": [f"127.0.0.1:{index.port}"]}}
        if redis is not None:
            config["redis"] = {"url": f"redis://127.0.0.1:{redis.port}", "user": USER, "op_timeout_ms": 1000.0}
        name = f"gateway{number}"
        super().__init__(
            name, _command("gateway", config, folder, name), folder, broken, self._is_ready_now,
            env={"REDIS_PASSWORD": PASSWORD},
        )  # fmt: skip

    async def spawn(self) -> None:
        self.in_rotation = False
        await super().spawn()

    async def ready(self) -> None:
        await super().ready()
        self.in_rotation = True

    async def _is_ready_now(self) -> bool:
        if await _status(self.url + "/readyz") != 200 or len(await self.planes()) < self.n_planes:
            return False
        return not await self.unsettled(known=0)

    async def planes(self) -> dict[str, int]:
        """The pids of data planes that are ready, by their number; of a gateway that is one process: its own."""
        if self.n_planes == 1:
            return {"0": self.pid}
        places = await self.places()
        places.pop(HUB, None)
        return places

    async def places(self) -> dict[str, int]:
        """As `planes`, with the hub of one that has it."""
        them = (await _get(self.admin + "/debug/processes"))["processes"]
        return {it["process"]: it["pid"] for it in them if it["ready"] and it["state"] == "serving"}

    async def replaced(self, before: dict[str, int]) -> None:
        """Processes with other pids than `before` are in those places, and no place is empty."""

        async def are() -> bool:
            now = await self.places()
            n_planes = len(now.keys() - {HUB})
            return n_planes == self.n_planes and all(now.get(place, pid) != pid for place, pid in before.items())

        await until(are, f"others than {before} serve in {self.name}")

    async def kill_plane(self, place: str) -> None:
        with self._broken.cut(self.name):
            os.kill((await self.planes())[place], signal.SIGKILL)

    async def signal_hub(self, number: int) -> None:
        """No connection of a client breaks by it: nothing is excused."""
        os.kill((await self.places())[HUB], number)

    def restart_in_turn(self) -> None:
        os.kill(self.pid, signal.SIGUSR2)

    async def digests(self) -> list[Digests]:
        return [await self._digests(query) for query in self._of_each()]

    def _of_each(self) -> list[str]:
        """Queries of the admin port for which each data plane answers for itself."""
        return [""] if self.n_planes == 1 else [f"process={number}" for number in range(self.n_planes)]

    async def _digests(self, query: str) -> Digests:
        page = await _get(f"{self.admin}/debug/cache?digests&{query}")
        told = {worker: ranks["0"] for worker, ranks in page["digests"].items()}
        return {worker: (it["blocks"], int(it["keys_sum"], 16)) for worker, it in told.items() if it["blocks"]}

    async def unsettled(self, known: int | None = None) -> list[str]:
        """What is not as it is at rest: what is booked, who is not heard, which engine is not usable."""
        async with aiohttp.ClientSession() as http, http.get(self.url + "/metrics") as page:
            text = await page.text()
        wanted = (*BOOKED, "warmroute_replicas_", "warmroute_index_service_up", "warmroute_worker_up")
        lines = "\n".join(line for line in text.splitlines() if line.startswith(wanted))
        samples = [it for family in text_string_to_metric_families(lines + "\n") for it in family.samples]
        found = [f"{it.name}{dict(it.labels)} {it.value:g}" for it in samples if it.name in BOOKED and it.value]
        level = {it.name: it.value for it in samples}
        for name, least in (
            ("warmroute_replicas_shared", 1),
            ("warmroute_replicas_known", self.known if known is None else known),
            ("warmroute_index_service_up", 1),
        ):
            if level.get(name, 0) < least:
                found.append(f"{name} {level.get(name)}")
        return found

    async def states(self) -> list[dict[str, str]]:
        """By engine, as each data plane has them."""
        pages = [await _get(f"{self.admin}/debug/state?{query}") for query in self._of_each()]
        return [{worker["name"]: worker["state"] for worker in page["workers"]} for page in pages]


class RedisProcess(Process):
    def __init__(self, folder: Path, broken: Broken) -> None:
        self.port = fixed_port()
        self.links_by_gateway = [Link("redis", fixed_port(), self.port) for _ in range(N_GATEWAYS)]
        server = binary("redis") or binary("valkey")
        assert server is not None, "neither redis-server nor valkey-server is on this machine"
        arguments = [
            server, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "",
            "--appendonly", "no", "--user", USER, "on", ">" + PASSWORD, "resetkeys", *_RIGHTS,
        ]  # fmt: skip
        super().__init__("redis", arguments, folder, broken, self._answers, self.links_by_gateway)

    async def command(self, *words: str | int) -> Any:
        async with Redis(port=self.port, socket_timeout=10) as client:
            return await client.execute_command(*words)

    async def _answers(self) -> bool:
        try:
            return bool(await self.command("PING"))
        except (RedisError, OSError):
            return False


class Fleet(Stacked):
    """In a test: ``async with Fleet(folder, seed) as fleet:``. Ready when entered."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.broken = Broken()
        self.redis = RedisProcess(folder, self.broken)
        self.engines = [Engine(i, folder, self.broken, seed) for i in range(N_ENGINES)]
        self.indexer = Indexer(self.engines, folder, self.broken)
        self.sharing = [
            Gateway(
                i,
                n_planes,
                self.engines,
                folder,
                self.broken,
                index=self.indexer.watch_links[i],
                redis=self.redis.links_by_gateway[i],
                known=sum(N_PLANES) - 1,
            )
            for i, n_planes in enumerate(N_PLANES)
        ]
        self.alone = Gateway(N_GATEWAYS, N_PLANES_ALONE, self.engines, folder, self.broken, known=N_PLANES_ALONE - 1)

    @property
    def gateways(self) -> list[Gateway]:
        return [*self.sharing, self.alone]

    @property
    def processes(self) -> list[Process]:
        return [self.redis, *self.engines, self.indexer, *self.gateways]

    @property
    def links(self) -> list[Link]:
        return [link for process in self.processes for link in process.links]

    async def _start(self) -> None:
        for process in self.processes:
            self._stack.push_async_callback(process.end, within_s=10.0)
        for link in self.links:
            self._stack.push_async_callback(link.close)
        await self.redis.start()
        for kind in (self.engines, [self.indexer], self.gateways):
            for process in kind:
                await process.spawn()
            for process in kind:
                await process.ready()

    async def heal(self) -> None:
        """Whatever a fault that failed has left."""
        for link in self.links:
            if link.mode != "pass":
                await link.turn("pass")
        for process in self.processes:
            if not process.is_up:
                await process.start()
        for engine in self.engines:
            await engine.faults(drop_batches=0, replay_delay_s=0.0, replay="ok")
        await self.indexer.kill()  # Whatever its index has come to, the next fault begins with a true one.
        await self.indexer.start()

    async def true_digests(self) -> Digests | None:
        """What the engines' caches really hold; None while one of them computes."""
        held = await asyncio.gather(*(engine.held() for engine in self.engines))
        if not all(it["is_idle"] for it in held):
            return None
        named = zip(self.engines, held, strict=True)
        return {engine.name: (it["blocks"], int(it["keys_sum"], 16)) for engine, it in named if it["blocks"]}


def _command(face: str, config: dict[str, Any], folder: Path, name: str | None = None) -> list[str]:
    file = folder / f"{name or face}.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return [sys.executable, "-m", "gateway", face, "--config", str(file)]


async def _get(url: str) -> Any:
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        assert answer.status == 200, f"{url}: {answer.status}"
        return await answer.json()


async def _post(url: str, body: dict[str, Any]) -> None:
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
        assert answer.status == 200, f"{url}: {answer.status} {await answer.text()}"


async def _status(url: str) -> int:
    """0: nobody answers."""
    try:
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            return answer.status
    except (aiohttp.ClientError, OSError):
        return 0
