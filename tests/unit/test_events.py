"""Decoding of KVEvents batches: every layout that vLLM 0.11 to 0.32 sends, and what is not one."""

import math
from typing import Any

import msgspec
import pytest

from indexer import EventBatch, EventDecodeError, decode_batch
from indexer.events import U64, AllBlocksCleared, BlockRemoved, BlockStored, fold_hash
from tests.support.kv_feed import as_array, cleared, payload, removed, stored

DIGEST = bytes(range(100, 132))
LOW64 = int.from_bytes(DIGEST[-8:], "big")

FULL_STORED = stored(
    [1, U64],
    [5, 6, 7, 8, 9, 10, 11, 12],
    3,
    lora_id=2,
    medium="CPU",
    lora_name="a",
    extra_keys=[["a", "salt"], None],
    group_idx=1,
    kv_cache_spec_kind="sliding_window",
    kv_cache_spec_sliding_window=128,
    locality="REMOTE",
    origin="REUSED",
)
FULL_REMOVED = removed([7, 8], medium="STORAGE", group_idx=2, remaining_copy_counts=[0, 3])


def only_event(*events: Any) -> Any:
    batch = decode_batch(payload(*events))
    assert (batch.malformed, batch.unknown) == (0, {})
    (event,) = batch.events
    return event


@pytest.mark.parametrize("layout", [lambda e: e, as_array], ids=["map", "array"])
def test_every_field_is_read_in_both_layouts(layout: Any) -> None:
    event = only_event(layout(FULL_STORED))
    assert isinstance(event, BlockStored)
    assert {name: getattr(event, name) for name in FULL_STORED if name != "type"} == {
        name: value for name, value in FULL_STORED.items() if name != "type"
    }
    gone = only_event(layout(FULL_REMOVED))
    assert isinstance(gone, BlockRemoved)
    assert (gone.block_hashes, gone.medium, gone.group_idx, gone.remaining_copy_counts) == (
        [7, 8],
        "STORAGE",
        2,
        [0, 3],
    )
    clear = only_event(layout(cleared(medium="GPU")))
    assert isinstance(clear, AllBlocksCleared)
    assert clear.medium == "GPU"


def kinds(batch: EventBatch) -> list[type]:
    return [
        next(kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared) if isinstance(e, kind))
        for e in batch.events
    ]


# The fields each release added, in array order: releases without `medium` and those without `lora_name` are served too.
@pytest.mark.parametrize("n_fields", range(3, 14))
def test_array_layout_of_older_releases_leaves_out_later_fields(n_fields: int) -> None:
    event = only_event(as_array(FULL_STORED)[: n_fields + 1])
    assert event.block_hashes == [1, U64]
    assert event.token_ids == FULL_STORED["token_ids"]
    assert event.medium == ("CPU" if n_fields >= 6 else None)
    assert event.group_idx == (1 if n_fields >= 9 else None)
    assert event.origin == ("REUSED" if n_fields >= 13 else None)


def test_map_layout_may_leave_out_everything_but_the_hashes() -> None:
    event = only_event({"type": "BlockStored", "block_hashes": [1]})
    assert (event.parent_block_hash, event.token_ids, event.block_size, event.medium) == (None, [], None, None)
    assert only_event({"type": "BlockRemoved", "block_hashes": [1]}).medium is None
    assert only_event({"type": "AllBlocksCleared"}).medium is None
    assert only_event(["AllBlocksCleared"]).medium is None


def test_fields_we_do_not_know_are_ignored_in_both_layouts() -> None:
    # 0.30 added ownership and session_id
    assert only_event({**FULL_STORED, "ownership": "OWNED", "session_id": "s", "later": {"x": [1]}}).group_idx == 1
    assert only_event([*as_array(FULL_STORED), "OWNED", {"x": 1}]).group_idx == 1
    assert only_event([*as_array(FULL_REMOVED), "LOCAL", "OWNED"]).group_idx == 2


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_batch_as_array_or_map(rank: int | None) -> None:
    as_map = msgspec.msgpack.encode({"ts": 2.5, "events": [FULL_STORED], "data_parallel_rank": rank, "later": 1})
    for data in (as_map, payload(FULL_STORED, ts=2.5, rank=rank), memoryview(as_map)):
        batch = decode_batch(data)
        assert (batch.ts, batch.data_parallel_rank, len(batch.events)) == (2.5, rank, 1)


def test_batch_without_a_rank_and_with_more_elements() -> None:
    assert decode_batch(msgspec.msgpack.encode([1, []])).data_parallel_rank is None
    batch = decode_batch(msgspec.msgpack.encode([1, [["AllBlocksCleared"]], 2, "later"]))
    assert (batch.ts, batch.data_parallel_rank, len(batch.events)) == (1.0, 2, 1)


@pytest.mark.parametrize("data", [[1.0, None, 4], {"ts": 1.0, "events": None, "data_parallel_rank": 4}, [1.0, [], 4]])
def test_batch_without_events(data: Any) -> None:
    batch = decode_batch(msgspec.msgpack.encode(data))
    assert (batch.events, batch.data_parallel_rank, batch.malformed) == ([], 4, 0)


@pytest.mark.parametrize("value", [-1, -(1 << 63), -5_000_000_000_000_000_000])
def test_signed_hash_equals_its_unsigned_twin(value: int) -> None:
    event = only_event(stored([value], [1, 2, 3, 4], value))
    assert event.block_hashes == [value + (1 << 64)]
    assert event.parent_block_hash == value + (1 << 64)
    assert only_event(removed([value])).block_hashes == [value & U64]


def test_digest_is_folded_to_its_low_64_bits() -> None:
    event = only_event(stored([DIGEST, LOW64, LOW64 - (1 << 64) if LOW64 >> 63 else LOW64], list(range(12)), DIGEST))
    assert set(event.block_hashes) == {LOW64}
    assert event.parent_block_hash == LOW64
    assert only_event(removed([DIGEST])).block_hashes == [LOW64]


def test_fold_hash() -> None:
    assert fold_hash(b"\x01") == 1
    assert fold_hash(-1) == U64
    with pytest.raises(ValueError, match="empty"):
        fold_hash(b"")


def test_array_and_map_events_in_one_batch() -> None:
    batch = decode_batch(payload(as_array(FULL_STORED), FULL_REMOVED, ["AllBlocksCleared"], stored([9], [1, 2, 3, 4])))
    assert kinds(batch) == [BlockStored, BlockRemoved, AllBlocksCleared, BlockStored]
    assert batch.malformed == 0


@pytest.mark.parametrize(
    "unknown",
    [["BlockMigrated", 1, 2], {"type": "BlockMigrated", "x": 1}, ["BlockMigrated"]],
    ids=["array", "map", "bare"],
)
def test_unknown_event_type_is_counted_and_its_neighbours_stay(unknown: Any) -> None:
    good = stored([1], [1, 2, 3, 4])
    batch = decode_batch(payload(good, unknown, as_array(good), unknown))
    assert len(batch.events) == 2
    assert batch.unknown == {"BlockMigrated": 2}
    assert batch.malformed == 0


def test_unknown_event_names_are_cut() -> None:
    assert list(decode_batch(payload(["x" * 1000])).unknown) == ["x" * 64]


MALFORMED = {
    "nil": None,
    "number": 5,
    "text": "BlockStored",
    "empty list": [],
    "empty map": {},
    "no hashes": {"type": "BlockStored"},
    "hashes of another type": stored(["a"], [1, 2, 3, 4]),
    "empty digest": stored([b""], [1, 2, 3, 4]),
    "empty parent digest": stored([b"x"], [1, 2, 3, 4], b""),
    "hashes no list": {**stored([], []), "block_hashes": 7},
    "token pairs": stored([1], [[1, 2], [2, 3], [3, 4], [4, 5]]),
    "fractional tokens": stored([1], [1.5, 2, 3, 4]),
    "removed nothing": ["BlockRemoved"],
    "medium is a number": removed([1], medium=4),
    "type is a list": {"type": ["BlockStored"]},
    "type is a map": {"type": {"a": 1}},
    "number first": [7, [1], None, [1, 2, 3, 4]],
}


@pytest.mark.parametrize("name", sorted(MALFORMED))
def test_malformed_event_is_counted_and_its_neighbours_stay(name: str) -> None:
    good = stored([1], [1, 2, 3, 4])
    for layout in (lambda e: e, as_array):
        batch = decode_batch(payload(layout(good), MALFORMED[name], layout(removed([1])), layout(good)))
        assert kinds(batch) == [BlockStored, BlockRemoved, BlockStored]
        assert (batch.malformed, batch.unknown) == (1, {})


def test_lists_of_events_within_events_are_unfolded_once() -> None:
    good = stored([1], [1, 2, 3, 4])
    batch = decode_batch(payload([as_array(good), good], [good, None, ["Later"]], [[as_array(good)]]))
    assert len(batch.events) == 3
    assert batch.unknown == {"Later": 1}
    assert batch.malformed == 2  # the nil, and the list in a list in a list


def test_unreadable_msgpack_in_one_event_costs_only_that_event() -> None:
    head = b"\x93\xcb" + b"\0" * 8 + b"\x92"
    good = msgspec.msgpack.encode(stored([1], [1, 2, 3, 4]))
    bad_utf8, bad_timestamp = b"\x91\xa2\xff\xfe", b"\x91\xc7\x0c\xff" + b"\xff" * 12
    unhashable_key = b"\x81\x81\x01\x02\x03"
    nested = b"\x91" * 900 + b"\xc0"
    for bad in (bad_utf8, bad_timestamp, unhashable_key, nested):
        batch = decode_batch(head + bad + good + b"\xc0")
        assert (len(batch.events), batch.malformed) == (1, 1)


WHOLE = payload(FULL_STORED, as_array(FULL_REMOVED), rank=1)


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_truncated_payload_raises(length: int) -> None:
    with pytest.raises(EventDecodeError):
        decode_batch(WHOLE[:length])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        WHOLE + b"\x00",
        b"\x91" * 100_000,
        b"\x93\xcb" + b"\0" * 8 + b"\x91" * 100_000 + b"\xc0\xc0",
        msgspec.msgpack.encode("text that is no batch"),
        msgspec.msgpack.encode(7_000_000),
        msgspec.msgpack.encode({"events": []}),
        msgspec.msgpack.encode(["ts", []]),
        msgspec.msgpack.encode([1.0, {"type": "AllBlocksCleared"}]),
        msgspec.msgpack.encode([1.0, [], "rank"]),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_batch_raises(data: bytes) -> None:
    with pytest.raises(EventDecodeError):
        decode_batch(data)


@pytest.mark.parametrize("n_events", [1, 15, 16, 300, 70_000])
def test_number_of_events_changes_the_msgpack_header_only(n_events: int) -> None:
    for event in (removed([5]), ["BlockRemoved", [5]]):
        assert len(decode_batch(payload(*[event] * n_events)).events) == n_events


def test_whole_number_timestamps_are_read() -> None:
    assert math.isclose(decode_batch(msgspec.msgpack.encode([7, [], 0])).ts, 7.0)
