"""An index that goes on from what another has saved answers as that one does, and never more than an engine holds."""

from __future__ import annotations

import random
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer import EventBatch, PrefixIndex, SavedRank, Stream
from indexer.events import AllBlocksCleared, BlockRemoved, BlockStored
from indexer.stream import Clear, Replay

SIZE = 4
HOLDER = ("w", 0)


def batch(*events: object) -> EventBatch:
    return EventBatch(ts=1.0, events=list(events))


def stored(path: tuple[int, ...]) -> BlockStored:
    """The block at the end of `path`, a number for each block; the hash is made of all of it."""
    return BlockStored(
        block_hashes=[hash_of(path)],
        parent_block_hash=hash_of(path[:-1]) if len(path) > 1 else None,
        token_ids=[path[-1]] * SIZE,
        block_size=SIZE,
    )


def hash_of(path: tuple[int, ...]) -> int:
    return hash(path) & (2**64 - 1)


def tokens_of(path: tuple[int, ...]) -> bytes:
    return array("I", [number for number in path for _ in range(SIZE)]).tobytes()


def saved(index: PrefixIndex) -> SavedRank:
    found = index.save(*HOLDER)
    assert found is not None
    it = SavedRank(1, 1.0, 1, None, *found)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(it), type=SavedRank)


def steps(rng: random.Random, n: int) -> list[EventBatch]:
    """Blocks of a small tree come and go in any order, also such whose parent has not come or is gone."""
    paths = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    paths += [(a, b, c) for a in range(3) for b in range(3) for c in range(2)]
    out = []
    for _ in range(n):
        path = rng.choice(paths)
        if rng.random() < 0.6:
            out.append(batch(stored(path)))
        elif rng.random() < 0.03:
            out.append(batch(AllBlocksCleared()))
        else:
            out.append(batch(BlockRemoved(block_hashes=[hash_of(path)])))
    return out


def reach(index: PrefixIndex, path: tuple[int, ...]) -> int:
    found = index.match(tokens_of(path)).get(HOLDER)
    return 0 if found is None else found.reach_tokens


@given(st.randoms(use_true_random=False), st.integers(0, 60), st.integers(0, 40), st.booleans())
def test_it_goes_on_as_if_nothing_had_happened(rng: random.Random, before: int, after: int, orphans: bool) -> None:
    first = PrefixIndex(orphan_blocks=64 if orphans else 0)
    for each in [batch(stored((0,))), *steps(rng, before)]:
        first.apply(*HOLDER, each)
    second = PrefixIndex(orphan_blocks=64 if orphans else 0)
    second.restore(*HOLDER, saved(first))
    for each in [None, *steps(rng, after)]:
        if each is not None:
            first.apply(*HOLDER, each)
            second.apply(*HOLDER, each)
        for a in range(3):
            for b in range(3):
                for c in range(2):
                    had, has = reach(first, (a, b, c)), reach(second, (a, b, c))
                    # A first block computed twice just then counts once: less, if anything.
                    assert has == had if each is None else has <= had
    second.clear(*HOLDER)
    second.sweep(1 << 20)
    assert second.bytes_used() == 0


def test_what_is_known_is_not_written_over() -> None:
    index = PrefixIndex()
    index.apply(*HOLDER, batch(stored((1,))))
    with pytest.raises(ValueError, match="known"):
        index.restore(*HOLDER, saved(index))


def ids(stream: Stream, actions: list[object]) -> int:
    (ask,) = (each for each in actions if isinstance(each, Replay))
    return ask.id


def test_a_stream_goes_on_where_the_engine_confirms_it() -> None:
    before = Stream()
    replay = ids(before, before.connected())
    for seq in range(3):
        before.replayed(replay, seq, b"%d" % seq, batch())
    assert before.position() is None  # A replay is under way.
    before.replay_done(replay)
    position = before.position()
    assert position is not None
    for changed in (False, True):
        after = Stream()
        after.resume(*position)
        (ask,) = after.connected()
        assert isinstance(ask, Replay)
        assert ask.start == 2
        actions = after.replayed(ask.id, 2, b"other" if changed else b"2", batch())
        assert [type(each) for each in actions] == ([Clear, Replay] if changed else [])
        if not changed:
            assert after.replayed(ask.id, 3, b"3", batch())
            assert not after.partial


def test_a_stream_whose_history_is_gone_begins_anew() -> None:
    after = Stream()
    after.resume(3, 1.0, 7)
    (ask,) = after.connected()
    assert isinstance(ask, Replay)
    actions = after.replayed(ask.id, 10, b"10", batch())  # The engine has forgotten what was before.
    assert isinstance(actions[0], Clear)
