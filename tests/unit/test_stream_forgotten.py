"""A cache that was emptied by hand: what was published before stays away."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from indexer import Stream
from indexer.stream import Phase
from tests.support.stream_talk import ask, joined, live, replayed, told


def test_the_next_batch_counts_and_the_ones_before_do_not() -> None:
    stream = joined(5)
    assert told(stream.forgotten("new weights")) == ["clear"]
    assert live(stream, 8) == [8]  # 5 to 7 were published before, or are not worth a replay of what may be.
    assert (stream.partial, stream.epoch) == (False, 0)
    assert live(stream, 9) == [9]
    assert live(stream, 11) == [("replay", 2, 10)]


def test_a_replay_under_way_is_void() -> None:
    stream = joined(5)
    replay_id = ask(live(stream, 8))
    assert replayed(stream, replay_id, 5) == [5]
    assert told(stream.forgotten("new weights")) == ["clear"]
    assert replayed(stream, replay_id, 6) == []
    assert told(stream.replay_done(replay_id)) == []
    assert told(stream.replay_failed(replay_id)) == []
    assert stream.phase is Phase.LIVE
    assert live(stream, 9) == [9]


def test_a_history_that_was_not_read_yet_is_left_alone() -> None:
    stream = Stream()
    stream.forgotten("new weights")
    assert told(stream.connected()) == []
    assert live(stream, 40) == [40]
    assert told(stream.connected()) == [("replay", 2, 40)]  # From now on as ever: the last one is compared.
    assert replayed(stream, 2, 40) == []


def test_another_process_is_read_from_its_beginning() -> None:
    stream = joined(5)
    stream.forgotten("new weights")
    assert told(stream.restarted("start time")) == ["clear", ("replay", 2, 0)]


def test_a_batch_that_comes_twice_is_no_next_one() -> None:
    stream = joined(5)
    stream.forgotten("new weights")
    assert live(stream, 4) == []
    assert live(stream, 5) == [5]


def test_a_history_that_cannot_be_read_for_a_while_brings_nothing_of_before() -> None:
    stream = Stream(replay_attempts=1)
    assert told(stream.connected()) == [("replay", 1, 0)]
    assert replayed(stream, 1, 0) == [0]
    assert told(stream.replay_done(1)) == []
    stream.forgotten("new weights")
    assert live(stream, 1) == [1]
    again = ask(told(stream.connected()))
    assert told(stream.replay_failed(again)) == ["clear"]
    later = ask(live(stream, 2))
    assert [replayed(stream, later, seq) for seq in (0, 1, 2)] == [[], [1], [2]]
    assert told(stream.replay_done(later)) == []
    assert stream.next_seq == 3


steps = st.lists(
    st.tuples(st.sampled_from(["publish", "publish", "lose", "replay", "fail", "connect"]), st.integers(0, 4)),
    max_size=40,
)


@given(steps, steps)
def test_nothing_published_before_is_ever_applied_after(
    before: list[tuple[str, int]], after: list[tuple[str, int]]
) -> None:
    """One process; lost batches, reconnects and replays, whole or broken off, in any order around the reset."""
    stream = Stream(replay_attempts=2)
    published = 0
    first = 0
    replays: list[tuple[int, int]] = []

    def take(actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, tuple):
                replays.append((action[1], action[2]))
            elif action != "clear":
                assert action >= first

    def play(steps: list[tuple[str, int]]) -> None:
        nonlocal published
        for what, part in steps:
            if what in ("publish", "lose"):
                published += 1
                if what == "publish":
                    take(live(stream, published - 1))
            elif what == "connect":
                take(told(stream.connected()))
            elif replays:
                replay_id, start = replays.pop(0)
                stop = published if what == "replay" else min(published, start + part)
                for seq in range(start, stop):
                    take(replayed(stream, replay_id, seq))
                take(told(stream.replay_done(replay_id) if what == "replay" else stream.replay_failed(replay_id)))

    take(told(stream.connected()))
    play(before)
    first = published
    assert told(stream.forgotten("new weights")) == ["clear"]
    play(after)
    take(live(stream, published))
    assert replays or stream.next_seq == published + 1
