"""Random prompts, and their KV events as vLLM 0.32 sends them."""

from __future__ import annotations

import random
from array import array

import msgspec

BLOCK_SIZE = 16
VOCABULARY = 128_000


def tokens(rng: random.Random, n: int) -> array[int]:
    return array("I", (rng.randrange(VOCABULARY) for _ in range(n)))


def frame(hashes: list[int], parent: int | None, ids: list[int], per_event: int) -> bytes:
    """One payload as vLLM 0.32 sends it: a chain of `hashes`, `per_event` blocks in each event."""
    events = []
    for i in range(0, len(hashes), per_event):
        part = hashes[i : i + per_event]
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": part,
                "parent_block_hash": parent,
                "token_ids": ids[i * BLOCK_SIZE : (i + len(part)) * BLOCK_SIZE],
                "block_size": BLOCK_SIZE,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None] * len(part),
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )
        parent = part[-1]
    return msgspec.msgpack.encode([0.0, events, 0])


def removal(hashes: list[int]) -> bytes:
    events = [{"type": "BlockRemoved", "block_hashes": [h], "medium": "GPU", "group_idx": 0} for h in hashes]
    return msgspec.msgpack.encode([0.0, events, 0])
