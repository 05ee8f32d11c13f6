"""The cells of the comparison: a fleet under a load, and who is compared there."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec

from bench.sim.arms import arm
from bench.sim.fleet import FleetSpec, Restart, Slow, servers
from bench.sim.load import Workload
from bench.sim.peers import PeerWorld
from bench.sim.transfers import NVLINK, RDMA_40GB, Link
from bench.sim.workloads.generated import CHAT, CODE, Chat, Mixed, Sessions
from bench.sim.workloads.shared import Batch, Hotspot, Ladder
from bench.sim.workloads.traces import Replay, Row, like_azure, like_mooncake, read_azure, read_mooncake
from bench.sim.world import Run
from scorer.types import Role

POOL: Final = (
    "warmroute", "clairvoyant", "least-load", "lmetric", "llm-d-322", "dynamo-2", "conductor", "sticky",
)  # fmt: skip
"""Arms for a fleet where every server takes whole requests: ours, the reference, and the strongest of the others."""
POOL_ALL: Final = (
    *POOL, "round-robin", "random", "longest-prefix", "llm-d-111", "dynamo", "kv-aware", "clairvoyant-local",
)  # fmt: skip
SPLIT: Final = (
    "warmroute", "aggregated", "local", "threshold-1024", "isl-ratio-4096-0.6", "ppd", "edpp", "least-load",
)  # fmt: skip
"""Arms for a fleet with prefill workers."""
SPLIT_ALL: Final = (
    *SPLIT, "clairvoyant", "always-remote", "threshold-16", "isl-2048-0.7", "dynamo", "dynamo-2", "conductor",
    "round-robin", "random", "longest-prefix", "lmetric", "kv-aware", "llm-d-111", "llm-d-322", "sticky",
)  # fmt: skip
REFERENCES: Final = ("clairvoyant", "clairvoyant-local")
"""No router could do what they do; they are shown and not among those to be beaten."""

MIXED_RATES: Final = (3, 6, 9, 11)
CHAT_RATES: Final = (1, 2, 3, 4)
CODE_RATES: Final = (0.1, 0.15, 0.2, 0.25)


@dataclass(frozen=True, slots=True)
class Cell:
    """`load` makes the workload of a seed. `arms` are compared by default, `all_arms` in full."""

    name: str
    spec: FleetSpec
    load: Callable[[int], Workload]
    arms: Sequence[str] = POOL
    all_arms: Sequence[str] = POOL_ALL
    seeds: int = 1
    """How many of them by default: one, but where a target is so near its goal that one does not decide."""
    all_seeds: int = 3
    note: str = ""

    def run(self, name: str, seed: int) -> Run:
        """One arm, one seed. `aggregated` has the same servers, all of which take whole requests."""
        spec = aggregated(self.spec) if name == "aggregated" else self.spec
        return PeerWorld(spec, arm(name), self.load(seed), seed=seed).run()


def aggregated(spec: FleetSpec) -> FleetSpec:
    return replace(spec, servers=tuple(replace(server, role=Role.BOTH) for server in spec.servers))


@dataclass(frozen=True, slots=True)
class Traces:
    """Where recorded traffic is; what has no file is generated in its likeness."""

    mooncake: Path | None = None
    azure: Path | None = None
    _rows: dict[tuple[str, int], list[Row]] = field(default_factory=dict)

    def conversation(self, seed: int, n: int) -> list[Row]:
        """The recording has one course for all seeds."""
        return self._get("mooncake", seed, n)

    def lengths(self, seed: int, n: int) -> list[Row]:
        return self._get("azure", seed, n)

    def _get(self, kind: str, seed: int, n: int) -> list[Row]:
        path = self.mooncake if kind == "mooncake" else self.azure
        key = kind, seed if path is None else 0
        if key not in self._rows:
            if kind == "mooncake":
                self._rows[key] = like_mooncake(seed, n) if path is None else read_mooncake(path)
            else:
                self._rows[key] = like_azure(seed, n) if path is None else read_azure(path)
        return self._rows[key]


_MOONCAKE_LINK: Final = Link(base_s=0.005, bytes_per_s=87e9, per_descriptor_s=0.0)
"""What its transfer engine reaches over 4 x 200 Gb/s."""


def conversation(traces: Traces, speed: float) -> Cell:
    """Mooncake's conversation trace over 8 engines of 8 A800 that compute prompts (1 token is generated)."""
    return Cell(
        f"mooncake x{speed:g}",
        FleetSpec(servers("a800x8-llama3-70b", both=8, block_size=512), link=_MOONCAKE_LINK),
        lambda seed: Replay(traces.conversation(seed, 12_031), speed=speed, prefill_only=True),
    )


def ladder(event_delay_s: float) -> Cell:
    """llm-d's 73 % benchmark: 8 engines of 2 H100 with Qwen3-32B, 3 to 60 requests a second in stages."""
    delayed = f", events {event_delay_s:g} s late" if event_delay_s > 0.1 else ""
    return Cell(
        f"llm-d ladder{delayed}",
        FleetSpec(servers("h100x2-qwen3-32b", both=8), event_delay_s=event_delay_s),
        Ladder,
        ("warmroute", "random") if delayed else ("random", *POOL),
    )


def batch(shuffled: bool) -> Cell:
    """SGLang's generated shared prefixes: 64 x 16 prompts at once over 8 A100 with Llama-3.1-8B, on engines that share
    a block once it is computed, as SGLang's did in the published run (vLLM's share it as soon as it is scheduled).
    """
    return Cell(
        f"sglang batch, {'shuffled' if shuffled else 'ordered'}",
        FleetSpec(servers("a100-llama3-8b", both=8, kv_tokens=250_000, late_sharing=True)),
        lambda seed: Batch(seed, shuffled=shuffled),
        ("round-robin", *POOL),
    )


def mixed(rate: float) -> Cell:
    """The load measured on two H200: 40 % long prompts, SLO 1 s and 20 ms, one prefill and one decode server."""
    return Cell(
        f"mixed {rate:g}/s",
        FleetSpec(servers("h200-7b", prefill=1, decode=1), link=NVLINK, pd_policy=PD_POLICY),
        lambda seed: Mixed(seed, rate=rate, duration_s=60.0),
        SPLIT,
        SPLIT_ALL,
        1,
        30,
    )


_NEAR_ITS_GOAL: Final = {("chat", 4): 3, ("code", 0.2): 3, ("code", 0.25): 6}
"""Seeds by default. Here the attainment of one is up to a tenth off that of six, and the goal a twentieth."""


def sessions(name: str, chat: Chat, rate: float) -> Cell:
    """1P+3D, Llama-3.1-70B on 4 H100 each, 40 GB/s between them."""
    return Cell(
        f"{name} {rate:g}/s",
        FleetSpec(servers("h100x4-llama3-70b", prefill=1, decode=3), link=RDMA_40GB, pd_policy=PD_POLICY),
        lambda seed: Sessions(seed, chat, rate=rate, duration_s=240.0),
        SPLIT,
        SPLIT_ALL,
        _NEAR_ITS_GOAL.get((name, rate), 1),
        6,
    )


PD_POLICY: Final = "cost"
"""What a planner with prefill workers is told by default."""

_CONTEXTS: Final = (256, 2048)
_LATER_TURNS: Final = (
    (16, 32), (32, 256), (32, 512), (64, 1024), (64, 64), (128, 128), (256, 64), (512, 64), (1024, 32),
)  # fmt: skip
"""PPD's second turns: (tokens asked, tokens answered)."""


def _ppd_chat(rng: random.Random) -> Chat:
    context = rng.choice(_CONTEXTS)
    asked, answered = rng.choice(_LATER_TURNS)
    first = max(context // 2, context - answered)
    return Chat(first_tokens=first, turn_tokens=asked, turns=2, output_tokens=answered, think_s=2.0)


def appends(*, whole_kv: bool = False) -> Cell:
    """PPD's second turns on 2P+2D, Llama-3.1-8B on one H100 each; with NIXL, or as in its publication with a connector
    that moves the whole prompt's KV each turn.
    """
    spec = FleetSpec(servers("h100-llama3-8b", prefill=2, decode=2), link=RDMA_40GB, pd_policy=PD_POLICY)
    return Cell(
        "append prefill, whole KV moved" if whole_kv else "append prefill",
        replace(spec, whole_kv=whole_kv),
        lambda seed: Sessions(seed, _ppd_chat, rate=4.0, duration_s=240.0),
        ("warmroute", "clairvoyant", "local", "always-remote", "ppd", "edpp"),
        SPLIT_ALL,
    )


def appends_alone(*, whole_kv: bool = False) -> Cell:
    """The same sessions, so rare that each has the fleet to itself, and local: no second turn can begin sooner."""
    rate = 0.05
    cell = appends(whole_kv=whole_kv)
    return replace(
        cell,
        name=f"{cell.name}, alone",
        load=lambda seed: Sessions(seed, _ppd_chat, rate=rate, duration_s=240.0 / rate),
        arms=("local",),
        all_arms=("local",),
        all_seeds=1,
    )


AZURE_SLO: Final = (0.5, 0.020)
"""Balanced: splitting alone misses the first, not splitting the second."""
AZURE_SECONDS: Final = 40.0


def azure(traces: Traces, prefill: int, decode: int, rate: float) -> Cell:
    """Azure's lengths, evenly thinned or pressed together to `rate` a second, on four H200."""

    def load(seed: int) -> Workload:
        rows = traces.lengths(seed, 19_366)
        n = min(len(rows), round(rate * AZURE_SECONDS))
        begin = random.Random(f"azure {seed}").randrange(len(rows) - n + 1)
        rng = random.Random(f"azure arrivals {seed}")
        at_s, picked = 0.0, []
        for row in rows[begin : begin + n]:
            at_s += rng.expovariate(rate)
            picked.append(row._replace(at_s=at_s))
        return Replay(picked, slo_ttft_s=AZURE_SLO[0], slo_tpot_s=AZURE_SLO[1])

    return Cell(
        f"azure {prefill}P{decode}D {rate:g}/s",
        FleetSpec(servers("h200-7b", prefill=prefill, decode=decode), link=NVLINK, pd_policy=PD_POLICY),
        load,
    )


def azure_ceiling(traces: Traces, prefill: int, decode: int) -> tuple[float, float]:
    """(requests a second of so many engines that all compute and decode without a pause, of a split of as many): what
    no router can exceed for long. Prompts fill their steps, and each step decodes as many answers as an engine runs.
    """
    rows, kind = traces.lengths(0, 19_366), servers("h200-7b", both=1)[0].hardware
    timing, n = kind.timing, len(rows)
    full_s = timing.step_base_s / kind.max_num_seqs + timing.step_per_seq_s
    prefill_s = sum(
        timing.prefill_per_token_s * row.input_tokens + timing.prefill_per_pair_s * row.input_tokens**2 / 2
        for row in rows
    )
    decode_s = sum(
        row.output_tokens * (full_s + timing.step_per_kv_token_s * (row.input_tokens + row.output_tokens / 2))
        for row in rows
    )
    whole = (prefill + decode) * n / (prefill_s + decode_s)
    return whole, min(prefill * n / prefill_s, decode * n / decode_s)


HOT_RATE: Final = 56.0
HOT_SECONDS: Final = 150.0
FAULT_S: Final = 60.0


def hot(kind: str) -> Cell:
    """8 engines, 64 shared prefixes: evenly asked for (`balanced`), or one of them half of the time (`hotspot`), its
    place taken by another each minute (`shift`), an engine restarted (`restart`), 5 % of the events lost (`loss`).
    """
    spec = FleetSpec(servers("h100-llama3-8b", both=8, kv_tokens=120_000))
    if kind == "restart":
        spec = replace(spec, faults=(Restart(FAULT_S, "b0"),))
    elif kind == "loss":
        spec = replace(spec, event_loss=0.05)
    share = 0.0 if kind == "balanced" else 0.5
    shift_s = 60.0 if kind == "shift" else None
    return Cell(
        kind,
        spec,
        lambda seed: Hotspot(seed, rate=HOT_RATE, duration_s=HOT_SECONDS, hot_share=share, shift_s=shift_s),
    )


SETTLED_REQUESTS: Final = 200
"""After so many requests per worker the planner must have learned what is off."""
_ROBUST_RATE: Final = 12.0


def robust(kind: str) -> Cell:
    """Four H200 under the mixed load at 12/s, cost priors or servers not as they are thought to be. `told`: the same
    servers with everything known.
    """
    kind, _, told = kind.partition(" ")
    spec = FleetSpec(servers("h200-7b", prefill=1, decode=3), link=NVLINK, pd_policy=PD_POLICY)
    if kind in ("slow", "mixed-gpus"):
        halved = ("d0",) if kind == "slow" else ("d0", "d1")
        alike = [replace(s, speed=0.5, weight=0.5 if told else 1.0) if s.name in halved else s for s in spec.servers]
        spec = replace(spec, servers=tuple(alike))
    if kind == "slowed":
        spec = replace(spec, faults=(Slow(FAULT_S, "d0", 0.5),))
    factors = {"priors/3": 1 / 3, "priors*3": 3.0}
    spec = replace(spec, prior_factor=factors.get(kind, 1.0))
    if kind.startswith("broken"):
        rng = random.Random(kind)
        c = spec.priors()
        off = {f: getattr(c, f) * 10 ** rng.uniform(-1, 1) for f in c.__struct_fields__ if f.endswith("_s")}
        spec = replace(spec, constants=msgspec.structs.replace(c, **off))
    return Cell(
        f"robust {kind} {told}".rstrip(),
        spec,
        lambda seed: Mixed(seed, rate=_ROBUST_RATE, duration_s=180.0),
        ("warmroute", "least-load"),
        SPLIT_ALL,
    )


def all_cells(traces: Traces) -> list[Cell]:
    """Every cell whose arms are worth a table."""
    return [
        conversation(traces, 1.0),
        conversation(traces, 1.5),
        ladder(0.01),
        ladder(1.0),
        batch(False),
        batch(True),
        *(sessions("chat", CHAT, rate) for rate in CHAT_RATES),
        *(sessions("code", CODE, rate) for rate in CODE_RATES),
        *(mixed(rate) for rate in MIXED_RATES),
        appends(),
        appends(whole_kv=True),
        *(hot(kind) for kind in ("balanced", "hotspot", "shift", "restart", "loss")),
    ]
