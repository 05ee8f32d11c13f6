"""vllm-router's `kv_aware` (0.1.17, as observed): the prompt tokens to compute, then the load, ties to the first.

Its log names the cost's parts: the last block of a full match is not credited, and idle equals all go to one worker.
The load enters as in its RFC 294: prefill blocks plus decode blocks, all weights 1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.sim.arms.choosing import Cached, Ruled
from bench.sim.router import Factory, SimRequest, WorkerView


def new_prefill_tokens(prompt_tokens: int, matched_tokens: int, block_size: int) -> int:
    """What is to be computed. A match to the prompt's end does not count with its last block."""
    return prompt_tokens - min(matched_tokens, (prompt_tokens - 1) // block_size * block_size)


def choose(request: SimRequest, workers: Sequence[WorkerView], cached: Cached, rng: random.Random) -> WorkerView:
    def cost_blocks(worker: WorkerView) -> float:
        fresh = new_prefill_tokens(request.prompt_tokens, cached.get(worker.name, 0), worker.block_size)
        return (worker.booked.uncached_tokens + fresh + worker.booked.kv_tokens) / worker.block_size

    return min(workers, key=cost_blocks)


ARMS: dict[str, Factory] = {"kv-aware": lambda setup: Ruled("kv-aware", choose)}
