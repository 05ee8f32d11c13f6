"""A gateway of several processes in front of fake engines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import aiohttp

from bench.engine.config import FakeVllmConfig
from bench.engine.server import FakeVllm
from tests.support.command import Command
from tests.support.gateway_world import engine
from tests.support.stacked import Stacked

DEADLINE_S = 60.0
_ARRIVING = "warmroute_events_arriving{"


class Processes(Stacked):
    """In a test: ``async with Processes(2, a=engine()) as them:``. All serve when entered. `args` are the gateway's.
    `has_engines`: False where these name workers of their own.
    """

    def __init__(
        self,
        n: int,
        *args: str,
        entry: tuple[str, ...] | None = None,
        env: dict[str, str] | None = None,
        has_engines: bool = True,
        **engines: FakeVllmConfig,
    ) -> None:
        self.n = n
        self._args = args
        self._entry = entry
        self._env = env or {}
        self._configs = engines or ({"a": engine(), "b": engine()} if has_engines else {})
        self.engines: dict[str, FakeVllm] = {}

    async def _start(self) -> None:
        for name, config in self._configs.items():
            self.engines[name] = await self._stack.enter_async_context(FakeVllm(config))
        workers = [f"--worker={server.url}" for server in self.engines.values()]
        self.command = Command(
            "gateway", f"--processes={self.n}", *workers, "--health-scrape-interval-s=0.2",
            "--tokens-engine-budget-ms=5000", "--logging-level=info", *self._args,
        )  # fmt: skip
        self.command.env |= self._env
        await self._stack.enter_async_context(self.command)
        self.http = self.command.http
        await self.all_ready()

    @property
    def url(self) -> str:
        return self.command.url

    @property
    def admin(self) -> str:
        return self.command.admin

    async def get(self, path: str) -> Any:
        async with self.http.get(self.admin + path) as answer:
            return await answer.json(content_type=None)

    async def processes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.get("/debug/processes"))["processes"]
        return found

    async def pid(self, process: str) -> int:
        """Of who has that place."""
        return next(int(it["pid"]) for it in await self.processes() if it["process"] == process and it["serves"])

    async def pids(self) -> dict[str, int]:
        return {it["process"]: it["pid"] for it in await self.processes() if it["serves"]}

    async def all_ready(self) -> None:
        async def are() -> bool:
            them = await self.processes()
            return len(them) == self.n + 1 and all(it["ready"] and it["state"] == "serving" for it in them)

        await eventually(are)
        await eventually(self._know_all)

    async def _know_all(self) -> bool:
        """Each process knows all workers and their events."""
        for label in ("hub", *map(str, range(self.n))):
            body = await self.get(f"/admin/workers?process={label}")
            workers = body.get("workers", [])
            if len(workers) < len(self.engines) or not all(it["state"] == "healthy" for it in workers):
                return False
        # Until then what is assumed goes where it is given up when events begin.
        told = [value for name, value in (await self.metrics()).items() if name.startswith(_ARRIVING)]
        return len(told) == len(workers) and all(value == 1 for value in told)

    async def kill(self, process: str) -> int:
        pid = await self.pid(process)
        os.kill(pid, signal.SIGKILL)
        return pid

    async def replaced(self, process: str, pid: int) -> None:
        """Another one than `pid` has that place, and serves."""

        async def is_there() -> bool:
            return any(
                it["process"] == process and it["pid"] != pid and it["ready"] and it["state"] == "serving"
                for it in await self.processes()
            )

        await eventually(is_there)

    async def complete(self, http: aiohttp.ClientSession, prompt: Any, **fields: Any) -> tuple[int, str]:
        """(status, worker) of a completion on a connection of `http`."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, **fields}
        async with http.post(self.url + "/v1/completions", json=body) as answer:
            await answer.read()
            return answer.status, answer.headers.get("x-warmroute-worker", "")

    async def metrics(self) -> dict[str, float]:
        """By name and labels, as they are written."""
        async with self.http.get(self.admin + "/metrics") as answer:
            assert answer.status == 200
            return series(await answer.text())

    async def by_process(self) -> Counter[str]:
        """Decisions that each made."""
        made: Counter[str] = Counter()
        for number in range(self.n):
            made[str(number)] = (await self.get(f"/debug/decisions?n=0&process={number}"))["made"]
        return made


def series(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            assert name not in found, f"{name} is told twice"
            found[name] = float(value)
    return found


def total(metrics: dict[str, float], name: str) -> float:
    """Of all series of a name."""
    return sum(value for key, value in metrics.items() if re.split("[{ ]", key)[0] == name)


async def eventually(check: Callable[[], Any]) -> None:
    """Until it is so; errors are no answer yet."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                if await check():
                    return
            except (aiohttp.ClientError, KeyError, StopIteration, ValueError):
                pass
            await asyncio.sleep(0.05)


class Load(Stacked):
    """Clients that ask one request after the other, each on a connection of its own. `statuses` of what was answered,
    `broken` counts what was not.
    """

    def __init__(self, them: Processes, n_clients: int) -> None:
        self._them = them
        self._n_clients = n_clients
        self.statuses: Counter[int] = Counter()
        self.broken = 0
        self._asked = 0

    async def _start(self) -> None:
        for i in range(self._n_clients):
            http = await self._stack.enter_async_context(aiohttp.ClientSession())
            task = asyncio.create_task(self._ask(http, i))
            self._stack.push_async_callback(asyncio.gather, task, return_exceptions=True)
            self._stack.callback(task.cancel)

    async def more(self, n: int) -> None:
        """Until so many more were answered."""
        wanted = self.statuses.total() + n

        async def are() -> bool:
            return self.statuses.total() >= wanted

        await eventually(are)

    async def _ask(self, http: aiohttp.ClientSession, client: int) -> None:
        while True:
            self._asked += 1
            try:
                status, _ = await self._them.complete(http, [client, self._asked % 200, *range(40)])
                self.statuses[status] += 1
            except aiohttp.ClientError:
                self.broken += 1
            await asyncio.sleep(0.02)  # The machine has others to serve.


class RawClient:
    """A connection that is kept, and shows when it is not."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def of(cls, them: Processes) -> RawClient:
        return cls(*await asyncio.open_connection("127.0.0.1", them.command.port))

    async def complete(self, prompt: list[int]) -> int:
        """Its status. Raises where the connection has ended."""
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 2}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        self.send(head.encode() + b"\r\n\r\n" + body)
        return await self.status()

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def status(self) -> int:
        """Of the next answer. Raises where the connection has ended."""
        async with asyncio.timeout(DEADLINE_S):
            told = (await self._reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"(?i)content-length: (\d+)", told)
            assert length is not None, told
            await self._reader.readexactly(int(length[1]))
        return int(told.split()[1])

    async def ended(self) -> None:
        """Once the other side has ended it, without a further word."""
        async with asyncio.timeout(DEADLINE_S):
            assert await self._reader.read() == b""

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


class Held(Stacked):
    """Requests that engines take and do not answer, each on a connection of its own."""

    def __init__(self, them: Processes) -> None:
        self._them = them
        self._tasks: list[asyncio.Task[tuple[int, str]]] = []

    async def _start(self) -> None:
        for server in self._them.engines.values():
            server.faults.paths = ("/v1/completions",)
            server.faults.headers_delay_s = 600.0

    async def begin(self, prompt: list[int]) -> None:
        http = await self._stack.enter_async_context(aiohttp.ClientSession())
        task = asyncio.create_task(self._them.complete(http, prompt))
        self._tasks.append(task)
        self._stack.push_async_callback(asyncio.gather, task, return_exceptions=True)
        self._stack.callback(task.cancel)

    async def busy(self) -> dict[str, float]:
        """How many each worker has, of those that have any, by what all processes have booked."""
        metrics = await self._them.metrics()
        found = re.compile(r'warmroute_worker_booked_prefills\{worker="(.*)"\}')
        return {it[1]: value for name, value in metrics.items() if (it := found.fullmatch(name)) and value}

    async def are_some_cut(self) -> bool:
        return self.n_left < len(self._tasks)

    @property
    def n_left(self) -> int:
        return sum(not task.done() for task in self._tasks)
