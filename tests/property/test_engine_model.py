"""The engine model against naive oracles: what it announces, what it holds and what it hands out."""

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from bench.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from bench.engine.model import Engine
from bench.engine.request import EngineConfig, Request, StepResult
from bench.engine.timing import Timing

BLOCK = 4
TIMING = Timing(0.005, 1e-5, 1e-7, 2e-5, 1e-9, 0.04)


@dataclass
class Arrival:
    at_step: int
    prompt: list[int]
    max_tokens: int
    lora: str | None
    salt: str | None
    abort_after: int | None
    remote: bool
    hold: bool


def prompts() -> st.SearchStrategy[list[int]]:
    """Prompts made of few distinct stretches, so that prefixes are shared and block ends are hit exactly."""
    stretch = st.integers(0, 3).map(lambda it: [it * 10 + k for k in range(BLOCK)])
    tail = st.lists(st.integers(0, 3), max_size=BLOCK)
    parts = st.lists(stretch, max_size=6).map(lambda rows: [token for row in rows for token in row])
    return st.tuples(parts, tail).map(lambda pair: pair[0] + pair[1]).filter(bool)


arrivals = st.lists(
    st.builds(
        Arrival,
        at_step=st.integers(0, 12),
        prompt=prompts(),
        max_tokens=st.integers(1, 12),
        lora=st.sampled_from([None, None, "l1"]),
        salt=st.sampled_from([None, None, "tenant-a"]),
        abort_after=st.sampled_from([None, None, None, 1, 3]),
        remote=st.sampled_from([False, False, False, True]),
        hold=st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=14,
)
configs = st.builds(
    EngineConfig,
    block_size=st.just(BLOCK),
    num_gpu_blocks=st.integers(14, 40),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([3, 8, 17, 64]),
    max_model_len=st.just(48),
    reserve_full_prompt=st.booleans(),
    seed=st.integers(0, 3),
    timing=st.just(TIMING),
)


class Mirror:
    """Residency as an outsider derives it: one count per stored copy, nothing else."""

    def __init__(self) -> None:
        self.copies: Counter[int | bytes] = Counter()

    def apply(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.copies.clear()
            elif isinstance(event, BlockStored):
                self.copies.update(event.block_hashes)
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                parent = event.parent_block_hash
                assert parent is None or parent in self.copies, "a block was announced before its parent"
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    assert self.copies[block_hash] > 0, "a removal of something never stored"
                    self.copies[block_hash] -= 1
                    if not self.copies[block_hash]:
                        del self.copies[block_hash]


class Run:
    """Drives an engine over a schedule of arrivals until it is idle, checking the invariants after every step."""

    def __init__(self, config: EngineConfig, schedule: list[Arrival]) -> None:
        self.config = config
        self.schedule = schedule
        self.engine = Engine(config)
        self.mirror = Mirror()
        self.results: list[StepResult] = []
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.cached: dict[str, int] = {}
        self.held: list[str] = []

    def go(self) -> "Run":
        now_s, step = 0.0, 0
        abort_at: dict[int, list[str]] = {}
        last = max(arrival.at_step for arrival in self.schedule)
        while step <= last or not self.engine.idle():
            for number, arrival in enumerate(self.schedule):
                if arrival.at_step == step:
                    request = self.request(number, arrival)
                    self.engine.add_request(request, now_s)
                    if arrival.abort_after is not None:
                        abort_at.setdefault(step + arrival.abort_after, []).append(request.request_id)
            for request_id in abort_at.pop(step, ()):
                if request_id not in self.reasons and self.engine.abort(request_id):
                    self.aborted.add(request_id)
            wake_s = self.engine.next_wake_s(now_s)
            assert wake_s is not None or step <= last or self.held or abort_at or self.engine.idle(), (
                "the engine is stuck"
            )
            result = self.engine.step(now_s if wake_s is None else wake_s)
            now_s += result.dt_s
            self.check(result)
            for pull in result.pulls:
                self.engine.pull_done(pull.request_id, ok=pull.num_tokens % 3 != 0)
            if self.held and (step % 5 == 0 or wake_s is None):
                assert self.engine.release(self.held.pop(0))
            step += 1
            assert step < 5000, "the engine does not come to an end"
        return self

    @staticmethod
    def request(number: int, arrival: Arrival) -> Request:
        return Request(
            request_id=f"r{number}",
            prompt_token_ids=arrival.prompt,
            max_tokens=arrival.max_tokens,
            seed=number,
            lora_name=arrival.lora,
            lora_id=1 if arrival.lora else None,
            cache_salt=arrival.salt,
            remote_tokens=len(arrival.prompt) if arrival.remote else 0,
            hold_blocks=arrival.hold,
        )

    def check(self, result: StepResult) -> None:
        self.results.append(result)
        self.mirror.apply(result.events)
        if result.scheduled_tokens:
            assert dict(self.mirror.copies) == dict(self.engine.resident())
            assert result.dt_s > 0
        assert result.scheduled_tokens <= self.config.max_num_batched_tokens
        stats = self.engine.stats()
        assert 0 <= stats.kv_usage <= 1
        assert stats.running <= self.config.max_num_seqs
        assert self.engine.pool.num_used <= self.config.num_gpu_blocks - 1
        for admitted in result.admitted:
            self.cached[admitted.request_id] = admitted.cached_tokens
        for token in result.tokens:
            ids = self.tokens.setdefault(token.request_id, [])
            assert token.request_id not in self.reasons, "a token after the end"
            assert token.position == len(ids), "tokens out of order, lost or doubled"
            ids.append(token.token_id)
            if token.finish_reason:
                self.reasons[token.request_id] = token.finish_reason
                if self.schedule[int(token.request_id[1:])].hold:
                    self.held.append(token.request_id)


@given(configs, arrivals)
def test_announced_blocks_are_exactly_the_resident_ones(config: EngineConfig, schedule: list[Arrival]) -> None:
    """Mirror.apply and Run.check hold it after every step; at the end only held requests may keep blocks."""
    run = Run(config, schedule).go()
    assert run.engine.stats().held == len(run.held)
    for request_id in run.held:
        assert run.engine.release(request_id)
    assert run.engine.pool.num_used == 0


@given(configs, arrivals)
def test_every_request_gets_all_its_tokens(config: EngineConfig, schedule: list[Arrival]) -> None:
    """Chunking, preemption and pulls neither lose nor double a token."""
    run = Run(config, schedule).go()
    for number, arrival in enumerate(schedule):
        request_id = f"r{number}"
        if request_id in run.aborted:
            continue
        room = config.max_model_len - len(arrival.prompt)
        assert len(run.tokens[request_id]) == min(arrival.max_tokens, room)
        assert run.reasons[request_id] == "length"
    generated = sum(len(ids) for ids in run.tokens.values())
    assert run.engine.stats().generated_tokens == generated


@given(configs, arrivals)
def test_hits_never_exceed_an_infinite_cache(config: EngineConfig, schedule: list[Arrival]) -> None:
    """A hit is a whole number of blocks, below the prompt's length, of a prefix someone computed in that namespace."""
    run = Run(config, schedule).go()
    texts = {
        f"r{number}": (arrival.lora, arrival.salt, [*arrival.prompt, *run.tokens.get(f"r{number}", [])])
        for number, arrival in enumerate(schedule)
    }
    for request_id, cached in run.cached.items():
        lora, salt, _ = texts[request_id]
        prompt = schedule[int(request_id[1:])].prompt
        assert cached % BLOCK == 0
        assert cached <= (len(prompt) - 1) // BLOCK * BLOCK
        best = max(
            (
                common_prefix(prompt, other_tokens)
                for other, (other_lora, other_salt, other_tokens) in texts.items()
                if other != request_id and (other_lora, other_salt) == (lora, salt)
            ),
            default=0,
        )
        assert cached <= best
    stats = run.engine.stats()
    assert stats.prefix_hits == sum(run.cached.values())
    assert stats.prefix_hits <= stats.prefix_queries


@given(configs, arrivals)
def test_equal_seeds_give_equal_runs(config: EngineConfig, schedule: list[Arrival]) -> None:
    first, second = Run(config, schedule).go(), Run(config, schedule).go()
    assert first.results == second.results
    other = Run(replace(config, seed=config.seed + 1), schedule).go()
    assert other.tokens == first.tokens
    stored = [event for result in first.results for event in result.events if isinstance(event, BlockStored)]
    if stored:
        elsewhere = [event for result in other.results for event in result.events if isinstance(event, BlockStored)]
        hashes = {it for event in stored for it in event.block_hashes}
        assert not hashes & {it for event in elsewhere for it in event.block_hashes}


@given(configs, arrivals)
def test_answers_do_not_depend_on_the_schedule(config: EngineConfig, schedule: list[Arrival]) -> None:
    """The same request answers the same alone and in a crowd, preempted or not."""
    run = Run(config, schedule).go()
    for number, arrival in enumerate(schedule):
        if f"r{number}" in run.aborted:
            continue
        alone = Run(config, [replace(arrival, abort_after=None)])
        engine = alone.engine
        engine.add_request(replace(Run.request(number, arrival), remote_tokens=0), 0.0)
        ids: list[int] = []
        while not engine.idle():
            ids += [token.token_id for token in engine.step(0.0).tokens]
        assert ids == run.tokens[f"r{number}"]


def common_prefix(left: list[int], right: list[int]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
