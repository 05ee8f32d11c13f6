"""The order of event batches: frames, gaps, replays. Epochs are in test_stream_epochs.py."""

import pytest

from indexer import FrameError, Stream, parse_frames
from indexer.stream import END_OF_REPLAY, REMEMBERED_BATCHES, Phase
from tests.support.stream_talk import ask, joined, live, replayed, told

# ---- frames ---------------------------------------------------------------------------------------------------------

SEQ7 = (7).to_bytes(8, "big")
END = b"\xff" * 8


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([b"kv@host@model", SEQ7, b"payload"], (7, b"payload")),
        ([b"", SEQ7, b"payload"], (7, b"payload")),
        ([b"", b"kv@host@model", SEQ7, b"payload"], (7, b"payload")),
        ([SEQ7, b"payload"], (7, b"payload")),
        ([b"", END, b""], (END_OF_REPLAY, b"")),
        ([b"", b"", END, b""], (END_OF_REPLAY, b"")),
        ([b"topic", (1 << 62).to_bytes(8, "big"), b"p"], (1 << 62, b"p")),
    ],
    ids=["live", "replayed <= 0.25", "replayed >= 0.26", "without topic", "end <= 0.25", "end >= 0.26", "large"],
)
def test_frames_of_every_release(frames: list[bytes], expected: tuple[int, bytes]) -> None:
    assert parse_frames(frames) == expected


@pytest.mark.parametrize("frames", [[], [b"x"], [b"topic", b"short", b"payload"], [SEQ7], [b"a", b"b", b"c", b"d"]])
def test_other_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(FrameError):
        parse_frames(frames)


# ---- order and gaps -------------------------------------------------------------------------------------------------


def test_batches_in_order_are_applied_at_once() -> None:
    stream = joined(50)
    assert stream.stats()["counters"] == {"applied_batches": 50}
    assert (stream.phase, stream.partial, stream.next_seq, stream.epoch) == (Phase.LIVE, False, 50, 0)


def test_a_gap_is_replayed_and_what_came_meanwhile_follows() -> None:
    stream = joined(2)
    assert live(stream, 4) == [("replay", 1, 2)]
    assert live(stream, 5) == []
    assert stream.stats()["buffered_batches"] == 2
    assert [replayed(stream, 1, 2), replayed(stream, 1, 3)] == [[2], [3]]
    assert told(stream.replay_done(1)) == [4, 5]
    assert live(stream, 6) == [6]
    assert not stream.partial
    assert stream.stats()["counters"]["gaps"] == 1


def test_joining_late_replays_from_the_start() -> None:
    stream = Stream()
    assert live(stream, 7) == [("replay", 1, 0)]
    for seq in range(7):
        assert replayed(stream, 1, seq) == [seq]
    assert told(stream.replay_done(1)) == [7]
    assert not stream.partial


def test_joining_with_a_truncated_history_is_partial() -> None:
    stream = Stream()
    replay_id = ask(live(stream, 7))
    assert replayed(stream, replay_id, 5) == [5]
    assert replayed(stream, replay_id, 6) == [6]
    assert told(stream.replay_done(replay_id)) == [7]
    assert stream.partial
    assert stream.stats()["counters"]["missing_batches"] == 5


def test_a_gap_older_than_the_history_keeps_what_is_known() -> None:
    stream = joined(3)
    replay_id = ask(live(stream, 9))
    assert [replayed(stream, replay_id, s) for s in (6, 7, 8)] == [[6], [7], [8]]
    assert told(stream.replay_done(replay_id)) == [9]
    assert (stream.partial, stream.epoch) == (True, 0)
    assert stream.stats()["counters"]["missing_batches"] == 3


def test_an_engine_without_any_history_is_asked_once_per_gap() -> None:
    stream = joined(1)
    replay_id = ask(live(stream, 3))
    assert told(stream.replay_done(replay_id)) == [3]
    assert stream.partial
    assert live(stream, 4) == [4]


def test_connecting_first_replays_everything() -> None:
    stream = Stream()
    replay_id = ask(told(stream.connected()))
    assert live(stream, 2) == []
    assert [replayed(stream, replay_id, s) for s in (0, 1, 2, 3)] == [[0], [1], [2], [3]]
    assert told(stream.replay_done(replay_id)) == []
    assert live(stream, 3) == []
    assert live(stream, 4) == [4]
    assert stream.stats()["counters"]["duplicates"] == 2


def test_live_and_replayed_overlap_is_applied_once() -> None:
    stream = joined(8)
    replay_id = ask(live(stream, 10))
    live(stream, 11)
    seen = [replayed(stream, replay_id, seq) for seq in range(6, 13)]
    assert seen == [[], [], [8], [9], [10], [11], [12]]
    assert told(stream.replay_done(replay_id)) == []
    assert live(stream, 12) == []
    assert live(stream, 13) == [13]


def test_the_same_batch_again_is_ignored() -> None:
    stream = joined(5)
    assert [live(stream, seq) for seq in (4, 0, 3)] == [[], [], []]
    assert stream.stats()["counters"]["duplicates"] == 3
    assert live(stream, 5) == [5]


def test_a_loss_during_a_replay_is_a_gap_of_its_own() -> None:
    stream = joined(3)
    first = ask(live(stream, 5))
    live(stream, 8)  # 6 and 7 were published after the engine answered the replay, and lost
    for seq in (3, 4):
        replayed(stream, first, seq)
    actions = told(stream.replay_done(first))
    assert actions == [5, ("replay", first + 1, 6)]
    assert [replayed(stream, first + 1, s) for s in (6, 7, 8)] == [[6], [7], [8]]
    assert told(stream.replay_done(first + 1)) == []
    assert not stream.partial


def test_a_full_buffer_ends_in_a_second_replay() -> None:
    stream = joined(1, buffer_batches=3)
    first = ask(live(stream, 2))
    for seq in range(3, 10):
        assert live(stream, seq) == []
    assert stream.stats()["buffered_batches"] == 3
    assert stream.stats()["counters"]["buffer_overflows"] == 5
    assert replayed(stream, first, 1) == [1]
    assert told(stream.replay_done(first)) == [2, 3, 4]
    second = ask(live(stream, 10))
    assert [replayed(stream, second, s) for s in range(5, 10)] == [[s] for s in range(5, 10)]
    assert told(stream.replay_done(second)) == [10]
    assert not stream.partial


# ---- replays that fail ----------------------------------------------------------------------------------------------


def test_a_failed_replay_is_asked_for_again_and_in_the_end_given_up() -> None:
    stream = joined(2)
    assert live(stream, 4) == [("replay", 1, 2)]
    assert told(stream.replay_failed(1)) == [("replay", 2, 2)]
    assert replayed(stream, 2, 2) == [2]
    assert told(stream.replay_failed(2)) == [("replay", 3, 3)]
    assert told(stream.replay_failed(3)) == [4]
    assert (stream.partial, stream.phase) == (True, Phase.LIVE)
    assert stream.stats()["counters"] == {
        "applied_batches": 4, "gaps": 1, "missing_batches": 1, "replay_failures": 3, "replays": 3,
    }  # fmt: skip
    assert live(stream, 5) == [5]


def test_attempts_count_anew_for_the_next_gap() -> None:
    stream = joined(2, replay_attempts=2)
    first = ask(live(stream, 4))
    stream.replay_failed(first)
    assert told(stream.replay_failed(first + 1)) == [4]
    assert live(stream, 6) == [("replay", first + 2, 5)]
    assert told(stream.replay_failed(first + 2)) == [("replay", first + 3, 5)]


def test_reports_of_a_void_replay_are_ignored() -> None:
    stream = joined(2)
    old = ask(live(stream, 4))
    new = ask(told(stream.replay_failed(old)))
    assert replayed(stream, old, 2) == []
    assert told(stream.replay_done(old)) == []
    assert told(stream.replay_failed(old)) == []
    assert stream.next_seq == 2
    assert [replayed(stream, new, 2), replayed(stream, new, 3)] == [[2], [3]]
    assert told(stream.replay_done(new)) == [4]
    assert replayed(stream, new, 4) == []
    assert told(stream.replay_done(new)) == told(stream.replay_failed(new)) == []


def test_without_a_replay_endpoint_a_gap_is_counted_and_passed() -> None:
    stream = Stream(can_replay=False)
    assert told(stream.connected()) == []
    assert live(stream, 3) == [3]
    assert stream.partial
    assert live(stream, 6) == [6]
    assert stream.stats()["counters"]["missing_batches"] == 5
    assert live(stream, 0, process=1) == ["clear", 100_000]
    assert not stream.partial
    assert live(stream, 1, process=1) == [100_001]
    assert live(stream, 1, process=2) == ["clear", 200_001]
    assert stream.partial


# ---- the rest -------------------------------------------------------------------------------------------------------


def test_an_undecodable_batch_is_lost_but_stops_nothing() -> None:
    stream = joined(2)
    assert stream.undecodable(2) == []
    assert live(stream, 3) == [3]
    assert (stream.partial, stream.stats()["counters"]["undecodable_batches"]) == (True, 1)


def test_an_undecodable_batch_in_a_gap_does_not_end_in_endless_replays() -> None:
    stream = joined(2)
    replay_id = ask(live(stream, 4))
    assert replayed(stream, replay_id, 2) == [2]
    assert stream.undecodable(3) == []
    actions = told(stream.replay_done(replay_id))
    for _ in range(3):  # the same batch is undecodable whenever it is asked for
        if not any(isinstance(a, tuple) for a in actions):
            break
        replay_id = ask(actions)
        stream.undecodable(3)
        actions = replayed(stream, replay_id, 4) + told(stream.replay_done(replay_id))
    assert actions == [4]
    assert stream.partial
    assert live(stream, 5) == [5]


def test_memory_of_applied_batches_is_bounded() -> None:
    stream = joined(5 * REMEMBERED_BATCHES)
    assert len(stream._seen) <= 2 * REMEMBERED_BATCHES
    for back in (1, REMEMBERED_BATCHES):
        assert live(stream, 5 * REMEMBERED_BATCHES - back) == []


def test_fills_gap_says_what_the_waited_for_replay_would_bring() -> None:
    stream = joined(2)
    assert not stream.fills_gap(2)
    replay_id = ask(live(stream, 5))
    assert [stream.fills_gap(s) for s in (1, 2, 4, 5)] == [False, True, True, False]
    replayed(stream, replay_id, 2)
    assert [stream.fills_gap(s) for s in (2, 3)] == [False, True]


def test_stats_are_plain_values() -> None:
    stream = joined(1)
    live(stream, 3)
    assert stream.stats() == {
        "phase": "replaying",
        "partial": False,
        "epoch": 0,
        "next_seq": 1,
        "buffered_batches": 1,
        "counters": {"applied_batches": 1, "gaps": 1, "replays": 1},
    }


def test_two_ranks_do_not_know_of_each_other() -> None:
    ranks = [Stream(), Stream()]
    for seq in range(3):
        assert [live(stream, seq, process=rank) for rank, stream in enumerate(ranks)] == [[seq], [100_000 + seq]]
    replay_id = ask(live(ranks[0], 4))
    assert live(ranks[1], 3, process=1) == [100_003]
    assert live(ranks[1], 0, process=2)[0] == "clear"
    assert replayed(ranks[0], replay_id, 3) == [3]
    assert told(ranks[0].replay_done(replay_id)) == [4]
    assert (ranks[0].epoch, ranks[1].epoch) == (0, 1)


# ---- what was given up ----------------------------------------------------------------------------------------------


def given_up() -> Stream:
    """0, 1 and 4 are applied; 2 and 3 are not, and nobody asks for them any more."""
    stream = joined(2)
    assert live(stream, 4) == [("replay", 1, 2)]
    assert told(stream.replay_failed(1)) == [("replay", 2, 2)]
    assert told(stream.replay_failed(2)) == [("replay", 3, 2)]
    assert told(stream.replay_failed(3)) == [4]
    assert stream.partial
    return stream


def test_what_was_given_up_is_mended_by_the_whole_history() -> None:
    stream = given_up()
    assert told(stream.mend()) == [("replay", 4, 0)]
    assert live(stream, 5) == []
    assert replayed(stream, 4, 0) == ["clear", 0]
    assert [replayed(stream, 4, seq) for seq in range(1, 5)] == [[1], [2], [3], [4]]
    assert told(stream.replay_done(4)) == [5]
    assert (stream.partial, stream.phase, stream.next_seq) == (False, Phase.LIVE, 6)
    assert stream.mend() == []


def test_a_history_that_begins_too_late_changes_nothing() -> None:
    stream = given_up()
    assert told(stream.mend()) == [("replay", 4, 0)]
    assert live(stream, 5) == []
    assert replayed(stream, 4, 3) == [5]
    assert (stream.partial, stream.phase) == (True, Phase.LIVE)
    assert replayed(stream, 4, 4) == []
    assert live(stream, 6) == [6]


def test_mending_that_fails_changes_nothing() -> None:
    stream = given_up()
    assert told(stream.mend()) == [("replay", 4, 0)]
    assert live(stream, 5) == []
    assert told(stream.replay_failed(4)) == [5]
    assert (stream.partial, stream.phase) == (True, Phase.LIVE)
    assert told(stream.mend()) == [("replay", 5, 0)]
    assert told(stream.replay_done(5)) == []
    assert stream.partial


def test_only_what_is_missing_is_mended() -> None:
    assert joined(2).mend() == []
