"""What one (worker, rank) holds with all that its further events refer to, and where in its stream that was: for
another process to go on from there.

A block is its engine's hash and our key, so removals work as if nothing had happened. What waits for its parent is left
out, and copies counted within the last steps are counted anew: both can only make less of what is there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from threading import Lock
from typing import Annotated

import msgspec
from msgspec import Meta

from indexer.held import packed
from indexer.holder import GPU, MAX_COPIES, TIER_NAMES, EntryMap, HolderState
from indexer.ingest import MAX_BLOCK_SIZE
from indexer.plane import NO_PARENT, ROOT_PARENT, Plane
from indexer.table import ENTRY_BYTES, KEY_BYTES, SLICE_BLOCKS, Table

_ROOT, _NONE = 2**64 - 1, 2**64 - 2
"""Stand for parents in a list of keys; a block whose key is one of them would lose its parent."""
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class SavedPlace(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one tier, KV-cache group and block size. `hashes` and `keys` are as many uint64. A block's parent is
    the block before it, but where `parents` has its number and its parent's key, two uint64 each.
    """

    tier: Annotated[int, Meta(ge=0, lt=len(TIER_NAMES))]
    group: _Count
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)]
    hashes: bytes
    keys: bytes
    parents: bytes
    copies: dict[int, Annotated[int, Meta(ge=1, le=MAX_COPIES)]] = {}


class SavedRank(msgspec.Struct, frozen=True, array_like=True):
    """`next_seq`: the number of the batch to go on with; `last_ts`, `last_hash`: what the one before it was;
    `epoch_ts`: the engine's clock at the first batch of its process that was seen; `adapters`: names in its events.
    """

    next_seq: Annotated[int, Meta(ge=1, le=1 << 62)]
    last_ts: float
    last_hash: int
    epoch_ts: float | None
    groups: dict[_Count, bool]
    adapters: list[str]
    places: list[SavedPlace]

    @property
    def n_blocks(self) -> int:
        return sum(len(place.keys) // 8 for place in self.places)


def save_places(table: Table, state: HolderState, lock: Lock) -> list[SavedPlace]:
    """Nothing may be applied meanwhile; `lock` is held for a slice at a time."""
    return [_save(table.planes[entries.tier], state, entries, lock) for entries in state.all_maps() if entries.own]


def _save(plane: Plane, state: HolderState, entries: EntryMap, lock: Lock) -> SavedPlace:
    with lock:
        items = list(entries.own.items())
        copies = dict(entries.copies)
        loose = dict(state.loose[entries.tier])
    parents: dict[int, int] = {}
    for start in range(0, len(items) if plane.linked else 0, SLICE_BLOCKS):
        with lock:
            for _, key in items[start : start + SLICE_BLOCKS]:
                children = plane.links[key & 0xFF].get(key)
                if children is None:
                    continue
                for child in (children,) if isinstance(children, int) else children:
                    parents[child] = key
    others = array("Q")
    before = None
    for i, (_, key) in enumerate(items):
        parent = parents.get(key)
        if parent is None:
            parent = loose.get(key, ROOT_PARENT)
        if parent != before:
            others.extend((i, _ROOT if parent == ROOT_PARENT else _NONE if parent == NO_PARENT else parent))
        before = key
    return SavedPlace(
        entries.tier,
        entries.group,
        entries.block_size,
        packed(h for h, _ in items),
        packed(key for _, key in items),
        others.tobytes(),
        copies,
    )


def restore_places(table: Table, state: HolderState, places: list[SavedPlace], lock: Lock) -> None:
    """Into a state that has nothing yet. Raises ValueError for what `save_places` never says."""
    for place in places:
        entries = _place(table, state, place, lock)
        plane = table.planes[place.tier]
        keys = list(_values(place.keys))
        blocks = list(zip(_values(place.hashes), keys, _parents(keys, place.parents), strict=True))
        for start in range(0, len(blocks), SLICE_BLOCKS):
            part = blocks[start : start + SLICE_BLOCKS]
            with lock:
                if not table.is_current(state):
                    return
                table.make_room(len(part) * (KEY_BYTES + ENTRY_BYTES))
                for h, key, parent in part:
                    if h not in entries.own:
                        _restore(table, plane, state, entries, h, key, parent)
        with lock:
            entries.copies.update({h: n for h, n in place.copies.items() if h in entries.own})


def _place(table: Table, state: HolderState, place: SavedPlace, lock: Lock) -> EntryMap:
    with lock:
        entries = state.entry_map(place.tier, place.group, place.block_size)
        entries = entries or state.new_entry_map(place.tier, place.group, place.block_size)
        table.version += 1
    if entries is None:
        raise ValueError("more block sizes than an index has")
    return entries


def _restore(table: Table, plane: Plane, state: HolderState, entries: EntryMap, h: int, key: int, parent: int) -> None:
    if parent == _ROOT:
        table.add_entry(state, plane, entries, h, key, ROOT_PARENT, True)
    elif parent == _NONE or entries.tier != GPU:
        table.add_entry(state, plane, entries, h, key, NO_PARENT, False)
    else:
        table.add_entry(state, plane, entries, h, key, parent, bool(plane.holders(parent) & state.bit))


def _parents(keys: list[int], others: bytes) -> list[int]:
    found = [_ROOT, *keys[:-1]][: len(keys)]
    numbers = _values(others)
    for i, parent in zip(numbers, numbers, strict=True):
        if i >= len(found):
            raise ValueError("a parent of a block that is not there")
        found[i] = parent
    return found


def _values(data: bytes) -> Iterator[int]:
    if len(data) % 8:
        raise ValueError("no whole number of blocks")
    return iter(memoryview(data).cast("B").cast("Q"))
