"""The simulator: nothing is lost, nothing happens before its cause, nothing is hit that was never computed."""

from array import array
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bench.engine.events import BlockStored, Event
from bench.engine.model import Engine
from bench.engine.request import Admitted, EngineConfig, Pull, Request
from bench.engine.timing import Timing
from bench.sim.arms import arm
from bench.sim.arms.basic import PlannerRouter
from bench.sim.clock import Clock
from bench.sim.engine import SimEngine
from bench.sim.fleet import FleetSpec, Restart, Server, Slow
from bench.sim.hardware import Hardware
from bench.sim.load import Ask, Stage
from bench.sim.prompts import answer, unique
from bench.sim.record import Record, gap_of
from bench.sim.router import Setup
from bench.sim.transfers import Link
from bench.sim.view import MODEL
from bench.sim.world import Run, World
from indexer import Prompt
from scorer.types import Role

BLOCK = 4
TIMING = Timing(0.005, 1e-5, 1e-7, 2e-5, 1e-9, front_base_s=0.001, front_per_token_s=1e-5)
FLOORED = replace(TIMING, prefill_floor_s=0.04)


# ---- one engine: steps taken together are the steps taken one by one -------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    at_s: float
    texts: tuple[int, ...]
    tail: int
    output: int

    def prompt(self) -> bytes:
        return b"".join(unique(text, 2 * BLOCK) for text in self.texts) + unique(77, self.tail)


arrivals = st.lists(
    st.builds(
        Arrival,
        at_s=st.integers(0, 40).map(lambda it: it / 37),
        texts=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
        tail=st.integers(0, BLOCK),
        output=st.integers(1, 60),
    ),
    min_size=1,
    max_size=10,
)
configs = st.builds(
    EngineConfig,
    block_size=st.just(BLOCK),
    num_gpu_blocks=st.integers(30, 70),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([8, 17, 64]),
    max_model_len=st.just(29 * BLOCK),
    reserve_full_prompt=st.booleans(),
    timing=st.just(TIMING),
)


class Watcher:
    """Notes when each token came and what was said of blocks."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.first_s: dict[str, float] = {}
        self.last_s: dict[str, float] = {}
        self.times_s: dict[str, list[float]] = {}
        """Of every token, those between two that are told from the engine's pace."""
        self.stored: Counter[int | bytes] = Counter()
        self._since: dict[str, int] = {}

    def admitted(self, engine: SimEngine, admitted: Admitted) -> None:
        pass

    def pull(self, engine: SimEngine, pull: Pull) -> float:
        raise AssertionError("nobody pulls here")

    def token(self, engine: SimEngine, request_id: str, position: int, ended: bool) -> None:
        if position == 0:
            assert request_id not in self.first_s
            self.first_s[request_id] = self.clock.now_s
            self.times_s[request_id] = []
        if request_id in self._since:
            self._catch_up(engine, request_id)
        else:
            self.times_s[request_id].append(self.clock.now_s)
        self._since[request_id] = len(engine.pace)
        if ended:
            assert request_id not in self.last_s
            self.last_s[request_id] = self.clock.now_s

    def preempted(self, engine: SimEngine, request_id: str) -> None:
        if request_id in self._since:
            self._catch_up(engine, request_id)
            del self._since[request_id]

    def _catch_up(self, engine: SimEngine, request_id: str) -> None:
        times_s = self.times_s[request_id]
        for step_s in engine.pace.steps_s[self._since[request_id] :]:
            times_s.append(times_s[-1] + step_s)

    def lot(self, engine: SimEngine) -> None:
        pass

    def published(self, engine: SimEngine, events: list[Event]) -> None:
        for event in events:
            count = 1 if isinstance(event, BlockStored) else -1
            for block_hash in event.block_hashes:  # type: ignore[union-attr]
                self.stored[block_hash] += count


def request(number: int, arrival: Arrival) -> Request:
    return Request(
        request_id=str(number),
        prompt_token_ids=array("I", arrival.prompt()),
        max_tokens=arrival.output,
        seed=number,
    )


def one_by_one(config: EngineConfig, todo: list[Arrival]) -> tuple[dict[str, list[float]], Engine]:
    """The engine model driven in the plainest way: the times of every request's tokens."""
    engine = Engine(config)
    left = sorted(enumerate(todo), key=lambda it: it[1].at_s)
    times_s: dict[str, list[float]] = {}
    now_s = 0.0
    while left or not engine.idle():
        while left and left[0][1].at_s <= now_s:
            number, arrival = left.pop(0)
            engine.add_request(request(number, arrival), arrival.at_s)
        wake_s = engine.next_wake_s(now_s)
        coming_s = left[0][1].at_s if left else None
        if wake_s is None or (coming_s is not None and coming_s < wake_s):
            assert coming_s is not None, "stuck"
            now_s = coming_s
            continue
        now_s = max(now_s, wake_s)
        result = engine.step(now_s)
        now_s += result.dt_s
        for token in result.tokens:
            times_s.setdefault(token.request_id, []).append(now_s)
    return times_s, engine


def together(config: EngineConfig, todo: list[Arrival]) -> tuple[Watcher, SimEngine]:
    """The same by `SimEngine`."""
    clock = Clock()
    watcher = Watcher(clock)
    sim = SimEngine("e", config, clock, watcher)

    def submit(number: int, arrival: Arrival) -> None:
        sim.submit(request(number, arrival))

    for number, arrival in enumerate(todo):
        clock.at(arrival.at_s, partial(submit, number, arrival))
    clock.run()
    return watcher, sim


# One is preempted as it needs a block, and resumed with all it had but one token: a step that looks like decoding.
RESUMED_BY_ONE_TOKEN = (
    EngineConfig(
        block_size=BLOCK,
        num_gpu_blocks=31,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        max_model_len=29 * BLOCK,
        reserve_full_prompt=False,
        timing=replace(TIMING, front_base_s=0.0, front_per_token_s=0.0),
    ),
    [
        Arrival(0.0, (10, 10), 3, 39),
        Arrival(0.0, (11,), 1, 50),
        Arrival(0.0, (12, 12, 12, 12), 0, 47),
        Arrival(0.0, (13, 13), 3, 16),
    ],
)


@example(*RESUMED_BY_ONE_TOKEN)
@given(configs, arrivals)
def test_steps_taken_together_end_as_those_taken_one_by_one(config: EngineConfig, todo: list[Arrival]) -> None:
    watcher, sim = together(config, todo)
    times_s, engine = one_by_one(config, todo)
    assert watcher.times_s.keys() == watcher.last_s.keys() == times_s.keys()
    for request_id, expected in times_s.items():
        assert watcher.times_s[request_id] == pytest.approx(expected, abs=1e-4)  # Those of one run are spread evenly.
        assert watcher.first_s[request_id] == pytest.approx(expected[0], abs=1e-9)
        assert watcher.last_s[request_id] == pytest.approx(expected[-1], abs=1e-9)
    assert sim.engine.stats().generated_tokens == engine.stats().generated_tokens
    assert sim.engine.stats().preemptions == engine.stats().preemptions
    assert dict(sim.engine.resident()) == dict(engine.resident())
    assert +watcher.stored == Counter(dict(sim.engine.resident())), "the events tell another story"


@given(configs, arrivals)
def test_launching_ahead_hides_the_floor_and_never_the_work(config: EngineConfig, todo: list[Arrival]) -> None:
    todo = [replace(arrival, at_s=0.0) for arrival in todo]
    ends: list[float] = []
    for timing in (TIMING, FLOORED):
        watcher, sim = together(replace(config, timing=timing), todo)
        assert sim.busy_s == pytest.approx(sum(sim.pace.steps_s))
        ends.append(max(watcher.last_s.values()))
        assert ends[-1] >= sim.busy_s
    floors_s = sim.engine.stats().steps * FLOORED.prefill_floor_s
    assert ends[0] - 1e-9 <= ends[1] <= ends[0] + floors_s


# ---- a whole fleet ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    apart: bool
    arm: str
    block_size: int
    kv_blocks: int
    delay_s: float
    loss: float
    lease_s: float
    fault: str
    late_sharing: bool
    asks: tuple[Arrival, ...]
    turns: int
    nixl: bool = False

    def spec(self) -> FleetSpec:
        hw = Hardware(FLOORED, layers=4, kv_bytes_per_token=1000, kv_tokens=0, chunk_tokens=32, max_num_seqs=4)
        roles = [Role.PREFILL, Role.DECODE, Role.DECODE] if self.apart else [Role.BOTH] * 3
        servers = tuple(
            Server(f"w{i}", hw, role, self.block_size, self.kv_blocks * self.block_size, late_sharing=self.late_sharing)
            for i, role in enumerate(roles)
        )
        faults = {
            "none": (),
            "slow": (Slow(0.3, "w1", 0.5),),
            "restart": (Restart(0.4, "w1", 0.2),),
            "restart prefill": (Restart(0.4, "w0", 0.2),),
        }
        link = Link(per_descriptor_s=1e-4, bytes_per_s=1e6)
        return FleetSpec(
            servers,
            link,
            self.delay_s,
            self.loss,
            lease_s=self.lease_s,
            faults=faults[self.fault],  # type: ignore[arg-type]
            nixl=self.nixl,
        )


cases = st.builds(
    Case,
    apart=st.booleans(),
    arm=st.sampled_from(["warmroute", "always-remote", "round-robin", "longest-prefix"]),
    block_size=st.sampled_from([4, 8]),
    kv_blocks=st.integers(40, 60),
    delay_s=st.sampled_from([0.0, 0.01, 0.3]),
    loss=st.sampled_from([0.0, 0.0, 0.3]),
    lease_s=st.sampled_from([30.0, 30.0, 0.0]),
    fault=st.sampled_from(["none", "none", "slow", "restart", "restart prefill"]),
    late_sharing=st.booleans(),
    asks=arrivals.map(tuple),
    turns=st.integers(1, 3),
    nixl=st.booleans(),
)


class Turns:
    """Each arrival is a conversation: what was said before comes again."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.texts: dict[str, bytes] = {}
        """Request -> its prompt and answer."""

    def start(self, stage: Stage) -> None:
        for number, arrival in enumerate(self.case.asks):
            stage.submit(arrival.at_s, self._ask(number, 0, arrival.prompt(), arrival.output))

    def _ask(self, number: int, turn: int, prompt: bytes, output: int) -> Ask:
        seed = number * 10 + turn
        return Ask(lambda: prompt, output, session=str(number), turn=turn, seed=seed)

    def ended(self, ask: Ask, record: Record, stage: Stage) -> None:
        text = ask.tokens() + answer(ask.seed, ask.output_tokens)
        self.texts[record.request_id] = text
        longer = text + unique(500 + ask.seed, 3)
        if record.ok and ask.turn + 1 < self.case.turns and len(longer) // 4 + ask.output_tokens < 150:
            number = int(ask.session or 0)
            stage.submit(stage.now_s, self._ask(number, ask.turn + 1, longer, ask.output_tokens))


def simulate(case: Case) -> tuple[World, Turns, Run]:
    load = Turns(case)
    world = World(case.spec(), arm(case.arm), load)
    return world, load, world.run()


fleets = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@fleets
@given(cases)
def test_tokens_are_conserved_and_everything_is_given_back(case: Case) -> None:
    world, load, run = simulate(case)
    assert len(load.texts) == len(run.records), "a request was forgotten"
    for record in run.records:
        text = load.texts[record.request_id]
        if record.ok:
            assert record.output_tokens == len(text) // 4 - record.prompt_tokens
            assert record.gaps.total() == record.output_tokens - 1
            gaps_s = sum(gap_of(bin_) * n for bin_, n in record.gaps.items())
            assert gaps_s == pytest.approx(record.last_s - (record.first_s or 0.0), rel=0.01)
    for name, sim in run.engines.items():
        if sim.dead:
            continue
        assert sim.engine.idle()
        if case.lease_s > 1:
            assert sim.engine.pool.num_used == 0, f"{name} leaks blocks"
        booked = world.view.worker(name).booked
        assert (booked.requests, booked.uncached_tokens, booked.kv_tokens) == (0, 0, 0)
    if isinstance(world.router, PlannerRouter):
        assert world.router.planner.in_flight() == 0
        for worker in world.fleet.workers.values():
            assert all(load.requests == 0 and load.kv_tokens == 0 for load in worker.loads.values())


@fleets
@given(cases)
def test_nothing_happens_before_its_cause(case: Case) -> None:
    world, _, run = simulate(case)
    front_s = FLOORED.front_s(1)
    for record in run.records:
        if not record.ok:
            continue
        assert record.first_s is not None
        assert record.arrival_s + front_s <= record.first_s <= record.last_s <= world.clock.now_s
        assert record.e2e_s >= sum(n for n in record.gaps.values()) * TIMING.step_base_s * 0.99
        if record.prefill is not None and not record.retries:
            assert record.prefill_s is not None
            assert record.prefill_s + world.spec.link.hop_s + front_s <= record.ttft_s
    by_session: dict[str | None, list[Record]] = {}
    for record in run.records:
        by_session.setdefault(record.session, []).append(record)
    for turns in by_session.values():
        assert all(before.last_s <= after.arrival_s for before, after in pairwise(turns))


@fleets
@given(cases)
def test_hits_never_exceed_those_of_an_endless_cache(case: Case) -> None:
    _, load, run = simulate(case)
    size = 4 * case.block_size
    prompts = {r.request_id: load.texts[r.request_id][: 4 * r.prompt_tokens] for r in run.records}
    for record in run.records:
        prompt = prompts[record.request_id]
        best = 0
        for other in run.records:
            if other is not record and record.first_s is not None and other.arrival_s <= record.first_s:
                text = load.texts[other.request_id]
                same = 0
                while prompt[same : same + size] == text[same : same + size] and same + size <= len(prompt):
                    same += size
                best = max(best, same // 4)
        most = (record.prompt_tokens - 1) // case.block_size * case.block_size
        # A request that was preempted or tried twice may find its own blocks.
        assert record.cached_tokens <= (most if record.retries else min(best, most))
        assert record.prefill_cached_tokens <= (most if record.retries else min(best, most))


@fleets
@given(cases)
def test_the_index_ends_up_with_what_the_engines_hold(case: Case) -> None:
    world, load, run = simulate(replace(case, loss=0.0))
    world.clock.at(world.clock.now_s + 1.0, lambda: None)
    world.clock.run()
    world.senses.drain()
    for text in load.texts.values():
        found = {name: match.reach_tokens for (name, _), match in world.index.match(Prompt(text), model=MODEL).items()}
        for name, sim in run.engines.items():
            engine = sim.engine
            hashes = engine.block_hashes(Request(request_id="", prompt_token_ids=array("I", text), max_tokens=1))
            held = len(engine.pool.lookup(hashes, len(hashes))) * case.block_size
            claimed = found.get(name, 0)
            assert claimed <= (0 if sim.dead else held)
            # A pulled prompt is announced when it has arrived. If the same was computed here meanwhile, the index takes
            # that for a repeated announcement, not a second copy, and gives the block up when either is evicted.
            assert case.apart or sim.dead or claimed == held


@fleets
@given(cases)
def test_equal_seeds_mean_equal_runs(case: Case) -> None:
    first, second = (simulate(case)[2] for _ in range(2))
    assert [_figures(record) for record in first.records] == [_figures(record) for record in second.records]


def _figures(record: Record) -> tuple[object, ...]:
    return (
        record.request_id,
        record.decode,
        record.prefill,
        record.first_s,
        record.last_s,
        record.cached_tokens,
        sorted(record.gaps.items()),
    )


def test_the_clock_refuses_the_past() -> None:
    clock = Clock()
    clock.at(2.0, lambda: None)
    clock.run()
    with pytest.raises(ValueError, match="nothing can be set to 1"):
        clock.at(1.0, lambda: None)


def test_an_arm_is_built_from_the_setup_alone() -> None:
    seen: list[Setup] = []

    def factory(setup: Setup) -> PlannerRouter:
        seen.append(setup)
        return PlannerRouter(setup)

    case = Case(False, "warmroute", 4, 40, 0.0, 0.0, 30.0, "none", False, (Arrival(0.0, (1,), 0, 2),), 1)
    World(case.spec(), factory, Turns(case)).run()
    assert [worker.name for worker in seen[0].workers] == ["w0", "w1", "w2"]
