"""Decode first, then who computes the prompt for it: choosing, booking, and the next when one fails."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from indexer import Holder
from scorer.pairs import BACKOFF_MIN_S, FAILURES
from scorer.planner import NoWorker
from scorer.types import OutcomeKind, PdReason, TokenSource
from tests.support.fleets import D, P, Rig, W, fleet, prompt

REMOTE = "always-remote"


def break_pair(rig: Rig, prefill: str, decode: str) -> None:
    for _ in range(FAILURES):
        rig.planner.pairs.start((prefill, decode))
        rig.planner.pairs.broke((prefill, decode), rig.now_s)


# ---- the decode worker comes first -----------------------------------------------------------------------------------


def test_the_decode_worker_is_chosen_first_and_by_its_own_price() -> None:
    rig = fleet(D("cold"), D("warm"), P("p"), pd_policy=REMOTE)
    text = prompt(4000)
    rig.hold("warm", text)
    plan = rig.route(text)
    assert (plan.chosen.decode, plan.chosen.prefill) == (("warm", 0), ("p", 0))
    assert (plan.chosen.cached_tokens, plan.chosen.prefill_cached_tokens) == (3984, 0)
    assert plan.remote
    assert plan.pd_reason is PdReason.POLICY


def test_prefill_workers_never_decode_and_decode_workers_never_prefill() -> None:
    rig = fleet(P("p1"), P("p2"), D("d"), pd_policy=REMOTE)
    for seed in range(10):
        plan = rig.route(prompt(2000, seed=seed))
        assert plan.chosen.decode == ("d", 0)
        assert plan.chosen.prefill in {("p1", 0), ("p2", 0)}
    with pytest.raises(NoWorker):
        rig.route(prompt(2000), available=["p1", "p2"])


def test_workers_of_both_roles_may_decode_but_are_not_asked_to_prefill() -> None:
    rig = fleet(W("a"), W("b"), pd_policy=REMOTE)
    plan = rig.route(prompt(2000))
    assert not plan.remote
    assert plan.pd_reason is PdReason.NO_PREFILL_WORKER


def test_considered_shows_the_remote_ways_beside_the_local_ones() -> None:
    rig = fleet(D("d1"), D("d2"), P("p1"), P("p2"), pd_policy=REMOTE)
    plan = rig.route(prompt(2000))
    ways = [(c.decode[0], c.prefill and c.prefill[0]) for c in plan.considered]
    assert len(set(ways)) == len(ways) == plan.n_candidates == 4
    assert {way[1] for way in ways[:2]} == {"p1", "p2"}
    assert {way for way in ways if way[1] is None} == {("d1", None), ("d2", None)}


def test_the_remote_price_is_made_of_both_workers_seconds() -> None:
    rig = fleet(D("d"), P("p"), pd_policy=REMOTE)
    price = rig.route(prompt(8000)).chosen.price
    assert price.comp_s > 0
    assert price.pull_s > 0
    assert price.hop_s > 0
    assert price.step_s > 0
    parts = price.front_s + price.wait_s + price.adm_s + price.load_s
    parts += price.comp_s + price.hop_s + price.pull_s + price.step_s
    assert price.ttft_s == pytest.approx(parts)
    others = price.harm_s + price.decode_s + price.queue_s + price.displaced_s + price.viol_s
    assert price.total_s == pytest.approx(price.ttft_s + others)


def test_what_the_decode_worker_holds_need_not_be_pulled() -> None:
    text = prompt(8000)
    pulls = []
    for held in (False, True):
        rig = fleet(D("d"), P("p"), pd_policy=REMOTE)
        if held:
            rig.hold("d", text[:4000])
        pulls.append(rig.route(text).chosen.price.pull_s)
    c = rig.planner.cost.constants
    assert pulls[0] - pulls[1] == pytest.approx(250 * c.pull_per_block_s)


# ---- which prefill worker --------------------------------------------------------------------------------------------


def test_the_prefill_worker_with_the_shorter_queue_is_taken() -> None:
    rig = fleet(D("d"), P("busy"), P("idle"), pd_policy=REMOTE)
    for seed in range(3):
        rig.route(prompt(8000, seed=seed), available=["d", "busy"])
    for seed in range(5):
        plan = rig.route(prompt(500, seed=90 + seed))
        assert plan.chosen.prefill == ("idle", 0)
        rig.observe(plan, OutcomeKind.CANCELLED)


def test_a_prefill_worker_that_others_keep_waiting_is_avoided() -> None:
    rig = fleet(D("d"), P("busy", waiting=20), P("idle"), pd_policy=REMOTE)
    for seed in range(10):
        plan = rig.route(prompt(4000, seed=seed))
        assert plan.chosen.prefill == ("idle", 0)
        rig.observe(plan, OutcomeKind.CANCELLED)


def test_the_prefill_worker_that_holds_the_prompt_is_taken() -> None:
    for seed in range(10):
        rig = fleet(D("d"), P("cold"), P("warm"), P("also_cold"), pd_policy=REMOTE, seed=seed)
        text = prompt(8000)
        rig.hold("warm", text)
        plan = rig.route(text)
        assert plan.chosen.prefill == ("warm", 0)
        assert (plan.chosen.cached_tokens, plan.chosen.prefill_cached_tokens) == (0, 7984)


def test_near_equals_are_drawn_and_a_dearer_one_is_not() -> None:
    hits: Counter[Holder | None] = Counter()
    for seed in range(90):
        rig = fleet(D("d"), P("p1"), P("p2"), P("p3"), P("far", weight=0.5), pd_policy=REMOTE, seed=seed)
        hits[rig.route(prompt(4000)).chosen.prefill] += 1
    assert set(hits) == {("p1", 0), ("p2", 0), ("p3", 0)}
    assert max(hits.values()) < 50


def test_each_rank_is_a_place_of_its_own() -> None:
    rig = fleet(D("d", ranks=2), P("p", ranks=3), pd_policy=REMOTE)
    plans = [rig.route(prompt(4000, seed=seed)) for seed in range(6)]
    assert Counter(plan.chosen.prefill for plan in plans) == {("p", rank): 2 for rank in range(3)}
    assert Counter(plan.chosen.decode for plan in plans) == {("d", rank): 3 for rank in range(2)}
    assert rig.route(prompt(2000), rank=1).chosen.decode == ("d", 1)
    with pytest.raises(NoWorker):
        rig.route(prompt(2000), rank=2)


def test_a_burst_spreads_over_the_prefill_workers() -> None:
    rig = fleet(D("d"), *(P(f"p{i}") for i in range(4)), pd_policy=REMOTE)
    hits = Counter(rig.route(prompt(2000, seed=i)).chosen.prefill for i in range(40))
    assert all(7 <= n <= 13 for n in hits.values()), hits


# ---- hints -----------------------------------------------------------------------------------------------------------


def test_hinted_workers_are_taken_in_their_order_whatever_they_cost() -> None:
    rig = fleet(D("d"), P("p1"), P("p2"), P("p3"))
    text = prompt(4000)
    rig.hold("p1", text)
    plan = rig.route(text, prefill_hint=("p3", "p2"))
    assert (plan.chosen.prefill, plan.pd_reason) == (("p3", 0), PdReason.HINT)
    plan = rig.next_prefill(plan)
    assert (plan.chosen.prefill, plan.pd_reason) == (("p2", 0), PdReason.HINT)
    plan = rig.next_prefill(plan, PdReason.PREFILL_TIMEOUT)
    assert (plan.chosen.prefill, plan.pd_reason) == (None, PdReason.PREFILL_TIMEOUT)


def test_a_hint_is_obeyed_under_every_rule() -> None:
    for pd_policy in ("header", "local", "threshold:100000", "isl:100000,1"):
        rig = fleet(D("d"), P("p1"), P("p2"), pd_policy=pd_policy)
        assert rig.route(prompt(2000), prefill_hint=("p2",)).chosen.prefill == ("p2", 0)


def test_a_hinted_worker_that_was_not_asked_yet_is_taken_at_its_word() -> None:
    rig = fleet(D("d"), P("known"), P("new", asked=False, scraped=False), pd_policy=REMOTE)
    assert rig.route(prompt(2000)).chosen.prefill == ("known", 0)
    assert rig.route(prompt(2000), prefill_hint=("new",)).chosen.prefill == ("new", 0)


def test_hinted_workers_that_cannot_be_used_leave_the_prompt_local() -> None:
    rig = fleet(D("d"), P("p1"), P("other", models=("another",)))
    for hint in (("gone",), ("other",), ("d",)):
        plan = rig.route(prompt(2000), prefill_hint=hint)
        assert (plan.remote, plan.pd_reason) == (False, PdReason.NO_PREFILL_WORKER)
    plan = rig.route(prompt(2000), available=["d"], prefill_hint=("p1",))
    assert (plan.remote, plan.pd_reason) == (False, PdReason.NO_PREFILL_WORKER)


# ---- every reason the planner can give -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pd_policy", "facts", "decode", "remote", "reason"),
    [
        (REMOTE, {}, {}, True, PdReason.POLICY),
        ("local", {}, {}, False, PdReason.POLICY),
        ("threshold:1000", {}, {}, True, PdReason.THRESHOLD),
        ("threshold:5000", {}, {}, False, PdReason.THRESHOLD),
        ("isl:2048,0.7", {}, {}, True, PdReason.THRESHOLD),
        ("header", {}, {}, False, PdReason.NO_HINT),
        ("header", {"prefill_hint": ("p",)}, {}, True, PdReason.HINT),
        (REMOTE, {}, {"block_size": None}, False, PdReason.UNKNOWN_BLOCK_SIZE),
        (REMOTE, {}, {"block_size": 4096}, False, PdReason.SHORT_PROMPT),
        (REMOTE, {}, {"block_size": 2000}, True, PdReason.POLICY),
        (REMOTE, {"token_source": TokenSource.LOCAL}, {"max_model_len": 2000}, False, PdReason.WOULD_BE_REJECTED),
        (REMOTE, {"token_source": TokenSource.LOCAL}, {"max_model_len": 2001}, True, PdReason.POLICY),
        (
            REMOTE,
            {"token_source": TokenSource.ENGINE, "max_output_tokens": 2051},
            {"max_model_len": 2050},
            False,
            PdReason.WOULD_BE_REJECTED,
        ),
        (
            REMOTE,
            {"token_source": TokenSource.ENGINE, "max_output_tokens": 2000},  # The engine gives what there is room for.
            {"max_model_len": 2050},
            True,
            PdReason.POLICY,
        ),
        (REMOTE, {"token_source": TokenSource.ESTIMATE}, {"max_model_len": 100}, True, PdReason.POLICY),
        (REMOTE, {"keep_local": PdReason.N_SEQUENCES}, {}, False, PdReason.N_SEQUENCES),
        (REMOTE, {"keep_local": PdReason.PLAN, "prefill_hint": ("p",)}, {}, False, PdReason.PLAN),
        (REMOTE, {"excluded": frozenset({"p"})}, {}, False, PdReason.NO_PREFILL_WORKER),
    ],
)
def test_reasons(pd_policy: str, facts: dict[str, Any], decode: dict[str, Any], remote: bool, reason: PdReason) -> None:
    rig = fleet(D("d", **decode), P("p"), pd_policy=pd_policy)
    plan = rig.route(prompt(2000), **facts)
    assert (plan.remote, plan.pd_reason) == (remote, reason)
    explained = rig.planner.explain(rig.facts(prompt(2000, seed=1), **facts), None, rig.now_s, rig.rng)
    assert (explained.remote, explained.pd_reason) == (remote, reason)


def test_what_is_cached_at_the_decode_worker_counts_for_the_rules() -> None:
    rig = fleet(D("d"), P("p"), pd_policy="threshold:1000")
    text = prompt(4000)
    rig.hold("d", text[:3200])
    assert rig.route(text).pd_reason is PdReason.THRESHOLD
    assert not rig.route(text).remote
    assert rig.route(prompt(4000, seed=1)).remote


def test_broken_and_incompatible_pairs_are_told_apart() -> None:
    rig = fleet(D("d"), P("p1"), P("p2"), pd_policy=REMOTE)
    pairs = rig.planner.pairs
    pairs.set_incompatible(("p1", "d"), "different vLLM versions")
    assert rig.route(prompt(2000)).chosen.prefill == ("p2", 0)
    pairs.set_incompatible(("p2", "d"), "different vLLM versions")
    assert rig.route(prompt(2000)).pd_reason is PdReason.PAIR_INCOMPATIBLE
    pairs.set_incompatible(("p2", "d"), None)
    break_pair(rig, "p2", "d")
    assert rig.route(prompt(2000)).pd_reason is PdReason.PAIR_BROKEN


def test_a_broken_pair_leaves_its_worker_to_the_others() -> None:
    rig = fleet(D("d1"), D("d2"), P("p"), pd_policy=REMOTE)
    break_pair(rig, "p", "d1")
    assert rig.route(prompt(2000), available=["d1", "p"]).pd_reason is PdReason.PAIR_BROKEN
    assert rig.route(prompt(2000), available=["d2", "p"]).chosen.prefill == ("p", 0)


# ---- breakers, as requests open and close them -----------------------------------------------------------------------


def test_failed_pairs_open_are_probed_by_one_request_and_close() -> None:
    rig = fleet(D("d"), P("p"), pd_policy=REMOTE)
    for seed in range(FAILURES):
        plan = rig.route(prompt(2000, seed=seed))
        assert plan.remote
        rig.observe(plan, OutcomeKind.PREFILL_DONE)
        rig.observe(plan, OutcomeKind.PAIR_FAILED)
        rig.observe(plan, OutcomeKind.END)
    assert rig.route(prompt(2000)).pd_reason is PdReason.PAIR_BROKEN
    rig.now_s += BACKOFF_MIN_S
    probe = rig.route(prompt(2000))
    assert probe.remote
    assert rig.route(prompt(2000)).pd_reason is PdReason.PAIR_BROKEN, "one probe at a time"
    rig.observe(probe, OutcomeKind.PREFILL_DONE)
    assert rig.route(prompt(2000)).pd_reason is PdReason.PAIR_BROKEN, "only the decode worker's first byte shows it"
    rig.observe(probe, OutcomeKind.FIRST_TOKEN)
    assert rig.route(prompt(2000)).remote


@pytest.mark.parametrize("kind", [OutcomeKind.CANCELLED, OutcomeKind.ERROR, OutcomeKind.END])
def test_a_probe_that_ends_early_leaves_the_pair_to_the_next(kind: OutcomeKind) -> None:
    rig = fleet(D("d"), P("p"), pd_policy=REMOTE)
    break_pair(rig, "p", "d")
    rig.now_s += BACKOFF_MIN_S
    probe = rig.route(prompt(2000))
    assert probe.remote
    rig.observe(probe, kind)
    assert not rig.planner.pairs.pairs[("p", "d")].probing
    assert rig.route(prompt(2000)).remote


def test_a_probe_whose_prefill_failed_leaves_the_pair_to_the_next() -> None:
    rig = fleet(D("d"), P("p"), pd_policy=REMOTE)
    break_pair(rig, "p", "d")
    rig.now_s += BACKOFF_MIN_S
    probe = rig.next_prefill(rig.route(prompt(2000)))
    assert (probe.remote, probe.pd_reason) == (False, PdReason.PREFILL_FAILED)
    assert rig.route(prompt(2000)).remote


# ---- the next prefill worker -----------------------------------------------------------------------------------------


def test_the_next_is_another_until_the_decode_worker_does_it_itself() -> None:
    rig = fleet(D("d"), P("p1"), P("p2"), pd_policy=REMOTE)
    first = rig.route(prompt(2000))
    second = rig.next_prefill(first)
    assert {first.chosen.prefill, second.chosen.prefill} == {("p1", 0), ("p2", 0)}
    assert second.pd_reason is PdReason.POLICY
    assert (first.chosen.decode, second.chosen.decode) == (("d", 0), ("d", 0))
    last = rig.next_prefill(second, PdReason.PREFILL_TIMEOUT)
    assert (last.chosen.prefill, last.pd_reason) == (None, PdReason.PREFILL_TIMEOUT)
    assert last.chosen.decode == ("d", 0)
    assert rig.loads() == {"d": 1, "p1": 0, "p2": 0}


def test_local_at_once_where_no_other_prefill_worker_would_do() -> None:
    rig = fleet(D("d"), P("p1"), P("p2"), pd_policy=REMOTE)
    plan = rig.next_prefill(rig.route(prompt(2000)), PdReason.NO_PARAMS, local=True)
    assert (plan.remote, plan.pd_reason) == (False, PdReason.NO_PARAMS)
    assert rig.loads() == {"d": 1, "p1": 0, "p2": 0}


def test_what_is_considered_after_a_failure_names_no_way_twice_and_not_the_failed_one() -> None:
    rig = fleet(D("d1"), D("d2"), P("p1"), P("p2"), pd_policy=REMOTE)
    first = rig.route(prompt(2000))
    for plan in (rig.next_prefill(first), rig.next_prefill(first)):
        ways = [(c.decode, c.prefill) for c in plan.considered]
        assert len(set(ways)) == len(ways), ways
        assert (first.chosen.decode, first.chosen.prefill) not in ways
        assert plan.considered[0] == plan.chosen


def test_workers_that_went_meanwhile_are_not_the_next() -> None:
    rig = fleet(D("d"), P("p1"), P("p2"), pd_policy=REMOTE)
    first = rig.route(prompt(2000))
    assert not rig.next_prefill(first, available=["d"]).remote


def test_after_a_failure_the_local_price_is_what_is_booked() -> None:
    rig = fleet(D("d"), P("p"), pd_policy=REMOTE)
    plan = rig.route(prompt(8000))
    load = rig.planner.fleet.workers["d"].loads[0]
    assert load.prefill_backlog_s(rig.now_s) == pytest.approx(rig.planner.cost.constants.pull_stall_s)
    plan = rig.next_prefill(plan)
    assert plan.chosen.price.comp_s == pytest.approx(rig.planner.cost.comp_s(8000, 0))
    assert load.prefill_backlog_s(rig.now_s) == pytest.approx(rig.planner.cost.comp_s(8000, 0))


def test_an_unknown_request_has_no_next() -> None:
    rig = fleet(D("d"), P("p"), pd_policy=REMOTE)
    plan = rig.route(prompt(2000))
    rig.observe(plan, OutcomeKind.CANCELLED)
    why = PdReason.PREFILL_FAILED
    assert rig.planner.next_prefill(plan.request_id, why, None, rig.now_s, rig.rng) is None


# ---- bookings --------------------------------------------------------------------------------------------------------


def test_both_workers_are_booked_and_given_back_one_after_the_other() -> None:
    rig = fleet(D("d"), P("p"), pd_policy=REMOTE)
    plan = rig.route(prompt(2000))
    assert rig.loads() == {"d": 1, "p": 1}
    rig.observe(plan, OutcomeKind.PREFILL_DONE)
    assert rig.loads() == {"d": 1, "p": 0}
    rig.observe(plan, OutcomeKind.FIRST_TOKEN)
    assert rig.planner.fleet.workers["d"].loads[0].streams == 1
    rig.observe(plan, OutcomeKind.END)
    assert rig.loads() == {"d": 0, "p": 0}


@pytest.mark.parametrize("end", [OutcomeKind.END, OutcomeKind.ERROR, OutcomeKind.CANCELLED])
@pytest.mark.parametrize(
    "before",
    [
        [],
        [OutcomeKind.PREFILL_DONE],
        [OutcomeKind.PREFILL_DONE, OutcomeKind.PAIR_FAILED],
        [OutcomeKind.PREFILL_DONE, OutcomeKind.FIRST_TOKEN],
        [OutcomeKind.FIRST_TOKEN, OutcomeKind.TOKEN, OutcomeKind.PREFILL_DONE],
    ],
)
def test_every_way_out_gives_both_bookings_back(before: list[OutcomeKind], end: OutcomeKind) -> None:
    rig = fleet(D("d"), P("p"), pd_policy=REMOTE)
    plan = rig.route(prompt(2000))
    for kind in (*before, end, end):
        rig.observe(plan, kind, n_tokens=3)
    assert rig.loads() == {"d": 0, "p": 0}
    assert rig.planner.in_flight() == 0
    for worker in rig.planner.fleet.workers.values():
        assert worker.loads[0].kv_tokens == 0


def test_explaining_books_nothing() -> None:
    rig = fleet(D("d"), P("p"), pd_policy=REMOTE)
    plan = rig.planner.explain(rig.facts(prompt(2000)), None, rig.now_s, rig.rng)
    assert plan.remote
    assert rig.loads() == {"d": 0, "p": 0}
    assert rig.planner.pairs.pairs == {}


def test_prefill_wait_is_the_time_behind_others() -> None:
    rig = fleet(D("d"), P("p"), pd_policy=REMOTE)
    first, second = rig.route(prompt(2000)), rig.route(prompt(2000, seed=1))
    rig.now_s += 3
    rig.observe(first, OutcomeKind.PREFILL_DONE)
    rig.now_s += 2
    assert rig.planner.prefill_wait_s(second.request_id, rig.now_s) == pytest.approx(3.0)
    assert rig.planner.prefill_wait_s(first.request_id, rig.now_s) is None
    rig.observe(second, OutcomeKind.PREFILL_DONE)
    third = rig.route(prompt(2000, seed=2))
    rig.now_s += 4
    assert rig.planner.prefill_wait_s(third.request_id, rig.now_s) == pytest.approx(0.0)
    assert rig.planner.prefill_wait_s("nobody", rig.now_s) is None


# ---- blocks that are assumed -----------------------------------------------------------------------------------------


def test_both_workers_are_assumed_to_get_the_blocks() -> None:
    text = prompt(16_000)
    rig = fleet(D("d1"), D("d2"), P("p1"), P("p2"), pd_policy=REMOTE)
    first = rig.route(text)
    rig.observe(first, OutcomeKind.PREFILL_DONE)
    rig.observe(first, OutcomeKind.FIRST_TOKEN)
    second = rig.route(text)
    assert (second.chosen.decode, second.chosen.prefill) == (first.chosen.decode, first.chosen.prefill)
    assert (second.chosen.cached_tokens, second.chosen.prefill_cached_tokens) == (15_984, 15_984)


def test_a_failed_prefill_worker_is_not_assumed_to_have_them() -> None:
    text = prompt(4000)
    rig = fleet(D("d"), P("p", events=False), pd_policy=REMOTE)
    plan = rig.next_prefill(rig.route(text))
    rig.observe(plan, OutcomeKind.FIRST_TOKEN)
    again = rig.route(text)
    assert again.remote
    assert (again.chosen.cached_tokens, again.chosen.prefill_cached_tokens) == (3984, 0)


def test_a_prefill_worker_without_events_is_remembered_by_what_it_computed() -> None:
    text = prompt(4000)
    rig = fleet(D("d"), P("p", events=False), pd_policy=REMOTE)
    plan = rig.route(text)
    rig.observe(plan, OutcomeKind.PREFILL_DONE)
    rig.observe(plan, OutcomeKind.CANCELLED)
    rig.now_s += 60
    assert rig.route(text).chosen.prefill_cached_tokens == 3984
