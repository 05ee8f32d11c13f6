"""The parts of `python -m bench scale` that are about a large fleet's index."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.kv_frames import BLOCK_SIZE
from bench.scale.held import CHAIN_BLOCKS, CHAINS, Held, questions
from bench.scale.judged import GOALS, judge
from bench.scale.sizes import SIZES, Costs, Limits, Load, lines, most_workers, size
from indexer import PrefixIndex, decode_batch

HELD = Held(workers=6, blocks=400, sharers=3, prompt_blocks=64)
FIGURES = {
    "indexer_us_per_change": 5.0,
    "gateway_us_per_change": 3.0,
    "fanout_us_per_change": 0.05,
    "indexer_us_per_reading": 400.0,
    "gateway_us_per_reading": 400.0,
    "replay_start_us_per_copy": 5.0,
    "snapshot_start_us_per_copy": 3.0,
    "replay_bytes_per_copy": 200.0,
    "replay_accounted_bytes_per_copy": 300.0,
    "gateway_request_us": 700.0,
    "gateway_chunk_us": 10.0,
}


def index_of(held: Held) -> PrefixIndex:
    index = PrefixIndex()
    for worker, batches in enumerate(held.batches()):
        for payload in batches:
            index.apply(f"w{worker}", 0, decode_batch(payload))
    return index


# ---- what is held ----------------------------------------------------------------------------------------------------


def test_a_prompt_is_held_by_one_worker_and_its_first_half_by_as_many_as_are_asked_for() -> None:
    index = index_of(HELD)
    assert index.stats()["entries"] == HELD.copies
    assert index.stats()["orphan_blocks"] == 0
    for prompt in questions(HELD, 8):
        found = index.match(prompt)
        tokens = Counter(match.gpu_tokens for match in found.values())
        assert tokens == {HELD.prompt_blocks * BLOCK_SIZE: 1, HELD.prompt_blocks // 2 * BLOCK_SIZE: HELD.sharers - 1}


def test_another_prompt_has_other_sharers() -> None:
    assert HELD.sharers_of(0) != HELD.sharers_of(1)
    assert sorted(worker for group in HELD.sharers_of(1) for worker in group) == list(range(HELD.workers))


def test_blocks_come_and_go_without_end_and_their_number_stays() -> None:
    index = index_of(HELD)
    churn = HELD.churn(2)
    for i in range(2 * CHAINS + 3):
        index.apply("w2", 0, decode_batch(churn[i % CHAINS]))
        assert index.stats()["entries"] == HELD.copies
    assert index.stats()["orphan_blocks"] == 0
    assert HELD.copies % CHAIN_BLOCKS == 0


# ---- goals -----------------------------------------------------------------------------------------------------------


def test_a_goal_is_judged_where_its_figure_is() -> None:
    low = judge({name: 0.0 for name, _, _ in GOALS})
    assert [target["met"] for target in low] == [relation == "<=" for _, relation, _ in GOALS]
    assert judge({"else": 1.0}) == []


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_a_larger_fleet_takes_more_of_everything_but_of_what_one_cell_takes() -> None:
    costs, load, limits = Costs.of(FIGURES), Load(), Limits()
    bound = min(most_workers(costs, load, limits).values())
    before = None
    for gpus in SIZES:
        it = size(gpus, costs, load, limits)
        assert it.gpus / it.cells <= bound
        assert it.cores <= it.gateways + it.indexers
        if before is not None:
            assert it.cells >= before.cells
            assert it.cores > before.cores
        before = it
    assert before is not None
    assert before.cells > 100


def test_a_dearer_change_makes_cells_smaller() -> None:
    costs = Costs.of({**FIGURES, "indexer_us_per_change": 50.0})
    assert most_workers(costs, Load(), Limits())["what an indexer follows"] < 50
    assert size(1000, costs, Load(), Limits()).cells > size(1000, Costs.of(FIGURES), Load(), Limits()).cells


def test_the_table_wants_all_its_figures() -> None:
    assert len([line for line in lines(FIGURES) if line.startswith("| 1,000,000 |")]) == 1
    with pytest.raises(KeyError, match="fanout_us_per_change"):
        list(lines({name: value for name, value in FIGURES.items() if name != "fanout_us_per_change"}))
