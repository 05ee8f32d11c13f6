"""The index's memory: holder states, their bits, the tiers' tables, and what gives way when the budget is reached."""

from __future__ import annotations

from itertools import islice

from indexer.holder import GPU, MAX_COPIES, TIER_NAMES, EntryMap, HolderState
from indexer.match import Holder
from indexer.plane import Plane

SLICE_BLOCKS = 128
"""No lock is held for more blocks than this at a time."""

KEY_BYTES = 190
ENTRY_BYTES = 125
"""Accounted size of one key (mask row, link row, the key itself) and of one engine-hash entry. Upper ends of what
`python -m bench micro` measures (CPython 3.11; a dict row costs 38 to 84 bytes depending on how full the dict is)."""

ORPHAN_BYTES = 400
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
        self.planes = [Plane(linked=tier == GPU) for tier in range(len(TIER_NAMES))]
        self.states: dict[Holder, HolderState] = {}
        self.retired: list[HolderState] = []
        self.entries = 0
        self.orphans = 0
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
            state.ignored.clear()
            return
        self._retire(state)
        fresh = state.next_epoch(self._take_bit())
        self.states[holder] = self._by_bit[fresh.bit] = fresh
        self.version += 1

    def _retire(self, state: HolderState) -> None:
        self.orphans -= state.orphans.blocks
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
                for h in list(islice(reversed(entries.own), max_blocks - freed)):
                    self.drop_entry(state, entries, h)
                    freed += 1
            if not state.entries:
                self.retired.pop()
                self.planes[GPU].open &= ~state.bit
                self._free_bits.append(state.bit)
                self._free_bits.sort(reverse=True)
        return freed

    def bytes_used(self) -> int:
        """Accounted bytes of blocks (the touched keys have a fixed share of the budget besides)."""
        gpu, cpu, disk, other = self.planes
        keys = gpu.size + cpu.size + disk.size + other.size
        return keys * KEY_BYTES + self.entries * ENTRY_BYTES + self.orphans * ORPHAN_BYTES

    def touch(self, keys: list[int]) -> None:
        """Remember that a lookup met `keys`. Two generations of them share an eighth of the budget."""
        if len(self._hot) + len(keys) > self._hot_limit:
            self._hot_before = self._hot
            self._hot = set()
        self._hot.update(keys[: self._hot_limit])

    def make_room(self, n_blocks: int, block_bytes: int) -> None:
        """Forget what must be forgotten so that `n_blocks` more stay within the budget."""
        self._room_bytes -= n_blocks * block_bytes
        if self._room_bytes >= 0:
            return
        hot_bytes = 2 * self._hot_limit * HOT_BYTES
        allowed = self.budget_bytes - hot_bytes - n_blocks * block_bytes
        while self.bytes_used() > allowed:
            if self.retired:
                self.sweep_slice(SLICE_BLOCKS)
            elif self.entries:
                self._evict(SLICE_BLOCKS)
            elif self.orphans:
                state = max(self.states.values(), key=lambda s: s.orphans.blocks)
                before = state.orphans.blocks
                state.orphans.drop_oldest()
                self.orphans += state.orphans.blocks - before
            else:
                break
        # all growth passes here, so what is free now need not be counted anew until it is used up
        self._room_bytes = max(0, allowed - self.bytes_used())

    def _evict(self, n_blocks: int) -> None:
        """Forget the oldest untouched blocks of the holder that has most; touched ones get a second chance."""
        state = max(self.states.values(), key=lambda s: s.entries)
        entries = max(state.all_maps(), key=lambda m: len(m.own))
        spared = 0
        for h, key in list(islice(entries.own.items(), n_blocks)):
            if key in self._hot or key in self._hot_before:
                entries.own[h] = entries.own.pop(h)
                spared += 1
            else:
                self.drop_entry(state, entries, h)
                self.evicted += 1
        if spared == n_blocks or len(entries.own) <= spared:
            self._hot_before = set()
            self._hot = set()

    def remove_worker(self, worker: str) -> None:
        for holder in [h for h in self.states if h[0] == worker]:
            self._retire(self.states.pop(holder))
        self.modes.pop(worker, None)
        self.version += 1

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

    @staticmethod
    def count_copy(entries: EntryMap, h: int, count: bool, copies: int = 1) -> None:
        if count:
            entries.copies[h] = min(entries.copies.get(h, 0) + copies, MAX_COPIES)

    def drop_entry(self, state: HolderState, entries: EntryMap, h: int) -> None:
        key = entries.own.pop(h)
        if entries.copies:
            entries.copies.pop(h, None)
        state.entries -= 1
        self.entries -= 1
        shared = state.shared[entries.tier]
        if shared and key in shared:
            shared[key] -= 1
            if not shared[key]:
                del shared[key]
        else:
            self.planes[entries.tier].remove(key, state.bit, state.loose[entries.tier])
