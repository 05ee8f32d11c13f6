"""What a worker holds of a prompt."""

from __future__ import annotations

import msgspec


class Match(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a prompt that one (worker, rank) holds, each counted from block 0 and only as far as it is contiguous.

    `gpu_tokens`, `cpu_tokens` and `disk_tokens` say how far each tier reaches by itself. `reach_tokens` is how far the
    tiers reach together (a prefix on the GPU that the CPU tier continues), which is what an engine can skip computing.
    `approximate` marks a claim that rests on what was routed, not on the engine's own events.
    """

    gpu_tokens: int = 0
    cpu_tokens: int = 0
    disk_tokens: int = 0
    reach_tokens: int = 0
    approximate: bool = False


Holder = tuple[str, int]
"""(worker, data-parallel rank)."""
