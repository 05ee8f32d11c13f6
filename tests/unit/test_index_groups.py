"""KV-cache groups, data-parallel ranks and block sizes."""

import msgspec
import pytest

from indexer import Match, decode_batch
from tests.support.kv_feed import SIZE, Feed, batch, payload, prompt, removed, stored

TOKENS = prompt(4)
FULL = ["full_attention", "mla_attention", "sink_full_attention"]
SPARSE = [
    "sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba", "cross_attention",
    "encoder_only_attention", "some_later_kind",
]  # fmt: skip


@pytest.mark.parametrize("group", [0, 1, 5])
@pytest.mark.parametrize("kind", FULL)
def test_groups_that_prove_a_full_prefix_count(kind: str, group: int) -> None:
    feed = Feed()
    feed.store("w", TOKENS, group_idx=group, kv_cache_spec_kind=kind)
    assert feed.held(TOKENS) == 16


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("kind", SPARSE)
def test_groups_that_do_not_are_counted_only(kind: str, group: int) -> None:
    feed = Feed()
    feed.store("w", TOKENS, group_idx=group, kv_cache_spec_kind=kind)
    assert feed.match(TOKENS) == {}
    assert feed.rank_stats()["ignored_group_blocks"] == {str(group): 4}
    feed.remove("w", TOKENS, 0, 1, 2, group_idx=group)
    assert feed.rank_stats()["ignored_group_blocks"] == {str(group): 1}
    assert feed.counter("unknown_removed_blocks") == 0


def test_a_group_beyond_the_first_has_to_say_that_it_counts() -> None:
    feed = Feed()
    feed.store("w", TOKENS, group_idx=1)
    assert feed.match(TOKENS) == {}
    feed.store("w", TOKENS, group_idx=1, kv_cache_spec_kind="full_attention")
    feed.store("w", prompt(2, 500), group_idx=1)
    assert (feed.held(TOKENS), feed.held(prompt(2, 500))) == (16, 8)


def test_removal_in_one_group_keeps_the_others_block() -> None:
    feed = Feed()
    for group in (0, 1):
        feed.store("w", TOKENS, group_idx=group, kv_cache_spec_kind="full_attention")
    feed.remove("w", TOKENS, 3, 2, group_idx=0)
    assert feed.held(TOKENS) == 16
    feed.remove("w", TOKENS, 3, group_idx=1)
    assert feed.held(TOKENS) == 12


def test_sparse_group_with_its_own_block_size_beside_a_full_one() -> None:
    """A window's tail of other sizes (64, 8) says nothing about the prefix of 256-token blocks."""
    feed = Feed(size=256)
    tokens = prompt(4, size=256)
    feed.store("w", tokens, 0, 2, group_idx=0, kv_cache_spec_kind="full_attention")
    for group, size in ((1, 64), (2, 8)):
        feed.store("w", tokens, 0, size=size, group_idx=group, kv_cache_spec_kind="sliding_window")
    assert feed.held(tokens) == 512
    assert feed.rank_stats()["block_sizes"] == [256]


def test_one_hash_for_many_tokens_is_refused() -> None:
    feed = Feed(size=16)
    feed.apply("w", stored([1], prompt(1, size=64), block_size=16))
    assert feed.counter("malformed_events") == 1
    assert feed.index.stats()["entries"] == 0


# ---- ranks ----------------------------------------------------------------------------------------------------------


def test_the_rank_in_the_batch_wins() -> None:
    feed = Feed()
    event = feed.event("w", TOKENS)
    feed.index.apply("w", 0, batch(event, rank=3))
    feed.index.apply("w", 1, batch(event, rank=None))
    assert set(feed.match(TOKENS)) == {("w", 3), ("w", 1)}
    as_map = {"ts": 1.0, "events": [removed(event["block_hashes"])], "data_parallel_rank": 3}
    feed.index.apply("w", 0, decode_batch(msgspec.msgpack.encode(as_map)))
    assert set(feed.match(TOKENS)) == {("w", 1)}


def test_ranks_are_separate_holders() -> None:
    feed = Feed()
    feed.store("w", TOKENS, rank=0)
    feed.store("w", TOKENS, 0, 1, rank=1)
    feed.remove("w", TOKENS, 3, rank=1)
    assert feed.match(TOKENS) == {("w", 0): Match(16, 0, 0, 16), ("w", 1): Match(4, 0, 0, 4)}
    feed.index.clear("w", 0)
    assert set(feed.match(TOKENS)) == {("w", 1)}
    feed.store("w", TOKENS, rank=0)
    feed.index.clear("w")
    assert feed.match(TOKENS) == {}


# ---- block sizes ----------------------------------------------------------------------------------------------------


def test_workers_with_several_block_sizes_answer_one_query() -> None:
    feed = Feed()
    tokens = prompt(12)
    for worker, size in (("w16", 16), ("w4", 4), ("w32", 32), ("w48", 48)):
        feed.store(worker, tokens, size=size)
    assert {w: m.gpu_tokens for (w, _), m in feed.match(tokens).items()} == {"w16": 48, "w4": 48, "w32": 32, "w48": 48}
    assert {w: m.gpu_tokens for (w, _), m in feed.match(tokens[:40]).items()} == {"w16": 32, "w4": 40, "w32": 32}


def test_one_worker_with_two_block_sizes_is_credited_the_longer() -> None:
    feed = Feed()
    tokens = prompt(8)
    feed.store("w", tokens, 0, 3, size=4)
    feed.store("w", tokens, 0, 2, size=8, group_idx=1, kv_cache_spec_kind="full_attention")
    assert feed.match(tokens) == {("w", 0): Match(16, 0, 0, 16)}


def test_a_fifth_block_size_is_refused() -> None:
    feed = Feed()
    tokens = prompt(32)
    for size in (4, 8, 16, 32, 64):
        feed.store("w", tokens, size=size)
    assert feed.rank_stats()["block_sizes"] == [4, 8, 16, 32]
    assert feed.counter("refused_block_size_events") == 1
    feed.store("w", tokens, size=4)
    assert feed.held(tokens) == 128


def test_lower_tier_may_be_coarser_but_not_finer_than_the_gpu() -> None:
    feed = Feed(size=8)
    tokens = prompt(4, size=8)
    feed.store("w", tokens)
    feed.store("w", tokens, size=4, medium="CPU")
    assert feed.match(tokens) == {("w", 0): Match(32, 0, 0, 32)}
    assert feed.counter("refused_block_size_events") == 1
    feed.store("w", tokens, size=16, medium="CPU")
    assert feed.match(tokens) == {("w", 0): Match(32, 32, 0, 32)}


def test_a_parent_of_another_block_size_is_no_parent() -> None:
    feed = Feed()
    tokens = prompt(8)
    feed.store("w", tokens, 0, 4)
    event = feed.event("w", tokens, 1, 2, size=16)
    feed.apply("w", {**event, "parent_block_hash": feed.hashes("w", tokens)[3]})
    assert feed.held(tokens) == 4 * SIZE


def test_block_size_changes_after_a_clear() -> None:
    feed = Feed()
    tokens = prompt(8)
    feed.store("w", tokens)
    feed.index.clear("w")
    feed.store("w", tokens, size=16)
    assert feed.held(tokens) == 32
    assert feed.rank_stats()["block_sizes"] == [16]


def test_payload_with_an_unknown_event_still_indexes_the_rest() -> None:
    feed = Feed()
    feed.index.apply("w", 0, decode_batch(payload({"type": "BlockMoved"}, feed.event("w", TOKENS), None)))
    assert feed.held(TOKENS) == 16
    assert feed.rank_stats()["counters"] == {"malformed_events": 1, "unknown_events": 1}
