"""A copy of another index, kept by its changes (`journal.py`): it answers lookups as that one does."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from indexer.holder import CPU, DISK, TIER_NAMES, EntryMap, HolderState
from indexer.ingest import MAX_BLOCK_SIZE
from indexer.journal import CHILD, FIRST, Change, digest_of
from indexer.match import Holder
from indexer.plane import NO_PARENT, ROOT_PARENT
from indexer.prefix import PrefixIndex
from indexer.table import ENTRY_BYTES, KEY_BYTES, SLICE_BLOCKS


class Replica(PrefixIndex):
    """What its blocks are, changes alone say: `clear` and `remove_worker` leave them, as the index it is a copy of goes
    by the same engines and says so itself. Where a copy needs more than its own budget it forgets what it must, and is
    `trimmed` from then on.

    One thread at a time may change it.
    """

    @property
    def is_trimmed(self) -> bool:
        return self._table.evicted > 0

    def clear(self, worker: str, rank: int | None = None) -> None:
        """Nothing: a clear that overtook the changes of before it would be undone by them."""

    def remove_worker(self, worker: str) -> None:
        """Forget what it serves."""
        with self._lock:
            self._serves.pop(worker, None)
            self._table.version += 1

    def drop(self, worker: str, rank: int | None = None) -> None:
        """Forget its blocks, while nobody tells changes."""
        super().clear(worker, rank)

    def take(self, change: Change) -> bool:
        """Take in a change. False where it has a digest and that is not what is here. Raises ValueError for what no
        index can say.
        """
        holder = (change.worker, change.rank)
        if change.adapter is not None:
            self._learn(change.worker, change.adapter)
        if change.gone:
            self._forget(holder)
        elif change.cleared:
            super().clear(*holder)
        if change.removed:
            self._remove(holder, change.tier, change.removed)
        if change.stored:
            self._store(holder, change)
        if self._table.retired:
            self.sweep(4 * SLICE_BLOCKS)
        return change.digest is None or change.digest == self._undisturbed_digest(holder)

    def replace(self, holder: Holder, changes: Sequence[Change]) -> None:
        """It holds what `changes` store (see `Journal.read`) and nothing else. Raises ValueError, as `take`."""
        for tier in range(len(TIER_NAMES)):
            wanted: set[int] = set()
            for change in changes:
                if change.tier == tier:
                    wanted.update(change.stored)
            with self._lock:
                state = self._table.states.get(holder)
                maps = [] if state is None else [list(m.own) for m in state.all_maps() if m.tier == tier]
            self._remove(holder, tier, [key for own in maps for key in own if key not in wanted])
        for change in changes:
            self._store(holder, change)

    def keep_only(self, holders: Collection[Holder]) -> None:
        """Forget all others."""
        with self._lock:
            others = [holder for holder in self._table.states if holder not in holders]
        for holder in others:
            self._forget(holder)

    def digest(self, holder: Holder) -> tuple[int, int]:
        """(blocks, their keys summed up by tier). For the thread that changes it, so that lookups need not wait.

        Raises RuntimeError where `drop` comes in between.
        """
        state = self._table.states.get(holder)
        return (0, 0) if state is None else digest_of(state)

    def _undisturbed_digest(self, holder: Holder) -> tuple[int, int]:
        while True:
            try:
                return self.digest(holder)
            except RuntimeError:  # Which the next time finds dropped.
                continue

    def _learn(self, worker: str, adapter: str) -> None:
        with self._lock:
            self._ingest.adapters.setdefault(worker, set()).add(adapter)
            self._table.version += 1

    def _forget(self, holder: Holder) -> None:
        with self._lock:
            self._table.remove_holder(holder)

    def _remove(self, holder: Holder, tier: int, keys: list[int]) -> None:
        for start in range(0, len(keys), SLICE_BLOCKS):
            with self._lock:
                state = self._table.states.get(holder)
                if state is None:
                    return
                for entries in [m for m in state.all_maps() if m.tier == tier]:
                    own = entries.own
                    for key in keys[start : start + SLICE_BLOCKS]:
                        if own.pop(key, None) is not None:
                            self._table.release(state, tier, key)

    def _store(self, holder: Holder, change: Change) -> None:
        tier, keys = change.tier, change.stored
        if not 0 <= tier < len(TIER_NAMES) or not 0 < change.block_size <= MAX_BLOCK_SIZE:
            raise ValueError("not what an index has told")
        with self._lock:
            state = self._table.state(*holder)
            entries = self._entries(state, tier, change.block_size)
        if not change.runs:
            for start in range(0, len(keys), SLICE_BLOCKS):
                self._add(state, entries, keys[start : start + SLICE_BLOCKS], None)
            return
        parents = iter(change.parents)
        start = 0
        for run in change.runs:
            kind, stop = run & 3, start + (run >> 2)
            parent = ROOT_PARENT if kind == FIRST else next(parents, NO_PARENT) if kind == CHILD else NO_PARENT
            while start < stop:
                part = keys[start : min(start + SLICE_BLOCKS, stop)]
                if not part:
                    raise ValueError("runs of more blocks than there are")
                self._add(state, entries, part, parent)
                parent = part[-1]
                start += len(part)

    def _add(self, state: HolderState, entries: EntryMap, keys: list[int], parent: int | None) -> None:
        """`parent` None: the keys are in no order."""
        table, own = self._table, entries.own
        with self._lock:
            if not table.is_current(state):
                return
            table.make_room(len(keys) * (KEY_BYTES + ENTRY_BYTES))
            plane = table.planes[entries.tier]
            if parent is None:
                for key in keys:
                    if key not in own:
                        table.add_entry(state, plane, entries, key, key, NO_PARENT, False)
                return
            held = parent == ROOT_PARENT or (parent >= 0 and bool(plane.holders(parent) & state.bit))
            if own.keys().isdisjoint(keys) and len(set(keys)) == len(keys):
                table.add_entries(state, entries, keys, keys, parent, held)
                return
            for key in keys:
                if key not in own:
                    table.add_entry(state, plane, entries, key, key, parent, held)
                parent, held = key, True

    def _entries(self, state: HolderState, tier: int, block_size: int) -> EntryMap:
        """Which block sizes may be was decided where the events are."""
        entries = state.entry_map(tier, 0, block_size)
        if entries is None:
            entries = EntryMap(tier, 0, block_size)
            state.maps.setdefault((tier, 0), []).append(entries)
            state.tiered = state.tiered or tier in (CPU, DISK)
            self._table.version += 1
        return entries
