"""Faults other routers showed when scoring workers and counting load (docs/field-cases.md, rows S)."""

from __future__ import annotations

from collections import Counter

import pytest

from indexer import decode_batch
from scorer.types import ChangeKind, OutcomeKind, WorkerChange
from tests.support.fleets import W, add, fleet, prompt
from tests.support.wire import stored


def test_s1_client_leaves_while_waiting_for_headers() -> None:
    """S1: a hundred clients that leave before the first byte leave no phantom load behind."""
    rig = fleet(W("a"), W("b"))
    for i in range(100):
        rig.observe(rig.route(prompt(300, seed=i)), OutcomeKind.CANCELLED)
        assert rig.load("a") == rig.load("b") == 0


def test_s3_endpoint_flaps_while_a_request_runs() -> None:
    """S3: the end of a request that began before a worker left must not be booked on its successor."""
    rig = fleet(W("e"))
    first = rig.route(prompt(100))
    before = rig.planner.fleet.workers["e"]
    rig.planner.fleet.apply(WorkerChange(kind=ChangeKind.REMOVED, worker="e"))
    rig.planner.configure_worker("e")
    add(rig, W("e"))
    second = rig.route(prompt(100))
    rig.observe(first, OutcomeKind.END)
    assert rig.load("e") == 1
    rig.observe(second, OutcomeKind.END)
    assert rig.load("e") == 0
    assert before.loads[0].requests == 0


def test_s4_ending_twice_is_ending_once() -> None:
    """S4: whatever a clean-up path reports after the end changes nothing."""
    rig = fleet(W("a"))
    plan = rig.route(prompt(100))
    other = rig.route(prompt(100))
    for kind in (OutcomeKind.ERROR, OutcomeKind.END, OutcomeKind.CANCELLED, OutcomeKind.FIRST_TOKEN):
        rig.observe(plan, kind)
    assert rig.load("a") == 1
    rig.observe(other, OutcomeKind.END)
    assert rig.load("a") == 0


def test_s6_cold_prompt_ignores_who_has_fewest_blocks() -> None:
    """S6: an empty cache is no reason to send a cold prompt into a queue."""
    rig = fleet(W("empty", waiting=50), W("full-of-blocks"))
    for seed in range(20):
        rig.hold("full-of-blocks", prompt(1600, seed=100 + seed))
    assert rig.route(prompt(1000)).chosen.decode[0] == "full-of-blocks"


def test_s7_short_fully_cached_prompt_does_not_stick_to_a_busy_worker() -> None:
    """S7: what counts is the seconds a cache saves, not the share of the prompt it covers."""
    rig = fleet(W("hot"), W("idle"))
    text = prompt(100)
    rig.hold("hot", text)
    for seed in range(3):
        rig.route(prompt(6000, seed=seed + 1), available=["hot"])
    assert rig.route(text).chosen.decode[0] == "idle"


def test_s9_least_load_counts_without_metrics() -> None:
    """S9: load is what was booked; no scrape is needed to spread."""
    rig = fleet(*(W(f"w{i}", scraped=False) for i in range(4)), policy="least-load")
    hits = Counter(rig.route(50).chosen.decode[0] for _ in range(40))
    assert set(hits.values()) == {10}


def test_s10_second_request_of_a_shared_prompt_goes_to_the_idle_worker() -> None:
    """S10: at low load a shared system prompt must not pin everything to one node while it is slower there."""
    rig = fleet(W("warm"), W("idle"))
    system = prompt(160)
    rig.hold("warm", system)
    rig.hold("idle", system)
    first = rig.route(system + prompt(2000, seed=1))
    second = rig.route(system + prompt(2000, seed=2))
    assert first.chosen.decode != second.chosen.decode


def test_s13_stale_metrics_close_nobody() -> None:
    """S13: when every scrape is old the fleet serves on what it has booked, and old queues are not priced."""
    rig = fleet(W("a", waiting=50, kv_usage=1.0), W("b"))
    assert rig.planner.explain(rig.facts(prompt(500)), None, rig.now_s, rig.rng).chosen.decode[0] == "b"
    rig.now_s += 3600
    plan = rig.route(prompt(500))
    assert plan.n_candidates == 2
    assert plan.considered[0].price == plan.considered[1].price


def test_s15_predicted_then_announced_block_is_one_block() -> None:
    """S15: the same block, assumed by us and then announced under the engine's own hash, counts once."""
    rig = fleet(W("a"))
    text = prompt(1601)
    plan = rig.route(text)
    rig.hold("a", text)
    rig.observe(plan, OutcomeKind.FIRST_TOKEN)
    again = rig.route(text)
    assert again.chosen.cached_tokens == 1600
    assert not again.chosen.approximate
    assert rig.planner.holdings.optimistic.stats()["assumed_blocks"] == {"a": {"0": 0}}


def test_s16_high_cache_usage_alone_repels_nobody() -> None:
    """S16: KV usage is a slow signal; while blocks are free it does not move a decision."""
    hits: Counter[str] = Counter()
    for seed in range(40):
        rig = fleet(W("a", kv_usage=0.85), W("b", kv_usage=0.1), seed=seed)
        hits[rig.route(prompt(500)).chosen.decode[0]] += 1
    assert set(hits) == {"a", "b"}


def test_s18_lower_tier_tokens_are_counted_as_tokens() -> None:
    """S18: blocks in a lower tier cost their loading; they are not fewer tokens for it."""
    rig = fleet(W("a"))
    text = prompt(256 * 16)
    rig.index.apply("a", 0, decode_batch(stored(list(range(1, 241)), text[: 240 * 16], medium="CPU")))
    chosen = rig.route(text).chosen
    assert chosen.cached_tokens == 240 * 16
    assert chosen.cpu_tokens == 240 * 16
    assert chosen.price.load_s == pytest.approx(rig.planner.cost.load_s(240 * 16, 0))
