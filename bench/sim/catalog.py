"""The workloads that can be asked for by name, each with the fleet it was published or measured with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench.sim.fleet import FleetSpec, Restart, servers
from bench.sim.load import Workload
from bench.sim.transfers import RDMA_40GB
from bench.sim.workloads.generated import CHAT, CODE, Mixed, Sessions
from bench.sim.workloads.shared import LADDER, Batch, Hotspot, Ladder
from bench.sim.workloads.traces import Replay, Row, like_azure, like_mooncake, read_azure, read_mooncake
from scorer.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a named workload can be varied by. None: its own default."""

    seed: int = 0
    rate: float | None = None
    duration_s: float | None = None
    requests: int | None = None
    speed: float = 1.0
    trace: Path | None = None
    both: int | None = None
    prefill: int | None = None
    decode: int | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """A fleet and its load. The SLOs are for requests that bring none."""

    spec: FleetSpec
    workload: Workload
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None


def _rows(
    options: Options, read: Callable[[Path, int | None], list[Row]], like: Callable[[int, int], list[Row]], n: int
) -> list[Row]:
    if options.trace is not None:
        return read(options.trace, options.requests)
    return like(options.seed, options.requests or n)


def mooncake(options: Options) -> Cell:
    """Mooncake's conversation trace on 8 nodes that only compute prompts (8 x A800, 70B, 3M tokens of cache)."""
    rows = _rows(options, read_mooncake, like_mooncake, 12_000)
    fleet = servers("a800x8-llama3-70b", both=options.both or 8, block_size=512)
    return Cell(FleetSpec(fleet), Replay(rows, speed=options.speed, prefill_only=True))


def mooncake_full(options: Options) -> Cell:
    """The same with answers: 8 nodes that compute prompts and decode."""
    rows = _rows(options, read_mooncake, like_mooncake, 12_000)
    fleet = servers("a800x8-llama3-70b", both=options.both or 8, block_size=512)
    return Cell(FleetSpec(fleet), Replay(rows, speed=options.speed), 30.0, 0.1)


def azure(options: Options) -> Cell:
    """Azure's conversation lengths on 4 H100 (8B), as whole servers or, with --prefill and --decode, apart."""
    return _on_h100(options, _rows(options, read_azure, like_azure, 4000))


def recorded(options: Options) -> Cell:
    """What `warmroute record` has written (--trace), on the same servers."""
    if options.trace is None:
        raise ValueError("the workload recorded needs --trace FILE, a file of warmroute record")
    return _on_h100(options, read_mooncake(options.trace, options.requests))


def _on_h100(options: Options, rows: list[Row]) -> Cell:
    apart = options.prefill or options.decode
    fleet = servers(
        "h100-llama3-8b", both=0 if apart else options.both or 4, prefill=options.prefill or 0,
        decode=options.decode or 0,
    )  # fmt: skip
    spec = FleetSpec(fleet, link=RDMA_40GB)
    return Cell(spec, Replay(rows, speed=options.speed, slo_ttft_s=1.0, slo_tpot_s=0.05))


def ladder(options: Options) -> Cell:
    """llm-d's 73 % benchmark: 750 prompts with 150 beginnings, in stages, on 8 servers of 2 H100 (Qwen3-32B)."""
    fleet = servers("h100x2-qwen3-32b", both=options.both or 8)
    stages = LADDER if options.rate is None else ((15.0, 50.0), (options.rate, options.duration_s or 30.0))
    return Cell(FleetSpec(fleet), Ladder(options.seed, stages=stages))


def gsp(options: Options) -> Cell:
    """SGLang's shared-prefix batch, group by group, on 8 A100 (8B) that share blocks as SGLang does."""
    fleet = servers("a100-llama3-8b", both=options.both or 8, block_size=16, late_sharing=True)
    return Cell(FleetSpec(fleet), Batch(options.seed))


def gsp_shuffled(options: Options) -> Cell:
    """The same, shuffled."""
    return replace(gsp(options), workload=Batch(options.seed, shuffled=True))


def _one_and_three(options: Options) -> FleetSpec:
    fleet = servers("h100x4-llama3-70b", prefill=options.prefill or 1, decode=options.decode or 3)
    return FleetSpec(fleet, link=RDMA_40GB)


def chat(options: Options) -> Cell:
    """Chats of 5k + 50 a turn, 4 turns, on 1P+3D of 4 H100 (70B), 40 GB/s and 5 ms between them."""
    load = Sessions(options.seed, CHAT, rate=options.rate or 1.0, duration_s=options.duration_s or 300)
    return Cell(_one_and_three(options), load)


def code(options: Options) -> Cell:
    """Coding agents of 30k + 1,500 a turn, 15 turns, on the same."""
    load = Sessions(options.seed, CODE, rate=options.rate or 0.1, duration_s=options.duration_s or 300)
    return Cell(_one_and_three(options), load)


def mixed(options: Options) -> Cell:
    """The load measured on two H200, 1P+1D: 40 % of 6k..12k, the rest short; 1 s and 20 ms."""
    if options.both:
        fleet = servers("h200-7b", both=options.both)
    else:
        fleet = servers("h200-7b", prefill=options.prefill or 1, decode=options.decode or 1)
    load = Mixed(options.seed, rate=options.rate or 9.0, duration_s=options.duration_s or 20.0)
    return Cell(FleetSpec(fleet), load)


def hotspot(options: Options) -> Cell:
    """Half of the requests share one of 64 prefixes; 8 H100 (8B)."""
    fleet = servers("h100-llama3-8b", both=options.both or 8)
    load = Hotspot(options.seed, rate=options.rate or 40.0, duration_s=options.duration_s or 120)
    return Cell(FleetSpec(fleet), load)


def shift(options: Options) -> Cell:
    """The same, and every 60 s another prefix is hot."""
    load = Hotspot(options.seed, rate=options.rate or 40.0, duration_s=options.duration_s or 240, shift_s=60)
    return replace(hotspot(options), workload=load)


def documents(options: Options) -> Cell:
    """Half of the requests share one of 64 beginnings of 16k tokens, another one every 20 s; the same servers."""
    load = Hotspot(
        options.seed,
        rate=options.rate or 40.0,
        duration_s=options.duration_s or 60,
        shift_s=20,
        shared_tokens=16_384,
    )
    return replace(hotspot(options), workload=load)


def restart(options: Options) -> Cell:
    """The hotspot, and a server is gone for 10 s after a third of the time."""
    cell = hotspot(options)
    fault = Restart((options.duration_s or 120) / 3, cell.spec.servers[0].name)
    return replace(cell, spec=replace(cell.spec, faults=(fault,)))


def loss(options: Options) -> Cell:
    """The hotspot, and 5 % of the event batches are lost (and fetched again)."""
    cell = hotspot(options)
    return replace(cell, spec=replace(cell.spec, event_loss=0.05))


WORKLOADS: dict[str, Callable[[Options], Cell]] = {
    "mooncake": mooncake,
    "mooncake-full": mooncake_full,
    "azure": azure,
    "recorded": recorded,
    "ladder": ladder,
    "gsp": gsp,
    "gsp-shuffled": gsp_shuffled,
    "chat": chat,
    "code": code,
    "mixed": mixed,
    "hotspot": hotspot,
    "shift": shift,
    "documents": documents,
    "restart": restart,
    "loss": loss,
}
_FROM_TRACES = (mooncake, mooncake_full, azure, recorded)


def cell(name: str, options: Options) -> Cell:
    """The workload called `name`; ValueError names the known ones, or what is wrong with the options: what would be
    ignored is refused.
    """
    try:
        build = WORKLOADS[name]
    except KeyError:
        raise ValueError(f"no workload {name!r}; there is: {', '.join(WORKLOADS)}") from None
    for key in ("rate", "duration_s", "requests", "speed", "both", "prefill", "decode"):
        value = getattr(options, key)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{key.replace('_', '-')} {value:g} is not above 0")
    if options.trace is not None and build not in _FROM_TRACES:
        raise ValueError(f"the workload {name} is generated and takes no --trace")
    built = build(options)
    roles = Counter(server.role for server in built.spec.servers)
    for role, n in ((Role.BOTH, options.both), (Role.PREFILL, options.prefill), (Role.DECODE, options.decode)):
        if n is not None and roles[role] != n:
            raise ValueError(
                f"--{role.value} {n}: the workload {name} would run on {roles[role]} such servers all the same"
            )
    if not (roles[Role.BOTH] or roles[Role.DECODE]):
        raise ValueError("no server decodes; give --decode too")
    return built
