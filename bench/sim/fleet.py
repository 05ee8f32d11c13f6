"""The fleet of a cell, as it is built: servers, the links between them, how good the gateway's knowledge is, faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from bench.engine.request import EngineConfig
from bench.sim.hardware import Hardware, hardware
from bench.sim.transfers import NVLINK, Link
from scorer.cost import Constants
from scorer.types import Role


@dataclass(frozen=True, slots=True)
class Server:
    """One worker. `weight` is what the gateway is told of its speed, `speed` what it is, relative to `hardware`."""

    name: str
    hardware: Hardware
    role: Role = Role.BOTH
    block_size: int = 64
    kv_tokens: int = 0
    """0: the hardware's usual."""
    chunk_tokens: int = 0
    """`max_num_batched_tokens`; 0: the hardware's usual."""
    speed: float = 1.0
    weight: float = 1.0
    late_sharing: bool = False
    """Siblings in one step do not hit each other's blocks (SGLang)."""

    @property
    def kv_blocks(self) -> int:
        return (self.kv_tokens or self.hardware.kv_tokens) // self.block_size

    def engine(self, seed: int) -> EngineConfig:
        return EngineConfig(
            block_size=self.block_size,
            num_gpu_blocks=self.kv_blocks + 1,
            max_num_seqs=self.hardware.max_num_seqs,
            max_num_batched_tokens=self.chunk_tokens or self.hardware.chunk_tokens,
            max_model_len=self.kv_blocks * self.block_size,
            seed=seed,
            timing=self.hardware.timing.faster(self.speed),
        )


@dataclass(frozen=True, slots=True)
class Restart:
    """The process is gone at `at_s` with all it held and back, empty, `down_s` later."""

    at_s: float
    worker: str
    down_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Slow:
    """From `at_s` on, `factor` times as fast as it was (0.5: half)."""

    at_s: float
    worker: str
    factor: float


Fault = Restart | Slow


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """Everything of a cell but its load and who decides."""

    servers: tuple[Server, ...]
    link: Link = NVLINK
    event_delay_s: float = 0.01
    event_loss: float = 0.0
    """Share of event batches that do not arrive."""
    event_replay: bool = True
    scrape_s: float = 1.0
    lease_s: float = 30.0
    """How long a prefill worker keeps KV that nobody fetches."""
    optimistic_ttl_s: float = 4.0
    prior_factor: float = 1.0
    """How many times too slow everybody's cost priors say the servers are."""
    nixl: bool = False
    """Whether the engines tell of a KV connector, by which those that decode hand prompts over to each other, and the
    planner knows that two which have not met shake hands first.
    """
    whole_kv: bool = False
    """Whether all of a prompt's KV is moved, also what the decode engine holds already; NIXL moves what is missing."""
    pd_policy: str = "cost"
    """What a planner is told to do where it is not told otherwise."""
    faults: tuple[Fault, ...] = ()
    constants: Constants | None = field(default=None)
    """Cost priors; None: those that describe the first server (times `prior_factor`)."""
    links: tuple[tuple[str, str, Link], ...] = ()
    """(prefill, decode, link) of pairs that have another between them, which no prior knows of. `enter_s` and `hop_s`
    are everybody's.
    """

    def priors(self) -> Constants:
        first = self.servers[0]
        constants = self.constants or first.hardware.constants(self.link, first.block_size)
        if not self.nixl:
            constants = msgspec.structs.replace(constants, first_contact_s=0.0)
        return scaled(constants, self.prior_factor)


_NOT_TIMES = (
    "kv_bytes_per_token",
    "cpu_tier_bytes_per_s",
    "disk_tier_bytes_per_s",
    "pull_bytes_per_s",
    "expected_output_tokens",
)


def scaled(constants: Constants, factor: float) -> Constants:
    """The same with every time `factor` times as long."""
    if factor == 1.0:
        return constants
    times = [name for name in Constants.__struct_fields__ if name not in _NOT_TIMES]
    values = {name: getattr(constants, name) for name in Constants.__struct_fields__}
    return Constants(**(values | {name: values[name] * factor for name in times if name.endswith("_s")}))


def servers(
    hw: Hardware | str,
    *,
    both: int = 0,
    prefill: int = 0,
    decode: int = 0,
    block_size: int = 64,
    kv_tokens: int = 0,
    chunk_tokens: int = 0,
    late_sharing: bool = False,
) -> tuple[Server, ...]:
    """So many alike servers of each role, named b0.., p0.., d0... Raises ValueError for an unknown `hw`."""
    kind = hardware(hw) if isinstance(hw, str) else hw
    roles: Sequence[tuple[str, Role, int]] = (
        ("b", Role.BOTH, both),
        ("p", Role.PREFILL, prefill),
        ("d", Role.DECODE, decode),
    )
    one = Server(
        "", kind, block_size=block_size, kv_tokens=kv_tokens, chunk_tokens=chunk_tokens, late_sharing=late_sharing
    )
    return tuple(replace(one, name=f"{letter}{i}", role=role) for letter, role, n in roles for i in range(n))
