"""Whatever becomes of requests over two workers, in whatever order: nothing stays booked, and no pair stays probing."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from scorer.planner import NoWorker
from scorer.types import ChangeKind, OutcomeKind, PdReason, Plan, WorkerChange
from tests.support import FEW
from tests.support.fleets import D, P, Rig, W, add, fleet, prompt

ENDS = [OutcomeKind.END, OutcomeKind.ERROR, OutcomeKind.CANCELLED]
KINDS = [OutcomeKind.PREFILL_DONE, OutcomeKind.PAIR_FAILED, OutcomeKind.FIRST_TOKEN, OutcomeKind.TOKEN, *ENDS]
WORKERS = {
    "d1": D("d1", nixl=True),
    "d2": D("d2", ranks=2, nixl=True),
    "b": W("b", events=False, nixl=True),
    "p1": P("p1"),
    "p2": P("p2", events=False),
}
LONG = prompt(20_000, seed=9)
"""Worth fetching from who holds it."""


def _step(rig: Rig, rng: random.Random, plans: list[Plan]) -> None:
    action = rng.random()
    if action < 0.35:
        hint = tuple(rng.sample(["p1", "p2", "gone"], 2)) if rng.random() < 0.3 else ()
        source = rng.choice(["d1", "d2", "b", "gone"]) if rng.random() < 0.3 else None
        text = LONG if rng.random() < 0.3 else prompt(rng.randrange(1, 200), seed=rng.randrange(5))
        try:
            plans.append(rig.route(text, prefill_hint=hint, kv_source=source))
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


@FEW
@given(st.randoms(use_true_random=False))
def test_every_way_out_of_a_handoff_gives_everything_back(rng: random.Random) -> None:
    rig = fleet(*WORKERS.values(), pd_policy=rng.choice(["always-remote", "threshold:64", "cost"]))
    rig.hold("d1", LONG)
    rig.answer("d1", n_busy := rng.choice([0, 10]), 1000)
    busy = rig.planner.fleet.workers["d1"].loads[0]
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
        others = n_busy if load is busy else 0
        assert (load.requests, load.streams, load.kv_tokens) == (others, others, 1000 * others)
    assert not [names for names, pair in rig.planner.pairs.pairs.items() if pair.probing]
    rig.now_s += 1000
    for _ in range(4):  # Some of them at a time.
        rig.planner.holdings.settle(rig.now_s)
    assert not rig.planner.holdings._unannounced, "nothing assumed waits for ever"


@FEW
@given(st.randoms(use_true_random=False))
def test_nothing_is_taken_to_be_where_no_request_was_served(rng: random.Random) -> None:
    """Where there are no events, only what was computed stays assumed."""
    rig = fleet(
        D("d1", events=False), D("d2", events=False), P("p1", events=False), P("p2", events=False), pd_policy="cost"
    )
    plans: list[Plan] = []
    for i in range(12):
        rig.now_s += rng.random()
        if rng.random() < 0.5 or not plans:
            plans.append(rig.route(prompt(3000, seed=i), prefill_hint=("p1", "p2") if rng.random() < 0.7 else ()))
        else:
            plan, local = rng.choice(plans), rng.random() < 0.3
            rig.planner.next_prefill(plan.request_id, PdReason.PREFILL_FAILED, None, rig.now_s, rig.rng, local=local)
    for plan in plans:
        rig.now_s += rng.random()
        rig.observe(plan, rng.choice([OutcomeKind.ERROR, OutcomeKind.CANCELLED]))
    assert not [assumed for assumed in rig.planner.holdings.approximate._assumed.values() if assumed.blocks]
