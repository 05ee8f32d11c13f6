"""The pods of an InferencePool, or of a label selector, as workers."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from gateway.config.schema import KubernetesConfig
from gateway.discovery.base import Source
from gateway.discovery.kubernetes.access import Access, from_kubeconfig, in_cluster
from gateway.discovery.kubernetes.api import Api
from gateway.discovery.kubernetes.lease import Elector, lease_name
from gateway.discovery.kubernetes.objectives import PLURAL as OBJECTIVES
from gateway.discovery.kubernetes.objectives import read_objective
from gateway.discovery.kubernetes.optional import Optional
from gateway.discovery.kubernetes.pods import Endpoint, Pod, Shape, endpoints_of, read_pod
from gateway.discovery.kubernetes.pool import Pool, path_of, read_pool
from gateway.discovery.kubernetes.reflector import Parse, Reflector, Timers
from gateway.discovery.kubernetes.rewrites import PLURAL as REWRITES
from gateway.discovery.kubernetes.rewrites import RewriteRule, in_order, read_rewrite
from gateway.discovery.kubernetes.servers import Servers
from gateway.errors import UserError
from scorer.types import WorkerChange

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_TOLD = 8


def access_of(config: KubernetesConfig) -> Access:
    """Raises UserError."""
    return from_kubeconfig(config.kubeconfig) if config.kubeconfig is not None else in_cluster()


def elector_of(config: KubernetesConfig, changed: Callable[[bool], None] = lambda leads: None) -> Elector | None:
    """None: every replica serves. Raises UserError."""
    if not config.leader_election:
        return None
    if config.pool is None:
        raise UserError("kubernetes.leader_election needs kubernetes.pool, after which its Lease is called")
    access = access_of(config)
    namespace = config.namespace or access.namespace
    return Elector(Api(access), namespace, lease_name(namespace, config.pool), changed=changed)


class KubernetesDiscovery:
    """What a pod's changes mean is in `Servers`. While the API cannot be asked, everybody known stays.

    `objectives` is called with the priority of each of the pool's by name, `rewrites` with the rules of all: after the
    first look, and after each change. Who gives none has them not asked for.
    """

    source = Source.KUBERNETES

    def __init__(
        self,
        config: KubernetesConfig,
        access: Access,
        *,
        objectives: Callable[[Mapping[str, int]], None] | None = None,
        rewrites: Callable[[Sequence[RewriteRule]], None] | None = None,
        timers: Timers | None = None,
        look_again_s: float = 60.0,
        rng: random.Random | None = None,
    ) -> None:
        self.namespace = config.namespace or access.namespace
        self._config = config
        self._api = Api(access)
        self._objectives, self._rewrites = objectives, rewrites
        self._timers = timers or Timers()
        self._look_again_s = look_again_s
        self._rng = rng
        self._pool: Reflector[Pool] | None = None
        self._pods = Reflector(
            self._api,
            f"/api/v1/namespaces/{self.namespace}/pods",
            read_pod,
            self._pod_changed,
            what="pods",
            timers=self._timers,
            rng=rng,
        )
        self._others: list[Optional[Any]] = []
        self._selected: Pool | None = None
        self._shape: Shape | None = None
        self._servers = Servers()
        self._dirty: set[str] = set()
        self._odd: dict[str, list[str]] = {}
        """What is wrong with pods, by name."""
        self._wake = asyncio.Event()

    @property
    def problem(self) -> str | None:
        found = self._pool.problems if self._pool is not None else []
        if self._pool is not None and self._pool.synced and not self._pool.items and not found:
            found = [f"there is no InferencePool {self._config.pool} in namespace {self.namespace}"]
        found = [*found, *self._pods.problems]
        for other in self._others:
            found += other.problems
        found += sorted(text for texts in self._odd.values() for text in texts)
        more = len(found) - _MOST_TOLD
        return "; ".join([*found[:_MOST_TOLD], *([f"and {more} more"] if more > 0 else ())]) or None

    @property
    def synced(self) -> bool:
        """Whether everybody there is has been told of."""
        return self._shape is not None and self._pods.synced and not self._dirty

    async def changes(self) -> AsyncIterator[WorkerChange]:
        """Never ends."""
        tasks = [_begun(work, self._wake) for work in (self._guide(), *(it.run() for it in self._follow_others()))]
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                _raise_of(tasks)
                for each in self._settle():
                    yield each
        finally:
            await _ended(tasks)
            await self._api.close()

    def _follow_others(self) -> list[Optional[Any]]:
        pool, objectives, rewrites = self._config.pool, self._objectives, self._rewrites
        if pool is None:
            return []
        if objectives is not None:
            self._others.append(
                self._optional(
                    OBJECTIVES,
                    partial(read_objective, pool=pool),
                    lambda found: objectives({it.name: it.priority for it in found}),
                )
            )
        if rewrites is not None:
            self._others.append(
                self._optional(REWRITES, partial(read_rewrite, pool=pool), lambda found: rewrites(in_order(found)))
            )
        return self._others

    def _optional(self, plural: str, read: Parse[T | None], told: Callable[[tuple[T, ...]], None]) -> Optional[T]:
        return Optional(
            self._api,
            self.namespace,
            plural,
            read,
            told,
            look_again_s=self._look_again_s,
            timers=self._timers,
            rng=self._rng,
        )

    # ---- which pods --------------------------------------------------------------------------------------------------

    async def _guide(self) -> None:
        """Follow the pool, and the pods that it selects now."""
        config = self._config
        if config.pool is None:
            self._pods.select(config.selector)
            self._reshape(config.ports)
            await self._pods.run()
            return
        changed = asyncio.Event()
        self._pool = pool = Reflector(
            self._api,
            path_of(self.namespace),
            read_pool,
            lambda name: changed.set(),
            what="inferencepools",
            fields=f"metadata.name={config.pool}",
            timers=self._timers,
            rng=self._rng,
        )
        tasks = [_begun(pool.run(), changed)]
        try:
            while True:
                await changed.wait()
                changed.clear()
                _raise_of(tasks)
                if not pool.synced:
                    continue
                now = pool.items.get(config.pool)
                if now == self._selected or (now is None and config.pool in pool.unreadable):
                    continue  # One that cannot be read is no reason to let go of everybody.
                before, self._selected = self._selected, now
                if now is None:
                    _log.warning("InferencePool %s is gone; its workers are drained", config.pool)
                if now is None or before is None or now.selector != before.selector:
                    await _ended(tasks[1:])
                    del tasks[1:]
                    if now is not None:
                        self._pods.select(now.selector)
                        tasks.append(_begun(self._pods.run(), changed))
                self._reshape(None if now is None else now.ports)
        finally:
            await _ended(tasks)

    def _reshape(self, ports: tuple[int, ...] | None) -> None:
        """With other ports everybody is looked at again, as soon as the right pods are known."""
        config = self._config
        self._shape = None
        if ports is not None:
            self._shape = Shape(
                namespace=self.namespace,
                ports=ports,
                scheme=config.scheme,
                events=config.events,
                replay=config.replay,
            )
        self._dirty.update(self._pods.items, self._servers.pods)
        self._wake.set()

    def _pod_changed(self, name: str | None) -> None:
        if name is not None:
            self._dirty.add(name)
        self._wake.set()

    # ---- their workers -----------------------------------------------------------------------------------------------

    def _settle(self) -> Iterator[WorkerChange]:
        if self._shape is not None and not self._pods.synced:
            return
        dirty, self._dirty = self._dirty, set()
        found: list[tuple[bool, str]] = sorted((self._is_ready(name), name) for name in dirty)
        for _, name in found:  # Who leaves makes room first.
            pod = self._pod(name)
            endpoints: dict[str, Endpoint] = {}
            before = self._odd.pop(name, None)
            if pod is not None and not pod.over and self._shape is not None:
                endpoints, odd = endpoints_of(pod, self._shape)
                if odd:
                    self._odd[name] = odd
                    if odd != before:
                        _log.warning("%s", "; ".join(odd))
            yield from self._servers.settle(name, pod, endpoints)

    def _is_ready(self, name: str) -> bool:
        pod = self._pod(name)
        return pod is not None and pod.ready

    def _pod(self, name: str) -> Pod | None:
        """None, too, while there is no pool that could choose it."""
        return None if self._shape is None else self._pods.items.get(name)


def _begun(work: Coroutine[Any, Any, None], ended: asyncio.Event) -> asyncio.Task[None]:
    """A task that sets `ended` when it ends, which it is not meant to do."""
    task = asyncio.get_running_loop().create_task(work, name="kubernetes")
    task.add_done_callback(lambda _: ended.set())
    return task


def _raise_of(tasks: list[asyncio.Task[None]]) -> None:
    """Raises what one of them has raised."""
    for task in tasks:
        if task.done():
            task.result()


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
