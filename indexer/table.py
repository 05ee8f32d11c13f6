"""The index's memory: holder states, their bits, the tiers' tables, and what gives way when the budget is reached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from indexer.holder import GPU, MAX_COPIES, TIER_NAMES, EntryMap, HolderState
from indexer.match import Holder
from indexer.orphans import Run
from indexer.plane import Plane

if TYPE_CHECKING:
    from indexer.journal import Journal

SLICE_BLOCKS = 128
"""No lock is held for more blocks than this at a time."""

KEY_BYTES = 240
ENTRY_BYTES = 175
"""Accounted size of one key (mask row, link row, the key itself) and of one engine-hash entry. While the index grows
`python -m bench micro` measures about half of their sum; in steady replacement at the budget, with dicts full of gaps,
it was measured at 413 bytes (CPython 3.11).
"""

ORPHAN_SHARE = 16
"""Blocks without a parent may take one part in so many of the budget."""

HOT_BYTES = 110
MIN_BUDGET_BYTES = 1 << 20


class Table:
    """Everything the index remembers. Not thread-safe: its owner holds the lock."""

    def __init__(self, budget_bytes: int, orphan_blocks: int, physical: bool) -> None:
        if budget_bytes < MIN_BUDGET_BYTES:
            raise ValueError(f"budget_bytes must be at least {MIN_BUDGET_BYTES} (1 MiB), not {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.orphan_limit_blocks = orphan_blocks
        self.physical = physical
        self.modes: dict[str, bool] = {}
        """Workers whose removals differ from `physical`."""
        self.journal: Journal | None = None
        """Who is told of what changes."""
        self.planes = [Plane(linked=tier == GPU) for tier in range(len(TIER_NAMES))]
        self.states: dict[Holder, HolderState] = {}
        self.retired: list[HolderState] = []
        self.entries = 0
        self.orphan_bytes = 0
        self.evicted = 0
        self.version = 0
        """Grows whenever holders, bits or block sizes change, so that what was derived from them is stale."""
        self._by_bit: dict[int, HolderState] = {}
        self._free_bits: list[int] = []
        self._n_bits = 0
        self._room_bytes = 0
        self._hot: set[int] = set()
        self._hot_before: set[int] = set()
        self._hot_limit = budget_bytes // 16 // HOT_BYTES

    def state(self, worker: str, rank: int) -> HolderState:
        state = self.states.get((worker, rank))
        if state is None:
            physical = self.modes.get(worker, self.physical)
            state = HolderState(worker, rank, self._take_bit(), self.orphan_limit_blocks, physical)
            self.states[worker, rank] = self._by_bit[state.bit] = state
            self.version += 1
        return state

    def is_current(self, state: HolderState) -> bool:
        return self.states.get((state.worker, state.rank)) is state

    def clear(self, holder: Holder) -> None:
        state = self.states[holder]
        if state.is_empty():
            # the same bit, but another state: a store that is under way must not go on in this one
            fresh = state.next_epoch(state.bit)
        else:
            self._retire(state)
            if self.journal is not None:
                self.journal.cleared(state)
            fresh = state.next_epoch(self._take_bit())
        self.states[holder] = self._by_bit[fresh.bit] = fresh
        self.version += 1

    def _retire(self, state: HolderState) -> None:
        self.orphan_bytes -= state.orphans.bytes
        state.is_retired = True
        self.retired.append(state)
        del self._by_bit[state.bit]
        self.version += 1

    def _take_bit(self) -> int:
        if self._free_bits:
            return self._free_bits.pop()
        self._n_bits += 1
        return 1 << (self._n_bits - 1)

    def sweep_slice(self, max_blocks: int) -> int:
        freed = 0
        while self.retired and freed < max_blocks:
            state = self.retired[-1]
            if state.entries:
                entries = next(m for m in state.all_maps() if m.own)
                freed += self.drop_latest(state, entries, max_blocks - freed)
            if not state.entries:
                self.retired.pop()
                self.planes[GPU].open &= ~state.bit
                self._free_bits.append(state.bit)
                self._free_bits.sort(reverse=True)
        return freed

    def drop_latest(self, state: HolderState, entries: EntryMap, max_blocks: int) -> int:
        """Forget up to `max_blocks` blocks, the last stored first: children before their parents."""
        own = entries.own
        entries.copies.clear()
        freed = 0
        while own and freed < max_blocks:
            # popitem, as each scan of a dict from an end passes over all that was removed there before
            self.release(state, entries.tier, own.popitem()[1])
            freed += 1
        return freed

    def bytes_used(self) -> int:
        """Accounted bytes of blocks (the touched keys have a fixed share of the budget besides)."""
        gpu, cpu, disk, other = self.planes
        keys = gpu.size + cpu.size + disk.size + other.size
        return keys * KEY_BYTES + self.entries * ENTRY_BYTES + self.orphan_bytes

    def touch(self, keys: list[int]) -> None:
        """Remember that a lookup met `keys`. Two generations of them share an eighth of the budget."""
        if len(self._hot) + len(keys) > self._hot_limit:
            self._hot_before = self._hot
            self._hot = set()
        self._hot.update(keys[: self._hot_limit])

    def make_room(self, need_bytes: int) -> None:
        """Forget what must be forgotten so that `need_bytes` more stay within the budget."""
        self._room_bytes -= need_bytes
        if self._room_bytes >= 0:
            return
        allowed = self.budget_bytes - 2 * self._hot_limit * HOT_BYTES - need_bytes
        while self.bytes_used() > allowed:
            if self.retired:
                self.sweep_slice(SLICE_BLOCKS)
            elif self.entries:
                self._evict(SLICE_BLOCKS)
            elif self.orphan_bytes:
                self._drop_orphans()
            else:
                break
        # all growth passes here, so what is free now need not be counted anew until it is used up
        self._room_bytes = max(0, allowed - self.bytes_used())

    def add_orphans(self, state: HolderState, run: Run, count_copies: bool) -> None:
        """Keep a run until its parent comes; older ones give way beyond their share of the budget."""
        self.make_room(run.bytes)
        with self.orphan_change(state):
            state.orphans.add(run, count_copies)
        while self.orphan_bytes > self.budget_bytes // ORPHAN_SHARE:
            self._drop_orphans()

    @contextmanager
    def orphan_change(self, state: HolderState) -> Iterator[None]:
        """Keeps the account while the orphans of `state` change."""
        before = state.orphans.bytes
        yield
        self.orphan_bytes += state.orphans.bytes - before

    def _drop_orphans(self) -> None:
        state = max(self.states.values(), key=lambda s: s.orphans.bytes)
        with self.orphan_change(state):
            state.orphans.drop_oldest()

    def _evict(self, n_blocks: int) -> None:
        """Forget the oldest untouched blocks of the holder that has most; touched ones get a second chance."""
        state = max(self.states.values(), key=lambda s: s.entries)
        entries = max(state.all_maps(), key=lambda m: len(m.own))
        spared = evicted = 0
        for h in entries.oldest(n_blocks):
            key = entries.own[h]
            if key in self._hot or key in self._hot_before:
                entries.own[h] = entries.own.pop(h)
                spared += 1
            else:
                self.drop_entry(state, entries, h)
                evicted += 1
        self.evicted += evicted
        if not evicted:
            self._hot_before, self._hot = self._hot, set()

    def remove_worker(self, worker: str) -> None:
        for holder in [h for h in self.states if h[0] == worker]:
            self.remove_holder(holder)
        self.modes.pop(worker, None)
        self.version += 1

    def remove_holder(self, holder: Holder) -> None:
        state = self.states.pop(holder, None)
        if state is not None:
            self._retire(state)
            if self.journal is not None:
                self.journal.gone(state)

    def holders(self, mask: int) -> tuple[Holder, ...]:
        """The holders whose bits are in `mask`."""
        names = []
        while mask:
            low = mask & -mask
            state = self._by_bit[low]
            names.append((state.worker, state.rank))
            mask ^= low
        return tuple(names)

    def add_entry(
        self, state: HolderState, plane: Plane, entries: EntryMap, h: int, key: int, parent: int, held: bool
    ) -> None:
        entries.own[h] = key
        state.entries += 1
        self.entries += 1
        if not plane.add(key, parent, held, state.bit, state.loose[entries.tier]):
            shared = state.shared[entries.tier]
            shared[key] = shared.get(key, 0) + 1
        elif self.journal is not None:
            self.journal.stored(state, entries.tier, entries.block_size, parent, [key])

    def add_entries(
        self, state: HolderState, entries: EntryMap, hashes: list[int], keys: list[int], parent: int, held: bool
    ) -> None:
        """The same as `add_entry` for a chain of blocks whose hashes are all new to `entries`."""
        entries.own.update(zip(hashes, keys, strict=True))
        state.entries += len(hashes)
        self.entries += len(hashes)
        tier = entries.tier
        for key in self.planes[tier].add_chain(keys, parent, held, state.bit, state.loose[tier]):
            shared = state.shared[tier]
            shared[key] = shared.get(key, 0) + 1
        if self.journal is not None:
            self.journal.stored(state, tier, entries.block_size, parent, keys)

    @staticmethod
    def count_copy(entries: EntryMap, h: int, count: bool, copies: int = 1) -> None:
        if count:
            entries.copies[h] = min(entries.copies.get(h, 0) + copies, MAX_COPIES)

    def drop_entry(self, state: HolderState, entries: EntryMap, h: int) -> None:
        if entries.copies:
            entries.copies.pop(h, None)
        self.release(state, entries.tier, entries.own.pop(h))

    def release(self, state: HolderState, tier: int, key: int) -> None:
        """One of the holder's entries no longer has `key`."""
        state.entries -= 1
        self.entries -= 1
        shared = state.shared[tier]
        if shared and key in shared:
            shared[key] -= 1
            if not shared[key]:
                del shared[key]
        else:
            self.planes[tier].remove(key, state.bit, state.loose[tier])
            if self.journal is not None and not state.is_retired:
                self.journal.removed(state, tier, key)
