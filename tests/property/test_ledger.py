"""The ledger never goes negative and ends at zero, whatever order things happen in."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from scorer.types import ChangeKind, OutcomeKind, WorkerChange
from tests.support.fleets import W, add, fleet, prompt

ENDS = [OutcomeKind.END, OutcomeKind.ERROR, OutcomeKind.CANCELLED]


@given(st.randoms(use_true_random=False))
def test_every_way_out_gives_everything_back(rng: random.Random) -> None:
    rig = fleet(W("a"), W("b", ranks=2), W("c", events=False))
    plans = []
    for _ in range(40):
        action = rng.random()
        rig.now_s += rng.random()
        if action < 0.4:
            slo_tpot_s = rng.choice([None, 0.05])
            plans.append(rig.route(prompt(rng.randrange(1, 200), seed=rng.randrange(5)), slo_tpot_s=slo_tpot_s))
        elif action < 0.9 and plans:
            plan = rng.choice(plans)
            kind = rng.choice([OutcomeKind.FIRST_TOKEN, OutcomeKind.TOKEN, OutcomeKind.CACHED_TOKENS, *ENDS])
            rig.observe(plan, kind, n_tokens=rng.randrange(50))
        elif action < 0.95:
            name = rng.choice("abc")
            rig.planner.fleet.apply(WorkerChange(kind=ChangeKind.REMOVED, worker=name))
            rig.planner.configure_worker(name)
            add(rig, W(name, ranks=rng.choice([1, 2])))
        rig.check_loads()
    for plan in plans:
        rig.observe(plan, rng.choice(ENDS))
        rig.observe(plan, OutcomeKind.END)
    assert rig.planner.in_flight() == 0
    for worker in rig.planner.fleet.workers.values():
        for load in worker.loads.values():
            assert (load.requests, load.kv_tokens) == (0, 0)
