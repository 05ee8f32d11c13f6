"""The fleets that are compared, each simulated under the traffic with the planner that serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.advise.server import ServerPlan
from bench.advise.traffic import Traffic
from bench.sim.arms import arm
from bench.sim.fleet import FleetSpec, servers
from bench.sim.report import gap_percentiles, summarise
from bench.sim.transfers import Link
from bench.sim.world import World

KEPT = 0.95
"""A fleet that keeps the objectives of so many requests can be run like that."""
ENOUGH = 0.5
"""One that keeps those of fewer does not carry the traffic."""
_FIFTH = 5


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """`prefill` 0: all servers take whole requests. `chunk_tokens` 0: as configured (`max_num_batched_tokens`)."""

    servers: int
    prefill: int = 0
    chunk_tokens: int = 0

    @property
    def name(self) -> str:
        if self.prefill:
            return f"{self.prefill}P + {self.servers - self.prefill}D"
        return f"{self.servers} aggregated" + (f", chunks of {self.chunk_tokens:,}" if self.chunk_tokens else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one fleet. Latencies are of requests that ended well."""

    fleet: Fleet
    requests: int
    met: float
    """Share of all requests that kept both objectives."""
    goodput_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    itl_p50_ms: float
    itl_p95_ms: float
    itl_p99_ms: float
    tpot_p95_ms: float
    remote: float
    """Share of prompts that a prefill server computed."""
    hits: float
    """Share of prompt tokens found in a cache."""
    pulled_gbps: float
    """Into all decode servers together, on average."""
    preemptions: int
    overloaded: bool
    """Its queue grew for as long as requests came."""

    @property
    def carries(self) -> bool:
        """It can be run like that, if not well."""
        return self.met >= ENOUGH and not self.overloaded


def candidates(n_servers: int, prefill_share: float, most: int = 7) -> list[Fleet]:
    """Splits of `n_servers`: all, or the `most` around that share of prefill servers and the two ends."""
    every = list(range(1, n_servers))
    if len(every) > most:
        middle = min(max(round(prefill_share * n_servers), 1), n_servers - 1)
        nearest = sorted(every, key=lambda k: (abs(k - middle), k))[: most - 2]
        spread = [1, min(n_servers - 1, 2 * middle), max(1, middle // 2), n_servers // 2]
        every = sorted({*nearest, *[k for k in spread if k not in nearest][:2]})
    return [Fleet(n_servers, k) for k in every]


def prefill_share(plan: ServerPlan, traffic: Traffic) -> float:
    """Of the GPU time, by the step times alone: prompts against answers decoded 32 at once."""
    timing, streams = plan.hardware.timing, 32
    n, out = traffic.mean_input_tokens, traffic.mean_output_tokens
    new = (1 - traffic.reuse) * n
    prefill_s = timing.prefill_per_token_s * new + timing.prefill_per_pair_s * new * (n - new / 2)
    decode_s = out * timing.step_s(streams, streams * (n + out / 2), 0, 0) / streams
    return prefill_s / (prefill_s + decode_s)


def simulate(
    fleet: Fleet,
    plan: ServerPlan,
    traffic: Traffic,
    way: Link,
    objectives: Objectives,
    *,
    block_size: int,
    seed: int,
    faster: float = 1.0,
) -> Outcome:
    """One run. `faster`: with so many times the traffic's rate."""
    both = 0 if fleet.prefill else fleet.servers
    decode = fleet.servers - fleet.prefill if fleet.prefill else 0
    spec = FleetSpec(
        servers(
            plan.hardware, both=both, prefill=fleet.prefill, decode=decode, block_size=block_size,
            chunk_tokens=fleet.chunk_tokens,
        ),
        link=way,
    )  # fmt: skip
    load = traffic.workload(seed, objectives.ttft_s, objectives.tpot_s, faster)
    run = World(spec, arm("warmroute"), load, seed=seed).run()
    told = summarise(run)
    itl_p95_s = gap_percentiles([record for record in run.records if record.ok], [0.95])[0]
    return Outcome(
        fleet=fleet,
        requests=told["requests"],
        met=told["slo_share"],
        goodput_per_s=told["goodput_per_s"],
        ttft_p50_ms=told["ttft_p50_ms"],
        ttft_p95_ms=told["ttft_p95_ms"],
        itl_p50_ms=told["itl_p50_ms"],
        itl_p95_ms=1000 * itl_p95_s,
        itl_p99_ms=told["itl_p99_ms"],
        tpot_p95_ms=told["tpot_p95_ms"],
        remote=told["remote_share"],
        hits=told["hit_share"],
        pulled_gbps=told["transferred_bytes"] * 8e-9 / (run.duration_s or 1.0),
        preemptions=told["preemptions"],
        overloaded=_grows([record.ttft_s for record in run.records if record.first_s is not None], objectives.ttft_s),
    )


def _grows(ttfts_s: Sequence[float], objective_s: float) -> bool:
    """Of requests in the order of their arrival: on average the last fifth waits past the objective, and twice as long
    as the second fifth did.
    """
    fifth = max(1, len(ttfts_s) // _FIFTH)
    early, late = (fmean(part or [0.0]) for part in (ttfts_s[fifth : 2 * fifth], ttfts_s[-fifth:]))
    return late > objective_s and late > 2 * early
