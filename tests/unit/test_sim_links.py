"""Pairs of workers with a link of their own, and what the planner makes of a slow one that no prior tells of."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from bench.sim.arms.basic import PlannerRouter
from bench.sim.fleet import FleetSpec, servers
from bench.sim.router import Setup
from bench.sim.scripted import Line, play
from bench.sim.transfers import NVLINK
from bench.sim.workloads.generated import Mixed
from bench.sim.world import World
from scorer.calibrate import MIN_SAMPLES, Part

SLOW = replace(NVLINK, per_descriptor_s=8 * NVLINK.per_descriptor_s, bytes_per_s=NVLINK.bytes_per_s / 8)
FLEET = FleetSpec(servers("h200-7b", prefill=2, decode=2))
UNEVEN = replace(FLEET, links=(("p1", "d0", SLOW),))


def test_a_pair_s_own_link_is_that_pair_s_only() -> None:
    lines = [
        Line(5.0 * i, ((i, 8192),), d, p) for i, (p, d) in enumerate((p, d) for p in ("p0", "p1") for d in ("d0", "d1"))
    ]
    slow, even = play(UNEVEN, lines), play(FLEET, lines)
    later_s = [a.ttft_s - b.ttft_s for a, b in zip(slow.records, even.records, strict=True)]
    blocks, layers = 8192 // 64, 36
    more_s = 7 * NVLINK.per_descriptor_s * blocks * layers
    assert later_s == [0, 0, pytest.approx(more_s, rel=0.1), 0]


def served(spec: FleetSpec) -> tuple[Counter[tuple[str | None, str | None]], PlannerRouter]:
    """(pairs of the later requests whose prompt was computed elsewhere, and the planner)."""
    routers: list[PlannerRouter] = []

    def factory(setup: Setup) -> PlannerRouter:
        routers.append(PlannerRouter(setup))
        return routers[0]

    load = Mixed(0, rate=9.0, duration_s=120.0, long_share=0.6, slo_ttft_s=None, slo_tpot_s=None)
    records = World(spec, factory, load).run().records
    later = [record for record in records[len(records) // 2 :] if record.prefill is not None]
    return Counter((record.prefill, record.decode) for record in later), routers[0]


def test_the_planner_learns_the_slow_pair_and_avoids_it() -> None:
    even, _ = served(FLEET)
    uneven, router = served(UNEVEN)
    factors = router.planner.calibration.factors()
    assert factors[Part.PULL, "p1>d0"].n_samples >= MIN_SAMPLES
    slow, *others = (router.planner.calibration.value(Part.PULL, name) for name in ("p1>d0", "p0>d0", "p0>d1", "p1>d1"))
    assert slow > 1.5 * max(others), "all wait for a step and in line, too; and a factor is bounded"
    assert uneven["p1", "d0"] < even["p1", "d0"] / 2
    assert uneven["p1", "d1"] > 2 * uneven["p1", "d0"], "p1 is asked for the other one"
