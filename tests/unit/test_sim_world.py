"""The way of a request through a simulated fleet, and what goes wrong on it."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.sim.arms import arm, arms
from bench.sim.fleet import FleetSpec, Restart, Slow, scaled, servers
from bench.sim.hardware import HARDWARE, hardware
from bench.sim.record import gap_of
from bench.sim.router import Arm, ClairvoyantView, Placement, Setup, SimRequest, View
from bench.sim.scripted import Line, Script, named, play
from bench.sim.transfers import NVLINK, NVLINK_FRESH
from bench.sim.view import Clairvoyance, Knowledge
from bench.sim.workloads.generated import Chat, Mixed, Sessions
from bench.sim.workloads.shared import Hotspot
from bench.sim.world import Run, World
from scorer.cost import Constants
from scorer.types import EngineStats, Outcome, OutcomeKind

PAIR = FleetSpec(servers("h200-7b", prefill=1, decode=1), NVLINK_FRESH)
PROMPT = ((5, 8192),)


def test_a_local_prompt_takes_front_end_and_prefill() -> None:
    record = play(PAIR, [Line(1, PROMPT, "d0")]).records[0]
    timing = hardware("h200-7b").timing
    assert record.ttft_s == pytest.approx(timing.front_s(8192) + timing.step_s(0, 0, 8192, 8192 * 8192 / 2))
    assert (record.prefill, record.cached_tokens, record.ok) == (None, 0, True)


def test_a_remote_prompt_adds_hop_front_end_pull_and_one_step() -> None:
    meet, local, remote = Line(0, ((1, 100),), "d0", "p0"), Line(5, PROMPT, "d0"), Line(10, ((6, 8192),), "d0", "p0")
    run = play(PAIR, [meet, local, remote])
    here, there = run.records[1:]
    link, timing = PAIR.link, hardware("h200-7b").timing
    pull_s = link.transfer_s(8192 * 147_456, 0)
    rest_s = link.hop_s + timing.front_s(8192) + pull_s + timing.step_s(1, 8192, 0, 0) + link.enter_s
    assert there.prefill_s == pytest.approx(here.ttft_s)
    assert there.ttft_s == pytest.approx(here.ttft_s + rest_s)
    assert run.transfers.bytes == (100 + 8192) * 147_456
    assert run.engines["p0"].engine.stats().held == 0, "what was pulled is given back"


def test_only_what_the_decode_engine_lacks_is_moved() -> None:
    run = play(PAIR, [Line(0, ((5, 6400),), "d0"), Line(5, ((5, 6400), (6, 640)), "d0", "p0")])
    assert run.transfers.bytes == 640 * 147_456
    assert run.records[1].cached_tokens == 6400


def test_nothing_is_moved_where_the_decode_engine_has_it_all() -> None:
    run = play(PAIR, [Line(0, ((5, 6400),), "d0"), Line(5, ((5, 6400),), "d0", "p0")])
    # The last block is never a hit: its last token is to be computed.
    assert run.transfers.bytes == 64 * 147_456


def test_a_lease_that_is_over_means_computing_on_the_decode_engine() -> None:
    spec = replace(PAIR, lease_s=0.001)
    run = play(spec, [Line(0, PROMPT, "d0", "p0", 5)])
    record = run.records[0]
    assert record.ok
    assert record.pull_failed
    assert run.transfers.bytes == 0
    assert record.ttft_s > 2 * 0.2, "computed twice"
    assert run.engines["p0"].engine.stats().held_blocks == 0


def test_kv_nobody_fetches_is_given_back_when_its_lease_is_over() -> None:
    spec = replace(PAIR, faults=(Restart(0.27, "d0", 100.0),), lease_s=2.0)
    run = play(spec, [Line(0, PROMPT, "d0", "p0", 5), Line(10, ((9, 640),), "p0")])
    assert not run.records[0].ok, "the only decode engine is gone"
    assert run.engines["p0"].engine.pool.num_used == 0


def test_who_had_no_token_yet_is_tried_once_more_elsewhere() -> None:
    spec = FleetSpec(servers("h200-7b", both=2), faults=(Restart(0.1, "b0", 1.0),))
    load = Mixed(1, rate=100.0, duration_s=0.09, long_share=1.0)
    world = World(spec, arm("round-robin"), load)
    run = world.run()
    assert {record.retries for record in run.records} == {0, 1}
    assert all(record.ok and record.decode == "b1" for record in run.records if record.retries)
    assert all(record.ok for record in run.records)


def test_an_answer_under_way_dies_with_its_engine() -> None:
    spec = FleetSpec(servers("h200-7b", both=1), faults=(Restart(1.0, "b0", 1.0),))
    run = play(spec, [Line(0, PROMPT, "b0", None, 1000), Line(5, PROMPT, "b0", None, 2)])
    lost, after = run.records
    assert (lost.ok, after.ok) == (False, True)
    assert 50 < lost.output_tokens < 1000
    assert after.cached_tokens == 0, "the new process holds nothing"


def test_a_prefill_engine_that_dies_with_the_kv_makes_the_decode_engine_compute() -> None:
    spec = replace(PAIR, faults=(Restart(0.275, "p0", 1.0),))
    run = play(spec, [Line(0, PROMPT, "d0", "p0", 3)])
    record = run.records[0]
    assert record.ok
    assert record.pull_failed
    assert record.retries == 0


def test_a_preempted_answer_waits_and_nobody_loses_a_token() -> None:
    spec = FleetSpec(servers("h200-7b", both=1, block_size=16, kv_tokens=1600))
    run = play(spec, [Line(i / 100, ((5 + i, 480),), "b0", None, 400) for i in range(3)])
    assert run.engines["b0"].engine.stats().preemptions > 0
    for record in run.records:
        assert record.gaps.total() == record.output_tokens - 1 == 399
        gaps_s = sum(gap_of(bin_) * n for bin_, n in record.gaps.items())
        assert gaps_s == pytest.approx(record.last_s - (record.first_s or 0.0), rel=0.01)
    assert max(record.max_gap_s for record in run.records) > 1.0


def test_a_slow_engine_is_slower_than_its_like() -> None:
    spec = FleetSpec(servers("h200-7b", both=2), faults=(Slow(0.0, "b1", 0.5),))
    run = play(spec, [Line(1, PROMPT, "b0", None, 50), Line(1, ((6, 8192),), "b1", None, 50)])
    fast, slow = run.records
    assert slow.tpot_s == pytest.approx(2 * fast.tpot_s)


def test_a_conversation_hits_what_it_said_and_was_told_before() -> None:
    chat = Chat(first_tokens=1000, turn_tokens=100, turns=3, output_tokens=100, think_s=1.0)
    spec = FleetSpec(servers("h200-7b", both=1, block_size=16))
    run = World(spec, arm("warmroute"), Sessions(3, chat, rate=0.5, duration_s=4)).run()
    turns = [record for record in run.records if record.session == run.records[0].session]
    assert [record.prompt_tokens for record in turns] == [1000, 1200, 1400]
    assert [record.cached_tokens for record in turns] == [0, 1088, 1296]
    assert all(before.last_s < after.arrival_s for before, after in pairwise(turns))


class Listener(Arm):
    """Round robin over pairs that notes all it is told."""

    name = "listener"

    def __init__(self, setup: Setup) -> None:
        self.outcomes: list[tuple[str, OutcomeKind]] = []
        self.n_tokens = 0
        self.scrapes: list[EngineStats] = []

    def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
        self.view = view
        return Placement(view.decoders[0].name, view.prefillers[0].name)

    def observe(self, request_id: str, outcome: Outcome, now_s: float) -> None:
        self.outcomes.append((request_id, outcome.kind))
        self.n_tokens += outcome.n_tokens if outcome.kind is OutcomeKind.TOKEN else 0

    def scraped(self, worker: str, stats: EngineStats) -> None:
        self.scrapes.append(stats)


def test_an_arm_is_told_what_a_gateway_sees() -> None:
    world = World(PAIR, Listener, Mixed(2, rate=2.0, duration_s=2.0))
    run = world.run()
    listener = world.router
    assert isinstance(listener, Listener)
    order = {OutcomeKind.PREFILL_DONE: 0, OutcomeKind.FIRST_TOKEN: 1, OutcomeKind.TOKEN: 2}
    for record in run.records:
        kinds = [kind for request_id, kind in listener.outcomes if request_id == record.request_id]
        assert kinds[-2:] == [OutcomeKind.CACHED_TOKENS, OutcomeKind.END]
        assert [order[kind] for kind in kinds[:-2]] == sorted(order[kind] for kind in kinds[:-2])
    total = sum(record.output_tokens for record in run.records)
    assert 0.7 * total < listener.n_tokens < total
    assert listener.scrapes[-1].generation_tokens
    assert type(listener.view) is Knowledge, "engine internals are not for everybody"


def test_a_clairvoyant_arm_sees_inside() -> None:
    seen: list[tuple[int, int, int]] = []

    class Seer(Listener):
        clairvoyant = True

        def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
            assert isinstance(view, Clairvoyance)
            state: ClairvoyantView = view
            inside = state.engine("d0")
            seen.append((len(inside.waiting()), len(inside.running()), state.output_tokens(request.request_id)))
            assert inside.prefill_s(8192, 0) == pytest.approx(0.2106, abs=1e-3)
            return Placement("d0")

    World(PAIR, Seer, Mixed(2, rate=20.0, duration_s=1.0)).run()
    assert seen[0] == (0, 0, 128)
    assert max(waiting for waiting, _, _ in seen) > 0
    assert max(running for _, running, _ in seen) > 0


def test_events_lag_behind_and_optimistic_blocks_fill_in() -> None:
    found: list[tuple[int, int]] = []

    class Asker(Listener):
        def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
            known = view.cached_tokens(request, optimistic=False).get("b0", 0)
            found.append((known, view.cached_tokens(request).get("b0", 0)))
            return Placement("b0")

    script = Script([Line(at_s, ((5, 6400), (9, 100)), "b0") for at_s in (0.0, 0.1, 5.0)])
    World(FleetSpec(servers("h200-7b", both=1), event_delay_s=1.0), Asker, script).run()
    assert found == [(0, 0), (0, 6464), (6464, 6464)]


@pytest.mark.parametrize("whole", [False, True])
def test_a_connector_may_move_all_of_the_prompt_or_what_is_missing(whole: bool) -> None:
    """The decode engine holds the first 6400 of 6500 tokens."""
    spec = FleetSpec(servers("h200-7b", prefill=1, decode=1), whole_kv=whole)
    lines = [Line(0.0, ((5, 6400), (7, 100)), "d0"), Line(5.0, ((5, 6400), (9, 100)), "d0", "p0")]
    run = play(spec, lines)
    assert run.transfers.bytes == (6500 if whole else 100) * hardware("h200-7b").kv_bytes_per_token
    assert run.records[1].cached_tokens == 6400


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_priors_describe_the_hardware(name: str) -> None:
    hw = hardware(name)
    constants = hw.constants(NVLINK, 64)
    assert constants.step_base_s == hw.timing.step_base_s
    assert constants.pull_per_block_s == pytest.approx(
        max(hw.kv_bytes_per_token * 64 / NVLINK.bytes_per_s, NVLINK.per_descriptor_s * hw.layers)
    )


def test_priors_can_be_off_by_a_factor() -> None:
    off = scaled(Constants(), 3.0)
    assert off.comp_per_token_s == pytest.approx(3 * Constants().comp_per_token_s)
    assert off.kv_bytes_per_token == Constants().kv_bytes_per_token
    assert off.expected_output_tokens == Constants().expected_output_tokens


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="h200-7b"):
        servers("h201", both=1)
    with pytest.raises(ValueError, match="warmroute"):
        arm("warmrout")


@pytest.mark.parametrize("name", sorted(arms()))
def test_every_arm_serves_everybody(name: str) -> None:
    spec = FleetSpec(servers("h200-7b", prefill=1, decode=2))
    run = World(spec, arm(name), Mixed(4, rate=6.0, duration_s=4.0), seed=1).run()
    assert all(record.ok for record in run.records)
    assert {record.decode for record in run.records} <= {"d0", "d1", "p0"}


def test_named_finds_lines_by_name() -> None:
    run = play(PAIR, [Line(0, PROMPT, "d0", name="x"), Line(1, PROMPT, "d0", name="y")])
    assert [record.group for record in named(run, "y")] == ["y"]


def hot_spot(shared_tokens: int, *, nixl: bool) -> Run:
    """A long beginning that half of all requests share, and another one every 10 s."""
    spec = FleetSpec(servers("h100-llama3-8b", both=8), nixl=nixl)
    load = Hotspot(1, rate=40, duration_s=30, shift_s=10, shared_tokens=shared_tokens)
    return World(spec, arm("warmroute"), load, seed=1).run()


def test_peers_hand_over_where_a_long_beginning_is_shared() -> None:
    run, alone = hot_spot(16_384, nixl=True), hot_spot(16_384, nixl=False)
    handed = [record for record in run.records if record.prefill is not None]
    assert len(handed) > 10
    assert all(record.ok and record.prefill != record.decode and not record.pull_failed for record in handed)
    assert all(record.prefill_cached_tokens > (record.predicted_tokens or 0) for record in handed)
    assert all(engine.engine.stats().held == 0 for engine in run.engines.values())
    e2e_s, alone_s = (sum(r.e2e_s for r in it.records) / len(it.records) for it in (run, alone))
    assert e2e_s < alone_s
    assert all(record.prefill is None for record in alone.records)


def test_peers_hand_nothing_over_where_computing_it_costs_little() -> None:
    assert all(record.prefill is None for record in hot_spot(2048, nixl=True).records)
