"""What one (worker, rank) holds, by the engine's own block hashes."""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice
from typing import Any

from indexer.orphans import Orphans, Run

GPU, CPU, DISK, OTHER = range(4)
TIER_NAMES = ("gpu", "cpu", "disk", "other")
_TIERS = {
    "gpu": GPU,
    "cpu": CPU,
    "host": CPU,
    "storage": DISK,
    "disk": DISK,
    "ssd": DISK,
    "nvme": DISK,
    "fs": DISK,
}
FULL_PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""KV-cache groups whose blocks prove that the whole prefix up to them is usable (vLLM `kv_cache_spec_kind`)."""

MAX_BLOCK_SIZES = 4
MAX_GROUPS = 64
"""More block sizes or KV-cache groups than these, from one (worker, rank), are counted and not indexed."""
ROOT_COPY_BATCHES = 3
"""A second announcement of a first block counts as another physical copy only this many batches after the first one. An
engine computes a first block twice only when both requests are scheduled before either is cached, that is within a
step or two; anything later is the engine re-announcing what it holds (`kv_cache_report_mode=full`)."""

MAX_COPIES = 1024


def tier_of(medium: str | None, locality: str | None = None) -> int:
    """The tier of a medium. Blocks that are REMOTE, or in a medium we do not know, are counted but never credited."""
    if locality is not None and locality.upper() == "REMOTE":
        return OTHER
    return GPU if not medium else _TIERS.get(medium.lower(), OTHER)


class EntryMap:
    """Engine hash -> our key, for one (tier, KV-cache group, block size). `copies` counts physical copies beyond the
    first.
    """

    __slots__ = ("_oldest", "_roots_limit", "block_size", "copies", "group", "own", "roots", "tier")

    def __init__(self, tier: int, group: int, block_size: int) -> None:
        self.tier = tier
        self.group = group
        self.block_size = block_size
        self.own: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        self.roots: dict[int, int] = {}
        """First blocks -> the batch that stored them, for the latest ones."""
        self._roots_limit = 256
        self._oldest: deque[int] = deque()

    def oldest(self, n_blocks: int) -> list[int]:
        """Up to `n_blocks` hashes in the order they were stored, each given once per round through all of them."""
        found: list[int] = []
        while len(found) < n_blocks and self.own:
            if not self._oldest:
                if found:
                    break
                # a scan from the front passes over all that was removed there, so it is made for many at a time
                self._oldest.extend(islice(self.own, 4096))
            h = self._oldest.popleft()
            if h in self.own:
                found.append(h)
        return found

    def note_root(self, first_hash: int, batch: int) -> None:
        self.roots[first_hash] = batch
        if len(self.roots) > self._roots_limit:
            self.roots = {h: at for h, at in self.roots.items() if batch - at <= ROOT_COPY_BATCHES}
            self._roots_limit = 256 + 2 * len(self.roots)

    def is_reannouncement(self, first_hash: int, batch: int) -> bool:
        """Whether a known first block that is stored again is old enough to be no second physical copy."""
        stored_at = self.roots.get(first_hash)
        return stored_at is None or batch - stored_at > ROOT_COPY_BATCHES


class HolderState:
    """The blocks of one (worker, rank) in one epoch. Clearing throws the state away and starts another, under another
    bit.
    """

    __slots__ = (
        "batches",
        "bit",
        "counters",
        "entries",
        "group_counts",
        "ignored",
        "is_retired",
        "loose",
        "maps",
        "orphans",
        "physical",
        "rank",
        "ready",
        "removed",
        "shared",
        "stored",
        "tiered",
        "where",
        "worker",
    )

    def __init__(self, worker: str, rank: int, bit: int, orphan_limit_blocks: int, physical: bool) -> None:
        self.worker = worker
        self.rank = rank
        self.bit = bit
        self.physical = physical
        self.maps: dict[tuple[int, int], list[EntryMap]] = {}
        self.shared: list[dict[int, int]] = [{} for _ in TIER_NAMES]
        """Per tier: our key -> how many further entries (other groups, other hashes) name the same block."""
        self.loose: list[dict[int, int]] = [{} for _ in TIER_NAMES]
        self.orphans = Orphans(orphan_limit_blocks)
        self.ready: deque[tuple[Run, int, int]] = deque()
        """Former orphans whose parent has come: (run, the parent's hash, blocks already placed)."""
        self.tiered = False
        """Whether it ever held blocks below the GPU in this epoch."""
        self.is_retired = False
        """Whether another state has taken its place, so that its blocks only wait to be swept."""
        self.entries = 0
        self.batches = 0
        self.stored = 0
        self.removed = 0
        self.ignored: dict[int, int] = {}
        self.group_counts: dict[int, bool] = {}
        """KV-cache group -> whether it proves a full prefix; learned, as later events may leave the kind out."""
        self.counters: Counter[str] = Counter()
        self.where: dict[tuple[Any, ...], EntryMap] = {}
        """Entry maps by what events say of themselves: (medium, locality, group, its kind, block size)."""

    def next_epoch(self, bit: int) -> HolderState:
        """An empty state for the same engine: what was learned and counted stays, every block is gone."""
        fresh = HolderState(self.worker, self.rank, bit, self.orphans.limit_blocks, self.physical)
        fresh.group_counts = self.group_counts
        fresh.counters = self.counters
        fresh.batches = self.batches
        fresh.stored = self.stored
        fresh.removed = self.removed
        fresh.orphans.dropped = self.orphans.dropped
        return fresh

    def is_empty(self) -> bool:
        return not self.entries and not self.orphans.blocks

    def counts_group(self, group: int, kind: str | None) -> bool:
        """Whether blocks of this KV-cache group prove a full prefix. A group beyond the first must have said so."""
        if kind is not None and (group in self.group_counts or len(self.group_counts) < MAX_GROUPS):
            self.group_counts[group] = kind in FULL_PREFIX_KINDS
        return self.group_counts.get(group, group == 0)

    def entry_map(self, tier: int, group: int, block_size: int) -> EntryMap | None:
        """The entry map of that place, if it exists."""
        for entry_map in self.maps.get((tier, group), ()):
            if entry_map.block_size == block_size:
                return entry_map
        return None

    def new_entry_map(self, tier: int, group: int, block_size: int) -> EntryMap | None:
        """Begin one; None when the block size must be refused: finer than the GPU's, or one of too many."""
        if tier != GPU:
            gpu_sizes = [m.block_size for m in self.all_maps() if m.tier == GPU]
            if gpu_sizes and block_size < min(gpu_sizes):
                return None
        sizes = {m.block_size for m in self.all_maps()}
        if block_size not in sizes and len(sizes) >= MAX_BLOCK_SIZES:
            return None
        self.tiered = self.tiered or tier in (CPU, DISK)
        entry_map = EntryMap(tier, group, block_size)
        self.maps.setdefault((tier, group), []).append(entry_map)
        return entry_map

    def all_maps(self) -> list[EntryMap]:
        return [m for maps in self.maps.values() for m in maps]

    def find_key(self, engine_hash: int, near: EntryMap) -> int | None:
        """Our key of a block that any tier or group with the block size of `near` knows."""
        key = near.own.get(engine_hash)
        if key is None and len(self.maps) > 1:
            for entry_map in self.all_maps():
                if entry_map.block_size == near.block_size and (key := entry_map.own.get(engine_hash)) is not None:
                    return key
        return key

    def find_entry(self, engine_hash: int) -> tuple[EntryMap, int] | None:
        """Where any tier or group knows a block by its hash."""
        for entry_map in self.all_maps():
            key = entry_map.own.get(engine_hash)
            if key is not None:
                return entry_map, key
        return None

    def tokens(self) -> dict[str, int]:
        """Tokens of its blocks, by tier."""
        tokens = dict.fromkeys(TIER_NAMES, 0)
        for entry_map in self.all_maps():
            tokens[TIER_NAMES[entry_map.tier]] += len(entry_map.own) * entry_map.block_size
        return tokens

    def stats(self) -> dict[str, Any]:
        blocks = dict.fromkeys(TIER_NAMES, 0)
        for entry_map in self.all_maps():
            blocks[TIER_NAMES[entry_map.tier]] += len(entry_map.own)
        return {
            "blocks": blocks,
            "tokens": self.tokens(),
            "block_sizes": sorted({m.block_size for m in self.all_maps()}),
            "extra_copies": sum(sum(m.copies.values()) for m in self.all_maps()),
            "orphan_blocks": self.orphans.blocks,
            "orphan_blocks_dropped": self.orphans.dropped,
            "blocks_without_parent": len(self.loose[GPU]),
            "ignored_group_blocks": dict(sorted((str(g), n) for g, n in self.ignored.items() if n)),
            "batches": self.batches,
            "stored_blocks": self.stored,
            "removed_blocks": self.removed,
            "counters": dict(sorted(self.counters.items())),
        }
