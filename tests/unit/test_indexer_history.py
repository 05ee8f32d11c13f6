"""Deltas that are kept for watchers to go on from."""

from __future__ import annotations

import pytest

from gateway.indexservice.history import _OBJECT_BYTES, History
from gateway.pb import indexer_pb2 as pb


def update(sequence: int) -> bytes:
    return pb.Update(deltas=[pb.Delta(sequence=sequence)]).SerializeToString()


def numbers(raw: bytes) -> list[int]:
    return [delta.sequence for delta in pb.Update.FromString(raw).deltas]


async def test_whoever_is_within_what_is_kept_goes_on_and_nobody_else() -> None:
    history = History(10 * (len(update(100)) + _OBJECT_BYTES))
    for sequence in range(1, 101):
        history.append(update(sequence))
    assert (history.sequence, history.has_all_after(100), history.has_all_after(101)) == (100, True, False)
    kept = [at for at in range(101) if history.has_all_after(at)]
    assert kept == list(range(90, 101))
    assert numbers(history.after(90, 1 << 20)[0]) == list(range(91, 101))
    with pytest.raises(LookupError):
        history.after(89, 1 << 20)
    assert history.bytes <= 10 * (len(update(100)) + _OBJECT_BYTES)


async def test_a_long_way_is_told_in_pieces() -> None:
    history = History(1 << 20)
    for sequence in range(1, 51):
        history.append(update(sequence))
    at, told = 0, []
    while at < history.sequence:
        raw, at = history.after(at, 3 * len(update(1)))
        assert len(numbers(raw)) <= 4
        told += numbers(raw)
    assert told == list(range(1, 51))


async def test_the_last_one_is_always_kept() -> None:
    history = History(1)
    history.append(update(1))
    history.append(update(2))
    assert numbers(history.after(1, 1)[0]) == [2]


async def test_after_too_much_at_once_nobody_goes_on() -> None:
    history = History(1 << 20)
    history.append(update(1))
    history.forget()
    with pytest.raises(LookupError):
        history.after(1, 1)
    assert history.after(2, 1) == (b"", 2)
    history.append(update(3))
    assert numbers(history.after(2, 1)[0]) == [3]
