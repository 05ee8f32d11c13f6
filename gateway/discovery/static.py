"""The workers of the configuration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from gateway.config.schema import Worker
from gateway.discovery.base import Source, by_name, change
from scorer.types import ChangeKind, WorkerChange


class StaticDiscovery:
    """Raises NameClashError when two workers have one name."""

    source = Source.STATIC
    problem: str | None = None

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._workers = by_name(workers)

    async def changes(self) -> AsyncIterator[WorkerChange]:
        """One ADDED per worker; then it ends."""
        for name, worker in self._workers.items():
            yield change(ChangeKind.ADDED, name, worker)
