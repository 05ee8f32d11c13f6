"""The planner looks closely at the best few candidates only; looking closely at all of them must not choose better."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer import Prompt
from scorer.policies import TIE_S
from scorer.types import OutcomeKind, Price, RequestFacts, Role
from tests.support import FEW
from tests.support.fleets import BLOCK, D, P, Rig, fleet, prompt


def _rig(rng: random.Random, pd_policy: str) -> Rig:
    workers = [
        D(
            f"d{i}",
            weight=rng.choice([0.5, 1.0, 2.0]),
            waiting=rng.choice([0, 0, 3]),
            kv_usage=rng.choice([0.0, 1e-300, rng.random(), rng.random(), 1.0]),
            kv_blocks=rng.choice([None, 200, 4096]),
            scraped=rng.random() < 0.9,
        )
        for i in range(rng.randrange(1, 24))
    ]
    rig = fleet(*workers, *(P(f"p{i}") for i in range(rng.randrange(0, 4))), pd_policy=pd_policy)
    for name in rig.planner.fleet.workers:
        if rng.random() < 0.5:
            rig.hold(name, prompt(rng.randrange(1, 3000)))
    for _ in range(rng.randrange(80)):
        plan = rig.route(_length(rng), **_objectives(rng))
        if rng.random() < 0.7:
            rig.observe(plan, OutcomeKind.PREFILL_DONE)
            rig.observe(plan, OutcomeKind.FIRST_TOKEN)
    return rig


def _length(rng: random.Random) -> list[int]:
    return prompt(rng.randrange(1, 4000), seed=rng.randrange(3))


def _objectives(rng: random.Random) -> dict[str, float]:
    out = {}
    if rng.random() < 0.5:
        out["slo_ttft_s"] = rng.choice([0.05, 0.3, 1.0])
    if rng.random() < 0.5:
        out["slo_tpot_s"] = rng.choice([0.005, 0.01, 0.03])
    return out


def _all_local(rig: Rig, facts: RequestFacts) -> dict[str, Price]:
    """The price of every decode worker, each with a closer look."""
    planner, pricer = rig.planner, rig.planner._pricer
    places = planner.fleet.holders(facts.model, (Role.BOTH, Role.DECODE))
    held = planner.holdings.held(facts, Prompt(facts.tokens or b""), rig.now_s)
    priced = pricer.local(facts, places, held, rig.now_s, out_tokens=pricer.answer(facts).tokens)
    return {place[0].name: pricer.judged(facts, place, price) for place, (price, _) in zip(places, priced, strict=True)}


def _sum_of_parts(price: Price) -> float:
    return price.ttft_s + price.harm_s + price.decode_s + price.queue_s + price.displaced_s + price.viol_s


@FEW
@given(st.randoms(use_true_random=False))
def test_no_decode_worker_is_cheaper_than_the_chosen_one(rng: random.Random) -> None:
    rig = _rig(rng, "local")
    facts = rig.facts(_length(rng), **_objectives(rng))
    every = _all_local(rig, facts)
    plan = rig.planner.explain(facts, None, rig.now_s, rig.rng)
    best_s = min(price.total_s for price in every.values())
    assert plan.chosen.price == every[plan.chosen.decode[0]]
    assert plan.chosen.price.total_s <= best_s + TIE_S
    for candidate in plan.considered:
        assert candidate.price == every[candidate.decode[0]]


@FEW
@given(st.randoms(use_true_random=False))
def test_the_parts_of_a_price_are_its_total_and_breaking_objectives_never_makes_it_cheaper(rng: random.Random) -> None:
    rig = _rig(rng, "cost")
    facts = rig.facts(_length(rng), **_objectives(rng))
    plan = rig.planner.explain(facts, None, rig.now_s, rig.rng)
    for candidate in plan.considered:
        price = candidate.price
        assert price.total_s == pytest.approx(_sum_of_parts(price))
        ttft_s = price.front_s + price.wait_s + price.adm_s + price.load_s + price.comp_s
        assert price.ttft_s == pytest.approx(ttft_s + price.hop_s + price.pull_s + price.step_s)
        assert price.comp_s > 0
        assert candidate.cached_tokens % BLOCK == 0
        assert candidate.cached_tokens < max(1, facts.prompt_tokens)
        if facts.slo_ttft_s is None:
            assert price.viol_s >= 0
    best = [candidate.price.total_s for candidate in plan.considered[1:]]
    assert best == sorted(best)
