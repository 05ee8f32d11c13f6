"""The simulator against a real engine: the same requests, with the very same token ids, through both.

What an engine holds is decided by rules (blocks, copies, the order of eviction), so cached tokens must be equal, each
one. How long it takes is not: of classes of requests that the simulator puts far enough apart, the medians must
come in the same order. The timing below was fitted by eye to one run of the tiny model on one core, and nothing hangs
on it but which classes are that far apart.
"""

import random
import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from engines import BLOCK_TOKENS, VllmServer
from gateway_process import report
from pd_fleet import NUM_BLOCKS, PdFleet

from bench.engine.timing import Timing
from bench.sim.fleet import FleetSpec, Server
from bench.sim.hardware import Hardware
from bench.sim.load import Ask, Stage
from bench.sim.record import Record
from bench.sim.router import Arm, Placement, SimRequest, View
from bench.sim.world import World
from scorer.types import Role

SEED = 31
# Ordinary ids: the first ones are special tokens, the last one is 2047.
TOKEN_IDS = range(300, 2000)
CHUNK_TOKENS = 2048
CPU = Hardware(
    Timing(3e-4, 3e-4, 1e-6, 13e-6, 6.4e-9, front_base_s=8.5e-3, front_per_token_s=3e-6),
    layers=2,
    kv_bytes_per_token=1024,
    kv_tokens=0,
    chunk_tokens=CHUNK_TOKENS,
    max_num_seqs=16,
)
ROUNDS = 21
APART = 1.7


@dataclass(frozen=True)
class Sent:
    """One request; those of one `turn` are sent together, when all before are over."""

    tokens: tuple[int, ...]
    output_tokens: int = 1
    name: str = ""


Turn = Sequence[Sent]


class Trace:
    """The turns as a workload of the simulator."""

    def __init__(self, turns: Iterable[Turn]) -> None:
        self._turns = iter(list(turns))
        self._open = 0

    def start(self, stage: Stage) -> None:
        for number, sent in enumerate(next(self._turns, ())):
            self._open += 1
            tokens = array("I", sent.tokens).tobytes()
            ask = Ask(
                lambda tokens=tokens: tokens, sent.output_tokens, sent.output_tokens, group=sent.name, seed=number
            )
            stage.submit(stage.now_s + 1.0, ask)

    def ended(self, ask: Ask, record: Record, stage: Stage) -> None:
        self._open -= 1
        if not self._open:
            self.start(stage)


class Only(Arm):
    """Everything on one server, or on one pair."""

    name = "only"

    def __init__(self, decode: str, prefill: str | None = None) -> None:
        self._placement = Placement(decode, prefill)

    def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
        return self._placement


def server(name: str, num_blocks: int, role: Role = Role.BOTH) -> Server:
    """One block of an engine's is its own."""
    return Server(name, CPU, role, block_size=BLOCK_TOKENS, kv_tokens=(num_blocks - 1) * BLOCK_TOKENS)


def simulated(turns: Iterable[Turn], num_blocks: int) -> list[Record]:
    """In the order in which they were sent."""
    return World(FleetSpec((server("e", num_blocks),)), lambda setup: Only("e"), Trace(turns)).run().records


def emptied(engine: VllmServer) -> VllmServer:
    assert engine.post("/reset_prefix_cache").status == 200
    return engine


def body(sent: Sent) -> dict[str, Any]:
    fields = {"model": "tiny", "max_tokens": sent.output_tokens, "temperature": 0, "ignore_eos": True}
    return {**fields, "prompt": sent.tokens}


def ask(engine: VllmServer, sent: Sent) -> tuple[int, float]:
    """(cached tokens, seconds)"""
    began_s = time.perf_counter()
    answer = engine.post("/v1/completions", body(sent))
    took_s = time.perf_counter() - began_s
    return cached_of(answer), took_s


def cached_of(answer: Any) -> int:
    assert answer.status == 200, answer.body
    cached: int = answer.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def random_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(TOKEN_IDS, k=count))


def shared_prefixes(rng: random.Random, count: int, outputs: Sequence[int]) -> list[Sent]:
    """Prefixes of several lengths, cut anywhere and at block boundaries, with new ends or none, and repetitions."""
    blocks = (2, 5, 9, 14, 20, 30)
    prefixes = [random_tokens(rng, n * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS)) for n in blocks]
    past: list[Sent] = []
    for _ in range(count):
        prefix = rng.choice(prefixes)
        cut = rng.choice((len(prefix), rng.randint(1, len(prefix)), len(prefix) // BLOCK_TOKENS * BLOCK_TOKENS))
        tokens = prefix[:cut] + random_tokens(rng, rng.choice((0, 1, BLOCK_TOKENS, rng.randint(2, 300))))
        if past and rng.random() < 0.2:
            tokens = rng.choice(past).tokens
        past.append(Sent(tokens, rng.choice(outputs)))
    return past


def assert_all_equal(turns: Sequence[Turn], engine: Sequence[int], simulation: Sequence[int]) -> None:
    sent = [each for turn in turns for each in turn]
    wrong = [
        f"request {number}: {len(each.tokens)} tokens: engine {real}, simulator {told}"
        for number, (each, real, told) in enumerate(zip(sent, engine, simulation, strict=True))
        if real != told
    ]
    assert not wrong, "\n".join(wrong)


def test_every_request_hits_what_it_hits_in_the_simulator(engine: VllmServer) -> None:
    turns = [[sent] for sent in shared_prefixes(random.Random(SEED), 100, outputs=(1, 1, 8, BLOCK_TOKENS, 70))]
    emptied(engine)
    real = [ask(engine, sent)[0] for (sent,) in turns]
    told = [record.cached_tokens for record in simulated(turns, engine.num_blocks)]
    assert_all_equal(turns, real, told)
    # The run has to have met what it is about.
    assert sum(cached > 0 for cached in real) > 50
    roomy = [record.cached_tokens for record in simulated(turns, 100 * engine.num_blocks)]
    evicted = sum(less < more for less, more in zip(told, roomy, strict=True))
    assert evicted > 10
    report(f"simulator: {len(turns)} of {len(turns)} requests hit as on the engine, {evicted} after evictions")


def test_siblings_sent_together_hit_as_in_the_simulator(engine: VllmServer) -> None:
    """Which of them comes first is chance; the others find all that it brings."""
    rng = random.Random(SEED + 1)
    turns = []
    for blocks in (3, 10, 20):
        prefix = random_tokens(rng, blocks * BLOCK_TOKENS)
        turns.append([Sent(prefix + random_tokens(rng, 20), 4) for _ in range(3)])
    emptied(engine)
    with ThreadPoolExecutor(3) as threads:
        real = [sorted(cached for cached, _ in threads.map(lambda it: ask(engine, it), turn)) for turn in turns]
    told = [record.cached_tokens for record in simulated(turns, engine.num_blocks)]
    assert real == [sorted(told[3 * i : 3 * i + 3]) for i in range(len(turns))]


def test_prompts_computed_elsewhere_hit_as_in_the_simulator(fleet: PdFleet) -> None:
    """On both engines: what the prefill engine finds in its cache, and what the decode engine need not pull."""
    prefill, decode = fleet.prefill[0], fleet.decode[0]
    turns = [[sent] for sent in shared_prefixes(random.Random(SEED + 2), 30, outputs=(1, 8))]
    fleet.wait_until_nothing_is_held()
    emptied(prefill)
    emptied(decode)
    real: list[tuple[int, int]] = []
    for (sent,) in turns:
        hits = decode.metric("vllm:prefix_cache_hits_total")
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        first = prefill.post("/v1/completions", {**body(sent), "max_tokens": 1, "kv_transfer_params": params})
        assert first.status == 200, first.body
        second = decode.post("/v1/completions", {**body(sent), "kv_transfer_params": first.body["kv_transfer_params"]})
        assert second.status == 200, second.body
        fleet.wait_until_nothing_is_held()
        real.append((cached_of(first), round(decode.metric("vllm:prefix_cache_hits_total") - hits)))
    spec = FleetSpec((server("p", NUM_BLOCKS, Role.PREFILL), server("d", NUM_BLOCKS, Role.DECODE)))
    records = World(spec, lambda setup: Only("d", "p"), Trace(turns)).run().records
    assert_all_equal(turns, [it[0] for it in real], [record.prefill_cached_tokens for record in records])
    assert_all_equal(turns, [it[1] for it in real], [record.cached_tokens for record in records])


def timed_turns(rng: random.Random) -> list[Turn]:
    """Each class once, in some order: prompts of several lengths that are new, and some of which part is held."""
    long, half = random_tokens(rng, 1600), random_tokens(rng, 800)
    groups = [[Sent(random_tokens(rng, n), name=f"{n} new")] for n in (32, 200, 400, 800)]
    groups.append([Sent(long, name="1600 new"), Sent(long, name="1600 held")])
    groups.append([Sent(half), Sent(half + random_tokens(rng, 800), name="800 held, 800 new")])
    rng.shuffle(groups)
    return [[sent] for group in groups for sent in group]


def medians(names: Iterable[str], times_s: Iterable[float]) -> dict[str, float]:
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, time_s in zip(names, times_s, strict=True):
        by_name[name].append(time_s)
    return {name: statistics.median(found) for name, found in by_name.items() if name}


def test_times_to_first_token_come_in_the_simulators_order(engine: VllmServer) -> None:
    rng = random.Random(SEED + 3)
    turns = [turn for _ in range(ROUNDS) for turn in timed_turns(rng)]
    emptied(engine)
    asked = [ask(engine, sent) for (sent,) in turns]
    records = simulated(turns, engine.num_blocks)
    assert_all_equal(turns, [cached for cached, _ in asked], [record.cached_tokens for record in records])
    names = [sent.name for (sent,) in turns]
    # Answers of one token: they are over with it.
    real, told = medians(names, [took_s for _, took_s in asked]), medians(names, [record.ttft_s for record in records])
    pairs = [(a, b) for a in told for b in told if told[a] >= APART * told[b]]
    assert len(pairs) > 10
    wrong = [
        f"{a} is to take longer than {b}: engine {1e3 * real[a]:.1f} and {1e3 * real[b]:.1f} ms, "
        f"simulator {1e3 * told[a]:.1f} and {1e3 * told[b]:.1f} ms"
        for a, b in pairs
        if real[a] <= real[b]
    ]
    assert not wrong, "\n".join(wrong)
    figures = (f"{name} {1e3 * real[name]:.0f} ({1e3 * told[name]:.0f})" for name in sorted(told, key=told.__getitem__))
    report(f"simulator: median ms to the first token, engine (simulator): {', '.join(figures)}")
