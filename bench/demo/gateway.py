"""The real gateway, as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence

import aiohttp

_START_DEADLINE_S = 120.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def gateway(args: Sequence[str], n_workers: int) -> AsyncIterator[str]:
    """Yields its URL once it sees all `n_workers` of those `args` name."""
    port, admin = free_port(), free_port()
    own = ["--gateway-host", "127.0.0.1", "--gateway-port", str(port), "--gateway-admin-port", str(admin)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("WARMROUTE_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "gateway", *own, "--logging-level", "warning", *args, env=env
    )
    url = f"http://127.0.0.1:{port}"
    try:
        await _ready(url, process, n_workers)
        yield url
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _ready(url: str, process: asyncio.subprocess.Process, n_workers: int) -> None:
    deadline = time.monotonic() + _START_DEADLINE_S
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < deadline:
            if process.returncode is not None:
                raise RuntimeError(f"the gateway ended with exit code {process.returncode}")
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{url}/health") as response:
                    workers = (await response.json())["workers"].values()
                    if sum(bool(worker["models"]) for worker in workers) == n_workers:
                        return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the gateway did not see its {n_workers} workers within {_START_DEADLINE_S:.0f} s")
