"""Servers that die, come back or slow down."""

from __future__ import annotations

from typing import Protocol

from bench.sim.clock import Clock
from bench.sim.engine import SimEngine
from bench.sim.fleet import Fault, Slow


class Breakable(Protocol):
    """A world, as faults see it."""

    clock: Clock
    engines: dict[str, SimEngine]

    def killed(self, name: str) -> None: ...

    def born_again(self, name: str) -> None: ...


def set_fault(world: Breakable, fault: Fault) -> None:
    """Have it happen when its time comes. A fault alone does not keep a run going."""
    name, clock = fault.worker, world.clock
    if isinstance(fault, Slow):
        factor = fault.factor
        clock.at(fault.at_s, lambda: world.engines[name].speed_up(factor), background=True)
        return
    clock.at(fault.at_s, lambda: world.killed(name), background=True)
    clock.at(fault.at_s + fault.down_s, lambda: world.born_again(name), background=True)
