"""A collection that the API may not have, under the newer or the older name of its group.

llm-d's resources moved from one API group to another. The newer one counts where both are there, and either may be
installed, or taken away, at any time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Generic, TypeVar

import msgspec

from gateway.discovery.kubernetes.api import Api, ApiError, Refused, Unreachable
from gateway.discovery.kubernetes.reflector import Parse, Reflector, Timers

T = TypeVar("T")

GROUPS: Final = ("llm-d.ai", "inference.networking.x-k8s.io")
VERSION: Final = "v1alpha2"
_ABSENT: Final = 404


class _Resource(msgspec.Struct):
    name: str


class _Resources(msgspec.Struct):
    resources: list[_Resource] | None = None


_resources = msgspec.json.Decoder(_Resources)


class Optional(Generic[T]):
    """`changed(items)` is called with all there are: after the first look, and after each change. `parse` gives None
    for what does not concern us. `look_again_s`: how often is looked which group there is.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        plural: str,
        parse: Parse[T | None],
        changed: Callable[[tuple[T, ...]], None],
        *,
        look_again_s: float = 60.0,
        timers: Timers | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.group: str | None = None
        """Where they are, if anywhere."""
        self._api = api
        self._namespace = namespace
        self._plural = plural
        self._parse = parse
        self._changed = changed
        self._look_again_s = look_again_s
        self._timers = timers or Timers()
        self._rng = rng
        self._reflector: Reflector[T | None] | None = None
        self._problem: str | None = None
        self._told: tuple[T, ...] | None = None

    @property
    def problems(self) -> list[str]:
        found = [] if self._problem is None else [self._problem]
        return found if self._reflector is None else [*found, *self._reflector.problems]

    async def run(self) -> None:
        """Never ends by itself."""
        while True:
            try:
                self.group = await self._find()
                self._problem = None
                if self.group is not None:
                    await self._follow(self.group)
                else:
                    self._tell(())
                    await asyncio.sleep(self._look_again_s)
                    continue
            except ApiError as exc:
                self._problem = f"{self._plural}: {exc}"
            await asyncio.sleep(self._timers.slow_s)

    async def _find(self) -> str | None:
        """The group that has them. Raises ApiError."""
        for group in GROUPS:
            try:
                answer = await self._api.get(f"/apis/{group}/{VERSION}")
            except Refused as exc:
                if exc.status == _ABSENT:
                    continue
                raise
            try:
                resources = _resources.decode(answer).resources
            except msgspec.MsgspecError as exc:
                raise Unreachable(f"{group}/{VERSION} cannot be read: {exc}") from None
            if any(resource.name == self._plural for resource in resources or ()):
                return group
        return None

    async def _follow(self, group: str) -> None:
        """Until another group counts, or this one is not there. Raises ApiError."""
        reflector = Reflector(
            self._api,
            f"/apis/{group}/{VERSION}/namespaces/{self._namespace}/{self._plural}",
            self._parse,
            lambda name: self._take(),
            what=f"{self._plural}.{group}",
            optional=True,
            timers=self._timers,
            rng=self._rng,
        )
        self._reflector = reflector
        task = asyncio.get_running_loop().create_task(reflector.run(), name=f"kubernetes {self._plural}")
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self._look_again_s)
                if done:
                    return task.result()
                with suppress(ApiError):  # Whoever cannot be asked has not changed.
                    if await self._find() != group:
                        return
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._reflector = None

    def _take(self) -> None:
        if self._reflector is not None and self._reflector.synced:
            items = self._reflector.items
            self._tell(tuple(item for _, item in sorted(items.items(), key=lambda it: it[0]) if item is not None))

    def _tell(self, items: tuple[T, ...]) -> None:
        if items != self._told:
            self._told = items
            self._changed(items)
