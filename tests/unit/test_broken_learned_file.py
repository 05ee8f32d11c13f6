"""Saved factors that are wrong as far as they may be, and trusted as much as can be: the planner that begins with them
is no worse than least-load once it has seen some requests, and what could never have been saved is not taken over.
"""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import pytest

from bench.sim import grid
from bench.sim.arms import arm
from bench.sim.arms.basic import PlannerRouter
from bench.sim.fleet import FleetSpec, servers
from bench.sim.record import Record
from bench.sim.router import Factory, Setup
from bench.sim.sweep import share
from bench.sim.transfers import NVLINK
from bench.sim.workloads.generated import Mixed
from bench.sim.world import World
from scorer.calibrate import FLEET, Calibration, Part

SPEC = FleetSpec(servers("h200-7b", prefill=1, decode=3), link=NVLINK, pd_policy=grid.PD_POLICY)
NAMES = [server.name for server in SPEC.servers]
STARTED = 50 * len(NAMES)
"""So many requests are the start; a factor that is in use is forgotten within 60 samples."""


def subjects(part: Part) -> list[str]:
    if part is Part.OUTPUT:
        return ["sim", FLEET]
    if part in (Part.PULL, Part.MEETING):
        return [f"{p}>{d}" for p in NAMES for d in NAMES if p != d] + [FLEET]
    return [*NAMES, FLEET]


def broken(seed: int | str) -> dict[str, Any]:
    """Every factor at its one bound or the other, after thousands of samples of which each held one agreed. `slow` and
    `fast`: all at the same.
    """
    rng = random.Random(seed)

    def row(part: Part) -> list[float]:
        sign = {"slow": 1.0, "fast": -1.0}.get(str(seed)) or rng.choice((-1.0, 1.0))
        return [sign * math.log(part.bound), 4000, 1000, 0.0, math.log(part.bound)]

    return {"factors": {part.value: {name: row(part) for name in subjects(part)} for part in Part}}


def with_saved(state: dict[str, Any], setup: Setup) -> PlannerRouter:
    router = PlannerRouter(setup)
    assert router.planner.calibration.load(state) == 0
    return router


def run(factory: Factory, seed: int = 0) -> list[Record]:
    return World(SPEC, factory, Mixed(seed, rate=12.0, duration_s=60.0), seed=seed).run().records


def met(records: list[Record]) -> float:
    return share(record.met() for record in records[STARTED:])


@pytest.fixture(scope="module")
def least_load() -> float:
    return met(run(arm("least-load")))


@pytest.mark.parametrize("seed", ["slow", "fast", 0, 1])
def test_a_broken_fit_is_never_worse_than_least_load_after_the_start(seed: int | str, least_load: float) -> None:
    records = run(partial(with_saved, broken(seed)))
    assert all(record.ok for record in records)
    assert met(records) >= least_load


def test_it_is_in_force_when_it_begins() -> None:
    """Else the test above would hold nothing."""
    calibration = Calibration()
    calibration.load(broken("slow"))
    for part in Part:
        assert calibration.value(part, subjects(part)[0]) == pytest.approx(part.bound)


@pytest.mark.parametrize(
    "row",
    [
        [1.5, 4000, 1000, 0.0, 1.4],  # beyond the bound
        [-1.5, 4000, 1000, 0.0, 1.4],
        [math.nan, 4000, 1000, 0.0, 1.4],
        [1.3, math.inf, 1000, 0.0, 1.4],
        [1.3, 10, 1000, 0.0, 1.4],  # more held than there were
        [1.3, 4000, -1, 0.0, 1.4],
        [1.3, 4000, 1000, -1.0, 1.4],
        [1.3, 4000, 1000, 0.0, math.nan],
        [1.3],
        "1.3",
        None,
    ],
)
def test_what_was_never_saved_is_left_out_and_counted(row: Any) -> None:
    calibration = Calibration()
    good = [1.3, 4000, 1000, 0.0, 1.4]
    assert calibration.load({"factors": {"work": {"b0": row, "b1": good}, "nonsense": {"b0": good}}}) == 2
    assert calibration.value(Part.WORK, "b0") == 1.0
    assert calibration.value(Part.WORK, "b1") == pytest.approx(math.exp(1.3))
