"""A discovery as a sidecar sees it: it decodes on its own engine only, so other workers are there to prefill."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

import msgspec

from gateway.discovery import Discovery, Source
from scorer.types import ChangeKind, Role, WorkerChange


class Prefillers:
    """`discovery` without its decode workers (and without `engines`, which are ours); the others as prefill workers."""

    def __init__(self, discovery: Discovery, engines: Collection[str]) -> None:
        self._discovery = discovery
        self._engines = engines

    @property
    def source(self) -> Source:
        return self._discovery.source

    @property
    def problem(self) -> str | None:
        return self._discovery.problem

    async def changes(self) -> AsyncIterator[WorkerChange]:
        async for change in self._discovery.changes():
            if change.worker in self._engines:
                continue
            if change.role is Role.DECODE:  # It may have been another; who never was here cannot leave.
                yield msgspec.structs.replace(change, kind=ChangeKind.DRAINING, role=Role.PREFILL)
            else:
                yield msgspec.structs.replace(change, role=Role.PREFILL)
