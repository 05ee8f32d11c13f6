"""Prompts that cost next to nothing: a stretch of text is one token id repeated, so that equal stretches have equal
blocks, different ones different blocks, and no list of a million ints is ever made.
"""

from __future__ import annotations

from array import array
from functools import lru_cache

from bench.engine.request import EngineConfig, generated_ids, mix64

_FIRST_ID = 1 << 20
"""Above every id an engine generates."""


def unique(number: int, n_tokens: int) -> bytes:
    """Text number `number`, `n_tokens` long, as uint32 ids."""
    return (_FIRST_ID + number).to_bytes(4, "little") * n_tokens


stretch = lru_cache(maxsize=8192)(unique)
"""The same, for text that comes again."""


def blocks(numbers: list[int], block_tokens: int, n_tokens: int) -> bytes:
    """A prompt of `n_tokens` made of blocks of `block_tokens`, the last one perhaps cut."""
    block_tokens = min(block_tokens, n_tokens)
    return b"".join([stretch(number, block_tokens) for number in numbers])[: 4 * n_tokens]


def answer(seed: int, n_tokens: int) -> bytes:
    """What any engine of a simulation generates for a request of that seed."""
    return array("I", generated_ids(mix64(seed), 0, n_tokens, EngineConfig().generated_ids)).tobytes()
