"""A stand-in API server and a discovery that follows it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from gateway.config.schema import KubernetesConfig
from gateway.discovery.kubernetes import Access, KubernetesDiscovery
from gateway.discovery.kubernetes.reflector import Timers
from scorer.types import ChangeKind, WorkerChange
from tests.support.kube_server import KubeServer
from tests.support.stacked import Stacked

QUICK = Timers(
    watch_s=0.25, overdue_s=0.15, relist_s=1.0, backoff_s=0.005, longest_s=0.05, slow_s=0.05, page=3
)  # fmt: skip


class Fleet:
    """What a consumer of changes believes: who serves, and who is draining."""

    def __init__(self) -> None:
        self.serving: dict[str, WorkerChange] = {}
        self.draining: set[str] = set()
        self.seen: list[tuple[str, str]] = []

    def take(self, change: WorkerChange) -> None:
        name = change.worker
        self.seen.append((change.kind.value, name))
        if change.kind is ChangeKind.ADDED:
            assert name not in self.serving, "told twice"
            self.serving[name] = change
            self.draining.discard(name)
        elif change.kind is ChangeKind.CHANGED:
            assert self.serving[name].url == change.url
            self.serving[name] = change
        elif change.kind is ChangeKind.DRAINING:
            del self.serving[name]
            self.draining.add(name)
        else:
            self.serving.pop(name, None)
            self.draining.discard(name)

    @property
    def urls(self) -> dict[str, str | None]:
        return {name: change.url for name, change in sorted(self.serving.items())}


class KubeWorld(Stacked):
    """In a test: ``async with KubeWorld(pool="pool") as world:``. The discovery begins when it is told to `follow`."""

    def __init__(self, *, timers: Timers = QUICK, is_quick: bool = True, seed: int = 0, **config: Any) -> None:
        self.kube = KubeServer(bookmark_s=0.1 if is_quick else 30.0)
        self.fleet = Fleet()
        self.config = KubernetesConfig(**(config or {"pool": "pool"}))
        self.objectives: list[Any] = []
        self.rewrites: list[Any] = []
        self._timers = timers
        self._look_again_s = 0.05 if is_quick else 60.0
        self._rng = random.Random(seed)

    async def _start(self) -> None:
        await self._stack.enter_async_context(self.kube)

    async def follow(self) -> None:
        self.discovery = KubernetesDiscovery(
            self.config,
            Access(server=self.kube.url, token="t"),
            objectives=self.objectives.append,
            rewrites=self.rewrites.append,
            timers=self._timers,
            look_again_s=self._look_again_s,
            rng=self._rng,
        )
        self._task = asyncio.get_running_loop().create_task(self._follow())
        self._stack.push_async_callback(self._unfollow)

    async def _follow(self) -> None:
        async for change in self.discovery.changes():
            self.fleet.take(change)

    async def _unfollow(self) -> None:
        self._task.cancel()
        result, = await asyncio.gather(self._task, return_exceptions=True)  # fmt: skip
        assert isinstance(result, asyncio.CancelledError), result

    async def until(self, true: Callable[[], Any], within_s: float = 60.0, look_s: float = 0.002) -> None:
        """Wait for a condition; fails when it does not come true, or the discovery ends."""
        try:
            async with asyncio.timeout(within_s):
                while not true():
                    assert not self._task.done(), self._task.result()
                    await asyncio.sleep(look_s)
        except TimeoutError:
            raise AssertionError(f"not in time; told: {self.fleet.seen}, {self.discovery.problem}") from None

    async def serving(self, **urls: str) -> None:
        """Wait until exactly these serve, by name and address with port."""
        wanted = {name.replace("_", "-"): f"http://{address}" for name, address in urls.items()}
        await self.until(lambda: self.fleet.urls == wanted)
