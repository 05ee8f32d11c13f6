"""What goes into the engine model and what comes out of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Literal, NamedTuple

from bench.engine.events import Event
from bench.engine.timing import PRESETS, Timing

FinishReason = Literal["stop", "length"]

ID_TABLE: Final = 1 << 15
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = 0xFFFFFFFFFFFFFFFF


def mix64(value: int) -> int:
    """splitmix64's finaliser: a stateless, seedable stream of 64-bit numbers."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@cache
def id_table(ids: tuple[int, int]) -> list[int]:
    """Ids drawn from [ids[0], ids[1]). What a request generates is a stretch of it that begins anywhere."""
    first, last = ids
    return [first + mix64(index) % (last - first) for index in range(ID_TABLE)]


def generated_ids(draw: int, start: int, n: int, ids: tuple[int, int]) -> list[int]:
    """Ids start..start+n-1 of what is generated from `draw` (of a request's seed: `mix64(seed)`)."""
    table = id_table(ids)
    at = (draw + start) % ID_TABLE
    found = table[at : at + n]
    while len(found) < n:
        found += table[: n - len(found)]
    return found


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine core (one data-parallel rank). Names follow vLLM's; `num_gpu_blocks` includes the null block."""

    block_size: int = 16
    num_gpu_blocks: int = 4096
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 32768
    enable_prefix_caching: bool = True
    # vLLM's scheduler_reserve_full_isl: a request enters only if its whole prompt fits, not just its first chunk.
    reserve_full_prompt: bool = True
    seed: int = 0
    timing: Timing = PRESETS["cpu-fast"]
    # Generated ids are drawn uniformly from [first, last).
    generated_ids: tuple[int, int] = (1000, 32000)

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.generated_ids[0] >= self.generated_ids[1]:
            raise ValueError(f"generated_ids must be a non-empty range, got {self.generated_ids}")
        usable = (self.num_gpu_blocks - 1) * self.block_size
        if usable < self.max_model_len:
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit into {self.num_gpu_blocks} blocks of "
                f"{self.block_size} tokens, of which one is the null block ({usable} tokens)"
            )


@dataclass(slots=True, kw_only=True)
class Request:
    """One sequence. `seed` alone decides its generated ids, so equal seeds mean equal answers on any engine.

    `prompt_token_ids` is a list or, cheaper for long prompts, an array("I"); the two are hashed differently, so one
    engine should be given one kind.

    `stop_after` is the number of generated tokens after which the model itself stops (finish reason "stop").
    `remote_tokens` leading tokens are held by another engine and are pulled instead of computed (NIXL decode side);
    `hold_blocks` keeps the blocks after the end until `Engine.release` (NIXL prefill side).
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    seed: int = 0
    stop_after: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    report_full: bool = False
    remote_tokens: int = 0
    hold_blocks: bool = False


class Work(NamedTuple):
    """What a step has to do, in the order of `Timing.step_s`."""

    decode_seqs: int
    kv_tokens: int
    prefill_tokens: int
    prefill_pairs: float


class Token(NamedTuple):
    """One generated token, visible at the end of its step. `position` counts from 0."""

    request_id: str
    position: int
    token_id: int
    finish_reason: FinishReason | None


class Admitted(NamedTuple):
    """A request left the waiting queue for the first time."""

    request_id: str
    cached_tokens: int
    remote_tokens: int
    queued_s: float


class Pull(NamedTuple):
    """KV to fetch from another engine into `blocks`; answer with `Engine.pull_done`."""

    request_id: str
    num_tokens: int
    blocks: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)


class Pulled(NamedTuple):
    """How a `Pull` ended. `garbage`, if not 0, stands for KV that is not that of the prompt's tokens."""

    ok: bool
    garbage: int = 0


@dataclass(slots=True)
class StepResult:
    """Everything a step did; events and tokens become visible `dt_s` after its start."""

    events: list[Event] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_seqs: int = 0
    dt_s: float = 0.0

    @property
    def scheduled_tokens(self) -> int:
        return self.prefill_tokens + self.decode_seqs


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: gauges first, then counters since the start. Prefix figures are in tokens, as in vLLM.

    `external_hits` is what was to be pulled, failures included; `pulled_tokens` is what arrived. A prompt counts once
    it is known where its tokens come from: `prompt_tokens` is the sum of the computed, the locally cached, the pulled.
    """

    running: int
    waiting: int
    waiting_remote: int
    incoming: int
    held: int
    held_blocks: int
    kv_usage: float
    prefix_queries: int
    prefix_hits: int
    external_queries: int
    external_hits: int
    prompt_tokens: int
    cached_prompt_tokens: int
    pulled_tokens: int
    computed_prompt_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
