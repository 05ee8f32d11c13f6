"""What a sidecar makes of the workers that a discovery names."""

from collections.abc import AsyncIterator

from gateway.discovery import Source
from gateway.sidecar.prefillers import Prefillers
from scorer.types import ChangeKind, Role, WorkerChange

ADDED, CHANGED, DRAINING, REMOVED = ChangeKind.ADDED, ChangeKind.CHANGED, ChangeKind.DRAINING, ChangeKind.REMOVED


class Told:
    source = Source.STATIC
    problem: str | None = "half of it"

    def __init__(self, *changes: tuple[ChangeKind, str, Role]) -> None:
        self._changes = changes

    async def changes(self) -> AsyncIterator[WorkerChange]:
        for kind, name, role in self._changes:
            yield WorkerChange(kind=kind, worker=name, url="http://x:1", role=role)


async def seen(*changes: tuple[ChangeKind, str, Role]) -> list[tuple[ChangeKind, str, Role]]:
    prefillers = Prefillers(Told(*changes), ["engine:8200"])
    assert prefillers.problem == "half of it"
    return [(change.kind, change.worker, change.role) async for change in prefillers.changes()]


async def test_workers_that_can_prefill_are_there_for_that_alone() -> None:
    assert await seen((ADDED, "p", Role.PREFILL), (ADDED, "b", Role.BOTH), (REMOVED, "b", Role.BOTH)) == [
        (ADDED, "p", Role.PREFILL),
        (ADDED, "b", Role.PREFILL),
        (REMOVED, "b", Role.PREFILL),
    ]


async def test_a_worker_that_becomes_a_decode_worker_leaves() -> None:
    changes = await seen((ADDED, "w", Role.BOTH), (CHANGED, "w", Role.DECODE), (CHANGED, "w", Role.PREFILL))
    assert [kind for kind, _, _ in changes] == [ADDED, DRAINING, CHANGED]


async def test_nobody_else_is_called_as_the_engine() -> None:
    assert await seen((ADDED, "engine:8200", Role.PREFILL), (REMOVED, "engine:8200", Role.BOTH)) == []
