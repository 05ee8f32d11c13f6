"""One list of workers in the place of another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from gateway.config.schema import Worker
from gateway.discovery.base import Source, by_name, differences
from scorer.types import ChangeKind, WorkerChange


class RenewedList:
    """The workers of a configuration read again. Raises NameClashError when two of `after` have one name."""

    source = Source.STATIC
    problem: str | None = None

    def __init__(self, before: Iterable[Worker], after: Iterable[Worker]) -> None:
        self._before = by_name(before)
        self._after = by_name(after)

    async def changes(self) -> AsyncIterator[WorkerChange]:
        """Who is missing drains; then it ends."""
        for each in differences(self._before, self._after, ChangeKind.DRAINING):
            yield each
