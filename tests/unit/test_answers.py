"""How long answers are thought to get, against draws from the very distribution."""

from __future__ import annotations

import math
import random

import pytest

from scorer.answers import SCALE, Answer
from scorer.types import OutcomeKind
from tests.support.fleets import W, fleet, prompt


def draws(tokens: float, sigma: float, n: int = 40_000) -> list[float]:
    rng = random.Random(5)
    out = []
    for _ in range(n):
        u = rng.random()
        out.append(tokens * math.exp(SCALE * sigma * math.log(u / (1 - u))))
    return out


@pytest.mark.parametrize(("low", "high", "done"), [(0, 50, 0), (80, 300, 40), (10, 120, 60), (200, 1e9, 100)])
def test_the_share_is_that_of_drawn_answers(low: float, high: float, done: int) -> None:
    alive = [x for x in draws(100, 1.0) if x >= done]
    share = sum(max(low, done) <= x < high for x in alive) / len(alive)
    assert Answer(100, 1.0).ends_between(low, high, done) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("sigma", [0.0, 0.2, 1.0, 4.0])
def test_extremes_stay_probabilities(sigma: float) -> None:
    answer = Answer(1, sigma)
    for low, high in ((0.0, math.inf), (math.inf, math.inf), (1e-9, 1e12), (5.0, 5.1)):
        for done in (0, 1, 10, 100_000):
            assert 0 <= answer.ends_between(low, max(high, done), done) <= 1


def test_short_answers_make_a_stall_dear() -> None:
    """Two fleets whose answers are 200 tokens long on average: always, or some very short ones among long ones."""
    prices = []
    for lengths in ([200], [10, 390]):
        rig = fleet(W("a"))
        rng = random.Random(2)
        for _ in range(80):
            plan = rig.route(prompt(20), streaming=True)
            rig.now_s += 1
            rig.observe(plan, OutcomeKind.FIRST_TOKEN)
            rig.observe(plan, OutcomeKind.END, n_tokens=rng.choice(lengths))
        running = [rig.route(prompt(20, seed=i), streaming=True, slo_tpot_s=0.02) for i in range(8)]
        for plan in running:
            rig.observe(plan, OutcomeKind.FIRST_TOKEN)
        plan = rig.planner.explain(rig.facts(prompt(8000, seed=99)), None, rig.now_s, rig.rng)
        prices.append(plan.chosen.price.viol_s)
    assert prices[1] > prices[0] + 1
