"""GPU, CPU and disk are separate; what lies elsewhere is counted and never credited."""

import pytest

from indexer import Match
from tests.support.kv_feed import Feed, cleared, prompt, removed, stored

TOKENS = prompt(4)


def test_offload_names_known_blocks_by_hash_alone() -> None:
    """Stored on the GPU, offloaded with empty token_ids, then gone from the GPU, then from the CPU."""
    feed = Feed()
    feed.store("w", TOKENS, medium="GPU")
    feed.apply("w", stored(feed.hashes("w", TOKENS), [], medium="CPU"))
    assert feed.match(TOKENS) == {("w", 0): Match(16, 16, 0, 16)}
    feed.remove("w", TOKENS, 3, 2, medium="GPU")
    assert feed.match(TOKENS) == {("w", 0): Match(8, 16, 0, 16)}
    feed.remove("w", TOKENS, 1, 0, medium="GPU")
    assert feed.match(TOKENS) == {("w", 0): Match(0, 16, 0, 16)}
    feed.remove("w", TOKENS, 0, 1, 2, 3, medium="CPU")
    assert feed.match(TOKENS) == {}
    assert feed.index.stats()["entries"] == 0


def test_blocks_come_back_from_the_lower_tier() -> None:
    feed = Feed()
    feed.store("w", TOKENS)
    feed.apply("w", stored(feed.hashes("w", TOKENS), [], medium="CPU"))
    feed.remove("w", TOKENS, 3, 2, 1, 0)
    feed.apply("w", stored(feed.hashes("w", TOKENS)[:3], [], medium="GPU"))
    assert feed.match(TOKENS) == {("w", 0): Match(12, 16, 0, 16)}


def test_offload_of_unknown_blocks_is_counted() -> None:
    feed = Feed()
    feed.apply("w", stored([1, 2], [], medium="CPU"))
    assert feed.counter("unknown_offloaded_blocks") == 2
    assert feed.index.stats()["entries"] == 0


def test_child_stored_under_a_parent_that_only_a_lower_tier_still_holds() -> None:
    feed = Feed()
    feed.store("w", TOKENS, 0, 2)
    feed.apply("w", stored(feed.hashes("w", TOKENS)[:2], [], medium="CPU"))
    feed.remove("w", TOKENS, 1, 0, medium="GPU")
    feed.store("w", TOKENS, 2, medium="GPU")
    assert feed.match(TOKENS) == {("w", 0): Match(0, 8, 0, 16)}


def test_tiers_reach_together_where_each_alone_has_holes() -> None:
    feed = Feed()
    feed.store("w", TOKENS, 0, 1)
    feed.store("w", TOKENS, 1, 2, medium="CPU")
    feed.store("w", TOKENS, 2, 3, medium="STORAGE")
    feed.store("w", TOKENS, 3, 4, medium="GPU")
    assert feed.match(TOKENS) == {("w", 0): Match(4, 0, 0, 16)}
    feed.store("w", TOKENS, 0, 1, medium="STORAGE")
    assert feed.match(TOKENS) == {("w", 0): Match(4, 0, 4, 16)}
    feed.remove("w", TOKENS, 1, medium="CPU")
    assert feed.match(TOKENS) == {("w", 0): Match(4, 0, 4, 4)}


def test_removal_from_another_tier_changes_nothing() -> None:
    feed = Feed()
    feed.store("w", TOKENS)
    feed.remove("w", TOKENS, 3, medium="CPU")
    assert feed.held(TOKENS) == 16
    assert feed.counter("unknown_removed_blocks") == 1
    feed.remove("w", TOKENS, 3, medium="GPU")
    assert feed.held(TOKENS) == 12


@pytest.mark.parametrize(
    ("medium", "tier"),
    [(None, "gpu"), ("", "gpu"), ("gpu", "gpu"), ("GPU", "gpu"), ("cpu", "cpu"), ("HOST", "cpu"), ("STORAGE", "disk"),
     ("disk", "disk"), ("NVMe", "disk"), ("fs", "disk"), ("object_store", "other"), ("CXL", "other")],
)  # fmt: skip
def test_medium_names(medium: str | None, tier: str) -> None:
    feed = Feed()
    feed.store("w", TOKENS, medium=medium)
    assert {name for name, n in feed.rank_stats()["blocks"].items() if n} == {tier}
    found = feed.match(TOKENS)
    assert bool(found) == (tier != "other")
    feed.remove("w", TOKENS, 3, medium=medium)
    assert feed.rank_stats()["blocks"][tier] == 3


def test_remote_blocks_are_counted_but_not_credited() -> None:
    feed = Feed()
    feed.store("w", TOKENS, medium="CPU", locality="REMOTE")
    feed.store("v", TOKENS, medium="CPU", locality="LOCAL")
    assert feed.match(TOKENS) == {("v", 0): Match(0, 16, 0, 16)}
    assert feed.rank_stats()["blocks"]["other"] == 4


@pytest.mark.parametrize(
    ("medium", "left"),
    [("GPU", Match(0, 16, 8, 16)), ("CPU", Match(16, 0, 8, 16)), ("STORAGE", Match(16, 16, 0, 16)), (None, None)],
)
def test_clear_of_one_tier_or_of_all(medium: str | None, left: Match | None) -> None:
    feed = Feed()
    feed.store("w", TOKENS)
    feed.store("w", TOKENS, medium="CPU")
    feed.store("w", TOKENS, 0, 2, medium="STORAGE")
    feed.apply("w", cleared() if medium is None else cleared(medium=medium))
    assert feed.match(TOKENS) == ({} if left is None else {("w", 0): left})
    assert feed.counter("clears") == 1
    feed.store("w", TOKENS)
    assert feed.held(TOKENS) == 16


def test_clear_of_one_tier_keeps_the_others_waiting_blocks() -> None:
    feed = Feed()
    feed.store("w", TOKENS, 1, 2)
    feed.store("w", TOKENS, 2, 3, medium="CPU")
    feed.apply("w", cleared(medium="GPU"))
    assert feed.rank_stats()["orphan_blocks"] == 1
    feed.store("w", TOKENS, 0, 2, medium="CPU")
    assert feed.match(TOKENS) == {("w", 0): Match(0, 12, 0, 12)}


def test_clear_of_a_tier_longer_than_a_slice() -> None:
    feed = Feed()
    tokens = prompt(700)
    feed.store("w", tokens)
    feed.store("w", tokens, medium="CPU")
    feed.apply("w", cleared(medium="GPU"))
    assert feed.match(tokens) == {("w", 0): Match(0, 2800, 0, 2800)}
    assert feed.index.stats()["keys"]["gpu"] == 0


def test_clear_reaches_only_its_rank_and_worker() -> None:
    feed = Feed()
    for worker, rank in (("w", 0), ("w", 1), ("v", 0)):
        feed.store(worker, TOKENS, rank=rank)
    feed.apply("w", cleared(), rank=1)
    assert set(feed.match(TOKENS)) == {("w", 0), ("v", 0)}


def test_events_after_a_clear_in_the_same_batch_count() -> None:
    feed = Feed()
    feed.store("w", TOKENS)
    feed.apply("w", cleared(), feed.event("w", prompt(1, 500)), removed(feed.hashes("w", TOKENS)))
    assert (feed.held(TOKENS), feed.held(prompt(1, 500))) == (0, 4)
