"""KV-event payloads as vLLM 0.32 sends them."""

from __future__ import annotations

from typing import Any

import msgspec


def payload(events: list[Any], *, rank: int | None = 0, ts: float = 1.0) -> bytes:
    return msgspec.msgpack.encode([ts, events, rank])


def stored(
    hashes: list[int],
    tokens: list[int],
    *,
    parent: int | None = None,
    block_size: int = 16,
    rank: int | None = 0,
    lora: str | None = None,
    medium: str = "GPU",
    extra_keys: list[Any] | None = None,
    ts: float = 1.0,
) -> bytes:
    """One BlockStored event in a batch of its own."""
    extras = extra_keys or [[lora] if lora else None] * len(hashes)
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": block_size,
        "lora_id": 1 if lora else None,
        "medium": medium,
        "lora_name": lora,
        "extra_keys": extras,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return payload([event], rank=rank, ts=ts)


def removed(hashes: list[int], *, medium: str = "GPU", rank: int | None = 0, ts: float = 1.0) -> bytes:
    """One BlockRemoved per hash, as vLLM sends evictions."""
    events = [{"type": "BlockRemoved", "block_hashes": [h], "medium": medium, "group_idx": 0} for h in hashes]
    return payload(events, rank=rank, ts=ts)


def cleared(*, rank: int | None = 0, ts: float = 1.0) -> bytes:
    return payload([{"type": "AllBlocksCleared"}], rank=rank, ts=ts)
