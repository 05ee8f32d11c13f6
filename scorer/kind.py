"""What an engine is, as far as what was learned of it depends on that."""

from __future__ import annotations

import msgspec

_ROOM = 0.1
"""The same engine measures its free memory anew with each start, and its KV blocks with it."""


class EngineKind(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None: not known. `model` is where its weights are from, `weight` the speed its constants are divided by. Where it
    runs (its URL) is not in here: a pod that is rolled comes back elsewhere and is the same.
    """

    model: str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    kv_blocks: int | None = None
    weight: float = 1.0

    def is_like(self, other: EngineKind) -> bool:
        """Whether nothing known speaks against the two being one kind."""
        pairs = (
            (self.model, other.model),
            (self.kv_cache_dtype, other.kv_cache_dtype),
            (self.block_size, other.block_size),
            (self.weight, other.weight),
        )
        if any(mine is not None and its is not None and mine != its for mine, its in pairs):
            return False
        if not self.kv_blocks or not other.kv_blocks:
            return True
        return abs(self.kv_blocks - other.kv_blocks) <= _ROOM * max(self.kv_blocks, other.kv_blocks)
