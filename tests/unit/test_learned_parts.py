"""What is learned from one worker that behaves in a known way, part by part."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scorer.calibrate import MIN_SAMPLES, Part
from scorer.fleet import Worker
from scorer.types import OutcomeKind, PdReason, Plan
from tests.support.fleets import D, P, Rig, W, fleet, prompt

N = 2 * MIN_SAMPLES


def worker(rig: Rig, name: str = "a") -> Worker:
    return rig.planner.fleet.workers[name]


def serve(rig: Rig, plan: Plan, ttft_s: float, *, end: bool = True) -> None:
    rig.now_s = plan.decided_at_s + ttft_s
    rig.observe(plan, OutcomeKind.FIRST_TOKEN)
    if end:
        rig.observe(plan, OutcomeKind.END)


def alone(n_tokens: int, takes: Callable[[Plan], float], *, cached: bool = False) -> Rig:
    """One request after the other, with nobody else there."""
    rig = fleet(W("a", kv_blocks=100_000))
    if cached:
        rig.hold("a", prompt(n_tokens))
    for i in range(N):
        plan = rig.route(prompt(n_tokens, seed=0 if cached else i), streaming=True)
        serve(rig, plan, takes(plan))
        rig.now_s += 5
    return rig


def test_the_floor_from_short_prompts() -> None:
    rig = alone(100, lambda plan: plan.chosen.price.front_s + 2 * 0.042)
    it = worker(rig)
    assert (it.floor_factor, it.work_factor, it.front_factor) == (pytest.approx(2), 1, 1)


def test_the_work_from_long_ones() -> None:
    cost = fleet(W("a")).planner.cost
    rig = alone(8000, lambda plan: plan.chosen.price.front_s + 1.5 * cost.work_s(8000, 0))
    it = worker(rig)
    assert (it.work_factor, it.floor_factor, it.front_factor) == (pytest.approx(1.5), 1, 1)


def test_the_front_end_from_long_ones_that_are_cached() -> None:
    usual_s = fleet(W("a")).planner.cost.front_s(20_000, text=True)
    rig = alone(20_000, lambda plan: 3 * usual_s + 0.042, cached=True)
    it = worker(rig)
    assert (it.front_factor, it.floor_factor, it.work_factor) == (pytest.approx(3), 1, 1)
    plan = rig.route(prompt(20_000))
    assert plan.chosen.price.front_s == pytest.approx(3 * usual_s)


@pytest.mark.parametrize(("pace", "factor"), [(1.6, 1.6), (0.5, 1.0)])
def test_the_wait_from_those_that_stood_in_line(pace: float, factor: float) -> None:
    """Two at once. A queue that goes slower than booked is believed; a faster one is luck."""
    rig = fleet(W("a", kv_blocks=100_000))
    waits = []
    for i in range(N):
        first = rig.route(prompt(4000, seed=2 * i), streaming=True)
        second = rig.route(prompt(1000, seed=2 * i + 1), streaming=True)
        waits.append(second.chosen.price.wait_s)
        serve(rig, first, first.chosen.price.ttft_s)
        price = second.chosen.price
        serve(rig, second, price.front_s + pace * waits[0] + price.comp_s)
        rig.now_s += 5
    assert worker(rig).wait_factor == pytest.approx(factor, rel=0.01)
    assert waits[-1] == pytest.approx(factor * waits[0], rel=0.01)


def _pulls(rig: Rig, *, beside: bool) -> None:
    """One answer on d1 reports; a pull comes in between, and `beside` it a prompt is computed there."""
    for i in range(N):
        stream = rig.route(prompt(100, seed=3 * i), streaming=True, keep_local=PdReason.POLICY)
        rig.observe(stream, OutcomeKind.FIRST_TOKEN)
        if beside:
            other = rig.route(prompt(100, seed=3 * i + 2), streaming=True, keep_local=PdReason.POLICY)
        pulled = rig.route(prompt(3000, seed=3 * i + 1), streaming=True)
        assert pulled.remote
        rig.observe(pulled, OutcomeKind.PREFILL_DONE)
        rig.observe(pulled, OutcomeKind.FIRST_TOKEN)
        rig.observe(pulled, OutcomeKind.END)
        if beside:
            rig.observe(other, OutcomeKind.FIRST_TOKEN)
            rig.observe(other, OutcomeKind.END)
        rig.now_s += 0.1
        step_s = rig.planner.cost.step_s(1, 100)
        rig.observe(stream, OutcomeKind.TOKEN, n_tokens=16, longest_gap_s=step_s + 0.024)
        rig.observe(stream, OutcomeKind.END)
        rig.now_s += 5


@pytest.mark.parametrize(("beside", "factor"), [(False, 3.0), (True, 1.0)])
def test_what_a_pull_costs_the_others_from_the_longest_gap(beside: bool, factor: float) -> None:
    rig = fleet(D("d1"), P("p1"), pd_policy="always-remote")
    _pulls(rig, beside=beside)
    assert worker(rig, "d1").stall_factor == pytest.approx(factor, rel=0.05)
    assert worker(rig, "d1").step_factor == 1.0  # A pull came in between each time.
    plan = rig.route(prompt(3000, seed=-1), streaming=True)
    assert plan.chosen.price.stall_s == pytest.approx(factor * 0.008, rel=0.05)


def test_steps_only_where_nothing_was_computed_between_two_reports() -> None:
    rig = fleet(W("a"))
    stream = rig.route(prompt(100), streaming=True)
    rig.observe(stream, OutcomeKind.FIRST_TOKEN)
    for i in range(N):
        step_s = rig.planner.cost.step_s(1, rig.planner.fleet.workers["a"].loads[0].kv_tokens)
        rig.now_s += 16 * 2 * step_s
        if i % 2:  # Three times as slow, for a reason that is known.
            other = rig.route(prompt(100, seed=i), streaming=True)
            serve(rig, other, 0.05)
            rig.now_s += 16 * step_s
        rig.observe(stream, OutcomeKind.TOKEN, n_tokens=16)
    assert worker(rig).step_factor == pytest.approx(2, rel=0.02)


def test_nothing_is_learned_from_a_prompt_that_was_cached_further_than_thought() -> None:
    """A gateway that was restarted before warm engines, or whose engine has no events."""
    rig = fleet(W("a", kv_blocks=100_000))
    for i in range(N):
        plan = rig.route(prompt(8000, seed=i), streaming=True)
        rig.now_s += 0.05
        rig.observe(plan, OutcomeKind.FIRST_TOKEN)
        rig.observe(plan, OutcomeKind.CACHED_TOKENS, n_tokens=7984)
        rig.observe(plan, OutcomeKind.END)
        rig.now_s += 5
    assert worker(rig).work_factor == 1.0
    assert (Part.WORK, "a") not in rig.planner.calibration.factors()


@pytest.mark.parametrize("kind", [OutcomeKind.CANCELLED, OutcomeKind.ERROR])
def test_streams_are_not_charged_for_prompts_that_were_never_computed(kind: OutcomeKind) -> None:
    rig = fleet(W("a"))
    stream = rig.route(prompt(100), streaming=True)
    rig.observe(stream, OutcomeKind.FIRST_TOKEN)
    (booking,) = worker(rig).loads[0].streaming
    plan = rig.route(prompt(4000, seed=1), streaming=True)
    assert booking.stalled_s == pytest.approx(plan.chosen.price.stall_s)
    late = rig.route(prompt(200, seed=2), streaming=True)  # It was not charged and is not paid back.
    rig.observe(late, OutcomeKind.FIRST_TOKEN)
    rig.observe(plan, kind)
    stalls = [it.stalled_s for it in worker(rig).loads[0].streaming]
    assert stalls == [pytest.approx(late.chosen.price.stall_s), 0.0]
    rig.observe(late, OutcomeKind.END)
    assert booking.stalled_s == pytest.approx(late.chosen.price.stall_s)
