"""Which prompt prefixes save most, in bounded memory and without their text.

A space-saving sketch (Metwally, Agrawal, El Abbadi 2005): a full table gives the place of its smallest entry to the
newcomer, which inherits its count as possible error; whatever has more than total/capacity is in it. Keyed by block
keys (which name their whole path) at depths of 1, 2, 4, ... blocks.
"""

from __future__ import annotations

from typing import Any

import msgspec

from indexer import Prompt

DEEPEST_BLOCKS = 512
_SAME_SHARE = 0.9
"""A prefix nearly all of whose hits go on to one deeper prefix is not shown beside it."""


class Entry(msgspec.Struct, gc=False):
    key: int
    parent: int | None
    depth_tokens: int
    hits: float
    error: float
    """By how much `hits` may be too high."""

    @property
    def saved_tokens(self) -> float:
        return self.hits * self.depth_tokens


class TopPrefixes:
    """`capacity` entries. Hashing is paid at most `per_second` times a second; a note taken speaks for those skipped
    before it.
    """

    def __init__(self, capacity: int = 256, per_second: float = 50.0) -> None:
        self._capacity = capacity
        self._period_s = 1.0 / per_second
        self._next_s = 0.0
        self._skipped = 0
        self._entries: dict[int, Entry] = {}

    def note(self, prompt: Prompt, adapter: str | None, block_size: int, cached_tokens: int, now_s: float) -> None:
        """A prompt found `cached_tokens` of itself in the cache it went to."""
        # With images the engine finds more than the text before the first one, which is all that is known here.
        n_blocks = min(min(cached_tokens, prompt.n_tokens) // block_size, DEEPEST_BLOCKS)
        if n_blocks == 0:
            return
        if now_s < self._next_s:
            self._skipped += 1
            return
        self._next_s = now_s + self._period_s
        weight, self._skipped = 1.0 + self._skipped, 0
        keys = prompt.chain(adapter, block_size).upto(n_blocks)
        parent: int | None = None
        depth = 1
        while depth <= min(n_blocks, len(keys)):
            key = keys[depth - 1]
            self._add(key, parent, depth * block_size, weight)
            parent = key
            depth *= 2

    def top(self, n: int) -> list[dict[str, Any]]:
        """The `n` that saved most tokens, most first (JSON-ready)."""
        passed_on: dict[int, float] = {}
        for entry in self._entries.values():
            if entry.parent is not None:
                passed_on[entry.parent] = max(passed_on.get(entry.parent, 0.0), entry.hits)
        shown = [e for e in self._entries.values() if passed_on.get(e.key, 0.0) < _SAME_SHARE * e.hits]
        shown.sort(key=lambda entry: -entry.saved_tokens)
        return [
            {
                "key": f"{entry.key & 0xFFFFFFFFFFFFFFFF:016x}",
                "depth_tokens": entry.depth_tokens,
                "hits": round(entry.hits),
                "hits_error": round(entry.error),
                "saved_tokens": round(entry.saved_tokens),
            }
            for entry in shown[:n]
        ]

    def clear(self) -> None:
        self._entries.clear()

    def _add(self, key: int, parent: int | None, depth_tokens: int, weight: float) -> None:
        entry = self._entries.get(key)
        if entry is not None:
            entry.hits += weight
            return
        floor = 0.0
        if len(self._entries) >= self._capacity:
            least = min(self._entries.values(), key=lambda e: e.hits)
            del self._entries[least.key]
            floor = least.hits
        self._entries[key] = Entry(key, parent, depth_tokens, floor + weight, floor)
