"""Our own block keys: a chain of 64-bit XXH3 over (namespace, parent, token ids, extra keys).

A key names the whole path from block 0, so a flat table of keys *is* the radix tree. Engines keep their own hashes,
seeds and algorithms; we never need them to agree with ours or with each other.

- ``root(adapter, block_size)`` seeds the chain. The adapter (LoRA) is part of it; the base model is not, because a
  worker serves one base model and the index only looks at workers that serve the one that was asked for.
- A plain block is ``xxh3(token bytes, seed=parent)``: its input is always exactly ``4 * block_size`` bytes long.
- A block with extra keys (multimodal ids, cache salt, prompt embeddings) is ``xxh3(token bytes + framed extras,
  seed=parent)``, where each extra is preceded by its kind and length, so no two different inputs have the same bytes.
- The cache salt is an extra key of block 0, as in vLLM, which publishes it there without saying that it is a salt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, TypeAlias

import msgspec
import xxhash

xxh3 = xxhash.xxh3_64_intdigest
xxh3_128 = xxhash.xxh3_128_intdigest

Tokens: TypeAlias = "bytes | bytearray | memoryview | array[int] | Sequence[int]"
"""Token ids: a uint32 native-endian buffer (bytes, array('I'), memoryview) or, slower, a sequence of ints."""

Extra = tuple[bytes, ...]
"""The extra keys of one block in canonical form."""

_EXTRA_TAGS = frozenset({"lora", "mm", "cache_salt", "prompt_embeds"})
_LENGTH = Struct("<cI")
_ROOTS: dict[tuple[str | int | None, int], int] = {}


class MediaSpan(msgspec.Struct, frozen=True):
    """A multimodal item in a prompt: its content id and the tokens it covers, for callers that know no block size."""

    id: str
    start_token: int
    n_tokens: int


def token_bytes(tokens: Tokens) -> bytes:
    """`tokens` as uint32 bytes. Raises ValueError for an id outside uint32 or a buffer of another width."""
    if isinstance(tokens, bytes):
        data = tokens
    elif isinstance(tokens, array):
        data = tokens.tobytes() if tokens.itemsize == 4 else array("I", tokens).tobytes()
    elif isinstance(tokens, (bytearray, memoryview)):
        data = bytes(tokens)
    else:
        try:
            data = array("I", tokens).tobytes()
        except (OverflowError, TypeError) as error:
            raise ValueError(f"token ids must be integers from 0 to 4294967295: {error}") from None
    if len(data) % 4:
        raise ValueError("a token buffer must hold 4 bytes per token id")
    return data


def root(adapter: str | int | None, block_size: int) -> int:
    """The seed of a chain. `adapter` is a LoRA name, a LoRA id whose name is unknown, or None for the base model."""
    key = _ROOTS.get((adapter, block_size))
    if key is None:
        kind = "base" if adapter is None else "name" if isinstance(adapter, str) else "id"
        text = "" if adapter is None else str(adapter)
        framed = f"{kind}:{len(text)}:{text}:{block_size}".encode("utf-8", "surrogatepass")
        key = xxh3(framed)
        if len(_ROOTS) < 65536:
            _ROOTS[adapter, block_size] = key
    return key


def extra_parts(value: Any, lora_name: str | None) -> list[bytes]:
    """One block's extra keys, as an engine publishes them or a caller gives them, in canonical form without the LoRA
    name.

    Accepts bare strings and digests (vLLM >= 0.18), ``[id, offset]`` pairs (older) and tagged tuples; bare numbers are
    skipped.
    """
    if not value:
        return []
    items = value if isinstance(value, (list, tuple)) else [value]
    out: list[bytes] = []
    for item in items:
        if isinstance(item, (list, tuple)) and item:
            head = item[0]
            tagged = isinstance(head, str) and head in _EXTRA_TAGS and len(item) > 1 and not isinstance(item[1], int)
            if tagged and head == "lora":
                continue
            item = item[1] if tagged else head
        if isinstance(item, str):
            if item == lora_name:
                lora_name = None  # named once; a salt of the same text follows it
            else:
                out.append(item.encode("utf-8", "surrogatepass"))
        elif isinstance(item, (bytes, bytearray)):
            out.append(bytes(item))
    return out


def block_extra(value: Any, lora_name: str | None) -> Extra:
    """Canonical extra keys of one block of an event, in the engine's order: media as they come, then the salt."""
    return () if value is None else tuple(extra_parts(value, lora_name))


def event_extras(values: Sequence[Any] | None, n_blocks: int, lora_name: str | None) -> dict[int, Extra]:
    """Blocks of an event that have extra keys besides the LoRA name: ``{index in the event: extra}``."""
    if not values:
        return {}
    out = {}
    for i, value in enumerate(values[:n_blocks]):
        if value is not None and (extra := block_extra(value, lora_name)):
            out[i] = extra
    return out


def query_extras(
    extra_keys: Sequence[Any] | None, cache_salt: str | None, lora_name: str | None, block_size: int, n_blocks: int
) -> dict[int, Extra]:
    """Blocks of a query that have extra keys: ``{block index: extra}``.

    `extra_keys` is a list with one entry per block (None, or that block's ids), or a list of MediaSpan.
    A media id equal to the salt or to the LoRA name is not a media id. Raises ValueError for anything else.
    """
    parts: dict[int, list[bytes]] = {}
    for i, value in enumerate(extra_keys or ()):
        if isinstance(value, MediaSpan):
            ids = _media_ids(value.id, lora_name)
            last = (value.start_token + max(value.n_tokens, 1) - 1) // block_size
            for block in range(value.start_token // block_size, min(last + 1, n_blocks)):
                parts.setdefault(block, []).extend(ids)
        elif value is not None and i < n_blocks:
            parts.setdefault(i, []).extend(_media_ids(value, lora_name))
    if cache_salt is not None and n_blocks:
        salt = cache_salt.encode("utf-8", "surrogatepass")
        parts[0] = [part for part in parts.get(0, []) if part != salt] + [salt]
    return {i: tuple(ids) for i, ids in parts.items() if ids}


def _media_ids(value: Any, lora_name: str | None) -> list[bytes]:
    items = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(item, (str, bytes, int, list, tuple)) for item in items):
        raise ValueError("extra_keys must hold, per block, null or a list of ids (or be MediaSpans)")
    return extra_parts(value, lora_name)


def block_key(parent: int, tokens: bytes, extra: Extra = ()) -> int:
    """The key of one block whose `tokens` are exactly ``4 * block_size`` bytes."""
    if not extra:
        return xxh3(tokens, parent)
    return xxh3(tokens + _framed(extra), parent)


@lru_cache(maxsize=4096)
def _framed(extra: Extra) -> bytes:
    return b"".join(_LENGTH.pack(b"x", len(part)) + part for part in extra)


_SPLITTERS: dict[tuple[int, int], Struct] = {}


def _splitter(n_blocks: int, block_bytes: int) -> Struct:
    splitter = _SPLITTERS.get((n_blocks, block_bytes))
    if splitter is None:
        splitter = Struct(f"{block_bytes}s" * n_blocks)
        if len(_SPLITTERS) < 4096:
            _SPLITTERS[n_blocks, block_bytes] = splitter
    return splitter


def chain(parent: int, tokens: bytes, block_size: int, start: int, stop: int, extras: dict[int, Extra]) -> list[int]:
    """Keys of blocks ``start..stop-1`` of `tokens`; `parent` is the key before `start`, `extras` is by block index."""
    width = 4 * block_size
    # unpacking the slices in C and chaining in one comprehension halves the cost of a slicing loop
    blocks = _splitter(stop - start, width).unpack_from(tokens, start * width)
    key = parent
    if not extras or not any(start <= i < stop for i in extras):
        return [key := xxh3(block, key) for block in blocks]
    tails = {i: _framed(extra) for i, extra in extras.items() if start <= i < stop}
    return [key := xxh3(block + tails.get(i, b""), key) for i, block in enumerate(blocks, start)]


RUN_BLOCKS = 64
_MOST_RUNS = 4096
"""Some 10 MB: 4 million tokens of prompts."""
_runs: dict[tuple[int, int], list[int]] = {}
"""Keys of `RUN_BLOCKS` blocks by the key before them and the 128-bit hash of their tokens."""


def chain_again(
    parent: int, tokens: bytes, block_size: int, start: int, stop: int, extras: dict[int, Extra]
) -> list[int]:
    """As `chain`, for prompts that begin as earlier ones did: runs of blocks without extra keys are remembered.

    What a run's keys depend on is all in its entry's name, and nothing else is: an entry can be missing, not wrong.
    """
    keys: list[int] = []
    width = 4 * block_size * RUN_BLOCKS
    first_plain = max(extras, default=-1) + 1
    while stop - start >= RUN_BLOCKS:
        if start < first_plain:
            made = chain(parent, tokens, block_size, start, start + RUN_BLOCKS, extras)
        else:
            at = 4 * block_size * start
            name = parent, xxh3_128(tokens[at : at + width])
            made = _runs.get(name) or _remember(name, chain(parent, tokens, block_size, start, start + RUN_BLOCKS, {}))
        keys += made
        parent = made[-1]
        start += RUN_BLOCKS
    if start < stop:
        keys += chain(parent, tokens, block_size, start, stop, extras)
    return keys


def forget_runs() -> None:
    """As if no prompt had been seen yet."""
    _runs.clear()


def _remember(name: tuple[int, int], made: list[int]) -> list[int]:
    if len(_runs) >= _MOST_RUNS:
        forget_runs()
    _runs[name] = made
    return made
