"""Everything that is asked and everything that is answered; `advise` makes the one of the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.advise.capacity import Capacity
from bench.advise.errors import InputError
from bench.advise.network import BlockSize, best, block_sizes, link
from bench.advise.server import ServerPlan
from bench.advise.splits import KEPT, Fleet, Objectives, Outcome, candidates, prefill_share, simulate
from bench.advise.traffic import Traffic
from bench.advise.verdict import Verdict, judge
from bench.sim.transfers import Link

SMALL_CHUNKS: Final = 2048
"""The cheaper way to shorter stalls, so it is compared too: a third of the stall for 6 % of TTFT, as measured."""
FASTER: Final = (2.0, 3.0, 4.0)
"""Where whole servers keep the objectives, more traffic shows whether a split would ever pay."""
MOST_SPAN_S: Final = 86_400.0
"""Of what is simulated. Engines are asked each second, whether anything happens or not."""
_BUDGET_S: Final = 30.0
_ROUNDS: Final = 2.5
"""Times every fleet is run, as a rule: at the rate itself, and faster."""
_LEAST_REQUESTS: Final = 400
Heard = Callable[[int, int, str], None]
"""Told before each run: its number from 1, how many there are at least, what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`traffic` as recorded. `gbps` None with `nvlink`; `requests` None: as many as take about half a minute.
    `block_size` None: the one that is recommended.
    """

    plan: ServerPlan
    traffic: Traffic
    servers: int
    objectives: Objectives
    gbps: float | None
    context_tokens: int
    requests: int | None = None
    block_size: int | None = None
    seed: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """`growth`: (times the rate, what would be said then), up to where one kind of fleet falls behind."""

    question: Question
    simulated: Traffic
    outcomes: tuple[Outcome, ...]
    verdict: Verdict
    growth: tuple[tuple[float, Verdict], ...]
    sizes: tuple[BlockSize, ...]
    block_size: int
    capacity: Capacity
    way: Link
    assumptions: tuple[str, ...] = field(default=())

    @property
    def recommended(self) -> BlockSize:
        return best(self.sizes)


def advise(question: Question, heard: Heard = lambda number, of, what: None) -> Advice:
    """Some dozen simulated runs, seconds each. Raises InputError."""
    plan, way = question.plan, link(question.gbps)
    usual_tokens = question.traffic.mean_input_tokens
    sizes = block_sizes(plan.rank_layer_bytes_per_token, plan.kv_layers, usual_tokens, plan.tensor_parallel, way)
    block_size = question.block_size or best(sizes).tokens
    traffic = question.traffic.fitting(plan.hardware.kv_tokens // block_size * block_size)
    fleets = [Fleet(question.servers)]
    if plan.hardware.chunk_tokens > SMALL_CHUNKS:
        fleets.append(Fleet(question.servers, chunk_tokens=SMALL_CHUNKS))
    fleets += candidates(question.servers, prefill_share(plan, traffic))
    part = traffic.part(question.requests or affordable(traffic, round(_ROUNDS * len(fleets)), block_size))
    if part.span_s > MOST_SPAN_S:
        raise InputError(
            f"{traffic.source}: {len(part.rows):,} requests over {part.span_s / 86_400:.3g} days are too few to "
            "simulate; their times should be milliseconds. Give --rate, or less of the trace"
        )
    seen = 0

    def run(fleet: Fleet, faster: float = 1.0) -> Outcome:
        nonlocal seen
        seen += 1
        heard(seen, max(seen, len(fleets)), fleet.name + (f" at {faster:g} times the rate" if faster != 1.0 else ""))
        return simulate(
            fleet, plan, part, way, question.objectives, block_size=block_size, seed=question.seed, faster=faster
        )  # fmt: skip

    outcomes = tuple(run(fleet) for fleet in fleets)
    verdict = judge(outcomes)
    return Advice(
        question=question,
        simulated=part,
        outcomes=outcomes,
        verdict=verdict,
        growth=tuple(_growth(outcomes, verdict, run)),
        sizes=tuple(sizes),
        block_size=block_size,
        capacity=Capacity(plan.kv_tokens(question.context_tokens), question.context_tokens),
        way=way,
        assumptions=(*_assumptions(question, plan), *part.notes),
    )


def affordable(traffic: Traffic, runs: int, block_size: int) -> int:
    """Requests that so many runs can have in the time there is (fitted to runs on one core of a small server)."""
    blocks = traffic.mean_input_tokens / block_size
    each_s = 0.5e-3 + 2e-6 * traffic.mean_output_tokens + 10e-6 * blocks
    return max(_LEAST_REQUESTS, int(_BUDGET_S / runs / each_s))


def _growth(
    outcomes: Sequence[Outcome], verdict: Verdict, run: Callable[[Fleet, float], Outcome]
) -> Iterator[tuple[float, Verdict]]:
    for faster in FASTER:
        if verdict.pays or verdict.split is None or verdict.whole.met < KEPT:
            return
        outcomes = [run(it.fleet, faster) for it in outcomes if it.met >= KEPT or it.fleet == verdict.split.fleet]
        verdict = judge(outcomes)
        yield faster, verdict


def _assumptions(question: Question, plan: ServerPlan) -> list[str]:
    found = [plan.times.told(), f"KV capacity of a server: {plan.hardware.kv_tokens:,} tokens, {plan.kv_source}"]
    found.append(
        "network: KV moves over NVLink inside one host, as measured between two H200"
        if question.gbps is None
        else f"network: {question.gbps:g} Gb/s for each server, 80 % of it usable, 4.35 us for each descriptor"
    )
    found += [*question.notes, *plan.model.notes]
    found.append("every fleet is routed by warmroute's planner (pd.policy cost); caches are empty at the start")
    found.append("simulated, not measured: compare fleets with each other rather than with a stopwatch")
    return found
