"""The byte budget under random traffic: never above it, bookkeeping exact, and nothing false is ever claimed."""

from __future__ import annotations

import random

import pytest

from indexer import PrefixIndex
from indexer.table import ENTRY_BYTES, HOT_BYTES, KEY_BYTES, MIN_BUDGET_BYTES, ORPHAN_SHARE
from tests.support import IN_CI
from tests.support.kv_feed import SIZE, Feed, cleared, removed

SEEDS = range(20 if IN_CI else 3)
STEPS = 500


@pytest.mark.parametrize("seed", SEEDS)
def test_never_above_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    feed = Feed(PrefixIndex(budget_bytes=MIN_BUDGET_BYTES, orphan_blocks=rng.choice([100, 65536])))
    table = feed.index._table
    prompts: list[list[int]] = []
    resident: dict[str, set[int]] = {f"w{i}": set() for i in range(rng.choice([1, 3, 70]))}
    fullest = 0
    for _ in range(STEPS):
        worker = rng.choice(list(resident))
        action = rng.random()
        if action < 0.7:
            tokens = grow(rng, prompts)
            start = 0 if rng.random() < 0.7 else rng.randrange(len(tokens) // SIZE)
            medium = rng.choice(["GPU", "GPU", "GPU", "CPU"])
            feed.store(worker, tokens, start, medium=medium)
            resident[worker] |= set(feed.hashes(worker, tokens)[start:])
        elif action < 0.85 and prompts:
            gone = feed.hashes(worker, rng.choice(prompts))[rng.randrange(3) :]
            feed.apply(worker, removed(gone), removed(gone, medium="CPU"))
        elif action < 0.852:
            feed.apply(worker, cleared())
            resident[worker].clear()
        elif action < 0.854:
            feed.index.clear(worker)
            resident[worker].clear()
        elif prompts:
            tokens = rng.choice(prompts)
            for (name, _), match in feed.match(tokens).items():
                known = feed.hashes(name, tokens)[: match.reach_tokens // SIZE]
                assert resident[name] >= set(known), "claims what the engine never announced since its last clear"
        stats = feed.index.stats()
        fullest = max(fullest, stats["bytes"])
        assert stats["bytes"] + 2 * table._hot_limit * HOT_BYTES <= MIN_BUDGET_BYTES, ORPHAN_SHARE
        assert len(table._hot) <= table._hot_limit
        assert len(table._hot_before) <= table._hot_limit
    keys = sum(sum(map(len, plane.masks)) for plane in table.planes)
    states = [*table.states.values(), *table.retired]
    entries = sum(len(m.own) for state in states for m in state.all_maps())

    waiting = [run for state in table.states.values() for runs in state.orphans.by_parent.values() for run in runs]
    orphan_bytes = sum(run.bytes for run in waiting)
    assert feed.index.stats()["bytes"] == keys * KEY_BYTES + entries * ENTRY_BYTES + orphan_bytes
    assert orphan_bytes <= MIN_BUDGET_BYTES // ORPHAN_SHARE
    assert fullest > 0.8 * MIN_BUDGET_BYTES, "the budget was never reached"


def grow(rng: random.Random, prompts: list[list[int]]) -> list[int]:
    base = rng.choice(prompts[-20:]) if prompts and rng.random() < 0.6 else []
    base = base[: rng.randint(0, len(base) // SIZE) * SIZE]
    tokens = base + [rng.randrange(1 << 30) for _ in range(rng.randint(1, 60) * SIZE)]
    prompts.append(tokens)
    return tokens
