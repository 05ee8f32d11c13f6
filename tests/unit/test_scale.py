"""Replicas of the router in simulated time: one is the plain planner, several carry what those that serve would."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from bench.scale import cells, exchange, quality, replicas
from bench.scale.exchange import Member, News, Settings
from bench.scale.replicas import BALANCES, Replicas
from bench.sim import grid
from bench.sim.arms import arm
from bench.sim.fleet import FleetSpec, Restart, servers
from bench.sim.kept import Kept
from bench.sim.load import Workload
from bench.sim.prompts import unique
from bench.sim.record import Record
from bench.sim.router import Router, Setup, SimRequest
from bench.sim.sweep import Ran, Sweep
from bench.sim.view import MODEL
from bench.sim.workloads.generated import Mixed
from bench.sim.workloads.shared import Ladder
from bench.sim.world import World
from gateway.config.schema import RedisConfig
from gateway.replicas import codec, publisher, reader
from gateway.replicas.counts import Counts
from gateway.replicas.schema import Keys
from gateway.stored import StoredResponses
from indexer import PrefixIndex, Prompt
from scorer.fleet import Fleet
from scorer.journal import SessionAt
from scorer.ledger import NOTHING, InFlight
from scorer.planner import Planner
from scorer.types import EngineStats, Outcome, OutcomeKind, RequestFacts

POOL = FleetSpec(servers("h100x2-qwen3-32b", both=4))
SPLIT = FleetSpec(servers("h200-7b", prefill=1, decode=2), pd_policy="cost")
HOLDER = ("b0", 0)


def load(seed: int = 0) -> Workload:
    return Ladder(seed, groups=20, output_tokens=60, stages=((20, 2), (40, 2)))


def play(
    spec: FleetSpec, n: int, workload: Workload, settings: Settings | None, *, balance: str = "random"
) -> tuple[Replicas, list[Record]]:
    made: list[Replicas] = []

    def build(setup: Setup) -> Router:
        made.append(Replicas(setup, n, name="warmroute", exchange=settings, balance=balance, seed=3))
        return made[0]

    run = World(replace(spec, scrape_s=spec.scrape_s / n), build, workload, seed=3).run()
    return made[0], run.records


class Watched:
    """`n` replicas over idle servers, asked by hand, and the messages they write."""

    def __init__(self, n: int = 2, settings: Settings | None = None) -> None:
        world = World(POOL, arm("round-robin"), Ladder(0, stages=()), seed=0)
        setup = Setup(world.fleet, world.index, POOL.priors(), [])
        self.view = world.view
        self.replicas = Replicas(setup, n, name="r", exchange=settings or Settings(), balance="turns")
        assert self.replicas.exchange is not None
        self.exchange = self.replicas.exchange
        for server in POOL.servers:
            stats = EngineStats(scraped_at_s=0.0, block_size=server.block_size, kv_blocks=server.kv_blocks)
            self.replicas.scraped(server.name, stats)
        self.told: list[tuple[str, News]] = []
        publish = self.exchange.publish

        def watch(writer: Member, news: News) -> None:
            self.told.append((writer.name, news))
            publish(writer, news)

        self.exchange.publish = watch  # type: ignore[method-assign]

    def planner(self, i: int) -> Planner:
        return self.replicas.replicas[i].planner

    def place(self, request_id: str, text: int, now_s: float, n_tokens: int = 4096) -> str:
        """The worker."""
        request = SimRequest(request_id, unique(text, n_tokens), n_tokens, now_s)
        self.view.now_s = now_s
        return self.replicas.place(request, self.view, now_s, random.Random(0)).decode

    def others(self, i: int, worker: str) -> InFlight:
        return self.planner(i).fleet.workers[worker].loads[0].others


# ---- one ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [None, Settings()], ids=["apart", "sync"])
@pytest.mark.parametrize(
    ("spec", "workload"),
    [(POOL, load), (SPLIT, lambda: Mixed(1, rate=12.0, duration_s=6.0))],
    ids=["pool", "split"],
)
def test_one_replica_decides_exactly_as_the_plain_router(
    spec: FleetSpec, workload: Any, settings: Settings | None
) -> None:
    plain = World(spec, arm("warmroute"), workload(), seed=3).run()
    _, records = play(spec, 1, workload(), settings)
    assert len(records) > 40
    assert records_of(records) == records_of(plain.records)


def test_two_apart_do_not() -> None:
    """Else the test above would say nothing."""
    plain = World(POOL, arm("warmroute"), load(), seed=3).run()
    assert records_of(play(POOL, 2, load(), None)[1]) != records_of(plain.records)


def records_of(records: list[Record]) -> list[tuple[object, ...]]:
    return [
        (it.request_id, it.decode, it.prefill, it.predicted_tokens, it.cached_tokens, it.first_s, it.last_s)
        for it in records
    ]


def test_the_same_seed_makes_the_same_run() -> None:
    settings = Settings(loss=0.2)
    first, again = (play(POOL, 4, load(), settings) for _ in range(2))
    assert records_of(first[1]) == records_of(again[1])
    assert first[0].exchange is not None
    assert first[0].exchange.lost > 0


# ---- who gets what ---------------------------------------------------------------------------------------------------


def test_a_balancer_reaches_all_replicas() -> None:
    rng = random.Random(0)
    assert [BALANCES["turns"](rng, i, 3) for i in range(5)] == [0, 1, 2, 0, 1]
    assert {BALANCES["random"](rng, i, 3) for i in range(50)} == {0, 1, 2}


def test_each_replica_scrapes_as_often_as_one_would_and_at_another_time() -> None:
    watched = Watched(4)
    fleets = [watched.planner(i).fleet for i in range(4)]
    assert all(fleet.workers["b1"].stats is not None for fleet in fleets)
    for turn in range(1, 9):
        watched.replicas.scraped("b1", EngineStats(scraped_at_s=float(turn), running=turn))
    assert [fleet.workers["b1"].stats.running for fleet in fleets] == [5, 6, 7, 8]  # type: ignore[union-attr]


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_messages_are_what_the_journal_tells() -> None:
    watched = Watched()
    worker = watched.place("a", 1, 0.5)
    stay = watched.planner(0)._flights["a"].decode
    watched.replicas.pass_time(0.51)
    writer, news = watched.told[0]
    assert (writer, news.number) == ("0", 2)  # The first was all it had, nothing, when it began.
    assert news.loads == {stay.holder: stay.booking.load.own(0.5)}
    assert [(each.holder, each.keys) for each in news.arrivals] == [(stay.holder, stay.keys)]
    assert news.arrivals[0].number == stay.told
    assert worker == stay.holder[0]
    watched.replicas.observe("a", Outcome(kind=OutcomeKind.FIRST_TOKEN), 0.8)
    watched.replicas.observe("a", Outcome(kind=OutcomeKind.END, n_tokens=1), 0.81)
    watched.replicas.pass_time(0.9)
    last = watched.told[-1][1]
    assert dict(last.over) == {stay.told: True}
    assert is_nothing(last.loads[stay.holder])
    for _, each in watched.told:  # They are what goes through Redis.
        sent = codec.News(
            number=each.number,
            after=each.after,
            loads=each.loads,
            arrivals=each.arrivals,
            over=each.over,
            sessions=each.sessions,
        )
        assert codec.read_news(codec.news(sent)) == sent


def test_what_one_replica_sends_somewhere_the_other_knows_after_the_delay() -> None:
    watched = Watched(settings=Settings(delay_s=0.05))
    worker = watched.place("a", 1, 0.5)
    watched.replicas.pass_time(0.549)
    assert watched.others(1, worker) == NOTHING
    watched.replicas.pass_time(0.551)
    others = watched.others(1, worker)
    assert (others.prefills, others.kv_tokens) == (1, 4096)
    assert others.comp_s > 0
    facts = RequestFacts(request_id="b", model=MODEL, prompt_tokens=4096)
    held = watched.planner(1).holdings.held(facts, Prompt(unique(1, 4096)), 0.56)
    assert held[worker, 0].reach_tokens == 4096
    assert watched.place("b", 2, 0.56) != worker


def test_changes_are_told_at_once_and_then_no_more_often_than_the_interval() -> None:
    watched = Watched(1, Settings(interval_s=0.02, delay_s=0.001))
    for i in range(30):
        watched.place(f"r{i}", i, 0.5 + 0.001 * i)
    watched.replicas.pass_time(0.6)
    assert len(watched.told) == 3
    assert sum(len(news.arrivals) for _, news in watched.told) == 30
    assert len(watched.told[0][1].arrivals) == 1


def test_sessions_reach_the_others() -> None:
    watched = Watched()
    watched.replicas.pass_time(0.5)
    journal = watched.exchange.members[0].journal
    journal.session(SessionAt(b"k" * 16, HOLDER, 100))
    watched.place("a", 1, 0.5)
    watched.replicas.pass_time(0.6)
    assert list(watched.planner(1).sessions.recent(5)) == [SessionAt(b"k" * 16, HOLDER, 100)]
    assert len(watched.planner(0).sessions) == 0


@pytest.mark.parametrize("loss", [0.0, 0.3, 0.9])
def test_whatever_is_lost_all_ends_at_nothing(loss: float) -> None:
    spec = replace(POOL, faults=(Restart(1.5, "b1", 1.0),))
    run, records = play(spec, 4, load(), Settings(loss=loss))
    assert run.exchange is not None
    assert (run.exchange.lost > 0) == (loss > 0)
    assert any(each.retries for each in records)
    end_s = max(record.last_s for record in records)
    planners = [replica.planner for replica in run.replicas]
    believed = 0
    for step in range(1, 101):
        run.pass_time(end_s + 0.3 * step)
        believed += not all(is_nothing(load.others) for planner in planners for load in loads(planner))
    for planner in planners:
        assert planner.in_flight() == 0
        for each in loads(planner):
            assert is_nothing(each.others)
            assert (each.in_line, each.streams, each.kv_tokens) == (0, 0, 0)
    assert bool(believed) == (loss > 0)  # Some last words are lost then: it was not for want of them.


def is_nothing(it: InFlight) -> bool:
    return (it.prefills, it.streams, it.kv_tokens, it.comp_s) == (0, 0, 0, 0)


def loads(planner: Planner) -> list[Any]:
    return [load for worker in planner.fleet.workers.values() for load in worker.loads.values()]


def test_the_times_are_those_of_the_gateway() -> None:
    config, told = RedisConfig(), Settings()
    assert (1000 * told.interval_s, told.ttl_s) == (config.interval_ms, config.ttl_s)
    assert exchange.WHOLES_IN_TTL == publisher.WHOLES_IN_TTL
    assert exchange.NOT_READ_AGAIN_S == reader._NOT_READ_AGAIN_S
    assert exchange.MOST_ARRIVALS == reader.MOST_ARRIVALS


def test_a_replica_here_comes_to_believe_what_the_gateways_reader_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same messages, some of them lost, to both."""
    watched = Watched(2)
    served = Planner(Fleet(), PrefixIndex())
    source = watched.planner(1).fleet
    for worker in source.workers.values():
        served.fleet.workers[worker.name] = type(worker)(worker.name, 1)
        served.fleet.set_capabilities(worker.name, models=[MODEL])
        served.fleet.workers[worker.name].stats = worker.stats
        served.fleet.workers[worker.name].publishes_events = True
        served.configure_worker(worker.name)
    keys = Keys("warmroute", "test")
    counts = Counts(CollectorRegistry())
    hearing = reader.Reader("x", keys, served, StoredResponses(), counts, ttl_s=3.0, op_timeout_s=1.0)
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    ends: list[tuple[float, str]] = []
    rng = random.Random(5)
    for i in range(60):
        now_s = 0.5 + 0.03 * i
        watched.place(f"r{i}", i % 7, now_s)
        ends.append((now_s + 0.5 * rng.random(), f"r{i}"))
        for each in [each for each in ends if each[0] <= now_s]:
            ends.remove(each)
            watched.replicas.observe(each[1], Outcome(kind=OutcomeKind.FIRST_TOKEN), now_s)
            if rng.random() < 0.7:
                watched.replicas.observe(each[1], Outcome(kind=OutcomeKind.END, n_tokens=1), now_s)
    seen = 0
    mirror = Watched(2)
    mirrored = mirror.exchange.members[1]
    for n, (writer, news) in enumerate(watched.told):
        if writer != "0" or n % 5 == 4:
            continue
        seen += 1
        now_s = 3.0 + 0.02 * n
        mirror.replicas.clock.now_s = now_s
        mirrored._take("0", news)
        data = codec.News(
            number=news.number, after=news.after, loads=news.loads, arrivals=news.arrivals, over=news.over
        )
        hearing._take("0", codec.news(data))
        assert mirrored.elsewhere.missed == hearing.elsewhere.missed
        for name, worker in served.fleet.workers.items():
            # On its way through Redis a head is cut to the whole, which it may exceed by a rounding error.
            others = msgspec.to_builtins(worker.loads[0].others)
            assert others == pytest.approx(msgspec.to_builtins(mirror.others(1, name)))
            planner = mirror.planner(1)
            assert served.holdings.assumed_blocks(name) == planner.holdings.assumed_blocks(name)
    assert seen > 20
    assert hearing.elsewhere.missed > 0
    assert any(worker.loads[0].others.streams for worker in served.fleet.workers.values())


# ---- what it comes to ------------------------------------------------------------------------------------------------


def told(p90: float) -> Ran:
    figures: Any = {"ttft_p50_ms": 1.0, "ttft_p90_ms": p90, "ttft_p99_ms": p90, "e2e_mean_ms": 2000.0}
    figures |= {"hit_share": 0.5, "output_tokens_per_s": 10.0}
    stages = {"60/s": {"ttft_p90_ms": 2 * p90}, "9/s": {"ttft_p90_ms": 1.0}, "warm-up": {}}
    return Ran({**figures, "groups": stages}, 0.0)


def test_targets_compare_medians_with_one_replica() -> None:
    cell = cells.ladder((1, 2, 8), 3, Settings(), "random")
    sweep = Sweep()
    p90s = {"round-robin": (9, 9, 9), "1 replica": (100, 90, 500), "2 replicas, sync": (130, 1, 900)}
    for name in cell.arms:
        for seed, p90 in enumerate(p90s.get(name, (200, 200, 1))):
            sweep._take((cell.name, name, seed), cell, told(p90))
    two, eight = quality.targets(sweep, cell)
    assert two["name"] == "2 replicas with sync: TTFT p90 over one replica's"
    assert (two["goal"], two["measured"], two["met"]) == ("<= 1.3", 1.3, True)
    assert (eight["measured"], eight["met"]) == (2.0, False)
    lines = quality.lines(sweep, cell)
    assert "| 8 replicas, apart | 1 | 200 | 200 | 2000 | 10 | 0.500 |" in lines
    assert "| TTFT p90 ms by requests/s | 9/s | 60/s |" in lines
    assert "| 8 replicas, apart | 1 | 400 |" in lines
    assert quality.figures(sweep, cell)["ladder_2_replicas_sync_60_per_s_ttft_p90_ms"] == 260
    alone = cells.ladder((2,), 3, Settings(), "random")
    for seed in range(3):
        sweep._take((alone.name, "2 replicas, sync", seed), alone, told(1.0))
    assert [each["met"] for each in quality.targets(sweep, alone)] == [None]


def test_a_kept_run_is_this_code_and_these_settings(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    cell = cells.ladder((1, 2), 1, Settings(), "random", quick=True)
    Kept(path, grid.Traces(), also=(cells, exchange, replicas)).add(cell, "1 replica", 0, told(1.0))
    again = Kept(path, grid.Traces(), also=(cells, exchange, replicas))
    assert again.find(cell, "1 replica", 0) is not None
    assert Kept(path, grid.Traces()).find(cell, "1 replica", 0) is None
    for other in (
        cells.ladder((1, 2), 1, Settings(loss=0.1), "random", quick=True),
        cells.ladder((1, 2), 1, Settings(delay_s=0.1), "random", quick=True),
        cells.ladder((1, 2), 1, Settings(), "turns", quick=True),
        cells.ladder((1, 2), 1, Settings(), "random"),
    ):
        assert again.find(other, "1 replica", 0) is None
