"""vLLM's KVEvents wire format, decoded to typed events.

A payload is one msgpack batch ``[ts, events, data_parallel_rank]`` (or the same as a map). Its events are arrays with
the tag first (vLLM <= 0.23) or maps with a ``type`` key (vLLM >= 0.24). Block hashes are integers of either sign or
digests in bytes; both are folded to unsigned 64-bit integers, the way vLLM itself shortens a digest (its last eight
bytes, big-endian).

One event that cannot be read never costs its neighbours: the quick typed decoder takes the batch whole, and only when
it refuses is every event decoded by itself and the bad ones counted.
"""

from __future__ import annotations

from typing import Any

import msgspec

U64 = (1 << 64) - 1


class EventDecodeError(ValueError):
    """The payload is not a KVEvents batch at all (not msgpack, or not batch-shaped)."""


class BlockStored(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    """``len(block_hashes)`` full blocks, in chain order, now resident in `medium`.

    `token_ids` holds all blocks flattened; it may be empty for offloaded blocks that are already known by hash.
    `parent_block_hash` None means the first block starts a prompt. Field order is vLLM's array layout.
    """

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    origin: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    """One copy of each hash left `medium`. `remaining_copy_counts`, where an engine sends it, says what is left of
    each.
    """

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    remaining_copy_counts: list[int] | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    """Every block of `medium` is gone; without a medium, of every tier."""

    medium: str | None = None


class _MapStored(BlockStored, array_like=False, tag_field="type", tag="BlockStored", gc=False):
    parent_block_hash: int | bytes | None = None
    token_ids: list[int] = []


class _MapRemoved(BlockRemoved, array_like=False, tag_field="type", tag="BlockRemoved", gc=False):
    pass


class _MapCleared(AllBlocksCleared, array_like=False, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
_MapEvent = _MapStored | _MapRemoved | _MapCleared
_KNOWN = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)
"""What the decoders raise: a RecursionError for input that nests a thousand levels deep."""


class EventBatch(msgspec.Struct):
    """What one engine step announced.

    `ts` is the engine's clock in seconds (only compared for equality); `data_parallel_rank` is None when the engine
    does not say; `unknown` counts skipped events by their type, `malformed` the ones whose type was known but whose
    content was not.
    """

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None
    unknown: dict[str, int] = {}
    malformed: int = 0


class _Head(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw] | None
    data_parallel_rank: int | None = None


class _MapHead(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw] | None
    data_parallel_rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class _MapEventsBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_MapStored | _MapRemoved | _MapCleared]
    data_parallel_rank: int | None = None


_quick_array = msgspec.msgpack.Decoder(_ArrayBatch)
_quick_map = msgspec.msgpack.Decoder(_MapEventsBatch)
_head = msgspec.msgpack.Decoder(_Head)
_map_head = msgspec.msgpack.Decoder(_MapHead)
_one_array: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_one_map: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_MapStored | _MapRemoved | _MapCleared)


def _is_map(lead: int) -> bool:
    """Whether a msgpack value that starts with byte `lead` is a map."""
    return 0x80 <= lead <= 0x8F or lead in (0xDE, 0xDF)


def fold_hash(value: int | bytes) -> int:
    """An engine's block hash as an unsigned 64-bit integer (a digest gives its last eight bytes, big-endian)."""
    if isinstance(value, int):
        return value & U64
    if not value:
        raise ValueError("empty block hash")
    return int.from_bytes(value[-8:], "big")


def decode_batch(payload: bytes | memoryview) -> EventBatch:
    """Decode one payload frame. Raises EventDecodeError only when there is no batch in it."""
    if len(payload) < 2:
        raise EventDecodeError("empty KVEvents payload")
    if not _is_map(payload[0]):
        first = _first_event_byte(payload)
        for quick in (_quick_map, _quick_array) if first is None or _is_map(first) else (_quick_array, _quick_map):
            try:
                batch = quick.decode(payload)
                return EventBatch(batch.ts, _folded(batch.events), batch.data_parallel_rank)
            except _UNREADABLE:
                continue
    return _decode_one_by_one(payload)


def _first_event_byte(payload: bytes | memoryview) -> int | None:
    # [array header][float64: cb + 8 bytes][array header][first event ...] is the shape vLLM always sends
    if payload[1] != 0xCB or len(payload) < 12:
        return None
    lead = payload[10]
    if 0x91 <= lead <= 0x9F:
        return payload[11]
    if lead == 0xDC and len(payload) > 13:
        return payload[13]
    return None


def _folded(events: list[Any]) -> list[KVEvent]:
    for event in events:
        if isinstance(event, AllBlocksCleared):
            continue
        try:
            hashes = event.block_hashes
            plain = not hashes or min(hashes) >= 0
        except TypeError:  # Bytes, or a mix.
            plain = False
        if not plain:
            event.block_hashes = [fold_hash(h) for h in event.block_hashes]
        if isinstance(event, BlockStored):
            parent: Any = event.parent_block_hash
            if parent is not None and (type(parent) is bytes or parent < 0):
                event.parent_block_hash = fold_hash(parent)
    return events


def _decode_one_by_one(payload: bytes | memoryview) -> EventBatch:
    try:
        head = (_map_head if _is_map(payload[0]) else _head).decode(payload)
    except _UNREADABLE as error:
        raise EventDecodeError(f"not a KVEvents batch: {error}") from None
    batch = EventBatch(head.ts, [], head.data_parallel_rank, {})
    for raw in head.events or ():
        _decode_one(raw, batch, nested=False)
    return batch


def _decode_one(raw: msgspec.Raw, batch: EventBatch, nested: bool) -> None:
    data = bytes(raw)
    try:
        event = (_one_map if _is_map(data[0]) else _one_array).decode(data)
        batch.events += _folded([event])
        return
    except _UNREADABLE:
        pass
    try:
        value = msgspec.msgpack.decode(data)
    except _UNREADABLE:
        batch.malformed += 1
        return
    kind = value.get("type") if isinstance(value, dict) else value[0] if isinstance(value, list) and value else None
    if isinstance(value, list) and isinstance(kind, (list, dict)) and not nested:
        for inner in msgspec.msgpack.decode(data, type=list[msgspec.Raw]):
            _decode_one(inner, batch, nested=True)
    elif isinstance(kind, str) and kind not in _KNOWN:
        name = kind[:64]
        batch.unknown[name] = batch.unknown.get(name, 0) + 1
    else:
        batch.malformed += 1
