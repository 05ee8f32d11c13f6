"""Several physical copies of one block: how many removals it takes until it is gone."""

import pytest

from indexer import PrefixIndex
from tests.support.kv_feed import Feed, prompt, removed

TOKENS = prompt(3)


def twice(**index: str) -> Feed:
    feed = Feed(PrefixIndex(**index))  # type: ignore[arg-type]
    feed.store("w", TOKENS)
    feed.store("w", TOKENS)
    return feed


def test_two_copies_take_two_removals() -> None:
    feed = twice()
    assert feed.rank_stats()["extra_copies"] == 3
    feed.remove("w", TOKENS, 2, 1, 0)
    assert feed.held(TOKENS) == 12
    feed.remove("w", TOKENS, 2)
    assert feed.held(TOKENS) == 8
    feed.remove("w", TOKENS, 1, 0)
    assert feed.match(TOKENS) == {}


def test_clear_forgets_copies() -> None:
    feed = twice()
    feed.index.clear("w")
    feed.store("w", TOKENS)
    feed.remove("w", TOKENS, 2, 1, 0)
    assert feed.match(TOKENS) == {}


def test_logical_removals_take_one() -> None:
    feed = twice(removal_mode="logical")
    feed.remove("w", TOKENS, 2)
    assert feed.held(TOKENS) == 8


def test_removal_mode_per_worker() -> None:
    feed = Feed()
    feed.index.set_worker("logical", removal_mode="logical")
    for worker in ("logical", "physical"):
        feed.store(worker, TOKENS)
        feed.store(worker, TOKENS)
        feed.remove(worker, TOKENS, 2)
    assert (feed.held(TOKENS, "logical"), feed.held(TOKENS, "physical")) == (8, 12)
    feed.index.set_worker("physical", removal_mode="logical")
    feed.remove("physical", TOKENS, 1)
    assert feed.held(TOKENS, "physical") == 4
    feed.index.remove_worker("logical")
    for _ in range(2):
        feed.store("logical", TOKENS)
    feed.remove("logical", TOKENS, 2)
    assert feed.held(TOKENS, "logical") == 12, "a removed worker's mode is forgotten"


@pytest.mark.parametrize(("remaining", "removals_left"), [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_the_engine_says_how_many_copies_remain(remaining: int, removals_left: int) -> None:
    feed = twice()
    h = feed.hashes("w", TOKENS)[2]
    feed.apply("w", removed([h], remaining_copy_counts=[remaining]))
    for left in range(removals_left, 0, -1):
        assert feed.held(TOKENS) == 12, left
        feed.apply("w", removed([h]))
    assert feed.held(TOKENS) == 8


def test_remaining_counts_of_another_length_are_ignored() -> None:
    feed = twice()
    hashes = feed.hashes("w", TOKENS)
    feed.apply("w", removed([hashes[2], hashes[1]], remaining_copy_counts=[0]))
    assert feed.held(TOKENS) == 12
    feed.apply("w", removed([hashes[2], hashes[1]], remaining_copy_counts=[]))
    assert feed.held(TOKENS) == 4


def test_remaining_counts_hold_for_waiting_blocks() -> None:
    feed = Feed()
    hashes = feed.hashes("w", TOKENS)
    feed.store("w", TOKENS, 1)
    feed.apply("w", removed(hashes[1:], remaining_copy_counts=[2, 0]))
    feed.store("w", TOKENS, 0, 1)
    assert feed.held(TOKENS) == 8
    feed.apply("w", removed([hashes[1]]))
    assert feed.held(TOKENS) == 8
    feed.apply("w", removed([hashes[1]]))
    assert feed.held(TOKENS) == 4


def test_reused_blocks_are_no_further_copy() -> None:
    feed = Feed()
    feed.store("w", TOKENS, origin="COMPUTED")
    feed.store("w", TOKENS, origin="REUSED")
    feed.store("w", TOKENS, 1, origin="REUSED")
    feed.remove("w", TOKENS, 2, 1)
    assert feed.held(TOKENS) == 4
    assert feed.rank_stats()["extra_copies"] == 0


def test_reused_blocks_that_we_did_not_know_are_stored() -> None:
    feed = Feed()
    feed.store("w", TOKENS, origin="REUSED")
    assert feed.held(TOKENS) == 12


@pytest.mark.parametrize("batches_between", [0, 1, 3, 4, 20])
def test_reannouncement_from_block_0_long_after_is_no_copy(batches_between: int) -> None:
    """`kv_cache_report_mode=full` announces a hit as stored again; only a near second one can be a second copy."""
    feed = Feed()
    feed.store("w", TOKENS)
    for i in range(batches_between):
        feed.store("w", prompt(1, 1000 + 10 * i))
    feed.store("w", TOKENS)
    expected = 3 if batches_between < 3 else 0
    assert feed.rank_stats()["extra_copies"] == expected
    assert feed.counter("reannounced_blocks") == 3 - expected


def test_reannouncement_together_with_new_blocks() -> None:
    feed = Feed()
    longer = [*TOKENS, *prompt(2, 100)]
    feed.store("w", TOKENS)
    for i in range(10):
        feed.store("w", prompt(1, 1000 + 10 * i))
    feed.store("w", longer)
    assert feed.held(longer) == 20
    feed.remove("w", longer, 4, 3, 2)
    assert feed.held(longer) == 8


def test_a_hash_listed_twice_in_one_event_counts_once() -> None:
    feed = Feed()
    event = feed.event("w", TOKENS)
    h = event["block_hashes"]
    feed.apply("w", {**event, "block_hashes": [h[0], h[0], h[2]]})
    assert feed.counter("repeated_hashes") == 1
    assert feed.held(TOKENS) == 4
    feed.apply("w", removed([h[0]]))
    assert feed.match(TOKENS) == {}


def test_copies_are_capped() -> None:
    feed = Feed()
    tail = TOKENS[:8]
    feed.store("w", tail)
    event = feed.event("w", tail, 1)
    feed.apply("w", *[event] * 1500)
    assert feed.rank_stats()["extra_copies"] == 1024
