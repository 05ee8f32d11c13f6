"""Damaged payloads: never another exception than EventDecodeError, and a damaged event never costs its neighbours."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from indexer import EventBatch, EventDecodeError, PrefixIndex, decode_batch
from indexer.events import U64
from tests.support.kv_feed import Feed, as_array, payload, prompt, removed, stored

hashes = st.integers(-(1 << 63), U64) | st.binary(min_size=1, max_size=40)
scalars = (
    st.none() | st.booleans() | st.integers(-(1 << 63), U64) | st.floats() | st.text(max_size=5) | st.binary(max_size=9)
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Later"])
fields = st.sampled_from(
    ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
     "group_idx", "kv_cache_spec_kind", "locality", "origin", "remaining_copy_counts", "type", "later"]
)  # fmt: skip
near_events = (
    anything
    | st.builds(lambda name, rest: [name, *rest], names, st.lists(anything, max_size=13))
    | st.builds(lambda name, rest: {"type": name, **rest}, names, st.dictionaries(fields, anything, max_size=8))
)
TOKENS = prompt(3)
WHOLE = payload(
    Feed().event("w", TOKENS), as_array(removed([5, 6], medium="CPU")), {"type": "AllBlocksCleared"}, rank=1
)


def feed_to_an_index(batch: EventBatch) -> None:
    """Whatever was decoded can be applied, and the index still works."""
    feed = Feed(PrefixIndex())
    feed.index.apply("w", 0, batch)
    feed.index.match(TOKENS)
    feed.index.stats()
    feed.index.clear("w")
    feed.store("v", TOKENS)
    assert feed.held(TOKENS, "v") == 12


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    try:
        batch = decode_batch(data)
    except EventDecodeError:
        return
    feed_to_an_index(batch)


@given(st.data())
def test_mutated_payload(data: st.DataObject) -> None:
    mutated = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        how = data.draw(st.sampled_from(["set", "delete", "insert", "cut"]))
        if how == "set":
            mutated[at] = data.draw(st.integers(0, 255))
        elif how == "delete" and len(mutated) > 1:
            del mutated[at]
        elif how == "insert":
            mutated[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        elif at:
            del mutated[at:]
    try:
        batch = decode_batch(bytes(mutated))
    except EventDecodeError:
        return
    feed_to_an_index(batch)


@given(st.lists(near_events, max_size=3), st.lists(near_events, max_size=3), st.booleans())
def test_neighbours_of_any_event_survive(before: list[Any], after: list[Any], array: bool) -> None:
    good: Any = stored([2**64 - 2], [1, 2, 3, 4], 9, medium="CPU", group_idx=3)
    good = as_array(good) if array else good
    batch = decode_batch(payload(*before, good, *after))
    found = [e for e in batch.events if getattr(e, "group_idx", None) == 3 and e.block_hashes == [2**64 - 2]]
    assert found
    assert (found[0].parent_block_hash, found[0].token_ids) == (9, [1, 2, 3, 4])
    assert batch.malformed >= 0
    feed_to_an_index(batch)


@given(st.lists(hashes, min_size=1, max_size=5), hashes, st.booleans())
def test_hashes_of_any_form_fold_the_same_in_every_layout(values: list[Any], parent: Any, array: bool) -> None:
    def low(value: Any) -> int:
        return value & U64 if isinstance(value, int) else int.from_bytes(value[-8:], "big")

    event = stored(values, [], parent)
    batch = decode_batch(payload(as_array(event) if array else event, as_array(removed(values)), removed(values)))
    assert batch.malformed == 0
    assert [e.block_hashes for e in batch.events] == [[low(v) for v in values]] * 3
    assert batch.events[0].parent_block_hash == low(parent)  # type: ignore[union-attr]


@given(anything)
def test_any_msgpack_value_as_a_batch(value: Any) -> None:
    try:
        batch = decode_batch(msgspec.msgpack.encode(value))
    except EventDecodeError:
        return
    feed_to_an_index(batch)
