"""What others have in flight, in prices, in the count of room and in what is learned: counted once, and not as own."""

from __future__ import annotations

import random
from typing import Any

import pytest

from indexer import PrefixIndex
from scorer.elsewhere import MOST_WRITERS, Elsewhere
from scorer.fleet import Fleet
from scorer.journal import Journal
from scorer.ledger import NOTHING, InFlight
from scorer.planner import Planner
from scorer.saturation import Saturation
from scorer.types import ChangeKind, EngineStats, Outcome, OutcomeKind, RequestFacts, WorkerChange

RNG = random.Random(1)


def planner(*names: str, **stats: Any) -> Planner:
    fleet = Fleet()
    it = Planner(fleet, PrefixIndex())
    for name in names:
        fleet.apply(WorkerChange(kind=ChangeKind.ADDED, worker=name, url="http://x"))
        fleet.set_capabilities(name, models=["m"])
        fleet.set_stats(name, EngineStats(scraped_at_s=0.0, block_size=16, kv_blocks=10_000, **stats))
        it.configure_worker(name)
    return it


def facts(name: str = "r", tokens: int = 4000) -> RequestFacts:
    return RequestFacts(request_id=name, model="m", prompt_tokens=tokens)


def price_at(it: Planner, worker: str, now_s: float = 0.0) -> Any:
    plan = it.explain(facts(), None, now_s, RNG)
    return next(each.price for each in plan.considered if each.decode[0] == worker)


def test_others_prompts_are_waited_for_as_own_ones_are() -> None:
    own, alone = planner("a", "b"), planner("a", "b")
    alone.plan(facts("own"), ["a"], 0.0, RNG)
    told = alone.fleet.workers["a"].loads[0].own(0.0)
    Elsewhere(own.fleet).news("w", 1, {("a", 0): told}, 0.0)
    for now_s in (0.0, 0.05, 1.0):
        assert price_at(own, "a", now_s) == price_at(alone, "a", now_s)
    assert own.plan(facts(), None, 0.0, RNG).chosen.decode == ("b", 0)


def test_what_the_engine_says_of_others_is_not_added_to_what_they_say() -> None:
    it = planner("a", waiting=3.0, running=5.0, kv_usage=0.3, prefill_time_sum_s=10.0, prefill_time_count=10.0)
    unknown = price_at(it, "a")
    assert unknown.wait_s == pytest.approx(3.0)  # A second each, by the engine's own account.
    Elsewhere(it.fleet).news("w", 1, {("a", 0): InFlight(2, 0.1, 0.0, 5, 48_000)}, 0.0)
    known = price_at(it, "a")
    assert known.wait_s == pytest.approx(1.0 + 0.1)
    assert known.adm_s == unknown.adm_s == 0.0  # 3,000 of 10,000 blocks, whoever says it.


def test_room_counts_others_once() -> None:
    it = planner("a", waiting=6.0, running=5.0)
    worker = it.fleet.workers["a"]
    elsewhere = Elsewhere(it.fleet)
    elsewhere.news("w", 1, {("a", 0): InFlight(6, 0.1)}, 0.0)
    saturation = Saturation(8)
    assert saturation.is_open(worker, 0.0)
    elsewhere.news("w", 2, {("a", 0): InFlight(7, 0.1)}, 0.0)
    assert saturation.is_open(worker, 0.0)
    elsewhere.news("w", 3, {("a", 0): InFlight(8, 0.1)}, 0.0)  # Two more than when the engine was read.
    assert not saturation.is_open(worker, 0.0)


def test_own_figures_stay_own() -> None:
    it = planner("a")
    Elsewhere(it.fleet).news("w", 1, {("a", 0): InFlight(2, 1.0, 0.5, 3, 500)}, 0.0)
    load = it.fleet.workers["a"].loads[0]
    assert (load.requests, load.own_kv_tokens, load.own(0.0)) == (0, 0, NOTHING)
    it.plan(facts("r", 100), None, 0.0, RNG)
    it.observe("r", Outcome(kind=OutcomeKind.FIRST_TOKEN), 0.1)
    assert load.own(0.1) == InFlight(0, 0.0, 0.0, 1, 100, left_age_s=0.0)
    assert (load.in_line, load.streams, load.kv_tokens) == (2, 4, 600)


def test_a_new_rank_gets_what_others_have_there() -> None:
    it = planner("a")
    elsewhere = Elsewhere(it.fleet)
    elsewhere.news("w", 1, {("a", 1): InFlight(2)}, 0.0)
    it.fleet.set_capabilities("a", models=["m"], ranks=[0, 1])
    elsewhere.refold(1.0)
    assert it.fleet.workers["a"].loads[1].in_line == 2


def test_writers_are_bounded() -> None:
    it = planner("a")
    elsewhere = Elsewhere(it.fleet)
    for i in range(MOST_WRITERS + 10):
        elsewhere.news(f"w{i}", 1, {("a", 0): InFlight(1)}, 0.0)
    assert it.fleet.workers["a"].loads[0].in_line == MOST_WRITERS
    elsewhere.expire(10.0, 3.0)
    assert it.fleet.workers["a"].loads[0].others == NOTHING


def test_a_decision_is_told_with_the_ranks_it_loads_and_nothing_is_without_others() -> None:
    it = planner("a")
    woken: list[int] = []
    journal = Journal(lambda: woken.append(1))
    it.tell(journal)
    it.plan(facts(), None, 0.0, RNG)
    assert journal.take().loads == {("a", 0)}
    it.observe("r", Outcome(kind=OutcomeKind.END), 1.0)
    assert journal.take().loads == {("a", 0)}
    it.tell(None)
    it.plan(facts("again"), None, 2.0, RNG)
    assert not journal.take()
