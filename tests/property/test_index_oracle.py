"""The index against a naive oracle: any order of stores, removals, duplicates, clears, tiers, groups, ranks, block
sizes.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import IN_CI
from tests.support.index_world import run_world

SEEDED_LOOPS = 9000 if IN_CI else 900
MODES = {
    "any order": {},
    "tail first": {"tail_first": True, "tiers": 1},
    "any order, one tier": {"tiers": 1},
    "logical removals": {"logical": True},
}


@given(st.randoms(use_true_random=False), st.sampled_from(sorted(MODES)))
def test_index_answers_like_the_oracle(rng: random.Random, mode: str) -> None:
    run_world(rng, steps=12, **MODES[mode]).check_memory()


@pytest.mark.parametrize("mode", sorted(MODES))
def test_index_answers_like_the_oracle_seeded(mode: str) -> None:
    for seed in range(SEEDED_LOOPS // len(MODES)):
        world = run_world(random.Random(seed), steps=25, **MODES[mode])
        if seed % 3 == 0:
            world.check_memory()
