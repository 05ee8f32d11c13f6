"""`warmroute gateway` and `warmroute sidecar` as processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import aiohttp

from tests.support.sidecar_world import free_port
from tests.support.stacked import Stacked

_LEFT_OUT = ("WARMROUTE_", "STATE_DIRECTORY")


class Command(Stacked):
    """In a test: ``async with Command("gateway", "--workers", url) as gateway:``. Ready when entered."""

    def __init__(self, face: str, *args: str) -> None:
        self._face = face
        self._args = args
        self.env: dict[str, str] = {}
        self.entry: tuple[str, ...] = ("-m", "gateway")
        self.port, self.admin_port = free_port(), free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    async def _start(self) -> None:
        face = self._face
        ports = [f"--{face}-port", str(self.port), f"--{face}-admin-port", str(self.admin_port)]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_LEFT_OUT)}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *self.entry, face, f"--{face}-host", "127.0.0.1", *ports, *self._args,
            stderr=asyncio.subprocess.PIPE, env=inherited | self.env,
        )  # fmt: skip
        self._stack.push_async_callback(self._kill)
        assert self.process.stderr is not None
        self._log = asyncio.create_task(self.process.stderr.read())
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession())
        async with asyncio.timeout(180):
            while not await self._is_ready():  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.05)

    async def stopped(self) -> str:
        """Its log, once it has ended by itself, and well. `process.send_signal` first."""
        assert await asyncio.wait_for(self.process.wait(), 180) == 0
        log = (await self._log).decode()
        assert "Traceback" not in log
        return log

    async def terminate(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        return await self.stopped()

    async def _is_ready(self) -> bool:
        assert self.process.returncode is None, (await self._log).decode()
        try:
            async with self.http.get(self.url + "/readyz") as ready:
                return ready.status == 200
        except aiohttp.ClientError:
            return False

    async def _kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        await self._log


class EppCommand(Command):
    """Its pages are on a port of their own."""

    def __init__(self, metrics_port: int, face: str, *args: str) -> None:
        super().__init__(face, *args)
        self._metrics_port = metrics_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._metrics_port}"

    async def text(self, path: str) -> str:
        async with self.http.get(self.url + path) as response:
            return await response.text()
