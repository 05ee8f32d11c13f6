"""The oracle worlds again with tiny lookup steps and lock slices, so that every boundary is met all the time."""

import random

import pytest

import indexer.ingest
import indexer.plane
import indexer.prefix
import indexer.table
from tests.support import IN_CI
from tests.support.index_world import run_world

LOOPS = 600 if IN_CI else 60


@pytest.mark.parametrize("slice_blocks", [1, 2, 3])
@pytest.mark.parametrize(("first", "longest"), [(1, 1), (2, 3), (3, 2), (2, 8), (8, 8)])
def test_boundaries_of_steps_and_slices(
    monkeypatch: pytest.MonkeyPatch, first: int, longest: int, slice_blocks: int
) -> None:
    monkeypatch.setattr(indexer.plane, "FIRST_STEP_BLOCKS", first)
    monkeypatch.setattr(indexer.plane, "LONGEST_STEP_BLOCKS", longest)
    for module in (indexer.ingest, indexer.table, indexer.prefix):
        monkeypatch.setattr(module, "SLICE_BLOCKS", slice_blocks)
    for seed in range(LOOPS):
        mode = [{}, {"tail_first": True, "tiers": 1}, {"tiers": 1}, {"logical": True}][seed % 4]
        world = run_world(random.Random(1000 * slice_blocks + seed), steps=25, **mode)
        if seed % 3 == 0:
            world.check_memory()
