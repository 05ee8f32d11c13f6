"""Deciding and booking."""

from __future__ import annotations

from collections import Counter

import pytest

from scorer.planner import ModelNotFound, NoWorker
from scorer.types import ChangeKind, OutcomeKind, Role, WorkerChange
from tests.support.fleets import W, add, fleet, prompt


def test_a_warm_idle_worker_beats_a_cold_idle_one() -> None:
    rig = fleet(W("cold"), W("warm"))
    text = prompt(4000)
    rig.hold("warm", text)
    plan = rig.route(text)
    assert plan.chosen.decode == ("warm", 0)
    assert plan.chosen.cached_tokens == 3984  # the last token is always computed: 249 of 250 blocks
    assert [c.decode for c in plan.considered] == [("warm", 0), ("cold", 0)]
    assert plan.considered[0].price.total_s < plan.considered[1].price.total_s


def test_a_backlog_outweighs_a_short_cached_prefix() -> None:
    rig = fleet(W("warm"), W("idle"))
    shared = prompt(320)
    rig.hold("warm", shared)
    for i in range(4):
        rig.route(prompt(8000, seed=i + 1), available=["warm"])
    assert rig.route(shared + prompt(200, seed=99)).chosen.decode == ("idle", 0)


def test_a_long_cached_prefix_outweighs_a_small_backlog() -> None:
    rig = fleet(W("warm"), W("idle"))
    shared = prompt(16_000)
    rig.hold("warm", shared)
    rig.route(prompt(2000, seed=1), available=["warm"])
    assert rig.route(shared + prompt(200, seed=99)).chosen.decode == ("warm", 0)


def test_running_answers_push_a_cold_prompt_elsewhere() -> None:
    rig = fleet(W("busy"), W("quiet"))
    for i in range(8):
        plan = rig.route(prompt(100, seed=i), available=["busy"])
        rig.observe(plan, OutcomeKind.FIRST_TOKEN)
    plan = rig.route(prompt(4000, seed=50))
    assert plan.chosen.decode == ("quiet", 0)
    busy = next(c for c in plan.considered if c.decode[0] == "busy")
    assert busy.price.harm_s == pytest.approx(8 * busy.price.comp_s)


def test_idle_ties_do_not_all_go_to_one_worker() -> None:
    hits: Counter[str] = Counter()
    for seed in range(60):
        rig = fleet(*(W(f"w{i}") for i in range(4)), seed=seed)
        hits[rig.route(prompt(100)).chosen.decode[0]] += 1
    assert set(hits) == {"w0", "w1", "w2", "w3"}
    assert max(hits.values()) < 30


def test_among_equally_cheap_idle_workers_the_cached_one_is_taken() -> None:
    """A prefill step has a floor, so a short prompt costs the same everywhere; where it is cached it evicts nobody."""
    for seed in range(20):
        rig = fleet(*(W(f"w{i}") for i in range(4)), seed=seed)
        rig.hold("w2", prompt(160))
        assert rig.route(prompt(160)).chosen.decode == ("w2", 0)
        assert rig.route(prompt(160)).chosen.decode != ("w2", 0)  # busy now, so no longer equal


def test_a_burst_spreads_because_each_decision_is_booked() -> None:
    rig = fleet(*(W(f"w{i}") for i in range(4)))
    hits = Counter(rig.route(prompt(2000, seed=i)).chosen.decode[0] for i in range(40))
    assert set(hits.values()) == {10}


def test_blocks_of_a_routed_prompt_count_before_any_event() -> None:
    rig = fleet(W("a"), W("b"))
    text = prompt(4000)
    first = rig.route(text)
    rig.observe(first, OutcomeKind.FIRST_TOKEN)
    rig.observe(first, OutcomeKind.END)
    second = rig.route(text)
    assert second.chosen.decode == first.chosen.decode
    assert second.chosen.cached_tokens == 3984
    assert second.chosen.approximate


def test_blocks_of_a_routed_prompt_count_beyond_those_that_events_tell_of() -> None:
    """A shared system prompt is cached, and the document after it has just been sent to one of them."""
    rig = fleet(W("a"), W("b"))
    shared, document = prompt(800), prompt(3200, 1)
    for name in ("a", "b"):
        rig.hold(name, shared)
    first = rig.route([*shared, *document])
    assert first.chosen.cached_tokens == 800
    second = rig.route([*shared, *document])
    cached = {candidate.decode[0]: candidate.cached_tokens for candidate in second.considered}
    other = "a" if first.chosen.decode[0] == "b" else "b"
    assert cached == {first.chosen.decode[0]: 3984, other: 800}


def test_assumed_blocks_are_given_up_when_events_say_nothing() -> None:
    rig = fleet(W("a"))
    text = prompt(1600)
    plan = rig.route(text)
    rig.observe(plan, OutcomeKind.FIRST_TOKEN)
    rig.observe(plan, OutcomeKind.END)
    rig.now_s += 0.6
    assert rig.route(text).chosen.cached_tokens == 0


def test_an_announced_and_evicted_block_is_no_longer_assumed() -> None:
    """S15's other half: once the event has come, the events alone speak, also when they say that the block is gone."""
    rig = fleet(W("a"))
    text = prompt(1600)
    plan = rig.route(text)
    rig.hold("a", text)
    rig.observe(plan, OutcomeKind.FIRST_TOKEN)
    rig.observe(plan, OutcomeKind.END)
    rig.index.clear("a")
    assert rig.route(text).chosen.cached_tokens == 0


def test_a_failed_request_takes_its_assumed_blocks_back() -> None:
    rig = fleet(W("a"), W("b"))
    text = prompt(1600)
    plan = rig.route(text)
    rig.observe(plan, OutcomeKind.ERROR, worker_failed=True)
    assert rig.route(text).chosen.cached_tokens == 0


def test_workers_without_events_are_remembered_by_what_they_were_sent() -> None:
    rig = fleet(W("mute", events=False))
    text = prompt(1600)
    plan = rig.route(text)
    rig.observe(plan, OutcomeKind.FIRST_TOKEN)
    rig.observe(plan, OutcomeKind.END)
    rig.now_s += 60
    again = rig.route(text)
    assert again.chosen.cached_tokens == 1584
    assert again.chosen.approximate


def test_cached_tokens_correct_what_is_assumed_of_a_mute_worker() -> None:
    rig = fleet(W("mute", events=False))
    old, text = prompt(800, seed=1), prompt(1600, seed=2)
    for ids in (old, text):
        plan = rig.route(ids)
        rig.observe(plan, OutcomeKind.END)
        rig.now_s += 1
    again = rig.route(text)
    rig.observe(again, OutcomeKind.CACHED_TOKENS, n_tokens=0)
    rig.observe(again, OutcomeKind.END)
    rig.now_s += 1
    assert rig.route(old).chosen.cached_tokens == 0  # used before `text`, which was evicted
    assert rig.route(text).chosen.cached_tokens == 1584


def test_model_names_aliases_and_adapters_choose_the_workers() -> None:
    rig = fleet(W("a", models=("m", "m-alias"), adapters=("ad",)), W("b", models=("other",)))
    text = prompt(640)
    rig.hold("a", text)
    rig.hold("b", text)
    assert rig.route(text, model="m-alias").chosen.cached_tokens == 624
    assert rig.route(text, model="other").chosen.decode == ("b", 0)
    adapted = rig.route(text, model="ad", lora="ad")
    assert adapted.chosen.decode == ("a", 0)
    assert adapted.chosen.cached_tokens == 0
    with pytest.raises(ModelNotFound) as error:
        rig.route(text, model="nope")
    assert error.value.known == ["ad", "m", "m-alias", "other"]


def test_a_model_nobody_who_answered_serves_is_unknown_though_a_worker_is_down() -> None:
    """A typo must not be answered "try later" as long as some worker is down."""
    rig = fleet(W("a"))
    rig.planner.fleet.apply(WorkerChange(kind=ChangeKind.ADDED, worker="down", url="http://down"))
    with pytest.raises(ModelNotFound):
        rig.route(100, model="typo")


def test_before_any_worker_answered_no_model_is_unknown() -> None:
    rig = fleet()
    rig.planner.fleet.apply(WorkerChange(kind=ChangeKind.ADDED, worker="late", url="http://late"))
    with pytest.raises(NoWorker):
        rig.route(100, model="maybe")


def test_no_available_worker() -> None:
    rig = fleet(W("a"))
    with pytest.raises(NoWorker):
        rig.route(100, available=[])
    with pytest.raises(NoWorker):
        rig.route(100, excluded=frozenset({"a"}))
    with pytest.raises(NoWorker):
        fleet().route(100)


def test_draining_and_prefill_workers_get_no_new_requests() -> None:
    rig = fleet(W("a"), W("p", role=Role.PREFILL), W("d", role=Role.DECODE))
    rig.planner.fleet.apply(WorkerChange(kind=ChangeKind.DRAINING, worker="a"))
    assert {rig.route(prompt(100, seed=i)).chosen.decode[0] for i in range(8)} == {"d"}


def test_subset_limits_the_choice() -> None:
    rig = fleet(W("a"), W("b"), W("c"))
    assert {rig.route(prompt(99, seed=i), subset=frozenset({"b"})).chosen.decode[0] for i in range(5)} == {"b"}


def test_ranks_are_places_of_their_own() -> None:
    rig = fleet(W("dp", ranks=2))
    text = prompt(3200)
    rig.hold("dp", text, rank=1)
    assert rig.route(text).chosen.decode == ("dp", 1)


def test_explain_is_the_decision_and_books_nothing() -> None:
    rig = fleet(W("a"), W("b"))
    text = prompt(3200)
    rig.hold("b", text)
    explained = rig.planner.explain(rig.facts(text), None, rig.now_s, rig.rng)
    assert rig.planner.in_flight() == 0
    assert rig.load("b") == 0
    planned = rig.route(text)
    assert explained.considered == planned.considered


def test_foreign_requests_in_a_workers_queue_count() -> None:
    rig = fleet(W("queued", waiting=6), W("free"))
    assert {rig.route(prompt(100, seed=i)).chosen.decode[0] for i in range(3)} == {"free"}


def test_a_full_cache_makes_a_worker_wait_for_blocks() -> None:
    rig = fleet(W("full", kv_usage=1.0, running=20), W("roomy"))
    plan = rig.route(prompt(1000))
    assert plan.chosen.decode == ("roomy", 0)
    assert next(c for c in plan.considered if c.decode[0] == "full").price.adm_s > 0


def test_missing_metrics_price_nothing_and_break_nothing() -> None:
    rig = fleet(W("new", scraped=False), W("old", waiting=None, kv_usage=None, kv_blocks=None))
    assert rig.route(prompt(1000)).n_candidates == 2


def test_faster_hardware_is_preferred() -> None:
    rig = fleet(W("slow"), W("fast", weight=2.0))
    assert rig.route(prompt(8000)).chosen.decode == ("fast", 0)


def test_blocks_in_lower_tiers_cost_their_loading() -> None:
    rig = fleet(W("a"))
    text = prompt(1600)
    from indexer import decode_batch
    from tests.support.wire import stored

    rig.index.apply("a", 0, decode_batch(stored(list(range(1, 101)), text, medium="CPU")))
    chosen = rig.route(text).chosen
    assert chosen.cached_tokens == 1584
    assert chosen.price.load_s > 0


def test_a_returning_worker_starts_with_a_clean_ledger() -> None:
    rig = fleet(W("a"))
    old = rig.route(prompt(100))
    rig.planner.fleet.apply(WorkerChange(kind=ChangeKind.REMOVED, worker="a"))
    rig.planner.configure_worker("a")
    add(rig, W("a"))
    new = rig.route(prompt(100))
    rig.observe(old, OutcomeKind.END)
    assert rig.load("a") == 1
    rig.observe(new, OutcomeKind.END)
    assert rig.load("a") == 0


@pytest.mark.parametrize("policy", ["round-robin", "random", "least-load", "longest-prefix"])
def test_the_other_policies_also_book_and_explain(policy: str) -> None:
    rig = fleet(W("a"), W("b"), W("c"), policy=policy)
    plans = [rig.route(prompt(200, seed=i)) for i in range(30)]
    hits = Counter(plan.chosen.decode[0] for plan in plans)
    assert set(hits) == {"a", "b", "c"}
    if policy in ("round-robin", "least-load"):
        assert set(hits.values()) == {10}
    for plan in plans:
        rig.observe(plan, OutcomeKind.CANCELLED)
    assert [rig.load(w) for w in "abc"] == [0, 0, 0]


def test_longest_prefix_ignores_load() -> None:
    rig = fleet(W("warm"), W("idle"), policy="longest-prefix")
    text = prompt(320)
    rig.hold("warm", text)
    for i in range(10):
        rig.route(prompt(8000, seed=i + 1), available=["warm"])
    assert rig.route(text).chosen.decode == ("warm", 0)


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="round-robin"):
        fleet(W("a"), policy="roundrobin")
