"""Events as an engine sends them, built from prompts, and an index fed with them over the wire format."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from indexer import EventBatch, Match, PrefixIndex, decode_batch

SIZE = 4
ARRAY_FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
        "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "origin",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "remaining_copy_counts"),
    "AllBlocksCleared": ("medium",),
}  # fmt: skip


def stored(hashes: Sequence[Any], tokens: Sequence[Any], parent: Any = None, **fields: Any) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
    }
    return {**event, "block_size": SIZE, **fields}


def removed(hashes: Iterable[Any], **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **fields}


def cleared(**fields: Any) -> dict[str, Any]:
    return {"type": "AllBlocksCleared", **fields}


def as_array(event: dict[str, Any]) -> list[Any]:
    """The layout of vLLM <= 0.23: the tag, then the fields in order, without trailing ones that are not set."""
    names = ARRAY_FIELDS[event["type"]]
    last = max((i for i, name in enumerate(names) if name in event), default=-1)
    return [event["type"], *(event.get(name) for name in names[: last + 1])]


def payload(*events: Any, ts: float = 1.0, rank: int | None = None) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), rank])


def batch(*events: Any, ts: float = 1.0, rank: int | None = None) -> EventBatch:
    return decode_batch(payload(*events, ts=ts, rank=rank))


def hashes_of(tokens: Sequence[int], size: int = SIZE, seed: Any = "") -> list[int]:
    """One opaque hash per full block, chained as an engine does; `seed` stands for all else that goes into it."""
    out, parent = [], repr(seed).encode()
    for start in range(0, len(tokens) // size * size, size):
        parent = hashlib.sha256(parent + repr(list(tokens[start : start + size])).encode()).digest()
        out.append(int.from_bytes(parent[-8:], "big"))
    return out


class Feed:
    """Workers that announce prompts to one index. Every worker has its own hash seed, as with `PYTHONHASHSEED`."""

    def __init__(self, index: PrefixIndex | None = None, size: int = SIZE) -> None:
        self.index = index or PrefixIndex()
        self.size = size

    def hashes(self, worker: str, tokens: Sequence[int], variant: Any = None, size: int | None = None) -> list[int]:
        return hashes_of(tokens, size or self.size, (worker, variant))

    def event(
        self,
        worker: str,
        tokens: Sequence[int],
        start: int = 0,
        stop: int | None = None,
        *,
        variant: Any = None,
        size: int | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Blocks start..stop-1 of `tokens`; `variant` names what else (salt, adapter, image) is in the hashes."""
        size = size or self.size
        hashes = self.hashes(worker, tokens, variant, size)
        stop = len(hashes) if stop is None else stop
        parent = hashes[start - 1] if start else None
        return stored(hashes[start:stop], tokens[start * size : stop * size], parent, block_size=size, **fields)

    def apply(self, worker: str, *events: Any, rank: int = 0) -> None:
        self.index.apply(worker, rank, batch(*events))

    def store(self, worker: str, tokens: Sequence[int], start: int = 0, stop: int | None = None, **fields: Any) -> None:
        rank = fields.pop("rank", 0)
        self.apply(worker, self.event(worker, tokens, start, stop, **fields), rank=rank)

    def remove(self, worker: str, tokens: Sequence[int], *blocks: int, variant: Any = None, **fields: Any) -> None:
        rank = fields.pop("rank", 0)
        hashes = self.hashes(worker, tokens, variant)
        self.apply(worker, removed([hashes[i] for i in blocks], **fields), rank=rank)

    def match(self, tokens: Sequence[int], **query: Any) -> dict[tuple[str, int], Match]:
        return self.index.match(list(tokens), **query)

    def held(self, tokens: Sequence[int], worker: str = "w", rank: int = 0, **query: Any) -> int:
        """Tokens of the prompt that the worker holds on the GPU."""
        found = self.match(tokens, **query).get((worker, rank))
        return found.gpu_tokens if found else 0

    def rank_stats(self, worker: str = "w", rank: int = 0) -> dict[str, Any]:
        stats: dict[str, Any] = self.index.stats()["workers"][worker][str(rank)]
        return stats

    def counter(self, name: str, worker: str = "w", rank: int = 0) -> int:
        return int(self.rank_stats(worker, rank)["counters"].get(name, 0))


def prompt(n_blocks: int, first: int = 0, size: int = SIZE) -> list[int]:
    """Distinct tokens for `n_blocks` blocks."""
    return list(range(first, first + n_blocks * size))
