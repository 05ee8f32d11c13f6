"""The radix index of KV blocks: which worker holds how much of a prompt.

Theory of operation. Each (worker, rank) has a bit. A block is a key (`keys.py`) in its tier's table of holder masks
(`plane.py`); an engine's own hashes lead to keys through per-holder entry maps (`holder.py`), so removals need no
tokens. A block whose parent is unknown waits (`orphans.py`). Clearing a holder retires its bit at once and sweeps its
blocks later, a few at a time (`table.py`). One lock guards everything and no event holds it for more than SLICE_BLOCKS
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock
from typing import Any

from indexer.events import EventBatch
from indexer.held import HeldBlocks, packed
from indexer.holder import CPU, DISK, GPU, MAX_GROUPS, TIER_NAMES
from indexer.ingest import MAX_BLOCK_SIZE, Ingest
from indexer.journal import Journal, digest_of
from indexer.keys import Tokens
from indexer.match import Holder, Match
from indexer.plane import NO_PARENT, Chain, joint_depths
from indexer.prompt import Prompt
from indexer.saved_rank import SavedPlace, SavedRank, restore_places, save_places
from indexer.serves import UNDECLARED, Serves
from indexer.table import SLICE_BLOCKS, Table

_MAX_RANKS = 256
_CACHED_MASKS = 4096
_CACHED_PLANS = 1024

Plan = list[tuple[str | int | None, int, int, int]]
"""[(adapter, block size, mask of the holders to ask under that namespace, those of them with blocks below the GPU)]."""


class PrefixIndex:
    """Which (worker, rank) holds how much of a prompt, from engines' KV events.

    `budget_bytes` bounds the accounted memory: past it the oldest blocks that no lookup touched lately are forgotten.
    `orphan_blocks` bounds, per (worker, rank), the blocks that wait for their parent. `removal_mode` says what one
    BlockRemoved means: ``physical``, one of the copies (vLLM today), or ``logical``, the last one; `set_worker` can
    set it per worker. Thread-safe. Raises ValueError for a budget under 1 MiB.
    """

    def __init__(
        self, *, budget_bytes: int = 2 << 30, orphan_blocks: int = 65536, removal_mode: str = "physical"
    ) -> None:
        self._lock = Lock()
        self._writer = Lock()
        self._table = Table(budget_bytes, orphan_blocks, _is_physical(removal_mode))
        self._ingest = Ingest(self._table, self._lock)
        self._serves: dict[str, Serves] = {}
        self._plans: dict[tuple[str | None, str | int | None], Plan] = {}
        self._masks: dict[int, tuple[Holder, ...]] = {}
        self._matches: dict[int, Match] = {}
        self._version = 0
        self._lookups = 0
        self._refused_ranks = 0

    def keep_journal(self, wake: Callable[[], None], *, most_blocks: int = 1 << 22) -> Journal:
        """From now on what changes is noted, for copies (`Replica`)."""
        with self._lock:
            self._table.journal = journal = Journal(
                self._table, self._lock, self._ingest.adapters, most_blocks=most_blocks, wake=wake
            )
        return journal

    def set_worker(
        self,
        worker: str,
        *,
        models: Iterable[str] | None = None,
        loras: Iterable[str] = (),
        removal_mode: str | None = None,
    ) -> None:
        """Say what `worker` serves: its base model's names (all are one namespace) and its adapters' names."""
        physical = None if removal_mode is None else _is_physical(removal_mode)
        with self._lock:
            if models is not None:
                self._serves[worker] = Serves(models, loras)
            if physical is not None:
                self._table.modes[worker] = physical
                for (name, _), state in self._table.states.items():
                    if name == worker:
                        state.physical = physical
            self._table.version += 1

    def remove_worker(self, worker: str) -> None:
        """Forget `worker` altogether: its blocks, names and counters."""
        with self._lock:
            self._table.remove_worker(worker)
            self._ingest.adapters.pop(worker, None)
            self._serves.pop(worker, None)

    def clear(self, worker: str, rank: int | None = None) -> None:
        """Forget every block of `worker` (of one rank, if given), in constant time per rank."""
        with self._lock:
            for holder in [h for h in self._table.states if h[0] == worker and rank in (None, h[1])]:
                self._table.clear(holder)

    def clear_model(self, model: str) -> None:
        """Forget every block of every worker that serves `model` (its weights changed)."""
        with self._lock:
            for holder in list(self._table.states):
                if self._namespace(holder[0], model, None)[0]:
                    self._table.clear(holder)

    def apply(self, worker: str, rank: int, batch: EventBatch) -> None:
        """Take in one batch of `worker`. The batch's own rank, where it names one, is the rank its blocks go to."""
        holder = (worker, rank if batch.data_parallel_rank is None else batch.data_parallel_rank)
        # one batch after the other, while lookups and clears come between any two slices of one
        with self._writer:
            with self._lock:
                if not self._admits(holder):
                    self._refused_ranks += 1
                    return
                state = self._table.state(*holder)
                state.batches += 1
                if batch.malformed or batch.unknown:
                    state.counters["malformed_events"] += batch.malformed
                    state.counters["unknown_events"] += sum(batch.unknown.values())
            self._ingest.apply(holder, batch.events)
        if self._table.retired:
            self.sweep(4 * SLICE_BLOCKS)

    def _admits(self, holder: Holder) -> bool:
        """Whether events of this rank are taken; a worker cannot bring up ranks without end."""
        states = self._table.states
        return holder in states or sum(worker == holder[0] for worker, _ in states) < _MAX_RANKS

    def sweep(self, max_blocks: int) -> int:
        """Free up to `max_blocks` blocks of cleared holders; returns how many were freed. Also done by `apply`."""
        freed = 0
        while self._table.retired and freed < max_blocks:
            with self._lock:
                freed += self._table.sweep_slice(min(SLICE_BLOCKS, max_blocks - freed))
        return freed

    def match(
        self,
        tokens: Tokens | Prompt,
        *,
        model: str | None = None,
        lora: str | int | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> dict[Holder, Match]:
        """How much of `tokens` each (worker, rank) that serves `model` holds; holders of nothing are left out.

        `tokens` is best a uint32 buffer. `lora` names an adapter (named as the model, as OpenAI clients do, works too).
        `extra_keys` has one entry per block (None or that block's ids) or consists of MediaSpan.
        A `Prompt` in place of `tokens` brings its salt and media along and is hashed once over several lookups.
        Raises ValueError for ids that are not uint32.
        """
        prompt = tokens if isinstance(tokens, Prompt) else Prompt(tokens, cache_salt=cache_salt, extra_keys=extra_keys)
        with self._lock:
            self._lookups += 1
            plan = self._current_plan(model, lora)
        for adapter, block_size, _, _ in plan:
            prompt.chain(adapter, block_size)  # what media and salt add to its blocks is worked out without the lock
        out: dict[Holder, Match] = {}
        with self._lock:
            for adapter, block_size, candidates, tiered in self._current_plan(model, lora):
                chain = prompt.chain(adapter, block_size)
                if chain.n_blocks:
                    self._match(chain, candidates, tiered, out)
        return out

    def holds(self, worker: str, rank: int, key: int) -> bool:
        """Whether that (worker, rank) has the block with our key `key` on the GPU."""
        with self._lock:
            state = self._table.states.get((worker, rank))
            return state is not None and bool(self._table.planes[GPU].holders(key) & state.bit)

    def blocks(self, worker: str) -> int:
        """Blocks all its ranks' events say they hold, of all tiers together."""
        with self._lock:
            return sum(state.entries for (name, _), state in self._table.states.items() if name == worker)

    def resident_blocks(self, holder: Holder) -> int:
        """Blocks the rank's events say it holds, of all tiers together."""
        state = self._table.states.get(holder)
        return 0 if state is None else state.entries

    def _match(self, prompt: Chain, candidates: int, tiered: int, out: dict[Holder, Match]) -> None:
        planes = self._table.planes
        gpu = planes[GPU].depths(prompt, candidates)
        size = prompt.block_size
        found: dict[Holder, list[int]] = {}
        if tiered:
            lower = [planes[GPU], planes[CPU], planes[DISK]]
            for column, depths in enumerate(
                (
                    planes[GPU].depths(prompt, tiered),
                    planes[CPU].depths(prompt, tiered),
                    planes[DISK].depths(prompt, tiered),
                    joint_depths(lower, prompt, tiered),
                )
            ):
                for depth, mask in depths:
                    for holder in self._holders(mask):
                        found.setdefault(holder, [0, 0, 0, 0])[column] = depth * size
        deepest = gpu[-1][0] if gpu else 0
        for columns in found.values():
            deepest = max(deepest, columns[3] // size)
        if deepest and self._table.bytes_used() > self._table.budget_bytes // 2:
            self._table.touch(prompt.keys[:deepest])
        fresh = not out
        for depth, mask in gpu:
            match = self._gpu_match(depth * size)
            holders = self._masks.get(mask) or self._holders(mask)
            if not fresh:
                for holder in holders:
                    out[holder] = _deeper(out.get(holder), match)
            elif len(holders) == 1:
                out[holders[0]] = match
            else:
                out |= dict.fromkeys(holders, match)
        for holder, (on_gpu, cpu, disk, reach) in found.items():
            out[holder] = _deeper(out.get(holder), Match(on_gpu, cpu, disk, reach))

    def _namespace(self, worker: str, model: str | None, lora: str | int | None) -> tuple[bool, str | int | None]:
        serves = self._serves.get(worker) or UNDECLARED
        return serves.namespace(model, lora, self._ingest.adapters.get(worker, ()))

    def _current_plan(self, model: str | None, lora: str | int | None) -> Plan:
        if self._version != self._table.version:
            self._plans.clear()
            self._masks.clear()
            self._version = self._table.version
        plan = self._plans.get((model, lora))
        return self._plan(model, lora) if plan is None else plan

    def _plan(self, model: str | None, lora: str | int | None) -> Plan:
        wanted: dict[tuple[str | int | None, int], list[int]] = {}
        for (worker, _), state in self._table.states.items():
            answers, adapter = self._namespace(worker, model, lora)
            if answers:
                for block_size in {m.block_size for m in state.all_maps()}:
                    masks = wanted.setdefault((adapter, block_size), [0, 0])
                    masks[0] |= state.bit
                    masks[1] |= state.bit if state.tiered else 0
        plan: Plan = [(adapter, size, masks[0], masks[1]) for (adapter, size), masks in wanted.items()]
        if len(self._plans) >= _CACHED_PLANS:
            self._plans.clear()
        self._plans[model, lora] = plan
        return plan

    def _gpu_match(self, n_tokens: int) -> Match:
        match = self._matches.get(n_tokens)
        if match is None:
            if len(self._matches) >= _CACHED_MASKS:
                self._matches.clear()
            match = self._matches[n_tokens] = Match(n_tokens, 0, 0, n_tokens)
        return match

    def _holders(self, mask: int) -> tuple[Holder, ...]:
        found = self._masks.get(mask)
        if found is None:
            found = self._table.holders(mask)
            if len(self._masks) >= _CACHED_MASKS:
                self._masks.clear()
            self._masks[mask] = found
        return found

    def refused_events(self) -> dict[Holder, int]:
        """Events whose blocks cannot be followed (finer than the GPU's, or of too many sizes), where there were any."""
        with self._lock:
            states = self._table.states.items()
            counted = {holder: state.counters.get("refused_block_size_events", 0) for holder, state in states}
        return {holder: n for holder, n in counted.items() if n}

    def held_tokens(self) -> dict[Holder, dict[str, int]]:
        """Tokens of the blocks that each (worker, rank) holds, by tier."""
        with self._lock:
            return {holder: state.tokens() for holder, state in self._table.states.items()}

    def digests(self) -> dict[Holder, tuple[int, int]]:
        """(different blocks, their keys summed up by tier, modulo 2^64) of each (worker, rank), whatever the order they
        came in: where two indexes hold the same, theirs are equal. The lock is taken for one of them at a time.
        """
        with self._lock:
            holders = list(self._table.states)
        found = {}
        for holder in holders:
            with self._lock:
                state = self._table.states.get(holder)
                if state is not None:
                    found[holder] = digest_of(state)
        return found

    def held_blocks(self) -> Iterator[HeldBlocks]:
        """What each (worker, rank) holds; the lock is taken for one of its tiers at a time."""
        with self._lock:
            places = [(state, entries) for state in self._table.states.values() for entries in state.all_maps()]
        for state, entries in places:
            with self._lock:
                keys = packed(dict.fromkeys(entries.own.values()))
            if keys:
                yield HeldBlocks(
                    worker=state.worker,
                    rank=state.rank,
                    tier=TIER_NAMES[entries.tier],
                    block_size=entries.block_size,
                    keys=keys,
                )

    def take_back(self, blocks: HeldBlocks) -> None:
        """They are held, as `held_blocks` said. Raises ValueError for what it never says."""
        if blocks.tier not in TIER_NAMES or not 0 < blocks.block_size <= MAX_BLOCK_SIZE:
            raise ValueError("not what an index has told")
        tier, keys = TIER_NAMES.index(blocks.tier), blocks.values()
        with self._lock:
            state = self._table.state(blocks.worker, blocks.rank)
            entries = state.entry_map(tier, 0, blocks.block_size) or state.new_entry_map(tier, 0, blocks.block_size)
            if entries is None:
                raise ValueError("more block sizes than an index has")
            plane = self._table.planes[tier]
            for key in keys:
                if key not in entries.own:
                    self._table.add_entry(state, plane, entries, key, key, NO_PARENT, False)
            self._table.version += 1

    def save(self, worker: str, rank: int) -> tuple[dict[int, bool], list[str], list[SavedPlace]] | None:
        """(KV-cache groups that prove a prefix, adapters, blocks) of a (worker, rank), for `restore`; None: unknown."""
        with self._writer:
            with self._lock:
                state = self._table.states.get((worker, rank))
                groups = {} if state is None else dict(state.group_counts)
                adapters = sorted(self._ingest.adapters.get(worker, ()))
            return None if state is None else (groups, adapters, save_places(self._table, state, self._lock))

    def restore(self, worker: str, rank: int, saved: SavedRank) -> None:
        """It holds what another index saved. Raises ValueError for what that never says, or if something is known."""
        with self._writer:
            with self._lock:
                if not self._admits((worker, rank)):
                    raise ValueError("too many ranks")
                state = self._table.state(worker, rank)
                if not state.is_empty():
                    raise ValueError("something is known of it")
                state.group_counts.update(dict(list(saved.groups.items())[:MAX_GROUPS]))
                for adapter in saved.adapters:
                    self._ingest.learn_adapter(worker, adapter)
            restore_places(self._table, state, saved.places, self._lock)

    def bytes_used(self) -> int:
        """Accounted memory."""
        with self._lock:
            return self._table.bytes_used()

    def stats(self) -> dict[str, Any]:
        """Counts for people and metrics (JSON-ready): memory, keys by tier, and what each worker's ranks hold."""
        with self._lock:
            workers: dict[str, dict[str, Any]] = {}
            for (worker, rank), state in sorted(self._table.states.items()):
                workers.setdefault(worker, {})[str(rank)] = state.stats()
            return {
                "bytes": self._table.bytes_used(),
                "budget_bytes": self._table.budget_bytes,
                "keys": {name: plane.size for name, plane in zip(TIER_NAMES, self._table.planes, strict=True)},
                "entries": self._table.entries,
                "orphan_blocks": sum(state.orphans.blocks for state in self._table.states.values()),
                "orphan_bytes": self._table.orphan_bytes,
                "retired_holders": len(self._table.retired),
                "evicted_by_budget_blocks": self._table.evicted,
                "lookups": self._lookups,
                "batches_of_refused_ranks": self._refused_ranks,
                "workers": workers,
            }


def _deeper(had: Match | None, match: Match) -> Match:
    """What one holder has in two block sizes: the deeper of each."""
    if had is None:
        return match
    return Match(
        max(had.gpu_tokens, match.gpu_tokens),
        max(had.cpu_tokens, match.cpu_tokens),
        max(had.disk_tokens, match.disk_tokens),
        max(had.reach_tokens, match.reach_tokens),
    )


def _is_physical(removal_mode: str) -> bool:
    if removal_mode not in ("physical", "logical"):
        raise ValueError(f"removal_mode must be 'physical' or 'logical', not {removal_mode!r}")
    return removal_mode == "physical"
