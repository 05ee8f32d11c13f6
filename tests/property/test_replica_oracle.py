"""A copy of the index, kept by its changes: any events, any cuts, snapshots read while it goes on changing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.indexservice.wire import change_of, of_changes, section_changes, sections
from gateway.pb import indexer_pb2 as pb
from indexer import Change, Replica
from tests.support import IN_CI
from tests.support.index_world import BLOCK_SIZES, World

SEEDED_LOOPS = 2000 if IN_CI else 200
MODES = {"any order": {}, "tail first": {"tail_first": True, "tiers": 1}, "logical removals": {"logical": True}}


class Copied:
    """A world whose index is copied: `log` is every delta as it goes over the wire, `copies` have read some of it."""

    def __init__(self, rng: random.Random, **mode: bool | int) -> None:
        self.rng = rng
        self.world = World(rng, **mode)  # type: ignore[arg-type]
        self.journal = self.world.index.keep_journal(lambda: None)
        self.log: list[bytes] = []
        self.copies: list[list] = []
        """[replica, deltas taken]"""

    def flush(self) -> list:
        """The holders there are after it."""
        if self.rng.random() < 0.5:
            for holder in self.journal.holders():
                self.journal.note_digest(holder)
        taken = self.journal.take()
        assert not taken.is_lost
        if taken.changes:
            self.log.append(of_changes(len(self.log), taken.changes).SerializeToString())
        return taken.holders

    def begin(self, replica: Replica) -> None:
        """Read a snapshot, while events go on between any two holders and any two parts of one."""
        if self.rng.random() < 0.5:
            self.flush()
        taken = len(self.log)
        told: set = set()
        waiting = self.journal.holders()
        while waiting:
            for holder in waiting:
                parts: list[Change] = []
                for section in sections(*holder, self.journal.read(holder), most_blocks=self.rng.choice([1, 3, 64])):
                    parts += section_changes(pb.Section.FromString(section.SerializeToString()))
                    if self.rng.random() < 0.3:
                        self.world.step()
                        self.flush()
                replica.replace(holder, parts)
                told.add(holder)
                taken = self.catch_up(replica, taken, checked=False)
            waiting = [holder for holder in self.flush() if holder not in told]
        taken = self.catch_up(replica, taken, checked=False)
        replica.keep_only(told)
        self.copies.append([replica, taken])

    def catch_up(self, replica: Replica, taken: int, *, checked: bool) -> int:
        for raw in self.log[taken:]:
            for message in pb.Delta.FromString(raw).changes:
                assert replica.take(change_of(message)) or not checked
        return len(self.log)

    def check(self) -> None:
        self.flush()
        holders = self.journal.holders()
        for copy in self.copies:
            copy[1] = self.catch_up(*copy, checked=True)
            replica = copy[0]
            own = self.world.index
            for holder in holders:
                self.journal.note_digest(holder)
            for change in self.journal.take().changes:
                assert replica.digest((change.worker, change.rank)) == change.digest
            assert _planes(replica) == _planes(own)
            _check_closed(replica)
            for prompt in [*self.world.prompts, self.world.new_prompt()]:
                for size in BLOCK_SIZES:
                    asked = {
                        "lora": prompt.adapter,
                        "cache_salt": prompt.salt,
                        "extra_keys": prompt.extra_keys(size),
                    }
                    # What serves what is not copied: it comes from where the copy is.
                    assert replica.match(list(prompt.tokens), **asked) == own.match(list(prompt.tokens), **asked)


def _planes(index) -> list:
    """(key, its holders) of each tier: what a lookup goes by."""
    table = index._table
    masks = [[item for shard in plane.masks for item in shard.items()] for plane in table.planes]
    return [{key: names for key, mask in tier if (names := frozenset(_names(table, mask)))} for tier in masks]


def _check_closed(index) -> None:
    """A holder that is looked up by bisection has the parent of each of its blocks."""
    table = index._table
    on_gpu = _planes(index)[0]
    links = [item for shard in table.planes[0].links for item in shard.items()]
    parent_of = {c: p for p, children in links for c in (children if isinstance(children, set) else [children])}
    loose = {(name, key) for name, state in table.states.items() for key in state.loose[0]}
    for key, names in on_gpu.items():
        if (parent := parent_of.get(key)) is not None:
            assert all(name in on_gpu.get(parent, ()) or (name, key) in loose for name in names)


def _names(table, mask: int) -> list:
    live = {state.bit: name for name, state in table.states.items()}
    return [live[1 << i] for i in range(mask.bit_length()) if mask >> i & 1 and 1 << i in live]


def run(rng: random.Random, steps: int, mode: str) -> None:
    copied = Copied(rng, **MODES[mode])
    for _ in range(steps):
        action = rng.random()
        if action < 0.6:
            copied.world.step()
        elif action < 0.75:
            copied.flush()
        elif action < 0.85 and len(copied.copies) < 3:
            copied.begin(Replica())
        elif action < 0.9 and copied.copies:
            copied.begin(copied.copies.pop(rng.randrange(len(copied.copies)))[0])  # cut off, and begun anew in place
        elif action < 0.93:
            worker = rng.choice(list(copied.world.sizes))
            copied.world.index.clear(worker)
            for name, holder in copied.world.oracle.items():
                if name[0] == worker:
                    holder.clear(None)
        elif action < 0.95:
            worker = rng.choice(list(copied.world.sizes))
            models = copied.world.models[worker]
            copied.world.index.remove_worker(worker)
            copied.world.index.set_worker(worker, models=models, loras=["lora-a"])
            copied.world.oracle = {name: it for name, it in copied.world.oracle.items() if name[0] != worker}
        else:
            for copy in copied.copies:
                copy[1] = copied.catch_up(*copy, checked=True)
    copied.begin(Replica())
    copied.world.models = dict.fromkeys(copied.world.models)
    copied.world.index._serves.clear()
    copied.world.index._table.version += 1
    copied.check()


@given(st.randoms(use_true_random=False), st.sampled_from(sorted(MODES)))
def test_a_copy_is_what_it_copies(rng: random.Random, mode: str) -> None:
    run(rng, 15, mode)


@pytest.mark.parametrize("mode", sorted(MODES))
def test_a_copy_is_what_it_copies_seeded(mode: str) -> None:
    for seed in range(SEEDED_LOOPS // len(MODES)):
        run(random.Random(seed), 40, mode)


@pytest.mark.parametrize("seed", [847, 1326])
def test_the_parent_of_one_groups_block_may_be_anothers(seed: int) -> None:
    run(random.Random(seed), 15, "any order")
