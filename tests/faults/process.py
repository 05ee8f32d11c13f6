"""A process of the fleet: started, killed by its id, started again with the same arguments."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bench.proxy.processes import tree
from tests.faults.broken import Broken
from tests.faults.link import Link

_START_S = 90.0
_LEFT_OUT = ("WARMROUTE_", "STATE_DIRECTORY", "REDIS_PASSWORD")
_taken: set[int] = set()


def fixed_port() -> int:
    """A free one that stays free while nobody listens there: outside of those that outgoing connections take."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    rng = random.SystemRandom()
    for _ in range(1000):
        port = rng.randrange(10_000, max(lowest, 20_000))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _taken:
            _taken.add(port)
            return port
    raise OSError("no free port")


async def until(condition: Callable[[], Awaitable[bool]], what: str, within_s: float = _START_S) -> None:
    """Raises AssertionError when it does not come true."""
    try:
        async with asyncio.timeout(within_s):
            while not await condition():  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what}") from None


def _is_alive(pid: int) -> bool:
    """One that nobody has waited for yet is dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(") ")[2][0] not in "ZX"


class Process:
    """`is_ready` is asked until it says so. `links` lead to it: while it is down they refuse, as its own port would."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        folder: Path,
        broken: Broken,
        is_ready: Callable[[], Awaitable[bool]],
        links: Sequence[Link] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.kills = 0
        self.links = links
        self._arguments = arguments
        self._env = env or {}
        self._broken = broken
        self._is_ready = is_ready
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """Its own and those of what it has started."""
        return tree(self.pid)

    async def spawn(self) -> None:
        """Without waiting until it is ready."""
        env = {key: value for key, value in os.environ.items() if not key.startswith(_LEFT_OUT)}
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._arguments, stdout=log, stderr=log, env=env | self._env
            )
        for link in self.links:
            await link.listen()

    async def ready(self) -> None:
        async def is_ready() -> bool:
            assert self.is_up, f"{self.name} ended: {self.tail()}"
            return await self._is_ready()

        await until(is_ready, f"{self.name} is ready")

    async def start(self) -> None:
        await self.spawn()
        await self.ready()

    async def kill(self) -> None:
        """SIGKILL, to all there is of it, as a service manager kills a control group."""
        process, pids = self._process, self.pids
        assert process is not None

        async def all_are_dead() -> bool:
            return not any(map(_is_alive, pids))

        with self._broken.cut(self.name):
            self.kills += 1
            for link in self.links:
                link.refuse()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await process.wait()
            await until(all_are_dead, f"all of {self.name} is dead")

    async def end(self, number: int = signal.SIGTERM, within_s: float = 30.0) -> int | None:
        """Its exit code; it is killed when it takes longer."""
        process = self._process
        if process is None or process.returncode is not None:
            return None
        process.send_signal(number)
        try:
            return await asyncio.wait_for(process.wait(), within_s)
        except TimeoutError:
            process.kill()
            await process.wait()
            return None

    def tail(self, n_bytes: int = 3000) -> str:
        return self.log.read_bytes()[-n_bytes:].decode(errors="replace")
