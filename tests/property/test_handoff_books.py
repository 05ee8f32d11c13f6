"""Whatever becomes of requests over two workers, in whatever order: nothing stays booked, and no pair stays probing."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from scorer.planner import NoWorker
from scorer.types import ChangeKind, OutcomeKind, PdReason, Plan, WorkerChange
from tests.support.fleets import D, P, Rig, W, add, fleet, prompt

ENDS = [OutcomeKind.END, OutcomeKind.ERROR, OutcomeKind.CANCELLED]
KINDS = [OutcomeKind.PREFILL_DONE, OutcomeKind.PAIR_FAILED, OutcomeKind.FIRST_TOKEN, OutcomeKind.TOKEN, *ENDS]
WORKERS = {"d1": D("d1"), "d2": D("d2", ranks=2), "b": W("b", events=False), "p1": P("p1"), "p2": P("p2", events=False)}


def _step(rig: Rig, rng: random.Random, plans: list[Plan]) -> None:
    action = rng.random()
    if action < 0.35:
        hint = tuple(rng.sample(["p1", "p2", "gone"], 2)) if rng.random() < 0.3 else ()
        text = prompt(rng.randrange(1, 200), seed=rng.randrange(5))
        try:
            plans.append(rig.route(text, prefill_hint=hint))
        except NoWorker:
            return
    elif action < 0.75 and plans:
        rig.observe(rng.choice(plans), rng.choice(KINDS), n_tokens=rng.randrange(50))
    elif action < 0.93 and plans:
        plan, local = rng.choice(plans), rng.random() < 0.3
        rig.planner.next_prefill(plan.request_id, PdReason.PREFILL_FAILED, None, rig.now_s, rig.rng, local=local)
    elif action < 0.97:
        name = rng.choice(list(WORKERS))
        rig.planner.fleet.apply(WorkerChange(kind=ChangeKind.REMOVED, worker=name))
        rig.planner.configure_worker(name)
        rig.planner.pairs.forget(name)
        add(rig, WORKERS[name])
    else:
        rig.planner.pairs.forget(rng.choice(list(WORKERS)))


@given(st.randoms(use_true_random=False))
def test_every_way_out_of_a_handoff_gives_everything_back(rng: random.Random) -> None:
    rig = fleet(*WORKERS.values(), pd_policy=rng.choice(["always-remote", "threshold:64"]))
    loads = [load for worker in rig.planner.fleet.workers.values() for load in worker.loads.values()]
    plans: list[Plan] = []
    for _ in range(40):
        rig.now_s += 3 * rng.random()
        _step(rig, rng, plans)
        rig.check_loads()
        loads += [load for worker in rig.planner.fleet.workers.values() for load in worker.loads.values()]
    for plan in plans:
        rig.observe(plan, rng.choice(ENDS))
    assert rig.planner.in_flight() == 0
    for load in loads:
        assert (load.requests, load.streams, load.kv_tokens) == (0, 0, 0)
    assert not [names for names, pair in rig.planner.pairs.pairs.items() if pair.probing]
    rig.now_s += 1000
    rig.route(prompt(100))
    assert not rig.planner.holdings._unannounced, "nothing assumed waits for ever"
