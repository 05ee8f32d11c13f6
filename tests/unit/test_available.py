"""The workers that requests may go to."""

from __future__ import annotations

from gateway.engine.available import Available
from scorer.fleet import Fleet
from scorer.types import ChangeKind, Role, WorkerChange


def of(*names: str, roles: dict[str, Role] | None = None) -> Fleet:
    fleet = Fleet()
    for name in names:
        role = (roles or {}).get(name, Role.BOTH)
        fleet.apply(WorkerChange(kind=ChangeKind.ADDED, worker=name, url=f"http://{name}", role=role))
    return fleet


def test_those_that_are_better_are_asked_alone() -> None:
    fleet, up, better = of("a", "b", "c"), {"a", "b"}, {"b", "c"}
    assert Available(fleet.workers, up.__contains__).names() == ["a", "b"]
    available = Available(fleet.workers, up.__contains__, better.__contains__)
    assert available.names() == ["b"]
    better.clear()
    assert available.names() == ["a", "b"]


def test_prefill_workers_alone_are_nobody_to_ask() -> None:
    fleet = of("p", "d", roles={"p": Role.PREFILL, "d": Role.DECODE})
    assert Available(fleet.workers, lambda name: True, lambda name: name == "p").names() == ["p", "d"]
