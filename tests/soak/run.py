"""`python -m tests.soak.run [--seconds 1800]`: cycles of load and rest, and what each rest shows.

Of each process (gateway, picker, and the indexer that the picker goes by; the first two tell each other through Redis
where this machine has one), from the second third of the cycles on:

    bookings     nothing is booked, in flight or waiting at any rest
    descriptors  no more than `_MORE_DESCRIPTORS` above the first of these rests: idle connections come and go
    tasks        no more than `_MORE_TASKS` above it
    memory       RSS grows by less than `_BYTES_PER_REQUEST` for each request (the median slope over all pairs of
                 rests), or by less than `_FREE_GROWTH_BYTES` altogether, which says nothing about a slope
    objects      live Python objects: the same with `_OBJECTS_PER_REQUEST` and `_FREE_OBJECTS`
    index        never above its budget
    log          not one traceback, and it ends well when it is told to
    service      after it all every kind of request is served as it should be

What is bounded but large is made small (`_config`, `inside.py`), so that it is full early and growth means something.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

from bench.engine.server import FakeVllm
from tests.soak.clients import Client, Told
from tests.soak.picks import Proxy
from tests.soak.troubles import Troubles
from tests.soak.watched import AtRest, Watched
from tests.support.gateway_world import decode, engine, prefill
from tests.support.redis_server import RedisServer, binary
from tests.support.sidecar_world import free_port

_MORE_DESCRIPTORS = 16
_MORE_TASKS = 8
_BYTES_PER_REQUEST = 512
_FREE_GROWTH_BYTES = 12 << 20
_OBJECTS_PER_REQUEST = 1.0
_FREE_OBJECTS = 5000
_INDEX_BYTES = 16 << 20
_PATIENCE_S = 20.0
_BACK_S = 40.0
_LORAS = {"lora-a": "/adapters/a", "lora-b": "/adapters/b"}
_ROLES = {"p": "prefill", "d1": "decode", "d2": "decode", "both": "both"}


def _engines() -> dict[str, FakeVllm]:
    configs = {
        "p": prefill(lora_modules=_LORAS),
        "d1": decode(lora_modules=_LORAS, store_responses=True),
        "d2": decode(lora_modules=_LORAS, store_responses=True),
        "both": engine(lora_modules=_LORAS, store_responses=True),
    }
    return {name: FakeVllm(config.with_engine(num_gpu_blocks=1200)) for name, config in configs.items()}


def _config(engines: dict[str, FakeVllm], folder: Path, redis: str | None) -> Path:
    tree: dict[str, Any] = {
        "workers": [{"url": it.url, "name": name, "role": _ROLES[name]} for name, it in engines.items()],
        "gateway": {"stored_responses": 500, "drain_timeout_s": 1.0},
        "index": {"budget_bytes": _INDEX_BYTES},
        "tenancy": {"header": "x-tenant", "salt": "derive"},
        "scorer": {"session_affinity": "prefer"},
        "health": {"scrape_interval_s": 0.5},
        "tokens": {"engine_budget_ms": 500},
        "logging": {"level": "error"},
    }
    if redis is not None:
        tree["redis"] = {"url": redis}
    file = folder / "soak.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


class Soak:
    def __init__(self, seconds: float, cycles: int, rate: float) -> None:
        self.seconds = seconds
        self.cycles = cycles
        self.rate = rate
        self.told = {"gateway": Told(), "epp": Told()}
        self.rests: dict[str, list[AtRest]] = {"gateway": [], "epp": [], "indexer": []}
        self.troubles: dict[str, int] = {}
        self.unserved: list[str] = []
        self.logs: dict[str, str] = {}

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engines = _engines()
            for each in engines.values():
                await stack.enter_async_context(each)
            redis = await stack.enter_async_context(RedisServer()) if binary("redis") else None
            config = str(_config(engines, folder, None if redis is None else redis.url))
            ports = free_port(), free_port(), free_port()
            indexer = Watched(folder, "indexer", "--config", config, "--indexer-metrics-port", str(ports[2]),
                              metrics_port=ports[2])  # fmt: skip
            gateway = Watched(folder, "gateway", "--config", config, "--tenancy-salt", "off")  # No sessions with salts.
            epp = Watched(folder, "epp", "--config", config, "--epp-health-port", str(ports[0]), "--epp-metrics-port",
                          str(ports[1]), "--epp-tls", "off", "--index-source", "service", "--index-service-addresses",
                          f"127.0.0.1:{indexer.port}", metrics_port=ports[1])  # fmt: skip
            faces = {"indexer": indexer, "gateway": gateway, "epp": epp}
            for face in faces.values():
                await stack.enter_async_context(face)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                troubles = Troubles(engines, gateway.admin, http, longest_s=max(0.5, self.seconds / self.cycles / 8))
                for cycle in range(self.cycles):
                    await self._load(faces, troubles, cycle)
                    for name, face in faces.items():
                        self.rests[name].append(await face.at_rest(_PATIENCE_S, self._requests(name)))
                    print(self._line(cycle), file=sys.stderr, flush=True)
                self.troubles = dict(troubles.counts)
                await self._still_serves(gateway, http)
                if not await _follows(epp, http):
                    self.unserved.append("the picker follows no indexer")
            for name, face in faces.items():
                self.logs[name] = await face.ended()

    def _requests(self, name: str) -> int:
        """The indexer hears of what all of them make engines do."""
        return self.told[name].requests if name in self.told else sum(told.requests for told in self.told.values())

    async def _load(self, faces: dict[str, Watched], troubles: Troubles, cycle: int) -> None:
        """For one cycle's time. Its connections are closed when it ends, so that at rest only the faces' are open."""
        n_clients = 8
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            url, told = faces["gateway"].url, self.told["gateway"]
            clients = [Client(url, http, 100 * cycle + i, self.rate / n_clients, told) for i in range(n_clients)]
            proxies = [
                Proxy(f"127.0.0.1:{faces['epp'].port}", 100 * cycle + i, self.rate / 4, self.told["epp"])
                for i in range(2)
            ]
            running = [asyncio.create_task(each.run()) for each in (*clients, *proxies, troubles)]
            done, _ = await asyncio.wait(running, timeout=self.seconds / self.cycles, return_when="FIRST_COMPLETED")
            await _cancelled(running)
            for task in done:
                task.result()  # None ends by itself: it has failed.

    async def _still_serves(self, gateway: Watched, http: aiohttp.ClientSession) -> None:
        """Once every worker is healthy again, for which some of them want to be asked something."""
        client = Client(gateway.url, http, 0, 1.0, Told())
        until_s = time.monotonic() + _BACK_S
        while (states := await _states(gateway, http)) != dict.fromkeys(_ROLES, "healthy"):
            if time.monotonic() > until_s:
                self.unserved.append(f"workers are not back: {states}")
                return
            await client._chat()
            await asyncio.sleep(0.2)
        for what in (client._chat, client._tokens, client._messages_api, client._responses, client._models) * 4:
            status = await what()
            if status != 200:
                self.unserved.append(f"{what.__name__}: {status}")

    def _line(self, cycle: int) -> str:
        said = [
            f"{name}: {rest.requests} requests, {rest.rss_bytes / 2**20:.1f} MB, {rest.descriptors} descriptors, "
            f"{rest.tasks} tasks, {rest.objects} objects, index {rest.index_bytes / 2**20:.2f} MB, "
            f"booked {rest.booked or 0}"
            for name, (*_, rest) in self.rests.items()
        ]
        return f"soak: {cycle + 1}/{self.cycles}: " + "; ".join(said)

    def report(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "faces": {name: figures(rests) for name, rests in self.rests.items()},
            "requests": {name: dict(sorted(told.counts.items())) for name, told in self.told.items()},
            "troubles": self.troubles,
            "unserved": self.unserved,
            "wrong": [
                *(f"{name}: {each}" for name, rests in self.rests.items() for each in wrong(rests)),
                *(f"after it all: {each}" for each in self.unserved),
                *(f"{name} logged: {log[-4000:]}" for name, log in self.logs.items() if "Traceback" in log),
            ],
        }


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Again and again: one that comes while a wait of the client's own runs out is lost (in Python 3.11)."""
    until_s = time.monotonic() + _PATIENCE_S
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=1)
        if time.monotonic() > until_s:
            for task in left:
                task.print_stack()
            raise TimeoutError("a client does not end")


async def _follows(face: Watched, http: aiohttp.ClientSession) -> bool:
    async with http.get(face.pages + "/metrics") as page:
        return "\nwarmroute_index_service_up 1.0\n" in await page.text()


async def _states(gateway: Watched, http: aiohttp.ClientSession) -> dict[str, str]:
    async with http.get(gateway.admin + "/debug/state") as page:
        return {worker["name"]: worker["state"] for worker in (await page.json())["workers"]}


def judged(rests: Sequence[AtRest]) -> Sequence[AtRest]:
    """Those after the warm-up."""
    return rests[len(rests) // 3 :]


def slope(rests: Sequence[AtRest], what: str) -> float:
    """By request: the median over all pairs, which single rests cannot bend (Theil and Sen)."""
    slopes = [
        (getattr(later, what) - getattr(earlier, what)) / (later.requests - earlier.requests)
        for earlier, later in combinations(rests, 2)
        if later.requests > earlier.requests
    ]
    return statistics.median(slopes) if slopes else 0.0


def figures(rests: Sequence[AtRest]) -> dict[str, Any]:
    after = judged(rests)
    first, last = after[0], after[-1]
    kinds = {name: n - first.kinds.get(name, 0) for name, n in last.kinds.items()}
    return {
        "rss_mb": [round(rest.rss_bytes / 2**20, 1) for rest in rests],
        "rss_bytes_per_request": round(slope(after, "rss_bytes"), 1),
        "objects": [rest.objects for rest in rests],
        "objects_per_request": round(slope(after, "objects"), 4),
        "more_of": dict(sorted(kinds.items(), key=lambda kind: -kind[1])[:8]),
        "descriptors": [rest.descriptors for rest in rests],
        "tasks": [rest.tasks for rest in rests],
        "threads": [rest.threads for rest in rests],
        "index_mb": [round(rest.index_bytes / 2**20, 2) for rest in rests],
        "requests": last.requests,
    }


def wrong(rests: Sequence[AtRest]) -> list[str]:
    after = judged(rests)
    first, last = after[0], after[-1]
    said = [f"at rest after {rest.requests} requests: {rest.booked}" for rest in rests if rest.booked]
    if last.descriptors > first.descriptors + _MORE_DESCRIPTORS:
        said.append(f"{last.descriptors} descriptors, {first.descriptors} before")
    if last.tasks > first.tasks + _MORE_TASKS:
        said.append(f"{last.tasks} tasks, {first.tasks} before")
    if last.threads > first.threads + _MORE_TASKS:
        said.append(f"{last.threads} threads, {first.threads} before")
    per_request, grown = slope(after, "rss_bytes"), last.rss_bytes - first.rss_bytes
    if per_request > _BYTES_PER_REQUEST and grown > _FREE_GROWTH_BYTES:
        said.append(f"{per_request:.0f} bytes of memory more with each request, {grown / 2**20:.1f} MB altogether")
    per_request, grown = slope(after, "objects"), last.objects - first.objects
    if per_request > _OBJECTS_PER_REQUEST and grown > _FREE_OBJECTS:
        said.append(f"{per_request:.2f} objects more with each request, {grown} altogether")
    if max(rest.index_bytes for rest in rests) > _INDEX_BYTES:
        said.append(f"an index of more than {_INDEX_BYTES} bytes")
    return said


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.run", description="Does anything grow?")
    parser.add_argument("--seconds", type=float, default=1800.0, help="of load (1800)")
    parser.add_argument(
        "--cycles", type=int, default=None, help="loads with a rest after each (one in 60 s, 9 at least)"
    )
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second (20), and half as many picks")
    parser.add_argument("--json", action="store_true", help="all figures")
    options = parser.parse_args(argv)
    soak = Soak(options.seconds, options.cycles or max(9, round(options.seconds / 60)), options.rate)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # Of the engines, which are left in mid-answer.
    began_s = time.monotonic()
    asyncio.run(soak.run())
    report = soak.report()
    if options.json:
        print(json.dumps(msgspec.to_builtins(report), indent=1))
    for each in report["wrong"]:
        print(f"soak: WRONG: {each}", file=sys.stderr)
    if not report["wrong"]:
        n = " and ".join(f"{told.requests} of the {name}" for name, told in soak.told.items())
        print(
            f"soak: nothing grows and nothing is left after {n} in {time.monotonic() - began_s:.0f} s", file=sys.stderr
        )
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
