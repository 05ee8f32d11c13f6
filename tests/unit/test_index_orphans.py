"""Blocks whose parent is not known yet: any order of arrival gives the same index, within a bound."""

import itertools
import random

import pytest

from indexer import PrefixIndex
from tests.support.kv_feed import SIZE, Feed, prompt, removed


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_single_blocks_in_any_order(order: tuple[int, ...]) -> None:
    feed = Feed()
    tokens = prompt(4)
    for i, block in enumerate(order):
        feed.store("w", tokens, block, block + 1)
        come = set(order[: i + 1])
        assert feed.held(tokens) == SIZE * next(d for d in range(5) if d not in come)
    assert feed.rank_stats()["orphan_blocks"] == 0
    assert feed.index.stats()["entries"] == 4


@pytest.mark.parametrize("in_one_batch", [True, False])
def test_runs_of_blocks_children_before_parents(in_one_batch: bool) -> None:
    feed = Feed()
    tokens = prompt(12)
    events = [feed.event("w", tokens, start, stop) for start, stop in [(8, 12), (3, 8), (1, 3), (0, 1)]]
    if in_one_batch:
        feed.apply("w", *events)
    else:
        for event in events:
            feed.apply("w", event)
    assert feed.held(tokens) == 48


@pytest.mark.parametrize("n", [129, 300, 1000])
def test_orphan_runs_longer_than_a_slice(n: int) -> None:
    feed = Feed()
    tokens = prompt(n)
    feed.store("w", tokens, 130 if n > 130 else 1, n)
    if n > 130:
        feed.store("w", tokens, 1, 130)
    assert feed.match(tokens) == {}
    assert feed.rank_stats()["orphan_blocks"] == n - 1
    feed.store("w", tokens, 0, 1)
    assert feed.held(tokens) == n * SIZE
    assert feed.index.stats()["orphan_blocks"] == 0


def test_a_deep_chain_backwards() -> None:
    """5,000 blocks one by one, last first, as when a decode's events are replayed without their beginning."""
    feed = Feed()
    tokens = prompt(5000)
    hashes = feed.hashes("w", tokens)
    for i in range(4999, 0, -1):
        event = {**feed.event("w", tokens[:SIZE]), "token_ids": tokens[i * SIZE : (i + 1) * SIZE]}
        feed.apply("w", {**event, "block_hashes": [hashes[i]], "parent_block_hash": hashes[i - 1]})
    assert feed.rank_stats()["orphan_blocks"] == 4999
    feed.apply("w", {**feed.event("w", tokens[:SIZE]), "block_hashes": [hashes[0]]})
    assert feed.held(tokens) == 5000 * SIZE


def test_several_children_wait_for_one_parent() -> None:
    feed = Feed()
    head = prompt(2)
    tails = [prompt(3, 100 * (i + 1)) for i in range(20)]
    for tail in tails:
        feed.store("w", head + tail, 2)
    feed.store("w", head)
    assert {feed.held(head + tail) for tail in tails} == {20}


def test_removed_orphans_leave_a_hole() -> None:
    feed = Feed()
    tokens = prompt(5)
    feed.store("w", tokens, 1)
    feed.remove("w", tokens, 3)
    feed.store("w", tokens, 0, 1)
    assert feed.held(tokens) == 12
    feed.store("w", tokens, 3, 4)
    assert feed.held(tokens) == 20


def test_all_orphans_removed_leave_nothing() -> None:
    feed = Feed()
    tokens = prompt(5)
    feed.store("w", tokens, 1)
    feed.remove("w", tokens, 4, 3, 2, 1)
    assert feed.index.stats()["orphan_blocks"] == 0
    feed.store("w", tokens, 0, 1)
    assert feed.held(tokens) == 4
    assert feed.index.stats()["entries"] == 1


def test_an_orphan_stored_twice_survives_one_removal() -> None:
    feed = Feed()
    tokens = prompt(3)
    for _ in range(2):
        feed.store("w", tokens, 1)
    feed.remove("w", tokens, 1, 2)
    feed.store("w", tokens, 0, 1)
    assert feed.held(tokens) == 12
    feed.remove("w", tokens, 2)
    assert feed.held(tokens) == 8


def test_orphans_are_bounded_and_the_oldest_go_first() -> None:
    feed = Feed(PrefixIndex(orphan_blocks=10))
    prompts = [prompt(5, 1000 * i) for i in range(4)]
    for tokens in prompts:
        feed.store("w", tokens, 1)
    stats = feed.rank_stats()
    assert (stats["orphan_blocks"], stats["orphan_blocks_dropped"]) == (8, 8)
    for tokens in prompts:
        feed.store("w", tokens, 0, 1)
    assert [feed.held(tokens) for tokens in prompts] == [4, 4, 20, 20]


def test_orphans_of_one_worker_are_not_anothers() -> None:
    feed = Feed()
    tokens = prompt(3)
    feed.store("a", tokens, 1)
    feed.store("b", tokens, 0, 1)
    feed.store("a", tokens, 1, rank=1)
    feed.store("a", tokens, 0, 1, rank=1)
    assert feed.match(tokens).keys() == {("b", 0), ("a", 1)}
    assert feed.held(tokens, "a", 1) == 12
    assert feed.held(tokens, "b") == 4


def test_clearing_forgets_orphans() -> None:
    feed = Feed()
    tokens = prompt(3)
    feed.store("w", tokens, 1)
    feed.index.clear("w")
    feed.store("w", tokens, 0, 1)
    assert feed.held(tokens) == 4
    assert feed.index.stats()["orphan_blocks"] == 0


def test_a_known_block_in_the_middle_of_an_orphan_run() -> None:
    """The parent was forgotten, but a later block of the run is known: what hangs on that need not wait."""
    feed = Feed()
    tokens = prompt(6)
    feed.store("w", tokens, 0, 3)
    feed.remove("w", tokens, 0)
    feed.store("w", tokens, 1, 6)
    feed.store("w", tokens, 0, 1)
    assert feed.held(tokens) == 24


def test_unknown_removals_are_counted() -> None:
    feed = Feed()
    feed.apply("w", removed([1, 2, 3]))
    assert feed.counter("unknown_removed_blocks") == 3


@pytest.mark.parametrize("seed", range(20))
def test_random_trees_in_random_order(seed: int) -> None:
    rng = random.Random(seed)
    feed = Feed()
    prompts: list[list[int]] = []
    for _ in range(12):
        base = rng.choice(prompts) if prompts and rng.random() < 0.8 else []
        prompts.append(base[: rng.randint(0, len(base) // SIZE) * SIZE] + [rng.randrange(50) for _ in range(4 * SIZE)])
    events = {}
    for tokens in prompts:
        start = 0
        while start < len(tokens) // SIZE:
            stop = min(start + rng.randint(1, 3), len(tokens) // SIZE)
            for block in range(start, stop):
                events[feed.hashes("w", tokens)[block]] = (tokens, start, stop)
            start = stop
    unique = list({id(t) * 1000 + a: (t, a, b) for t, a, b in events.values()}.values())
    rng.shuffle(unique)
    for tokens, start, stop in unique:
        feed.store("w", tokens, start, stop)
    assert [feed.held(t) for t in prompts] == [len(t) for t in prompts]
    assert feed.index.stats()["orphan_blocks"] == 0
