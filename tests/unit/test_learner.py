"""What is learned from, and what is not: other things than the worker that take time."""

from __future__ import annotations

import pytest

from gateway.engine.health import Health, HealthSettings
from gateway.proxy.flight import REPORT_TOKENS, Flight
from scorer.calibrate import Part
from scorer.types import OutcomeKind, PdReason
from tests.support.fleets import D, P, Rig, W, fleet, prompt

REQUESTS = 40


def samples(rig: Rig, part: Part, subject: str) -> int:
    factor = rig.planner.calibration.factors().get((part, subject))
    return 0 if factor is None else factor.n_samples


def log_factor(rig: Rig, part: Part, subject: str) -> float:
    return rig.planner.calibration.factors()[part, subject].log


@pytest.mark.parametrize("local", [True, False])
def test_the_time_of_a_failed_prefill_is_nobody_elses(local: bool) -> None:
    rig = fleet(D("d"), P("p1"), P("p2"), pd_policy="always-remote")
    for i in range(REQUESTS):
        plan = rig.route(prompt(4000, seed=i), streaming=True)
        assert plan.chosen.prefill is not None
        failed = plan.chosen.prefill[0]
        rig.now_s += 30  # It has answered nothing.
        plan = rig.next_prefill(plan, PdReason.PREFILL_TIMEOUT, local=local)
        if plan.chosen.prefill is None:
            other = "d"
            rig.now_s += plan.chosen.price.ttft_s
        else:
            other = plan.chosen.prefill[0]
            assert other != failed
            rig.now_s += rig.planner.cost.front_s(4000, text=True) + plan.chosen.price.comp_s
            rig.observe(plan, OutcomeKind.PREFILL_DONE)
        rig.observe(plan, OutcomeKind.FIRST_TOKEN)
        rig.observe(plan, OutcomeKind.END)
        assert log_factor(rig, Part.WORK, other) == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize("n", [1, 4])
def test_a_step_brings_a_token_to_each_sequence(n: int) -> None:
    rig = fleet(W("a"))
    for i in range(REQUESTS):
        plan = rig.route(prompt(100, seed=i), streaming=True, n_sequences=n)
        rig.now_s += 0.1
        rig.observe(plan, OutcomeKind.FIRST_TOKEN)
        for _ in range(4):
            load = rig.planner.fleet.workers["a"].loads[0]
            rig.now_s += 64 * rig.planner.cost.step_s(load.streams, load.kv_tokens + 64 * n)
            rig.observe(plan, OutcomeKind.TOKEN, n_tokens=64 * n)
        rig.observe(plan, OutcomeKind.END, n_tokens=4 * 64 * n)
    assert rig.planner.fleet.workers["a"].step_factor == pytest.approx(1.0, abs=0.05)
    assert rig.planner.calibration.value(Part.OUTPUT, "m") == pytest.approx(1.0, abs=0.05)


def test_a_client_that_does_not_read_says_nothing_of_the_worker() -> None:
    rig = fleet(W("a"))
    plan = rig.route(prompt(100), streaming=True)
    flight = Flight(rig.planner, Health(HealthSettings()), rig.facts(100, request_id=plan.request_id), plan)
    flight.sent()
    flight.first_byte()
    flight.streamed(1)
    flight.streamed(REPORT_TOKENS)
    assert samples(rig, Part.STEP, "a") == 1
    flight.pause()
    flight.resume()
    for _ in range(3):  # The first came late, those behind it all at once.
        flight.streamed(REPORT_TOKENS)
    assert samples(rig, Part.STEP, "a") == 1
    flight.end()
    assert rig.planner.calibration.factors()[Part.OUTPUT, "m"].n_samples == 1
    assert rig.load("a") == 0


def test_a_guessed_time_is_booked_and_teaches_nothing() -> None:
    rig = fleet(P("p", nixl=True), D("d", nixl=True), pd_policy="always-remote")
    plan = rig.route(prompt(400), streaming=True)
    assert (rig.load("p"), rig.load("d")) == (1, 1)
    rig.now_s += 5
    rig.observe(plan, OutcomeKind.PREFILL_DONE, guessed=True)
    assert rig.load("p") == 0
    rig.observe(plan, OutcomeKind.FIRST_TOKEN, guessed=True)
    load = rig.planner.fleet.workers["d"].loads[0]
    assert (len(load.prefills), load.streams) == (0, 1)
    rig.observe(plan, OutcomeKind.END)
    assert rig.planner.calibration.factors() == {}
    rig.check_loads()
