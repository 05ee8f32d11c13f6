"""The peers' ways beside one that prices every source with every decode worker, and leaves nothing out."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from indexer import Prompt
from scorer.objectives import VIOLATION_S
from scorer.peers import GAIN, hands_over
from scorer.types import PdReason
from tests.support.fleets import BLOCK, Rig, W, fleet, prompt

TEXT = prompt(30_000)


@dataclass(frozen=True)
class State:
    nixl: bool
    held: int
    streams: int
    kv: int
    slo_tpot_s: float | None
    waiting: int
    kv_blocks: int


ANY = st.builds(
    State,
    nixl=st.sampled_from([True, True, True, False]),
    held=st.sampled_from([0, 1000, 15_000, 29_984, 30_000]),
    streams=st.sampled_from([0, 1, 10, 40]),
    kv=st.sampled_from([100, 10_000, 40_000]),
    slo_tpot_s=st.sampled_from([None, None, 0.02]),
    waiting=st.sampled_from([0, 0, 5]),
    kv_blocks=st.sampled_from([2500, 100_000]),
)
CROWDED = st.builds(
    State,
    nixl=st.just(True),
    held=st.integers(20_000, 30_000),
    streams=st.integers(4, 16),
    kv=st.integers(20_000, 60_000),
    slo_tpot_s=st.sampled_from([None, None, None, 0.02]),
    waiting=st.just(0),
    kv_blocks=st.just(100_000),
)
IDLE = st.builds(
    State,
    nixl=st.just(True),
    held=st.integers(0, 4000),
    streams=st.integers(0, 2),
    kv=st.just(1000),
    slo_tpot_s=st.just(None),
    waiting=st.just(0),
    kv_blocks=st.sampled_from([1800, 100_000]),
)
STATES = st.lists(ANY, min_size=1, max_size=4) | st.tuples(
    st.lists(CROWDED, min_size=1, max_size=2), st.lists(IDLE | ANY, min_size=1, max_size=2)
).map(lambda both: both[0] + both[1])


def build(states: list[State]) -> Rig:
    workers = [
        W(f"w{i}", nixl=it.nixl, waiting=it.waiting, kv_blocks=it.kv_blocks, running=it.streams)
        for i, it in enumerate(states)
    ]
    rig = fleet(*workers, pd_policy="cost")
    for i, it in enumerate(states):
        if it.held:
            rig.hold(f"w{i}", TEXT[: it.held])
        rig.answer(f"w{i}", it.streams, it.kv, slo_tpot_s=it.slo_tpot_s)
    return rig


def cheapest_peer_s(rig: Rig, n_tokens: int, out_tokens: int) -> float | None:
    """The lowest price of any (source, decode worker), by the planner's own prices of the parts."""
    facts = rig.facts(TEXT[:n_tokens], max_output_tokens=out_tokens)
    plan = rig.planner.explain(facts, None, rig.now_s, rig.rng)
    locals_ = {c.decode: c for c in plan.considered if c.prefill is None}
    assert len(locals_) == len(rig.planner.fleet.workers)
    pricer, fleet_ = rig.planner._pricer, rig.planner.fleet
    c = rig.planner.cost.constants
    held = rig.index.match(Prompt(facts.tokens or b""), model="m")
    places = {holder: (fleet_.workers[holder[0]], holder, fleet_.workers[holder[0]].loads[0]) for holder in locals_}
    by_themselves = dict(zip(places, pricer.local(facts, list(places.values()), held, rig.now_s), strict=True))
    best: float | None = None
    for source, place in places.items():
        for decode, local in locals_.items():
            taker = places[decode]
            if source == decode or source not in held or not (hands_over(place[0]) and hands_over(taker[0])):
                continue
            there, cached = by_themselves[source]
            if cached - local.cached_tokens < BLOCK or there.adm_s or local.price.adm_s:
                continue
            usual_s = pricer.usual_pull_s(facts, taker[0], local.cached_tokens)
            price = pricer.remote(facts, taker, source[0], local.price, there, usual_s, c.first_contact_s)
            price = pricer.judged(facts, taker, price)
            broken_s = VIOLATION_S * pricer.streams_late(facts, place, there.stall_s)
            again_s = local.price.displaced_s * taker[2].streams + there.displaced_s * place[2].streams
            total_s = price.total_s + broken_s + again_s
            best = total_s if best is None else min(best, total_s)
    return best


@given(STATES, st.sampled_from([1000, 30_000, 30_000]), st.sampled_from([1, 256, 256]))
def test_a_peer_is_chosen_exactly_where_one_is_cheap_enough(states: list[State], n_tokens: int, out: int) -> None:
    rig = build(states)
    best_s = cheapest_peer_s(rig, n_tokens, out)
    plan = rig.route(TEXT[:n_tokens], max_output_tokens=out)
    local_s = min(c.price.total_s for c in plan.considered if c.prefill is None)
    if best_s is None or best_s >= (1 - GAIN) * local_s:
        assert plan.choice == "local"
    else:
        assert plan.choice == "peer"
        assert abs(plan.chosen.price.total_s - best_s) < 1e-9
        assert plan.pd_reason is PdReason.COST
        assert plan.chosen.prefill is not None
        assert plan.chosen.prefill[0] != plan.chosen.decode[0]
    rig.check_loads()
