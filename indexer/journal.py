"""What changes in an index, in order, for those who keep a copy of it by keys alone (`replica.py`).

A change says who holds which keys from now on, or no longer: doing it twice changes nothing. So a copy can begin with
what the index is read to hold while it goes on changing, a holder at a time, and then take in every change since before
that reading began: whatever the reading missed or had already, the last change of a key is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from threading import Lock

import msgspec

from indexer.holder import GPU, HolderState
from indexer.match import Holder
from indexer.plane import N_SHARDS, NO_PARENT, ROOT_PARENT
from indexer.table import Table

FIRST, CHILD, UNKNOWN = range(3)
"""What the first block of a run is: a prompt's first one, a child of the next one of `parents`, or nobody knows."""

MOST_KEYS = 8192
"""Of one change, or a few more."""
_LOW = N_SHARDS - 1
_U64 = (1 << 64) - 1


class Change(msgspec.Struct, kw_only=True):
    """Of one holder, in this order: it is forgotten altogether (`gone`), or its blocks are (`cleared`); it no longer
    holds `removed`; it holds `stored`, both in `tier`.

    `runs` cuts `stored` into chains, in which each key is the parent of the next: ``length << 2 | kind`` of the first.
    Without runs the keys are in no order. `digest` is what all of its blocks come to at this point; `adapter` a name
    that its events have given (its rank is of no matter then).
    """

    worker: str
    rank: int
    gone: bool = False
    cleared: bool = False
    tier: int = GPU
    removed: list[int] = []
    block_size: int = 0
    stored: list[int] = []
    runs: list[int] = []
    parents: list[int] = []
    digest: tuple[int, int] | None = None
    adapter: str | None = None


def digest_of(state: HolderState) -> tuple[int, int]:
    """(blocks, their keys summed up by tier) of one holder, which does not change meanwhile.

    Some at a time, as other threads stand still while a builtin runs.
    """
    n_blocks, total = state.entries, 0
    for entries in state.all_maps():
        keys = iter(entries.own.values())
        while part := list(islice(keys, MOST_KEYS)):
            total += (entries.tier + 1) * sum(part)
    for tier, shared in enumerate(state.shared):
        n_blocks -= sum(shared.values())
        total -= (tier + 1) * sum(key * more for key, more in shared.items())
    return n_blocks, total & _U64


class Taken(msgspec.Struct, frozen=True):
    """`holders` are those there are after `changes`. `is_lost`: there were too many changes for those to be all, and
    every copy has to begin anew.
    """

    changes: list[Change]
    is_lost: bool
    holders: list[Holder]


class Journal:
    """Collects changes until they are taken. More than `most_blocks` of them are thrown away, which `take` tells.

    `wake` is called with the lock held, once there is something to take. What is noted is noted by `table`, whose owner
    holds `lock`; everything else may be called from any thread.
    """

    def __init__(
        self,
        table: Table,
        lock: Lock,
        adapters: Mapping[str, set[str]],
        *,
        most_blocks: int,
        wake: Callable[[], None],
    ) -> None:
        self._table = table
        self._lock = lock
        self._adapters = adapters
        self._most_blocks = most_blocks
        self._wake = wake
        self._changes: list[Change] = []
        self._open: Change | None = None
        self._of: HolderState | None = None
        self._tier = GPU
        self._removed: list[int] | None = None
        """Of the open change, while nothing is stored in it; counted when it is closed."""
        self._n_blocks = 0
        self._is_lost = False

    # ---- noted, with the lock held -----------------------------------------------------------------------------------

    def stored(self, state: HolderState, tier: int, block_size: int, parent: int, keys: list[int]) -> None:
        """`state` holds `keys` too, each the parent of the next; `parent` as for `Plane.add`."""
        change = self._open
        if (
            change is None
            or self._of is not state
            or change.tier != tier
            or len(change.stored) >= MOST_KEYS
            or (change.block_size and change.block_size != block_size)
        ):
            change = self._begin(state, tier)
        change.block_size = block_size
        if change.stored and parent == change.stored[-1]:
            change.runs[-1] += len(keys) << 2
        elif parent >= 0:
            change.runs.append(len(keys) << 2 | CHILD)
            change.parents.append(parent)
        else:
            change.runs.append(len(keys) << 2 | (FIRST if parent == ROOT_PARENT else UNKNOWN))
        change.stored += keys
        self._removed = None
        self._count(len(keys))

    def removed(self, state: HolderState, tier: int, key: int) -> None:
        # One call for each block that is removed: most of them one after the other, of one holder.
        removed = self._removed
        if self._of is state and removed is not None and self._tier == tier and len(removed) < MOST_KEYS:
            removed.append(key)
            return
        self._removed = self._begin(state, tier).removed
        self._removed.append(key)

    def cleared(self, state: HolderState) -> None:
        self._note(Change(worker=state.worker, rank=state.rank, cleared=True))

    def gone(self, state: HolderState) -> None:
        self._note(Change(worker=state.worker, rank=state.rank, gone=True))

    def learned(self, worker: str, adapter: str) -> None:
        self._note(Change(worker=worker, rank=0, adapter=adapter))

    # ---- read --------------------------------------------------------------------------------------------------------

    def take(self) -> Taken:
        """The changes since the last time."""
        with self._lock:
            taken = Taken(changes=self._changes, is_lost=self._is_lost, holders=list(self._table.states))
            self._changes, self._open, self._of, self._removed = [], None, None, None
            self._n_blocks, self._is_lost = 0, False
        return taken

    def holders(self) -> list[Holder]:
        with self._lock:
            return list(self._table.states)

    def adapters_of(self, worker: str) -> list[str]:
        """Those that its events have named."""
        with self._lock:
            return sorted(self._adapters.get(worker, ()))

    def read(self, holder: Holder) -> list[Change]:
        """What it holds, as changes that make a holder of nothing into it; more change while it is read."""
        with self._lock:
            state = self._table.states.get(holder)
            if state is None:
                return []
            held: dict[tuple[int, int], dict[int, None]] = {}
            for entries in state.all_maps():  # Of several KV-cache groups in one tier, one may have another's parents.
                if entries.own:
                    held.setdefault((entries.tier, entries.block_size), {}).update(dict.fromkeys(entries.own.values()))
            loose = dict(state.loose[GPU])
        found = []
        for (tier, block_size), named in held.items():
            keys = list(named)
            change = Change(worker=holder[0], rank=holder[1], tier=tier, block_size=block_size, stored=keys)
            if self._table.planes[tier].linked:
                change.runs, change.parents = self._runs(keys, loose, self._table.planes[tier].links)
            found.append(change)
        return found

    def note_digest(self, holder: Holder) -> None:
        """Put what its blocks come to among the changes, where it is true."""
        with self._lock:
            state = self._table.states.get(holder)
            if state is not None:
                self._note(Change(worker=holder[0], rank=holder[1], digest=digest_of(state)))

    # ---- rules -------------------------------------------------------------------------------------------------------

    def _begin(self, state: HolderState, tier: int) -> Change:
        change = Change(worker=state.worker, rank=state.rank, tier=tier, removed=[], stored=[], runs=[], parents=[])
        self._note(change)
        self._open, self._of, self._tier = change, state, tier
        return change

    def _note(self, change: Change) -> None:
        n_removed = 0 if self._open is None else len(self._open.removed)
        self._open = self._of = self._removed = None
        self._changes.append(change)
        if len(self._changes) == 1:
            self._wake()
        self._count(1 + n_removed)

    def _count(self, n_blocks: int) -> None:
        self._n_blocks += n_blocks
        if self._n_blocks > self._most_blocks:
            self._changes, self._open, self._of, self._removed = [], None, None, None
            self._n_blocks, self._is_lost = 0, True

    @staticmethod
    def _runs(
        keys: list[int], loose: Mapping[int, int], links: list[dict[int, int | set[int]]]
    ) -> tuple[list[int], list[int]]:
        """How `keys`, of one holder, hang together. A block that lacks its parent is in `loose`; else it is in the
        links of a key that is held too, or a first one. Links of blocks that are held stay, whatever changes meanwhile.
        """
        starts: list[int] = []
        before = NO_PARENT
        for i, key in enumerate(keys):
            children = links[before & _LOW].get(before) if before >= 0 else None
            if key in loose or not (key in children if isinstance(children, set) else children == key):
                starts.append(i)
            before = key
        unknown = {keys[i] for i in starts if keys[i] not in loose}
        parent_of = dict(loose)
        for key in keys:
            children = links[key & _LOW].get(key)
            if isinstance(children, set):
                for child in children & unknown:
                    parent_of[child] = key
            elif children in unknown:
                parent_of[children] = key
        runs, parents = [], []
        for start, stop in zip(starts, [*starts[1:], len(keys)], strict=True):
            parent = parent_of.get(keys[start], ROOT_PARENT)
            kind = CHILD if parent >= 0 else FIRST if parent == ROOT_PARENT else UNKNOWN
            runs.append((stop - start) << 2 | kind)
            if kind == CHILD:
                parents.append(parent)
        return runs, parents
