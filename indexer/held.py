"""Blocks of one (worker, rank) by our own keys: what an index can give away and take back. A key tells nothing of its
tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec


class HeldBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """`tier` is a name of `holder.TIER_NAMES`; `keys` are uint64, little-endian."""

    worker: str
    rank: int
    tier: str
    block_size: int
    keys: bytes

    @property
    def n_blocks(self) -> int:
        return len(self.keys) // 8

    def values(self) -> list[int]:
        """Raises ValueError when `keys` is no whole number of them."""
        return list(memoryview(self.keys).cast("B").cast("Q"))


def packed(keys: Iterable[int]) -> bytes:
    return array("Q", keys).tobytes()
