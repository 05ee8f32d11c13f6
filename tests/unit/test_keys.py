"""Block keys: what makes two blocks the same block, and what must keep them apart."""

import random
from array import array
from typing import Any

import pytest

from indexer import MediaSpan, Prompt
from indexer.keys import (
    RUN_BLOCKS,
    block_extra,
    block_key,
    chain,
    chain_again,
    event_extras,
    extra_parts,
    query_extras,
    root,
    token_bytes,
)

SIZE = 4


def keys(tokens: Any, adapter: str | int | None = None, size: int = SIZE, **prompt: Any) -> list[int]:
    found = Prompt(tokens, **prompt).chain(adapter, size)
    return list(found.upto(found.n_blocks))


TOKENS = list(range(1, 17))


@pytest.mark.parametrize(
    "form",
    [tuple, array_i := (lambda t: array("I", t)), lambda t: array_i(t).tobytes(), lambda t: bytearray(array_i(t)),
     lambda t: memoryview(array_i(t)), lambda t: memoryview(array_i(t).tobytes()), lambda t: array("Q", t)],
    ids=["tuple", "array I", "bytes", "bytearray", "memoryview of I", "memoryview of B", "array Q"],
)  # fmt: skip
def test_every_form_of_token_ids_gives_the_same_keys(form: Any) -> None:
    assert keys(form(TOKENS)) == keys(TOKENS)


@pytest.mark.parametrize("bad", [[-1], [1 << 32], ["a"], [1.5], [None]])
def test_ids_outside_uint32_are_refused(bad: list[Any]) -> None:
    with pytest.raises(ValueError, match="0 to 4294967295"):
        token_bytes(bad)


def test_buffer_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="4 bytes per token"):
        token_bytes(b"12345")


def test_a_key_names_its_whole_path() -> None:
    other = [99, *TOKENS[1:]]
    assert len(set(keys(TOKENS)) | set(keys(other))) == 8
    assert keys(TOKENS)[:2] == keys(TOKENS[:8])
    repeated = keys([7, 7, 7, 7] * 4)
    assert len(set(repeated)) == 4


def test_partial_last_block_has_no_key() -> None:
    assert keys(TOKENS[:11]) == keys(TOKENS)[:2]
    assert keys(TOKENS[:3]) == keys([]) == []


@pytest.mark.parametrize("seed", range(30))
def test_remembered_runs_are_those_that_chain_makes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr("indexer.keys._runs", {})
    monkeypatch.setattr("indexer.keys._MOST_RUNS", 3)  # So that they are forgotten in between.
    prompts = [array("I", (rng.randrange(2) for _ in range(rng.randrange(4 * SIZE * RUN_BLOCKS)))) for _ in range(3)]
    for _ in range(60):
        size = rng.choice([SIZE, 2 * SIZE])
        prompt = rng.choice(prompts)
        data = prompt.tobytes() if rng.random() < 0.7 else (prompt[: rng.randrange(len(prompt) + 1)] * 2).tobytes()
        n_blocks = len(data) // (4 * size)
        extras = {rng.randrange(300): (b"x",)} if rng.random() < 0.3 else {}
        at, parent, found = 0, root(None, size), []
        while at < n_blocks:
            stop = min(n_blocks, at + rng.choice([1, RUN_BLOCKS - 1, RUN_BLOCKS, 3 * RUN_BLOCKS]))
            found += chain_again(found[-1] if found else parent, data, size, at, stop, extras)
            at = stop
        assert found == chain(parent, data, size, 0, n_blocks, extras)


def test_chain_can_be_hashed_in_any_pieces() -> None:
    data = token_bytes(TOKENS)
    extras = {0: (b"s",), 2: (b"a", b"b")}
    whole = chain(root(None, SIZE), data, SIZE, 0, 4, extras)
    for cut in range(1, 4):
        head = chain(root(None, SIZE), data, SIZE, 0, cut, extras)
        assert head + chain(head[-1], data, SIZE, cut, 4, extras) == whole


def test_block_sizes_and_adapters_have_their_own_keys() -> None:
    roots = {root(None, 16), root(None, 32), root("a", 16), root("1", 16), root(1, 16), root("", 16), root("None", 16)}
    assert len(roots) == 7
    assert root("a", 16) == root("a", 16)


def test_extras_are_framed_so_that_no_two_inputs_coincide() -> None:
    tokens = token_bytes(TOKENS[:4])
    found = {
        block_key(1, tokens, extra) for extra in [(), (b"",), (b"ab",), (b"a", b"b"), (b"a", b"", b"b"), (b"a" * 300,)]
    }
    assert len(found) == 6


def test_salt_counts_in_the_first_block_only_but_separates_the_whole_chain() -> None:
    salted, plain = keys(TOKENS, cache_salt="s"), keys(TOKENS)
    assert not set(salted) & set(plain)
    assert query_extras(None, "s", None, SIZE, 4) == {0: (b"s",)}
    assert keys(TOKENS, cache_salt="") != plain


@pytest.mark.parametrize(
    ("published", "canonical"),
    [
        (None, ()),
        ([], ()),
        (["b", "a"], (b"b", b"a")),
        ("a", (b"a",)),
        (["a", "a"], (b"a", b"a")),
        ([["a", 15]], (b"a",)),
        ([("mm", "a", 3)], (b"a",)),
        ([["mm", "a", 3], "b"], (b"a", b"b")),
        ([["mm", 15]], (b"mm",)),
        ([["cache_salt", "s"]], (b"s",)),
        ([["prompt_embeds", b"\x01\x02"]], (b"\x01\x02",)),
        ([["lora", "adapter", "/path"], "a"], (b"a",)),
        ([42, "a"], (b"a",)),
        ([[42, "a"]], ()),
        ([42, 1.5, None, {}, []], ()),
        (["adapter", "a"], (b"a",)),
        ([bytearray(b"d")], (b"d",)),
    ],
)
def test_extra_keys_in_every_published_form(published: Any, canonical: tuple[bytes, ...]) -> None:
    """vLLM <= 0.17 sends [id, offset] pairs, later bare strings; tagged tuples are what 0.31 hashes internally."""
    assert block_extra(published, "adapter") == canonical


def test_event_extras_are_per_block_and_cut_to_the_blocks() -> None:
    values = [["hash_A"], ["hash_A"], None, ["hash_B"], ["hash_B", "hash_C"], ["beyond"]]
    expected = {0: (b"hash_A",), 1: (b"hash_A",), 3: (b"hash_B",), 4: (b"hash_B", b"hash_C")}
    assert event_extras(values, 5, None) == expected
    assert event_extras([["adapter-116"]], 1, "adapter-116") == {}
    assert event_extras(None, 3, None) == {}


def test_media_spans_taint_every_block_they_touch() -> None:
    """An image of 48 tokens at 0 taints blocks 0 to 2 of 16 tokens; two images leave the block between them alone."""
    assert query_extras([MediaSpan("A", 0, 48)], None, None, 16, 4) == dict.fromkeys(range(3), (b"A",))
    two = [MediaSpan("A", 0, 32), MediaSpan("B", 48, 32)]
    assert query_extras(two, None, None, 16, 5) == {0: (b"A",), 1: (b"A",), 3: (b"B",), 4: (b"B",)}
    assert query_extras([MediaSpan("A", 15, 2)], None, None, 16, 2) == {0: (b"A",), 1: (b"A",)}
    assert query_extras([MediaSpan("A", 16, 0)], None, None, 16, 2) == {1: (b"A",)}
    assert query_extras([MediaSpan("A", 40, 100)], None, None, 16, 3) == {2: (b"A",)}
    assert query_extras([MediaSpan("A", 100, 5)], None, None, 16, 3) == {}


def test_a_media_span_and_the_event_of_its_blocks_meet() -> None:
    by_span = keys(TOKENS, extra_keys=[MediaSpan("img", 5, 6)])
    by_block = keys(TOKENS, extra_keys=[None, ["img"], [["img", 1]]])
    assert by_span == by_block
    assert by_span[0] == keys(TOKENS)[0]
    assert by_span[1] != keys(TOKENS)[1]


def test_query_may_name_its_adapter_among_its_extra_keys() -> None:
    assert keys(TOKENS, "a", extra_keys=[["a"], ["a", "img"], None]) == keys(TOKENS, "a", extra_keys=[None, ["img"]])


def test_prompt_hashes_a_chain_once_and_only_as_far_as_asked() -> None:
    prompt = Prompt(TOKENS)
    first = prompt.chain(None, SIZE)
    assert prompt.chain(None, SIZE) is first
    assert first.keys == []
    assert len(first.upto(2)) == 2
    assert (prompt.n_tokens, first.n_blocks, prompt.chain(None, 3).n_blocks) == (16, 4, 5)


def test_no_recursion_into_strange_extra_keys() -> None:
    deep: Any = "a"
    for _ in range(10_000):
        deep = [deep]
    assert extra_parts(deep, None) == []


def test_a_salt_of_the_adapters_name_is_still_a_salt() -> None:
    """vLLM publishes [adapter, salt] in block 0; only one of two equal texts is the adapter."""
    assert event_extras([["l1", "l1"], ["l1"]], 2, "l1") == {0: (b"l1",)}
    assert query_extras(None, "l1", "l1", 4, 2) == {0: (b"l1",)}


def test_order_and_repetition_of_media_tell_blocks_apart() -> None:
    """Two small images in one block, swapped or repeated, are other content."""
    prompts = [["A", "B"], ["B", "A"], ["A", "A", "B"]]
    keys = {Prompt(range(4), extra_keys=[ids]).chain(None, 4).upto(1)[0] for ids in prompts}
    assert len(keys) == 3
    assert query_extras([["A", "salt"]], "salt", None, 4, 1) == {0: (b"A", b"salt")}


@pytest.mark.parametrize("extra_keys", [[{"id": "x"}], [[{"mm": "x"}]], [1.5], [object()]])
def test_a_query_with_other_extra_keys_is_refused(extra_keys: list[Any]) -> None:
    with pytest.raises(ValueError, match="extra_keys"):
        query_extras(extra_keys, None, None, 4, 1)
