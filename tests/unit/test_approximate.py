"""The approximate index: what was routed is assumed to be there, until time, capacity or the engine says otherwise."""

from typing import Any

import pytest

from indexer import ApproximateIndex, Match, MediaSpan, Prompt
from tests.support.kv_feed import SIZE, prompt

A, B, C = (prompt(4, 1000 * i) for i in range(3))


def make(**kwargs: Any) -> ApproximateIndex:
    return ApproximateIndex(**{"ttl_s": 100.0, "block_size": SIZE, "capacity_blocks": 100, **kwargs})


def held(index: ApproximateIndex, tokens: list[int], now_s: float = 0.0, worker: str = "w", **query: Any) -> int:
    found = index.match(tokens, now_s=now_s, **query).get((worker, 0))
    return found.gpu_tokens if found else 0


def test_what_was_routed_is_assumed_and_marked_approximate() -> None:
    index = make()
    index.assume("w", 1, Prompt([*A, 7]), 0.0)
    assert index.match([*A, *B], now_s=1.0) == {("w", 1): Match(16, 0, 0, 16, True)}
    assert index.match(B, now_s=1.0) == {}
    assert index.stats() == {"assumed_blocks": {"w": {"1": 4}}, "corrections": 0}


def test_assume_returns_the_keys_it_booked_from_the_first_block_asked_for() -> None:
    index = make()
    keys = index.assume("w", 0, Prompt(A), 0.0)
    assert len(keys) == 4
    assert index.assume("v", 0, Prompt(A), 0.0, first_block=2) == keys[2:]
    assert held(index, A, worker="v") == 0
    index.assume("v", 0, Prompt(A[:8]), 0.0)
    assert held(index, A, worker="v") == 16


def test_assumed_blocks_go_on_from_where_the_known_ones_end() -> None:
    index = make()
    known = {("w", 0): Match(8, 0, 0, 8), ("v", 0): Match(8, 0, 0, 8)}
    index.assume("w", 0, Prompt([*A, *B]), 0.0, first_block=2)
    whole = Prompt([*A, *B, *C])
    assert index.beyond(whole, known, now_s=1.0) == {("w", 0): Match(32, 0, 0, 32, True)}
    assert index.beyond(Prompt(A[:8]), known, now_s=1.0) == {}
    assert index.beyond(whole, {}, now_s=1.0) == {}  # What came before them is there no longer.
    loaded = {("w", 0): Match(4, 12, 0, 12)}
    assert index.beyond(whole, loaded, now_s=1.0) == {("w", 0): Match(4, 12, 0, 32, True)}
    assert index.beyond(whole, known, now_s=101.0) == {}


def test_assumptions_lapse_after_the_ttl_and_use_renews_them() -> None:
    index = make(ttl_s=10.0)
    index.assume("w", 0, Prompt(A), 0.0)
    index.assume("w", 0, Prompt(B), 5.0)
    assert (held(index, A, 9.99), held(index, B, 9.99)) == (16, 16)
    assert (held(index, A, 10.0), held(index, B, 10.0)) == (0, 16)
    index.assume("w", 0, Prompt(B[:8]), 14.0)
    assert held(index, B, 16.0) == 8
    assert held(index, B, 24.0) == 0
    assert index.stats()["assumed_blocks"] == {"w": {"0": 0}}


def test_capacity_drops_the_least_recently_used() -> None:
    index = make(capacity_blocks=8)
    index.assume("w", 0, Prompt(A), 0.0)
    index.assume("w", 0, Prompt(B), 1.0)
    index.assume("w", 0, Prompt(A), 2.0)
    index.assume("w", 0, Prompt(C), 3.0)
    assert [held(index, tokens, 3.0) for tokens in (A, B, C)] == [16, 0, 16]


def test_a_prompts_tail_gives_way_before_its_head() -> None:
    index = make(capacity_blocks=6)
    index.assume("w", 0, Prompt(A), 0.0)
    index.assume("w", 0, Prompt(B), 1.0)
    assert [held(index, tokens, 1.0) for tokens in (A, B)] == [8, 16]


def test_a_prompt_longer_than_the_cache_keeps_its_head() -> None:
    index = make(capacity_blocks=3)
    index.assume("w", 0, Prompt([*A, *B]), 0.0)
    assert held(index, [*A, *B]) == 12


def test_found_less_than_claimed_drops_everything_used_no_later() -> None:
    index = make()
    for at_s, tokens in enumerate((A, B, C)):
        index.assume("w", 0, Prompt(tokens), float(at_s))
    index.assume("w", 0, Prompt([*B, 1]), 10.0)
    index.correct("w", 0, Prompt([*B, 1]), 8, 10.0)
    assert [held(index, tokens, 10.0) for tokens in (A, B, C)] == [0, 16, 16]
    assert index.corrections == 1


def test_what_was_used_at_the_same_moment_as_the_missing_block_goes_too() -> None:
    index = make()
    for tokens in (A, B):
        index.assume("w", 0, Prompt(tokens), 0.0)
    index.assume("w", 0, Prompt([*B, 1]), 10.0)
    index.correct("w", 0, Prompt([*B, 1]), 0, 10.0)
    assert (held(index, A, 10.0), held(index, B, 10.0)) == (0, 16)


def test_found_as_much_as_claimed_changes_nothing() -> None:
    index = make()
    index.assume("w", 0, Prompt(A), 0.0)
    index.assume("w", 0, Prompt(B), 1.0)
    index.assume("w", 0, Prompt(B), 2.0)
    # of a fully cached prompt the engine recomputes the last token, and with it the last block
    index.correct("w", 0, Prompt(B), 12, 2.0)
    index.assume("w", 0, Prompt([*B, 1]), 3.0)
    index.correct("w", 0, Prompt([*B, 1]), 16, 3.0)
    index.correct("w", 0, Prompt([*B, 1]), 20, 3.0)
    assert (held(index, A, 3.0), index.corrections) == (16, 0)


def test_missing_last_block_of_a_prompt_that_goes_on_counts() -> None:
    index = make()
    index.assume("w", 0, Prompt(A), 0.0)
    index.assume("w", 0, Prompt(B), 1.0)
    index.assume("w", 0, Prompt([*B, 1, 2]), 2.0)
    index.correct("w", 0, Prompt([*B, 1, 2]), 12, 2.0)
    assert (held(index, A, 2.0), index.corrections) == (0, 1)


def test_a_cold_prompt_found_cold_corrects_nothing() -> None:
    index = make()
    index.assume("w", 0, Prompt(A), 0.0)
    index.assume("w", 0, Prompt(B), 1.0)
    index.correct("w", 0, Prompt(B), 0, 1.0)
    index.correct("nobody", 0, Prompt(B), 0, 1.0)
    index.correct("w", 0, Prompt(C), 0, 1.0)
    assert (held(index, A, 1.0), index.corrections) == (16, 0)


def test_a_sibling_in_the_same_burst_is_no_claim_from_before() -> None:
    """Two copies of a cold prompt are sent at once: that the first finds nothing says nothing about older prompts."""
    index = make()
    index.assume("w", 0, Prompt(A), 0.0)
    index.assume("w", 0, Prompt([*B, 1]), 10.0)
    index.assume("w", 0, Prompt([*B, 1]), 10.01)
    index.correct("w", 0, Prompt([*B, 1]), 0, 10.0)
    assert (held(index, A, 11.0), held(index, B, 11.0), index.corrections) == (16, 16, 0)


def test_retract_forgets_what_only_that_request_brought() -> None:
    index = make()
    index.assume("w", 0, Prompt(A), 0.0)
    longer = [*A, *B]
    keys = index.assume("w", 0, Prompt(longer), 1.0)
    index.retract("w", 0, keys, 1.0)
    assert held(index, longer, 1.0) == 16
    keys = index.assume("w", 0, Prompt(longer), 2.0)
    index.assume("w", 0, Prompt(longer), 3.0)
    index.retract("w", 0, keys, 2.0)
    assert held(index, longer, 3.0) == 32
    index.retract("nobody", 0, keys, 2.0)
    index.assume("w", 0, Prompt(longer), 500.0)  # the earlier assumptions have lapsed by then
    index.retract("w", 0, keys, 2.0)
    assert held(index, longer, 500.0) == 32


def test_namespaces() -> None:
    index = make()
    index.set_worker("w", models=["m", "alias"], loras=["a"])
    index.assume("w", 0, Prompt(A), 0.0, model="m")
    assert held(index, A, model="alias") == 16
    assert held(index, A, model="other") == held(index, A, model="a") == held(index, A, cache_salt="s") == 0
    index.assume("w", 0, Prompt(B, cache_salt="s", extra_keys=[MediaSpan("img", 4, 4)]), 0.0, model="a")
    media = {"cache_salt": "s", "extra_keys": [None, ["img"]]}
    assert held(index, B, model="a", **media) == held(index, B, model="m", lora="a", **media) == 16
    assert held(index, B, model="m", **media) == held(index, B, model="a") == 0


def test_several_block_sizes_and_ranks() -> None:
    index = make()
    index.set_worker("w8", block_size=8, capacity_blocks=2)
    for rank in (0, 1):
        index.assume("w8", rank, Prompt([*A, *B]), 0.0)
        index.assume("w4", rank, Prompt(A), 0.0)
    index.clear("w4", 1)
    expected = {("w8", 0): 16, ("w8", 1): 16, ("w4", 0): 16}
    assert {h: m.gpu_tokens for h, m in index.match([*A, *B], now_s=0.0).items()} == expected


def test_another_block_size_empties_the_list_and_another_capacity_does_not() -> None:
    index = make()
    index.assume("w", 0, Prompt(A), 0.0)
    index.set_worker("w", capacity_blocks=50)
    assert held(index, A) == 16
    index.set_worker("w", block_size=8)
    assert held(index, A) == 0
    index.assume("w", 0, Prompt(A), 0.0)
    assert held(index, A[:12]) == 8


def test_clear_and_remove_leave_nothing_and_free_their_bits() -> None:
    index = make()
    for n in range(50):
        for worker in ("a", "b", "c"):
            index.assume(worker, 0, Prompt(A), 0.0)
        assert len(index.match(A, now_s=0.0)) == 3
        index.clear("b")
        assert set(index.match(A, now_s=0.0)) == {("a", 0), ("c", 0)}
        index.assume(f"x{n}", 0, Prompt(A[:8]), 0.0)
        assert held(index, A, worker=f"x{n}") == 8
        for worker in ("a", "c", f"x{n}"):
            index.remove_worker(worker)
        assert index.match(A, now_s=0.0) == {}
    assert index._plane.size == 0
    assert not any(index._plane.masks)
    assert len(index._free_bits) <= 4


def test_what_is_no_setting_is_refused() -> None:
    for bad in ({"ttl_s": 0}, {"block_size": 0}, {"capacity_blocks": -1}):
        with pytest.raises(ValueError, match="positive"):
            make(**bad)
