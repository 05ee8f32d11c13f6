"""What a pull from a prefill worker is predicted to take: first contact, ids that go along, block size; how that is
learned, and what becomes of it when the engine counts something else.
"""

from __future__ import annotations

import msgspec
import pytest

from scorer.calibrate import BOUND, MIN_SAMPLES, Part
from scorer.pulls import Pulls
from scorer.types import EngineStats, OutcomeKind, PdReason, Plan, TokenSource
from tests.support.fleets import D, P, Rig, fleet, prompt

REMOTE = "always-remote"
N_TOKENS = 4000


def pair() -> Rig:
    return fleet(D("d", nixl=True, kv_blocks=100_000), P("p"), pd_policy=REMOTE)


def handed_over(rig: Rig, seed: int, pull_s: float) -> Plan:
    """One request; from the prefill's answer to the first token it takes all that is predicted but the pull, and
    `pull_s`.
    """
    plan = rig.route(prompt(N_TOKENS, seed=seed), streaming=True)
    assert plan.remote
    rig.now_s += 0.2
    rig.observe(plan, OutcomeKind.PREFILL_DONE)
    price, cost = plan.chosen.price, rig.planner.cost
    rig.now_s += cost.constants.hop_s + cost.front_s(N_TOKENS) + price.step_s + pull_s
    rig.observe(plan, OutcomeKind.FIRST_TOKEN)
    rig.observe(plan, OutcomeKind.END)
    rig.now_s += 5
    return plan


def counted(rig: Rig, transfers: int, took_s: float) -> None:
    """The decode worker's engine tells of its transfers so far."""
    stats = rig.planner.fleet.workers["d"].stats
    assert stats is not None
    now = msgspec.structs.replace(
        stats, scraped_at_s=rig.now_s, nixl_transfers=float(transfers), nixl_transfer_s=took_s, process_start_s=1.0
    )
    rig.planner.fleet.set_stats("d", now)


def usual_s(rig: Rig) -> float:
    return rig.planner.cost.pull_s(N_TOKENS // 16, 16)


# ---- the price -------------------------------------------------------------------------------------------------------


def test_a_prefill_worker_that_has_not_met_the_decode_worker_pays_the_handshake_once() -> None:
    rig = pair()
    c = rig.planner.cost.constants
    first = handed_over(rig, 0, usual_s(rig))
    assert first.chosen.price.pull_s == pytest.approx(usual_s(rig) + c.first_contact_s)
    assert handed_over(rig, 1, usual_s(rig)).chosen.price.pull_s == pytest.approx(usual_s(rig))


def test_a_handoff_that_was_given_up_is_no_meeting() -> None:
    rig = pair()
    first = rig.route(prompt(N_TOKENS), streaming=True)
    rig.next_prefill(first, PdReason.PREFILL_TIMEOUT, local=True)
    rig.observe(first, OutcomeKind.END)
    again = rig.route(prompt(N_TOKENS, seed=1), streaming=True)
    assert again.chosen.price.pull_s == pytest.approx(first.chosen.price.pull_s)


def test_of_two_prefill_workers_the_one_that_is_known_is_asked() -> None:
    rig = fleet(D("d"), P("p"), P("q"), pd_policy="cost")
    rig.answer("d", 60, 4000)
    for names in (("p", "d"), ("q", "d")):
        rig.planner.pairs.forget(names[0])
        rig.planner.pairs.start(names)
        rig.planner.pairs.worked(names)
        other = "q" if names[0] == "p" else "p"
        rig.planner.pairs.forget(other)
        plan = rig.planner.explain(rig.facts(prompt(8000)), None, rig.now_s, rig.rng)
        assert plan.chosen.prefill == (names[0], 0)


@pytest.mark.parametrize("n", [512, 2048, 8192, 32_768])
def test_the_decode_worker_gets_ids_where_the_first_engine_gets_text(n: int) -> None:
    """What that saves there was measured: 5, 12, 47 and 192 ms."""
    measured_s = {512: 0.005, 2048: 0.012, 8192: 0.047, 32_768: 0.192}[n]
    rig = fleet(D("d", kv_blocks=None), P("p", kv_blocks=None), pd_policy=REMOTE)
    by_source = {
        source: rig.route(prompt(n, seed=i), token_source=source).chosen.price
        for i, source in enumerate((TokenSource.GIVEN, TokenSource.LOCAL))
    }
    more_s = by_source[TokenSource.LOCAL].front_s - by_source[TokenSource.GIVEN].front_s
    assert more_s == pytest.approx(measured_s, abs=0.0025), "once, at the prefill worker"
    images = rig.route(prompt(n, seed=3), token_source=TokenSource.LOCAL, exact_prefix_tokens=100).chosen.price
    assert images.front_s - by_source[TokenSource.LOCAL].front_s == pytest.approx(measured_s, abs=0.0025)


@pytest.mark.parametrize(("block_size", "per_block_s"), [(16, 157e-6), (64, 157e-6), (1024, 147_456 * 1024 / 343e9)])
def test_a_block_takes_as_long_as_its_descriptors_or_its_bytes(block_size: int, per_block_s: float) -> None:
    rig = fleet(D("d", block_size=block_size), P("p", block_size=block_size), pd_policy=REMOTE)
    c = rig.planner.cost.constants
    price = rig.route(prompt(8192)).chosen.price
    blocks = 8192 // block_size
    assert price.pull_s == pytest.approx(c.first_contact_s + c.pull_base_s + blocks * per_block_s)


# ---- what is learned -------------------------------------------------------------------------------------------------


def test_a_slow_pair_is_learned_and_its_first_contact_is_not_taken_for_a_transfer() -> None:
    rig = pair()
    handed_over(rig, 0, usual_s(rig) + 10.0)  # A very long handshake.
    for i in range(1, 2 * MIN_SAMPLES):
        handed_over(rig, i, 3 * usual_s(rig))
    factors = rig.planner.calibration.factors()
    assert rig.planner.calibration.value(Part.PULL, "p>d") == pytest.approx(3, rel=0.01)
    assert factors[Part.MEETING, "p>d"].n_samples == 1
    assert factors[Part.PULL, "p>d"].n_samples == 2 * MIN_SAMPLES - 1


def test_handshakes_are_learned_for_all_pairs_that_have_not_met() -> None:
    rig = pair()
    c = rig.planner.cost.constants
    for i in range(2 * MIN_SAMPLES):
        rig.planner.pairs.forget("p")
        handed_over(rig, i, usual_s(rig) + 2 * c.first_contact_s)
    plan = rig.route(prompt(N_TOKENS, seed=-1))
    rig.planner.pairs.forget("p")
    assert plan.chosen.price.pull_s < usual_s(rig) + 0.01, "it is under way"
    plan = rig.route(prompt(N_TOKENS, seed=-2))
    assert plan.chosen.price.pull_s == pytest.approx(usual_s(rig) + 2 * c.first_contact_s, rel=0.05)


def test_what_was_predicted_at_the_decision_is_what_is_learned_from() -> None:
    """While a request is on its way, the factor it was planned with changes: from 1 to 3."""
    rig = pair()
    handed_over(rig, 0, usual_s(rig))
    plans = [rig.route(prompt(N_TOKENS, seed=1000 + i), streaming=True) for i in range(MIN_SAMPLES)]
    for i in range(1, 2 * MIN_SAMPLES):
        handed_over(rig, i, 3 * usual_s(rig))
    before = rig.planner.calibration.value(Part.PULL, "p>d")
    assert before == pytest.approx(3, rel=0.01)
    for plan in plans:
        rig.observe(plan, OutcomeKind.PREFILL_DONE)
        began_s = rig.now_s
        cost = rig.planner.cost
        rig.now_s += cost.constants.hop_s + cost.front_s(N_TOKENS) + plan.chosen.price.step_s + 3 * usual_s(rig)
        rig.observe(plan, OutcomeKind.FIRST_TOKEN)
        rig.now_s = began_s
    assert rig.planner.calibration.value(Part.PULL, "p>d") == pytest.approx(before, rel=0.01)


# ---- beside the engine's own count -----------------------------------------------------------------------------------


def test_an_engine_that_counts_what_no_factor_can_say_is_believed() -> None:
    """NIXL over plain TCP: twenty times the prior, where a factor may be four."""
    rig = pair()
    counted(rig, 0, 0.0)
    pulls = rig.planner.fleet.workers["d"].pulls
    for i in range(4 * MIN_SAMPLES):
        handed_over(rig, i, 20 * usual_s(rig))
        counted(rig, i + 1, (i + 1) * 20 * usual_s(rig))
    assert pulls.scale == pytest.approx(20, rel=0.01)
    assert pulls.news
    assert pulls.agrees
    price = rig.route(prompt(N_TOKENS, seed=-1)).chosen.price
    assert price.pull_s == pytest.approx(20 * usual_s(rig), rel=0.05)
    assert price.pull_s > 2 * BOUND * usual_s(rig)


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.8])
def test_an_engine_that_counts_about_the_same_changes_nothing(factor: float) -> None:
    rig = pair()
    counted(rig, 0, 0.0)
    for i in range(3 * MIN_SAMPLES):
        handed_over(rig, i, usual_s(rig))
        counted(rig, i + 1, (i + 1) * factor * usual_s(rig))
    pulls = rig.planner.fleet.workers["d"].pulls
    assert (pulls.scale, pulls.news, pulls.agrees) == (1.0, False, True)


def test_what_a_first_token_waits_for_beside_the_transfer_stays_learned() -> None:
    """The engine counts what the prior says, but the pair takes three times as long: pulls stand in line, say. The
    disagreement is there to be seen; the factor remains.
    """
    rig = pair()
    counted(rig, 0, 0.0)
    for i in range(4 * MIN_SAMPLES):
        handed_over(rig, i, 3 * usual_s(rig))
        counted(rig, i + 1, (i + 1) * usual_s(rig))
    pulls = rig.planner.fleet.workers["d"].pulls
    assert pulls.scale == 1.0
    assert pulls.agrees is False
    assert rig.planner.calibration.value(Part.PULL, "p>d") == pytest.approx(3, rel=0.01)


def test_nothing_is_held_against_few_transfers_or_those_of_another_process() -> None:
    pulls = Pulls()

    def stats(transfers: float | None, started_s: float) -> EngineStats:
        took_s = None if transfers is None else transfers / 10
        return EngineStats(
            scraped_at_s=0.0, nixl_transfers=transfers, nixl_transfer_s=took_s, process_start_s=started_s
        )

    for before, now in (
        (None, stats(100, 1)),
        (stats(100, 1), stats(50, 2)),
        (stats(50, 2), stats(None, 2)),
        (stats(None, 2), stats(90, 2)),
        (stats(90, 2), stats(20, 2)),
    ):
        pulls.scraped(before, now)
    assert pulls.engine_mean_s is None
    pulls.scraped(stats(0, 1), stats(MIN_SAMPLES, 1))
    assert pulls.engine_mean_s == pytest.approx(0.1)
    assert pulls.agrees is None, "there are none of ours to hold it against"
    for _ in range(MIN_SAMPLES):
        assert not pulls.check()
        pulls.came(1.0, 1.0)
    assert pulls.check()
    assert pulls.scale == pytest.approx(0.1)
