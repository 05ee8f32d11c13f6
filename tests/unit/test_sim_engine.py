"""One simulated engine: when its steps end, who interrupts them, and what a transfer costs."""

from array import array

import pytest

from bench.engine.events import Event
from bench.engine.request import Admitted, EngineConfig, Pull, Request
from bench.engine.steady import SteadyEngine
from bench.engine.timing import Timing, preset
from bench.sim.clock import Clock
from bench.sim.engine import MOST_STEPS, SimEngine
from bench.sim.prompts import answer, unique
from bench.sim.transfers import Link, Transfers

STEP_S = 0.01
TIMING = Timing(STEP_S, 0.0, 0.0, 0.001, 0.0)
CONFIG = EngineConfig(block_size=4, num_gpu_blocks=200, max_model_len=400, timing=TIMING)


class Notes:
    def __init__(self, clock: Clock, pull_s: float = 0.0) -> None:
        self.clock = clock
        self.pull_s = pull_s
        self.tokens: list[tuple[float, str, int, bool]] = []
        self.pulls: list[Pull] = []
        self.lots: list[float] = []

    def admitted(self, engine: SimEngine, admitted: Admitted) -> None: ...

    def preempted(self, engine: SimEngine, request_id: str) -> None: ...

    def published(self, engine: SimEngine, events: list[Event]) -> None: ...

    def pull(self, engine: SimEngine, pull: Pull) -> float:
        self.pulls.append(pull)
        return self.pull_s

    def token(self, engine: SimEngine, request_id: str, position: int, ended: bool) -> None:
        self.tokens.append((round(self.clock.now_s, 9), request_id, position, ended))

    def lot(self, engine: SimEngine) -> None:
        self.lots.append(self.clock.now_s)


def engine(config: EngineConfig = CONFIG, pull_s: float = 0.0) -> tuple[Clock, Notes, SimEngine]:
    clock = Clock()
    notes = Notes(clock, pull_s)
    return clock, notes, SimEngine("e", config, clock, notes)


def ask(name: str, n: int, output: int, remote: int = 0) -> Request:
    tokens = array("I", unique(hash(name) % 1000, n))
    return Request(request_id=name, prompt_token_ids=tokens, max_tokens=output, remote_tokens=remote)


def test_a_prefill_and_each_token_take_what_the_timing_says() -> None:
    clock, notes, sim = engine()
    sim.submit(ask("a", 10, 5))
    clock.run()
    prefill_s = STEP_S + 10 * 0.001
    assert notes.tokens == [(prefill_s, "a", 0, False), (pytest.approx(prefill_s + 4 * STEP_S), "a", -1, True)]
    assert sim.pace.steps_s == pytest.approx([prefill_s, *[STEP_S] * 4])


def test_an_arrival_waits_for_the_step_under_way_and_not_for_the_run_of_steps() -> None:
    clock, notes, sim = engine()
    sim.submit(ask("a", 10, 200))
    clock.at(0.105, lambda: sim.submit(ask("b", 20, 1)))
    clock.run()
    # "a" began at 0.02; the step that runs at 0.105 ends at 0.11, then comes one with 20 tokens of "b" and one of "a".
    first = next(it for it in notes.tokens if it[1] == "b")
    assert first == (pytest.approx(0.11 + STEP_S + 0.020), "b", 0, True)


def test_the_front_end_delays_a_prompt_without_stopping_the_answers() -> None:
    slow_front = EngineConfig(
        block_size=4, num_gpu_blocks=200, max_model_len=400, timing=Timing(STEP_S, 0, 0, 0.001, 0, front_base_s=0.05)
    )
    clock, notes, sim = engine(slow_front)
    sim.submit(ask("a", 10, 100))
    clock.at(0.103, lambda: sim.submit(ask("b", 20, 1)))
    clock.run()
    # Begun at 0.07, so steps end at 0.07 + k * 0.01; "b" is seen from 0.153 on.
    first = next(it for it in notes.tokens if it[1] == "b")
    assert first[0] == pytest.approx(0.16 + STEP_S + 0.020)


def test_runs_are_bounded_so_that_tokens_are_reported_on_the_way() -> None:
    clock, notes, sim = engine()
    sim.submit(ask("a", 10, 300))
    clock.run()
    gaps = [after - before for before, after in zip(notes.lots, notes.lots[1:], strict=False)]
    assert gaps
    assert max(gaps) <= MOST_STEPS * STEP_S + 1e-9


def test_a_pull_holds_up_its_request_and_its_posting_the_streams_beside_it() -> None:
    clock, notes, sim = engine(pull_s=0.03)
    sim.submit(ask("a", 10, 30))
    clock.at(0.1, lambda: sim.submit(ask("b", 20, 3, remote=20)))
    clock.run(0.2)
    assert [pull.num_tokens for pull in notes.pulls] == [20]
    assert not [it for it in notes.tokens if it[1] == "b"], "no token before the KV is here"
    assert max(sim.pace.steps_s) == pytest.approx(STEP_S + 0.03)
    clock.at(0.25, lambda: sim.pull_done("b", True))
    clock.run()
    first = next(it for it in notes.tokens if it[1] == "b")
    assert 0.25 + STEP_S <= first[0] <= 0.25 + 2 * STEP_S + 1e-9


def test_a_failed_pull_is_computed_here() -> None:
    clock, notes, sim = engine()
    sim.submit(ask("b", 20, 1, remote=20))
    clock.run()
    clock.at(1.0, lambda: sim.pull_done("b", False))
    clock.run()
    assert notes.tokens == [(pytest.approx(1.0 + STEP_S + 0.020), "b", 0, True)]


def test_an_engine_at_half_speed_takes_twice_as_long_from_the_next_step_on() -> None:
    clock, notes, sim = engine()
    sim.submit(ask("a", 10, 11))
    clock.at(0.065, lambda: sim.speed_up(0.5))
    clock.run()
    # At 0.07 five of the ten remaining tokens are there.
    assert notes.tokens[-1][0] == pytest.approx(0.07 + 5 * 2 * STEP_S)


def test_a_dead_engine_says_nothing_more() -> None:
    clock, notes, sim = engine()
    sim.submit(ask("a", 10, 50))
    clock.at(0.1, sim.kill)
    clock.run()
    assert [it[2] for it in notes.tokens] == [0]


def test_an_aborted_request_gives_its_blocks_back_and_the_others_go_on() -> None:
    clock, notes, sim = engine()
    sim.submit(ask("a", 10, 50))
    sim.submit(ask("b", 10, 50))
    clock.at(0.1, lambda: sim.abort("a"))
    clock.run()
    assert [it[1] for it in notes.tokens if it[3]] == ["b"]
    assert sim.engine.pool.num_used == 0


def test_what_an_engine_generates_is_what_sessions_expect() -> None:
    config = EngineConfig(block_size=4, num_gpu_blocks=100, max_model_len=300, timing=TIMING)
    steady = SteadyEngine(config)
    request = Request(request_id="a", prompt_token_ids=array("I", unique(1, 4)), max_tokens=70, seed=123)
    steady.add_request(request, 0.0)
    steady.step(0.0)
    seq = steady._running[0]
    while not steady.idle():
        steps = steady.steady_steps()
        assert steps > 0
        steady.take_steady(min(9, steps))
    assert array("I", seq.output).tobytes() == answer(123, 70)


def test_a_short_chunk_behind_a_long_one_costs_no_floor() -> None:
    config = EngineConfig(block_size=64, num_gpu_blocks=400, timing=preset("h200-7b"), max_model_len=16_384)
    clock, _, sim = engine(config)
    sim.submit(ask("a", 8192 + 64, 1))
    clock.run()
    assert len(sim.pace) == 2
    assert sim.pace.steps_s[1] < 0.010 < preset("h200-7b").prefill_floor_s
    sim.submit(ask("b", 64, 1))
    clock.run()
    assert sim.pace.steps_s[2] == preset("h200-7b").prefill_floor_s


def test_siblings_in_one_step_hit_each_other_or_not() -> None:
    hits: list[int] = []
    for late_sharing in (False, True):
        steady = SteadyEngine(CONFIG, late_sharing=late_sharing)
        for name in ("a", "b"):
            tokens = array("I", unique(1, 21))
            steady.add_request(Request(request_id=name, prompt_token_ids=tokens, max_tokens=1), 0.0)
        steady.step(0.0)
        steady.add_request(Request(request_id="c", prompt_token_ids=array("I", unique(1, 21)), max_tokens=1), 0.1)
        steady.step(0.1)
        hits.append(steady.stats().prefix_hits)
    assert hits == [40, 20]


# ---- transfers -------------------------------------------------------------------------------------------------------

LINK = Link(
    0.002, bytes_per_s=1e9, per_descriptor_s=4e-6, first_contact_s=0.1, post_base_s=0, post_per_descriptor_s=2e-6
)


def test_a_transfer_is_bound_by_its_bytes_or_its_descriptors() -> None:
    assert LINK.transfer_s(1e9, 10) == pytest.approx(1.002)
    assert LINK.transfer_s(1e3, 10_000) == pytest.approx(0.042)
    assert LINK.post_s(10_000) == pytest.approx(0.02)
    assert Link(per_descriptor_s=0.0).post_s(10_000) == Link().post_base_s


def test_pulls_of_one_decode_engine_queue_and_those_of_two_do_not() -> None:
    transfers = Transfers(LINK)
    transfers.begin("p", "d", 1e6, 0, 0.0)
    transfers.begin("p", "e", 1e6, 0, 0.0)
    first = transfers.begin("p", "d", 1e8, 0, 10.0)
    second = transfers.begin("p", "d", 1e8, 0, 10.0)
    other = transfers.begin("p", "e", 1e8, 0, 10.0)
    assert (first.done_s, second.done_s, other.done_s) == pytest.approx((10.102, 10.204, 10.102))


def test_first_contact_is_paid_once_and_again_after_a_restart() -> None:
    transfers = Transfers(LINK)
    took_s = [transfers.begin("p", "d", 0, 0, at_s).done_s - at_s for at_s in (0.0, 1.0)]
    transfers.forget("p")
    took_s.append(transfers.begin("p", "d", 0, 0, 2.0).done_s - 2.0)
    assert took_s == pytest.approx([0.102, 0.002, 0.102])
