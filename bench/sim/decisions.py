"""Where the planner would compute a prompt, by what is to be computed and what the decode worker is doing."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from bench.sim.fleet import FleetSpec
from bench.sim.view import MODEL
from indexer import PrefixIndex
from scorer.cost import CostModel
from scorer.fleet import Fleet
from scorer.planner import Planner
from scorer.types import (
    ChangeKind,
    EngineStats,
    Outcome,
    OutcomeKind,
    PdReason,
    Plan,
    RequestFacts,
    Role,
    TokenSource,
    WorkerChange,
)

PREFILL, DECODE = "p", "d"
_FIRST_TOKEN = Outcome(kind=OutcomeKind.FIRST_TOKEN)


@dataclass(frozen=True, slots=True)
class DecisionMap:
    """Rows are loads (`streams`: answers running on the decode worker), columns prompts (`uncached_tokens`)."""

    uncached_tokens: Sequence[int]
    streams: Sequence[int]
    remote: list[list[bool]]
    """What the planner would do."""
    local_s: list[list[float]]
    """What it predicts that costs, all in all."""
    remote_s: list[list[float]]


def decision_map(
    spec: FleetSpec,
    uncached_tokens: Sequence[int],
    streams: Sequence[int],
    *,
    stream_tokens: int = 2000,
    waiting_tokens: int = 0,
    slo_ttft_s: float | None = None,
    slo_tpot_s: float | None = None,
) -> DecisionMap:
    """The planner itself, asked about one prefill worker and one decode worker of `spec`'s hardware.

    `waiting_tokens` of another prompt are to be computed first by the prefill worker. The answers running on the decode
    worker have `stream_tokens` of KV each, and the same objectives as the prompts. `streams` ascend.
    """
    planner = _planner(spec)
    objectives = {"slo_ttft_s": slo_ttft_s, "slo_tpot_s": slo_tpot_s}
    if waiting_tokens:
        facts = msgspec.structs.replace(_facts("waiting", waiting_tokens, objectives), prefill_hint=(PREFILL,))
        planner.plan(facts, None, 0.0, random.Random(0))
    out = DecisionMap(uncached_tokens, streams, [], [], [])
    running = 0
    for wanted in streams:
        for number in range(running, wanted):
            facts = _facts(f"stream {number}", stream_tokens, objectives, keep_local=PdReason.PLAN)
            planner.plan(facts, None, 0.0, random.Random(0))
            planner.observe(facts.request_id, _FIRST_TOKEN, 0.0)
        running = max(running, wanted)
        plans = [planner.explain(_facts("asked", n, objectives), None, 0.0, random.Random(0)) for n in uncached_tokens]
        out.remote.append([plan.remote for plan in plans])
        out.local_s.append([_cheapest_s(plan, remote=False) for plan in plans])
        out.remote_s.append([_cheapest_s(plan, remote=True) for plan in plans])
    return out


def _cheapest_s(plan: Plan, *, remote: bool) -> float:
    """Infinite where there is no such way."""
    costs_s = [each.price.total_s for each in plan.considered if (each.prefill is not None) is remote]
    return min(costs_s, default=math.inf)


def _facts(
    request_id: str, n_tokens: int, objectives: dict[str, float | None], keep_local: PdReason | None = None
) -> RequestFacts:
    return RequestFacts(
        request_id=request_id,
        model=MODEL,
        prompt_tokens=n_tokens,
        token_source=TokenSource.GIVEN,
        streaming=True,
        keep_local=keep_local,
        slo_ttft_s=objectives["slo_ttft_s"],
        slo_tpot_s=objectives["slo_tpot_s"],
    )


def _planner(spec: FleetSpec) -> Planner:
    server = spec.servers[0]
    fleet = Fleet()
    planner = Planner(fleet, PrefixIndex(), pd_policy="cost", cost=CostModel(spec.priors()))
    for name, role in ((PREFILL, Role.PREFILL), (DECODE, Role.DECODE)):
        fleet.apply(WorkerChange(kind=ChangeKind.ADDED, worker=name, role=role))
        fleet.set_capabilities(name, models=[MODEL])
        fleet.set_stats(
            name, EngineStats(scraped_at_s=0.0, block_size=server.block_size, kv_blocks=server.kv_blocks, kv_usage=0.0)
        )
        planner.configure_worker(name)
    return planner
