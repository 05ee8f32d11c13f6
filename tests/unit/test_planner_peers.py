"""A prompt computed by a worker that decodes too and holds more of it: chosen when it should be, and only then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from scorer.ledger import Booking, Load
from scorer.pairs import FAILURES
from scorer.peers import GAIN, SOURCES
from scorer.types import OutcomeKind, PdReason, Role
from tests.support.fleets import D, P, Rig, W, fleet, prompt

TEXT = prompt(40_000)
BUSY = W("busy", nixl=True, kv_blocks=40_000)
IDLE = W("idle", nixl=True, kv_blocks=40_000)


def crowded(
    busy: W = BUSY,
    idle: W = IDLE,
    *others: W,
    held: int = 40_000,
    streams: int = 10,
    kv: int = 40_000,
    pd_policy: str = "cost",
    peers: bool = True,
) -> Rig:
    """`busy` holds so much of TEXT and has long answers to give; `idle` has neither."""
    rig = fleet(busy, idle, *others, pd_policy=pd_policy, peers=peers)
    rig.hold(busy.name, TEXT[:held])
    rig.answer(busy.name, streams, kv)
    return rig


def ways(rig: Rig, **facts: Any) -> set[tuple[str, str | None]]:
    return {(c.decode[0], c.prefill and c.prefill[0]) for c in rig.planner.explain(
        rig.facts(TEXT, **facts), None, rig.now_s, rig.rng).considered}  # fmt: skip


def test_a_long_prefix_on_a_crowded_worker_is_fetched_by_an_idle_one() -> None:
    rig = crowded()
    plan = rig.route(TEXT)
    chosen = plan.chosen
    assert (chosen.decode, chosen.prefill, chosen.peer) == (("idle", 0), ("busy", 0), True)
    assert (plan.choice, plan.pd_reason, plan.remote) == ("peer", PdReason.COST, True)
    assert (chosen.cached_tokens, chosen.prefill_cached_tokens) == (0, 39_984)
    locals_ = [c.price.total_s for c in plan.considered if c.prefill is None]
    assert len(locals_) == 2
    assert chosen.price.total_s < (1 - GAIN) * min(locals_)


def test_peers_can_be_turned_off_but_a_named_one_is_still_asked() -> None:
    rig = crowded(peers=False)
    assert {prefill for _, prefill in ways(rig)} == {None}
    named = rig.route(TEXT, kv_source="busy", subset=frozenset({"idle"}))
    assert (named.choice, named.pd_reason) == ("peer", PdReason.HINT)


def test_its_price_has_what_the_source_and_its_answers_lose() -> None:
    rig = crowded()
    price, c = rig.route(TEXT).chosen.price, rig.planner.cost.constants
    source = rig.planner.fleet.workers["busy"]
    assert price.comp_s == pytest.approx(c.comp_floor_s)
    step_s = rig.planner.cost.step_s(10, 400_000)
    assert price.harm_s == pytest.approx(10 * (c.comp_floor_s - step_s))
    assert price.pull_s == pytest.approx(c.pull_base_s + 2500 * c.pull_per_block_s + c.first_contact_s)
    text_s, ids_s = (rig.planner.cost.front_s(40_000, text=text) for text in (True, False))
    assert price.front_s == pytest.approx(text_s + ids_s)
    assert [booking.stalled_s for booking in source.loads[0].streaming] == [pytest.approx(c.comp_floor_s - step_s)] * 10
    parts = price.front_s + price.wait_s + price.comp_s + price.hop_s + price.pull_s + price.step_s
    assert price.ttft_s == pytest.approx(parts)
    others = price.harm_s + price.decode_s + price.queue_s + price.displaced_s + price.viol_s
    assert price.total_s == pytest.approx(price.ttft_s + others)


def test_the_handshake_is_paid_once() -> None:
    rig = crowded()
    first = rig.route(TEXT)
    rig.observe(first, OutcomeKind.PREFILL_DONE)
    rig.observe(first, OutcomeKind.FIRST_TOKEN)
    rig.observe(first, OutcomeKind.END)
    rig.planner.forget_blocks("idle")
    again = rig.planner.explain(rig.facts(TEXT), None, rig.now_s, rig.rng)
    assert again.choice == "peer"
    c = rig.planner.cost.constants
    assert first.chosen.price.pull_s - again.chosen.price.pull_s == pytest.approx(c.first_contact_s)


def test_a_source_holds_up_those_who_wait_anywhere_as_its_own_answer_would() -> None:
    """Other workers have a queue, and no answers run. What the source computes, it computes for nobody cheaper than for
    itself: another's answer only adds the pull.
    """
    rig = fleet(BUSY, IDLE, *(replace(IDLE, name=f"other{i}") for i in range(4)), pd_policy="cost")
    rig.hold("busy", TEXT[:20_000])
    for i in range(12):
        plan = rig.route(prompt(30_000, seed=10 + i), max_output_tokens=1)
        assert plan.chosen.prefill is None
    for name in ("busy", "idle"):
        rig.planner.fleet.workers[name].loads = {0: Load()}
    found = rig.planner.explain(rig.facts(TEXT, max_output_tokens=1), None, rig.now_s, rig.rng)
    local = found.chosen
    assert (local.decode, local.prefill) == (("busy", 0), None)
    assert local.price.queue_s > local.price.comp_s, "others wait"
    assert not any(each.peer for each in found.considered)


def test_objectives_broken_at_the_source_count() -> None:
    rig = crowded()
    rig.answer("busy", 1, 10, slo_tpot_s=0.019)
    assert rig.planner.explain(rig.facts(TEXT), None, rig.now_s, rig.rng).choice != "peer"


def test_what_is_pushed_out_counts_for_the_answers_beside_it() -> None:
    full = replace(IDLE, kv_blocks=2600)
    rig = crowded(idle=full)
    rig.hold("idle", prompt(40_000, seed=5))
    assert ("idle", "busy") in ways(rig)
    rig.answer("idle", 20, 16)
    assert ("idle", "busy") not in ways(rig)


def test_a_second_copy_is_dearer_by_what_answers_lose_for_it() -> None:
    rigs = [crowded(idle=replace(IDLE, kv_blocks=blocks)) for blocks in (40_000, 2600)]
    plans = []
    for rig in rigs:
        rig.hold("idle", prompt(2000, seed=5))
        rig.answer("idle", 1, 16)
        plans.append(rig.route(TEXT))
    roomy, full = (plan.chosen.price for plan in plans)
    assert {plan.choice for plan in plans} == {"peer"}
    local = next(c.price for c in plans[1].considered if c.prefill is None and c.decode == ("idle", 0))
    assert 0 < full.displaced_s == pytest.approx(2 * local.displaced_s)
    assert full.total_s - roomy.total_s == pytest.approx(full.displaced_s)


@pytest.mark.parametrize(("share", "choice"), [(-0.01, "peer"), (0.01, "local")])
def test_it_must_be_a_tenth_cheaper(share: float, choice: str) -> None:
    rig = crowded()
    plan = rig.planner.explain(rig.facts(TEXT), None, rig.now_s, rig.rng)
    local_s = min(c.price.total_s for c in plan.considered if c.prefill is None)
    room_s = (1 - GAIN + share) * local_s - plan.chosen.price.total_s
    cost = rig.planner.cost
    cost.constants = msgspec.structs.replace(cost.constants, hop_s=cost.constants.hop_s + room_s)
    assert rig.route(TEXT).choice == choice


@pytest.mark.parametrize(
    ("busy", "idle", "facts"),
    [
        ({"nixl": False}, {}, {}),
        ({}, {"nixl": False}, {}),
        ({"nixl": False}, {"nixl": False}, {}),
        ({"scraped": False}, {}, {}),
        ({"block_size": None}, {"block_size": None}, {}),
        ({}, {}, {"keep_local": PdReason.N_SEQUENCES}),
        ({}, {}, {"excluded": frozenset({"busy"})}),
        ({"kv_usage": 1.0}, {}, {}),
        ({}, {"kv_usage": 1.0}, {}),
        ({"models": ("other",)}, {}, {}),
        ({"asked": False}, {}, {}),
    ],
)
def test_it_is_no_way_where_either_cannot_or_must_not(
    busy: dict[str, Any], idle: dict[str, Any], facts: dict[str, Any]
) -> None:
    rig = crowded(replace(BUSY, **busy), replace(IDLE, **idle))
    assert ("idle", "busy") not in ways(rig, **facts)


@pytest.mark.parametrize(
    ("held", "streams", "kv", "tokens"),
    [
        (40_000, 0, 0, 40_000),  # The source can answer itself.
        (2000, 10, 40_000, 40_000),  # It would have to compute nearly all of it, in the way of its answers.
        (40_000, 300, 1000, 40_000),  # Too many would stand still for it.
        (40_000, 10, 40_000, 500),  # There is little to compute.
    ],
)
def test_it_is_not_chosen_where_it_does_not_pay(held: int, streams: int, kv: int, tokens: int) -> None:
    rig = crowded(held=held, streams=streams, kv=kv)
    assert rig.route(TEXT[:tokens]).choice == "local"


def test_it_is_not_chosen_over_a_slow_link() -> None:
    rig = crowded()
    cost = rig.planner.cost
    cost.constants = msgspec.structs.replace(cost.constants, pull_per_block_s=1e-3)
    assert rig.route(TEXT).choice == "local"


def test_available_draining_and_stale_workers() -> None:
    rig = crowded()
    assert rig.planner.explain(rig.facts(TEXT), ["idle"], rig.now_s, rig.rng).choice == "local"
    later = rig.planner.explain(rig.facts(TEXT), None, rig.now_s + 60, rig.rng)
    assert all(candidate.prefill is None for candidate in later.considered)
    rig.planner.fleet.workers["busy"].draining = True
    assert rig.route(TEXT).choice == "local"


@pytest.mark.parametrize("pd_policy", ["local", "header", "threshold:1024", "always-remote"])
def test_rules_know_nothing_of_sources(pd_policy: str) -> None:
    assert crowded(pd_policy=pd_policy).route(TEXT).choice == "local"


def test_so_many_sources_are_looked_at_the_fullest_and_least_busy_first() -> None:
    others = [W(f"w{i}", nixl=True, kv_blocks=40_000) for i in range(SOURCES + 2)]
    rig = crowded(BUSY, IDLE, *others, held=30_000)
    for i, worker in enumerate(others):
        rig.hold(worker.name, TEXT)
        rig.answer(worker.name, 8 + i, 50_000)
    sources = {prefill for decode, prefill in ways(rig) if decode == "idle" and prefill}
    assert sources == {f"w{i}" for i in range(SOURCES)}


def test_a_prefill_worker_that_is_cheaper_still_is() -> None:
    rig = crowded(BUSY, IDLE, P("p", nixl=True, kv_blocks=40_000))
    rig.hold("p", TEXT)
    plan = rig.route(TEXT)
    assert (plan.choice, plan.chosen.prefill) == ("remote", ("p", 0))


def test_a_source_that_fails_is_left_and_everything_is_given_back() -> None:
    rig = crowded()
    plan = rig.route(TEXT)
    assert rig.loads() == {"busy": 11, "idle": 1}
    after = rig.next_prefill(plan)
    assert (after.choice, after.chosen.decode, after.pd_reason) == ("local", ("idle", 0), PdReason.PREFILL_FAILED)
    assert not after.chosen.peer
    assert rig.loads() == {"busy": 10, "idle": 1}
    (booking,) = rig.planner.fleet.workers["idle"].loads[0].prefills
    assert isinstance(booking, Booking)
    assert booking.comp_s == pytest.approx(after.chosen.price.comp_s)
    rig.observe(plan, OutcomeKind.END)
    assert rig.loads() == {"busy": 10, "idle": 0}


def test_a_pair_that_does_not_do_is_not_asked_again() -> None:
    rig = crowded()
    for _ in range(FAILURES):
        plan = rig.route(TEXT)
        assert plan.choice == "peer"
        rig.observe(plan, OutcomeKind.PAIR_FAILED)
        rig.observe(plan, OutcomeKind.ERROR)
        rig.planner.forget_blocks("idle")
    assert rig.route(TEXT).choice == "local"


# ---- a source that somebody in front of us has named -----------------------------------------------------------------


@pytest.mark.parametrize("pd_policy", ["header", "local", "cost", "threshold:1024"])
def test_a_named_source_is_asked(pd_policy: str) -> None:
    rig = fleet(D("d", nixl=True), D("s", nixl=True), pd_policy=pd_policy)
    rig.hold("s", TEXT[:4000])
    plan = rig.route(TEXT[:4000], kv_source="s", subset=frozenset({"d"}))
    assert (plan.choice, plan.pd_reason) == ("peer", PdReason.HINT)
    assert (plan.chosen.decode, plan.chosen.prefill) == (("d", 0), ("s", 0))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (D("s"), PdReason.SOURCE_UNUSABLE),
        (D("other", nixl=True), PdReason.SOURCE_UNUSABLE),
        (D("s", nixl=True, models=("other",)), PdReason.SOURCE_UNUSABLE),
        (D("s", nixl=True), PdReason.SOURCE_HOLDS_NO_MORE),
        (D("s", nixl=True, events=False), None),
        (D("s", scraped=False, asked=False, events=False), None),
        (W("s", role=Role.SOURCE, scraped=False, asked=False, events=False), None),
    ],
)
def test_a_named_source_must_be_one_as_far_as_it_is_known(source: W, reason: PdReason | None) -> None:
    rig = fleet(D("d", nixl=True), source, pd_policy="header")
    plan = rig.route(prompt(4000), kv_source="s", subset=frozenset({"d"}))
    if reason is None:
        assert (plan.choice, plan.pd_reason) == ("peer", PdReason.HINT)
    else:
        assert (plan.choice, plan.pd_reason) == ("local", reason)


@pytest.mark.parametrize(("held", "choice"), [(3952, "peer"), (3968, "peer"), (3984, "local"), (4000, "local")])
def test_a_named_source_must_hold_a_block_more(held: int, choice: str) -> None:
    """The last block of a prompt is never a hit."""
    rig = fleet(D("d", nixl=True), D("s", nixl=True), pd_policy="header")
    rig.hold("s", TEXT[:4000])
    rig.hold("d", TEXT[:held])
    assert rig.route(TEXT[:4000], kv_source="s", subset=frozenset({"d"})).choice == choice


def test_a_decode_worker_without_a_connector_fetches_nothing() -> None:
    rig = fleet(D("d"), D("s", nixl=True, events=False), pd_policy="header")
    plan = rig.route(prompt(4000), kv_source="s", subset=frozenset({"d"}))
    assert (plan.choice, plan.pd_reason) == ("local", PdReason.SOURCE_UNUSABLE)


def test_a_request_that_goes_to_the_source_itself_is_like_any_other() -> None:
    rig = fleet(D("d", nixl=True), D("s", nixl=True), pd_policy="header")
    rig.hold("s", TEXT[:4000])
    plan = rig.route(TEXT[:4000], kv_source="s")
    assert (plan.choice, plan.chosen.decode, plan.pd_reason) == ("local", ("s", 0), PdReason.NO_HINT)


@pytest.mark.parametrize(("why", "reason"), [(None, PdReason.PAIR_BROKEN), ("x", PdReason.PAIR_INCOMPATIBLE)])
def test_a_named_source_of_a_bad_pair(why: str | None, reason: PdReason) -> None:
    rig = fleet(D("d", nixl=True), D("s", nixl=True, events=False), pd_policy="header")
    for _ in range(FAILURES):
        rig.planner.pairs.start(("s", "d"))
        rig.planner.pairs.broke(("s", "d"), rig.now_s)
    rig.planner.pairs.set_incompatible(("s", "d"), why)
    plan = rig.route(prompt(4000), kv_source="s", subset=frozenset({"d"}))
    assert (plan.choice, plan.pd_reason) == ("local", reason)


def test_a_source_of_no_use_leaves_the_rule_to_decide() -> None:
    rig = fleet(D("d", nixl=True), P("p", nixl=True), pd_policy="always-remote")
    plan = rig.route(prompt(4000), kv_source="gone", subset=frozenset({"d"}))
    assert (plan.choice, plan.pd_reason, plan.chosen.prefill) == ("remote", PdReason.POLICY, ("p", 0))
    kept = rig.route(prompt(4000), kv_source="gone", keep_local=PdReason.ECHO)
    assert (kept.choice, kept.pd_reason) == ("local", PdReason.ECHO)


def test_named_prefill_workers_come_before_a_named_source() -> None:
    rig = fleet(D("d", nixl=True), D("s", nixl=True, events=False), P("p", nixl=True), pd_policy="header")
    plan = rig.route(prompt(4000), kv_source="s", prefill_hint=("p",), subset=frozenset({"d"}))
    assert (plan.choice, plan.chosen.prefill) == ("remote", ("p", 0))


def test_a_named_source_that_fails_is_not_asked_again() -> None:
    rig = fleet(D("d", nixl=True), D("s", nixl=True, events=False), pd_policy="header")
    plan = rig.route(prompt(4000), kv_source="s", subset=frozenset({"d"}))
    after = rig.next_prefill(plan)
    assert (after.choice, after.pd_reason) == ("local", PdReason.PREFILL_FAILED)
    assert rig.loads() == {"d": 1, "s": 0}


def test_what_a_named_source_holds_unknown_to_us_teaches_nothing() -> None:
    rig = fleet(D("d", nixl=True), D("s", nixl=True, events=False), pd_policy="header")
    for seed in range(40):
        plan = rig.route(prompt(4000, seed=seed), kv_source="s", subset=frozenset({"d"}))
        rig.now_s += 0.001
        rig.observe(plan, OutcomeKind.PREFILL_DONE)
        rig.observe(plan, OutcomeKind.END)
    assert rig.planner.fleet.workers["s"].work_factor == 1.0
    assert rig.planner.fleet.workers["s"].floor_factor == 1.0
