"""KV events into the table: what each event means for the blocks of one holder."""

from __future__ import annotations

from array import array
from threading import Lock
from typing import Any

from indexer.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from indexer.holder import GPU, MAX_COPIES, EntryMap, HolderState, tier_of
from indexer.keys import Extra, chain, event_extras, root
from indexer.match import Holder
from indexer.orphans import Place, Run
from indexer.plane import NO_PARENT, ROOT_PARENT
from indexer.table import ENTRY_BYTES, KEY_BYTES, SLICE_BLOCKS, Table

MAX_BLOCK_SIZE = 1 << 16
_MAX_ADAPTERS = 4096
"""Names of adapters remembered per worker."""

_MAX_PLACES = 256
UNKNOWN = -1
"""In place of a key: the block is not known (yet)."""


class Ingest:
    """Applies events to `table`, taking `lock` for at most SLICE_BLOCKS blocks at a time."""

    def __init__(self, table: Table, lock: Lock) -> None:
        self._table = table
        self._lock = lock
        self.adapters: dict[str, set[str]] = {}
        """Adapter names seen in each worker's events."""

    def apply(self, holder: Holder, events: list[KVEvent]) -> None:
        """Apply `events` in order to whatever state `holder` has by then; a holder removed meanwhile ends it."""
        i, n = 0, len(events)
        while i < n:
            state = self._table.states.get(holder)
            if state is None:
                return
            event = events[i]
            i += 1
            if isinstance(event, BlockStored):
                self._stored(state, event)
                if state.ready:
                    self._adopt(state)
            elif isinstance(event, BlockRemoved):
                removals = [event]
                while i < n and len(removals) < SLICE_BLOCKS and isinstance(events[i], BlockRemoved):
                    removals.append(events[i])  # type: ignore[arg-type]
                    i += 1
                self._removed(state, removals)
            else:
                self._cleared(state, event)

    def _stored(self, state: HolderState, event: BlockStored) -> None:
        hashes: list[Any] = event.block_hashes
        n = len(hashes)
        place = (event.medium, event.locality, event.group_idx, event.kv_cache_spec_kind, event.block_size)
        entries = state.where.get(place)
        if entries is None or len(event.token_ids) != n * entries.block_size or not n:
            with self._lock:
                entries = self._place(state, event)
            if entries is None:
                if n and not event.token_ids and state.counts_group(event.group_idx or 0, event.kv_cache_spec_kind):
                    self._stored_by_hash(state, event)
                return
            if len(state.where) >= _MAX_PLACES:
                state.where.clear()
            state.where[place] = entries
        block_size = entries.block_size
        try:
            tokens = array("I", event.token_ids).tobytes()
        except (OverflowError, TypeError):
            state.counters["malformed_events"] += 1
            return
        extra_keys = event.extra_keys
        extras = event_extras(extra_keys, n, event.lora_name) if extra_keys and any(extra_keys) else {}
        parent: Any = event.parent_block_hash
        with self._lock:
            if not self._table.is_current(state):
                return
            if event.lora_name is not None:
                self.learn_adapter(state.worker, event.lora_name)
            count_copies = state.physical and event.origin != "REUSED"
            if parent is None:
                if hashes[0] not in entries.own:
                    entries.note_root(hashes[0], state.batches)
                elif (
                    count_copies
                    and event.origin is None
                    and entries.tier == GPU
                    and entries.is_reannouncement(hashes[0], state.batches)
                ):
                    state.counters["reannounced_blocks"] += n
                    count_copies = False
                key = root(event.lora_name if event.lora_name is not None else event.lora_id, block_size)
            else:
                found = entries.own.get(parent)
                if found is None:
                    found = state.find_key(parent, entries)
                key = UNKNOWN if found is None else found
            distinct = n == 1 or (n <= SLICE_BLOCKS and len(set(hashes)) == n)
            if distinct and key != UNKNOWN and not state.orphans.blocks and entries.own.keys().isdisjoint(hashes):
                self._store_new(state, entries, hashes, tokens, extras, key, parent is None)
                return
        run = Run(parent, hashes, tokens, block_size, extras, entries.tier, entries.group)
        if key == UNKNOWN:
            self._await_parent(state, entries, run, count_copies)
            self._collect(state, hashes)
            return
        for start in range(0, n, SLICE_BLOCKS):
            with self._lock:
                if not self._table.is_current(state):
                    return
                key = self._store_slice(state, entries, run, key, start, min(start + SLICE_BLOCKS, n), count_copies)
        self._collect(state, hashes)

    def _place(self, state: HolderState, event: BlockStored) -> EntryMap | None:
        """Where the blocks of `event` belong; None when it has no tokens or is not to be indexed, which is counted."""
        n = len(event.block_hashes)
        group = event.group_idx or 0
        if not state.counts_group(group, event.kv_cache_spec_kind):
            state.ignored[group] = state.ignored.get(group, 0) + n
            state.counters["ignored_group_blocks"] += n
            return None
        if n and not event.token_ids:
            return None
        tier = tier_of(event.medium, event.locality)
        block_size = event.block_size
        if block_size is None and n:
            block_size, rest = divmod(len(event.token_ids), n)
            block_size = 0 if rest else block_size
        if not n or not block_size or not 0 < block_size <= MAX_BLOCK_SIZE or len(event.token_ids) != n * block_size:
            state.counters["malformed_events"] += 1
            return None
        entries = state.entry_map(tier, group, block_size)
        if entries is None:
            entries = state.new_entry_map(tier, group, block_size)
            self._table.version += 1
        if entries is None:
            state.counters["refused_block_size_events"] += 1
        return entries

    def learn_adapter(self, worker: str, name: str) -> None:
        learned = self.adapters.setdefault(worker, set())
        if name not in learned and len(learned) < _MAX_ADAPTERS:
            learned.add(name)
            self._table.version += 1
            if self._table.journal is not None:
                self._table.journal.learned(worker, name)

    def _store_new(
        self,
        state: HolderState,
        entries: EntryMap,
        hashes: list[int],
        tokens: bytes,
        extras: dict[int, Extra],
        key: int,
        at_root: bool,
    ) -> None:
        """The common case: blocks this holder does not have, under a parent it knows, and nothing waits for them."""
        n = len(hashes)
        self._table.make_room(n * (KEY_BYTES + ENTRY_BYTES))
        keys = chain(key, tokens, entries.block_size, 0, n, extras)
        if at_root:
            self._table.add_entries(state, entries, hashes, keys, ROOT_PARENT, True)
        else:
            held = bool(self._table.planes[entries.tier].holders(key) & state.bit)
            self._table.add_entries(state, entries, hashes, keys, key, held)
        state.stored += n

    def _stored_by_hash(self, state: HolderState, event: BlockStored) -> None:
        """Blocks named by hash alone (an offload of blocks that another tier already told us about)."""
        tier = tier_of(event.medium, event.locality)
        for start in range(0, len(event.block_hashes), SLICE_BLOCKS):
            hashes: list[Any] = event.block_hashes[start : start + SLICE_BLOCKS]
            with self._lock:
                if not self._table.is_current(state):
                    return
                self._store_known(state, hashes, tier, event.group_idx or 0)

    def _store_known(self, state: HolderState, hashes: list[int], tier: int, group: int) -> None:
        plane = self._table.planes[tier]
        for h in hashes:
            found = state.find_entry(h)
            if found is None:
                state.counters["unknown_offloaded_blocks"] += 1
                continue
            near, key = found
            entries = state.entry_map(tier, group, near.block_size) or state.new_entry_map(tier, group, near.block_size)
            if entries is None:
                state.counters["refused_block_size_events"] += 1
            elif h in entries.own:
                self._table.count_copy(entries, h, state.physical)
            else:
                self._table.make_room(KEY_BYTES + ENTRY_BYTES)
                self._table.add_entry(state, plane, entries, h, key, NO_PARENT, False)
                self._table.version += 1

    def _await_parent(self, state: HolderState, entries: EntryMap, run: Run, count_copies: bool) -> None:
        """The parent of `run` is unknown: keep its blocks for later, but for those that hang on a block we do know."""
        n = len(run.hashes)
        parent = run.parent
        for start in range(0, n, SLICE_BLOCKS):
            stop = min(start + SLICE_BLOCKS, n)
            with self._lock:
                if not self._table.is_current(state):
                    return
                own = entries.own
                key = own.get(parent) if parent is not None else None
                known = next((i for i in range(start, stop) if run.hashes[i] in own), stop)
                known_key = own[run.hashes[known]] if known < stop else UNKNOWN
                if key is None and known > start:
                    waiting = _cut(run, parent, start, known)
                    self._table.add_orphans(state, waiting, count_copies)
                    state.counters["orphaned_blocks"] += waiting.live
                if key is not None:
                    self._store_slice(
                        state, entries, _cut(run, parent, start, stop), key, 0, stop - start, count_copies
                    )
                elif known < stop:
                    h = run.hashes[known]
                    self._table.count_copy(entries, h, count_copies and h in own)
                    tail = _cut(run, h, known + 1, stop)
                    self._store_slice(state, entries, tail, known_key, 0, len(tail.hashes), count_copies)
            parent = run.hashes[stop - 1]

    def _store_slice(
        self, state: HolderState, entries: EntryMap, run: Run, key: int, start: int, stop: int, count_copies: bool
    ) -> int:
        """Blocks start..stop-1 of `run`, the first of which has parent `key`. Returns the last one's key."""
        self._table.make_room((stop - start) * (KEY_BYTES + ENTRY_BYTES))
        plane = self._table.planes[entries.tier]
        own = entries.own
        seen = run.seen
        counts = run.counts
        parent, held = key, bool(plane.holders(key) & state.bit)
        if start == 0 and run.parent is None:
            parent, held = ROOT_PARENT, True
        keys = chain(key, run.tokens, run.block_size, start, stop, run.extras)
        for i, key in enumerate(keys, start):
            h = run.hashes[i]
            if seen is not None:
                if h in seen:
                    state.counters["repeated_hashes"] += 1
                    parent, held = key, False
                    continue
                seen.add(h)
            if counts and not counts[i]:
                held = False
            else:
                known = own.get(h)
                if known is None:
                    self._table.add_entry(state, plane, entries, h, key, parent, held)
                    if not count_copies and not counts and state.orphans.where:
                        # the same resident copy, which had waited for its parent so far
                        self._remove_orphan(state, (entries.tier, entries.group, h), None)
                elif known != key:
                    state.counters["remapped_blocks"] += 1
                    self._table.drop_entry(state, entries, h)
                    self._table.add_entry(state, plane, entries, h, key, parent, held)
                elif not counts:
                    self._table.count_copy(entries, h, count_copies)
                else:
                    self._table.count_copy(entries, h, state.physical, counts[i])
                if counts and known is None and counts[i] > 1:
                    self._table.count_copy(entries, h, state.physical, counts[i] - 1)
                held = True
            parent = key
        state.stored += stop - start
        return key

    def _collect(self, state: HolderState, hashes: list[int]) -> None:
        """Make ready what waited for one of `hashes`: after all of an event, which may bring waiting blocks too."""
        for start in range(0, len(hashes), SLICE_BLOCKS):
            with self._lock:
                waiting = state.orphans.by_parent
                if not waiting or not self._table.is_current(state):
                    return
                for h in hashes[start : start + SLICE_BLOCKS]:
                    if h in waiting and state.find_entry(h) is not None:
                        with self._table.orphan_change(state):
                            state.ready.extend((joined, h, 0) for joined in state.orphans.take(h))

    def _adopt(self, state: HolderState) -> None:
        """Place the runs whose parent has come, and those that waited for them in turn."""
        while state.ready:
            with self._lock:
                if not self._table.is_current(state):
                    return
                run, parent, start = state.ready.popleft()
                entries = state.entry_map(run.tier, run.group, run.block_size)
                key = None if entries is None else state.find_key(parent, entries)
                if entries is None or key is None:
                    state.counters["refused_block_size_events"] += 1
                    continue
                if start:
                    key = chain(key, run.tokens, run.block_size, 0, start, run.extras)[-1]
                stop = min(start + SLICE_BLOCKS, len(run.hashes))
                self._store_slice(state, entries, run, key, start, stop, False)
                if stop < len(run.hashes):
                    state.ready.appendleft((run, parent, stop))
                    continue
            self._collect(state, run.hashes)

    def _removed(self, state: HolderState, events: list[BlockRemoved]) -> None:
        """At most SLICE_BLOCKS events; most engines send one per block."""
        if sum(len(event.block_hashes) for event in events) <= SLICE_BLOCKS:
            with self._lock:
                if self._table.is_current(state):
                    self._remove_all(state, events)
            return
        for event in events:
            for start in range(0, len(event.block_hashes), SLICE_BLOCKS):
                with self._lock:
                    if self._table.is_current(state):
                        self._remove_slice(state, event, start, start + SLICE_BLOCKS)

    def _remove_all(self, state: HolderState, events: list[BlockRemoved]) -> None:
        """`_remove_slice` for each, with the common case, one map and no copies, spelled out."""
        place: Any = None
        entries: EntryMap | None = None
        dropped = 0
        for event in events:
            here = (event.medium, event.locality, event.group_idx)
            if here != place:
                place, entries = here, self._only_map(state, event)
            hashes: list[Any] = event.block_hashes
            if entries is None or entries.copies or event.remaining_copy_counts is not None:
                self._remove_slice(state, event, 0, len(hashes))
                continue
            own = entries.own
            for h in hashes:
                key = own.pop(h, None)
                if key is None:
                    if not self._remove_orphan(state, (entries.tier, entries.group, h), None):
                        state.counters["unknown_removed_blocks"] += 1
                else:
                    dropped += 1
                    self._table.release(state, entries.tier, key)
        state.removed += dropped

    @staticmethod
    def _only_map(state: HolderState, event: BlockRemoved) -> EntryMap | None:
        group = event.group_idx or 0
        if not state.group_counts.get(group, group == 0):
            return None
        maps = state.maps.get((tier_of(event.medium, event.locality), group), ())
        return maps[0] if len(maps) == 1 else None

    def _remove_slice(self, state: HolderState, event: BlockRemoved, start: int, stop: int) -> None:
        hashes: list[Any] = event.block_hashes
        group = event.group_idx or 0
        if not state.group_counts.get(group, group == 0):
            state.ignored[group] = max(0, state.ignored.get(group, 0) - len(hashes[start:stop]))
            return
        tier = tier_of(event.medium, event.locality)
        remaining = event.remaining_copy_counts
        if remaining is not None and len(remaining) != len(hashes):
            remaining = None
        maps = state.maps.get((tier, group), ())
        for i in range(start, min(stop, len(hashes))):
            h = hashes[i]
            for entries in maps:
                if h in entries.own:
                    self._remove_copy(state, entries, h, None if remaining is None else remaining[i])
                    break
            else:
                if not self._remove_orphan(state, (tier, group, h), None if remaining is None else remaining[i]):
                    state.counters["unknown_removed_blocks"] += 1

    def _remove_copy(self, state: HolderState, entries: EntryMap, h: int, remaining: int | None) -> None:
        state.removed += 1
        copies = entries.copies
        if remaining:
            if remaining > 1:
                copies[h] = min(remaining - 1, MAX_COPIES)
            else:
                copies.pop(h, None)
        elif remaining is None and copies and state.physical and h in copies:
            copies[h] -= 1
            if not copies[h]:
                del copies[h]
        else:
            self._table.drop_entry(state, entries, h)

    def _remove_orphan(self, state: HolderState, place: Place, remaining: int | None) -> bool:
        if remaining is None and not state.physical:
            remaining = 0
        with self._table.orphan_change(state):
            return state.orphans.remove(place, remaining)

    def _cleared(self, state: HolderState, event: AllBlocksCleared) -> None:
        state.counters["clears"] += 1
        tier = None if event.medium is None else tier_of(event.medium)
        with self._lock:
            if not self._table.is_current(state):
                return
            maps = state.all_maps()
            if tier is None or (not state.orphans.blocks and not any(m.own for m in maps if m.tier != tier)):
                self._table.clear((state.worker, state.rank))
                return
            waiting = state.orphans.places(tier)
        for start in range(0, len(waiting), SLICE_BLOCKS):
            with self._lock:
                if not self._table.is_current(state):
                    return
                for place in waiting[start : start + SLICE_BLOCKS]:
                    self._remove_orphan(state, place, 0)
        for entries in [m for m in maps if m.tier == tier]:
            while entries.own:
                with self._lock:
                    if not self._table.is_current(state):
                        return
                    self._table.drop_latest(state, entries, SLICE_BLOCKS)


def _cut(run: Run, parent: int | None, start: int, stop: int) -> Run:
    width = 4 * run.block_size
    extras: dict[int, Extra] = {i - start: extra for i, extra in run.extras.items() if start <= i < stop}
    tokens = run.tokens[start * width : stop * width]
    return Run(parent, run.hashes[start:stop], tokens, run.block_size, extras, run.tier, run.group)
