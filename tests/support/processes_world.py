"""A gateway of several processes in front of fake engines."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp

from bench.engine.config import FakeVllmConfig
from bench.engine.server import FakeVllm
from tests.support.command import Command
from tests.support.gateway_world import engine
from tests.support.stacked import Stacked

DEADLINE_S = 60.0


class Processes(Stacked):
    """In a test: ``async with Processes(2, a=engine()) as them:``. All serve when entered. `args` are the gateway's."""

    def __init__(
        self,
        n: int,
        *args: str,
        entry: tuple[str, ...] | None = None,
        env: dict[str, str] | None = None,
        **engines: FakeVllmConfig,
    ) -> None:
        self.n = n
        self._args = args
        self._entry = entry
        self._env = env or {}
        self._configs = engines or {"a": engine(), "b": engine()}
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
        return True

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
