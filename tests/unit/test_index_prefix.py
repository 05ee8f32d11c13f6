"""Depth of a prompt in the index: contiguous from block 0, holes, refills, many holders, odd prompts."""

from array import array

import pytest

from indexer import Match, PrefixIndex
from indexer.keys import chain, root, token_bytes
from tests.support.kv_feed import SIZE, Feed, as_array, prompt


def test_workers_with_other_hashes_meet_in_one_index() -> None:
    feed = Feed()
    tokens = prompt(4)
    feed.store("w1", tokens)
    feed.store("w2", tokens, 0, 2)
    assert feed.match(tokens) == {("w1", 0): Match(16, 0, 0, 16), ("w2", 0): Match(8, 0, 0, 8)}
    feed.store("w2", tokens, 2, 4)
    assert feed.held(tokens, "w2") == 16


def test_a_prompt_is_held_as_far_as_it_agrees() -> None:
    feed = Feed()
    feed.store("w", prompt(8))
    assert [feed.held(prompt(8)[: n * SIZE + 3]) for n in (0, 1, 5, 8)] == [0, 4, 20, 32]
    assert feed.held([*prompt(5), 999, *prompt(3)]) == 20
    assert feed.match([]) == feed.match([1]) == feed.match([999] * 8) == {}


def test_a_hole_cuts_the_depth_and_refilling_restores_it() -> None:
    feed = Feed()
    tokens = prompt(4)
    feed.store("w", tokens)
    feed.remove("w", tokens, 1)
    assert feed.held(tokens) == 4
    feed.store("w", tokens, 1, 2)
    assert feed.held(tokens) == 16
    feed.remove("w", tokens, 0)
    assert feed.match(tokens) == {}
    feed.store("w", tokens, 0, 1)
    assert feed.held(tokens) == 16


def test_removing_the_tail_shortens() -> None:
    feed = Feed()
    tokens = prompt(4)
    feed.store("w", tokens)
    feed.remove("w", tokens, 3, 2)
    assert feed.held(tokens) == 8
    feed.remove("w", tokens, 1, 0)
    assert feed.match(tokens) == {}
    assert feed.index.stats()["entries"] == 0


def test_digests_are_of_what_is_held_and_not_of_how_it_came() -> None:
    feed, other = Feed(), Feed()
    a, b = prompt(6), [900, *prompt(6)]
    feed.store("w", a)
    feed.store("w", b)
    feed.store("v", a)
    other.store("w", b, 0, 2)
    other.store("w", a)
    other.store("w", b, 2)
    other.store("v", b)
    keys = [
        *chain(root(None, SIZE), token_bytes(a), SIZE, 0, 6, {}),
        *chain(root(None, SIZE), token_bytes(b), SIZE, 0, 6, {}),
    ]
    assert feed.index.digests()["w", 0] == other.index.digests()["w", 0] == (12, sum(keys) % 2**64)
    assert feed.index.digests()["v", 0] != other.index.digests()["v", 0]
    other.remove("w", a, 5)
    assert other.index.digests()["w", 0] == (11, (sum(keys) - keys[5]) % 2**64)


@pytest.mark.parametrize("n", [63, 64, 65, 191, 192, 193, 447, 448, 700, 2000])
@pytest.mark.parametrize("hole", ["none", "first", "middle", "last"])
def test_depth_around_the_steps_of_a_lookup(n: int, hole: str) -> None:
    feed = Feed()
    tokens = prompt(n)
    feed.store("w", tokens)
    feed.store("other", tokens, 0, n - 1)
    at = {"none": n, "first": 0, "middle": n // 2, "last": n - 1}[hole]
    if hole != "none":
        feed.remove("w", tokens, at)
    assert feed.held(tokens) == at * SIZE
    assert feed.held(tokens, "other") == (n - 1) * SIZE
    assert feed.held([*tokens, *[7] * 40]) == at * SIZE


def test_more_holders_than_a_machine_word_has_bits() -> None:
    feed = Feed()
    tokens = prompt(6)
    for i in range(150):
        feed.store(f"w{i}", tokens, 0, 1 + i % 6)
    found = feed.match(tokens)
    assert found == {(f"w{i}", 0): Match(4 + 4 * (i % 6), 0, 0, 4 + 4 * (i % 6)) for i in range(150)}
    for i in range(0, 150, 2):
        feed.remove(f"w{i}", tokens, 0)
    assert set(feed.match(tokens)) == {(f"w{i}", 0) for i in range(1, 150, 2)}


def test_branches_of_one_system_prompt() -> None:
    feed = Feed()
    head = prompt(3)
    tails = [prompt(2, 1000 * (i + 1)) for i in range(200)]
    feed.store("w", head)
    for tail in tails:
        feed.store("w", head + tail, 3)
    assert {feed.held(head + tail) for tail in tails} == {20}
    for tail in tails[::2]:
        feed.remove("w", head + tail, 4, 3)
    assert [feed.held(head + tail) for tail in tails] == [12, 20] * 100
    feed.remove("w", head + tails[1], 1)
    assert {feed.held(head + tail) for tail in tails} == {4}
    feed.store("w", head + tails[1], 1, 2)
    assert [feed.held(head + tail) for tail in tails] == [12, 20] * 100


def test_any_buffer_of_tokens_can_be_asked() -> None:
    feed = Feed()
    tokens = prompt(4)
    feed.store("w", tokens)
    for form in (tuple(tokens), array("I", tokens), array("I", tokens).tobytes(), memoryview(array("I", tokens))):
        assert feed.index.match(form)["w", 0].gpu_tokens == 16
    with pytest.raises(ValueError, match="token ids"):
        feed.index.match([-1] * 8)


def test_array_events_index_like_map_events() -> None:
    feed = Feed()
    tokens = prompt(4)
    feed.apply("w", as_array(feed.event("w", tokens)))
    assert feed.held(tokens) == 16


def test_hash_as_digest_signed_or_unsigned_is_one_block() -> None:
    feed = Feed()
    tokens = prompt(1)
    (h,) = feed.hashes("w", tokens)
    for form in (h, h - (1 << 64) if h >> 63 else h, b"\xaa" * 24 + h.to_bytes(8, "big")):
        feed.apply("w", {**feed.event("w", tokens), "block_hashes": [form]})
        assert feed.held(tokens) == 4
        feed.index.clear("w")
        feed.apply("w", feed.event("w", tokens))
        feed.apply("w", {"type": "BlockRemoved", "block_hashes": [form]})
        assert feed.match(tokens) == {}


def test_a_hash_that_comes_to_mean_another_prompt() -> None:
    """Engines may reuse a hash after a reset that was not seen; the latest meaning counts."""
    feed = Feed()
    old, new = prompt(2), prompt(2, 500)
    feed.store("w", old)
    event = {**feed.event("w", new), "block_hashes": feed.hashes("w", old)}
    feed.apply("w", event)
    assert (feed.held(old), feed.held(new)) == (0, 8)
    assert feed.counter("remapped_blocks") == 2


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1, 2, 3]},
        {"token_ids": []},
        {"token_ids": list(range(9))},
        {"block_size": 3},
        {"block_size": 0},
        {"block_size": -4},
        {"block_size": None, "token_ids": list(range(9))},
        {"token_ids": [-1] * 8},
        {"token_ids": [1 << 32] * 8},
        {"block_hashes": []},
    ],
    ids=str,
)
def test_store_that_contradicts_itself_is_counted_and_stops_nothing(change: dict) -> None:
    feed = Feed()
    tokens = prompt(2)
    feed.apply("w", {**feed.event("w", prompt(2, 100)), **change}, feed.event("w", tokens))
    assert feed.held(tokens) == 8
    counters = feed.rank_stats()["counters"]
    assert counters.get("malformed_events", 0) + counters.get("unknown_offloaded_blocks", 0) >= 1
    assert feed.index.stats()["entries"] == 2


def test_block_size_is_learned_when_the_event_does_not_say() -> None:
    feed = Feed(size=8)
    feed.apply("w", {**feed.event("w", prompt(2, size=8)), "block_size": None})
    assert feed.held(prompt(2, size=8)) == 16
    assert feed.rank_stats()["block_sizes"] == [8]


@pytest.mark.parametrize("kwargs", [{"budget_bytes": 1000}, {"removal_mode": "maybe"}])
def test_bad_settings_are_refused(kwargs: dict) -> None:
    with pytest.raises(ValueError, match=str(next(iter(kwargs)))):
        PrefixIndex(**kwargs)
    with pytest.raises(ValueError, match="removal_mode"):
        PrefixIndex().set_worker("w", removal_mode="both")
