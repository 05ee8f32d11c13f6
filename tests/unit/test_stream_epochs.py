"""When a stream takes an engine for a new process, and when for the same one as before."""

import pytest

from indexer import Apply, Stream
from indexer.stream import Phase
from tests.support.kv_feed import batch, payload, removed
from tests.support.stream_talk import ask, joined, live, replayed, told


def test_sequence_back_to_zero_is_a_new_process() -> None:
    stream = joined(5)
    assert live(stream, 0, process=1) == ["clear", 100_000]
    assert live(stream, 1, process=1) == [100_001]
    assert (stream.epoch, stream.next_seq) == (1, 2)


def test_sequence_back_to_a_later_number_replays_the_new_process() -> None:
    stream = joined(9)
    clear, (_, replay_id, start) = live(stream, 3, process=1)
    assert (clear, start) == ("clear", 0)
    assert [replayed(stream, replay_id, s, process=1) for s in range(3)] == [[100_000], [100_001], [100_002]]
    assert told(stream.replay_done(replay_id)) == [100_003]


@pytest.mark.parametrize("what", ["timestamp", "content"])
def test_same_number_with_other_timestamp_or_content_is_a_new_process(what: str) -> None:
    stream = joined(1)
    event = removed([0 if what == "timestamp" else 77])
    ts = 5.0 if what == "timestamp" else 0.0
    actions = stream.live(0, payload(event, ts=ts), batch(event, ts=ts))
    assert told(actions)[0] == "clear"
    assert isinstance(actions[1], Apply)


def test_partial_ends_with_the_epoch() -> None:
    stream = joined(1)
    stream.replay_done(ask(live(stream, 5)))
    assert stream.partial
    live(stream, 0, process=1)
    assert not stream.partial


def test_idle_reconnect_to_the_same_process_goes_on() -> None:
    stream = joined(5)
    assert told(stream.connected()) == [("replay", 1, 4)]
    assert replayed(stream, 1, 4) == []
    assert told(stream.replay_done(1)) == []
    assert (stream.epoch, stream.partial) == (0, False)
    assert live(stream, 5) == [5]


def test_reconnect_brings_what_was_published_meanwhile() -> None:
    stream = joined(5)
    replay_id = ask(told(stream.connected()))
    assert live(stream, 7) == []
    assert [replayed(stream, replay_id, s) for s in (4, 5, 6, 7)] == [[], [5], [6], [7]]
    assert told(stream.replay_done(replay_id)) == []
    assert stream.epoch == 0


def test_idle_reconnect_to_another_process_with_as_many_batches() -> None:
    stream = joined(5)
    first = ask(told(stream.connected()))
    clear, (_, second, start) = replayed(stream, first, 4, process=1)
    assert (clear, start) == ("clear", 0)
    assert [replayed(stream, second, s, process=1) for s in range(5)] == [[100_000 + s] for s in range(5)]
    assert told(stream.replay_done(second)) == []
    assert live(stream, 5, process=1) == [100_005]


def test_idle_reconnect_to_another_process_with_fewer_batches() -> None:
    stream = joined(5)
    first = ask(told(stream.connected()))
    clear, (_, second, start) = told(stream.replay_done(first))
    assert (clear, start) == ("clear", 0)
    assert replayed(stream, second, 0, process=1) == [100_000]
    assert told(stream.replay_done(second)) == []
    assert live(stream, 1, process=1) == [100_001]


def test_idle_reconnect_to_an_empty_process() -> None:
    stream = joined(5)
    clear, (_, second, _) = told(stream.replay_done(ask(told(stream.connected()))))
    assert clear == "clear"
    assert told(stream.replay_done(second)) == []
    assert (stream.partial, stream.next_seq, stream.phase) == (False, 0, Phase.LIVE)
    assert live(stream, 0, process=1) == [100_000]


def test_reconnect_whose_last_batch_left_the_history_starts_over() -> None:
    stream = joined(5)
    first = ask(told(stream.connected()))
    clear, (_, second, _) = replayed(stream, first, 20)
    assert clear == "clear"
    assert [replayed(stream, second, s) for s in (20, 21)] == [[20], [21]]
    assert told(stream.replay_done(second)) == []
    assert stream.partial


def test_reconnect_that_cannot_be_verified_clears_and_is_partial() -> None:
    stream = joined(5, replay_attempts=2)
    first = ask(told(stream.connected()))
    assert told(stream.replay_failed(first)) == [("replay", first + 1, 4)]
    assert told(stream.replay_failed(first + 1)) == ["clear"]
    assert stream.partial
    assert live(stream, 9) == [("replay", first + 2, 0)]


def test_second_reconnect_during_verification_still_verifies() -> None:
    stream = joined(5)
    stream.connected()
    replay_id = ask(told(stream.connected()))
    assert replayed(stream, replay_id, 4) == []
    assert told(stream.replay_done(replay_id)) == []
    assert stream.epoch == 0


def test_reconnect_during_a_gap_replay_verifies_too() -> None:
    """The engine restarted while a gap was being fetched: neither the old blocks nor the waiting batch may stay."""
    stream = joined(5)
    live(stream, 8)
    first = ask(told(stream.connected()))
    clear, (_, second, _) = replayed(stream, first, 4, process=1)
    assert clear == "clear"
    applied = [replayed(stream, second, s, process=1) for s in range(6)]
    assert applied == [[100_000 + s] for s in range(6)]
    assert told(stream.replay_done(second)) == []
    assert stream.next_seq == 6
    assert not stream.partial


def test_reconnect_during_the_first_replay_keeps_what_it_brought() -> None:
    stream = Stream()
    first = ask(told(stream.connected()))
    assert [replayed(stream, first, s) for s in (0, 1)] == [[0], [1]]
    second = ask(told(stream.connected()))
    assert [replayed(stream, second, s) for s in (1, 2)] == [[], [2]]
    assert told(stream.replay_done(second)) == []


@pytest.mark.parametrize("seq", [0, 3])
def test_restart_seen_live_during_a_replay(seq: int) -> None:
    stream = joined(5)
    old = ask(live(stream, 8))
    live(stream, 9)
    actions = live(stream, seq, process=1)
    assert actions[0] == "clear"
    assert replayed(stream, old, 5) == []
    assert told(stream.replay_done(old)) == []
    if seq == 0:
        assert actions[1:] == [100_000]
    else:
        new = ask(actions)
        for s in range(seq):
            assert replayed(stream, new, s, process=1) == [100_000 + s]
        assert told(stream.replay_done(new)) == [100_000 + seq]
    assert live(stream, seq + 1, process=1) == [100_001 + seq]


def test_restart_seen_in_a_replayed_batch() -> None:
    stream = joined(5)
    old = ask(live(stream, 8))
    clear, (_, new, start) = replayed(stream, old, 4, process=1)
    assert (clear, start) == ("clear", 0)
    assert replayed(stream, new, 0, process=1) == [100_000]


def test_waiting_batch_that_differs_from_the_replayed_one_starts_over() -> None:
    stream = joined(2)
    old = ask(live(stream, 4))
    for seq in (2, 3, 4):
        replayed(stream, old, seq, process=1 if seq == 4 else 0)
    clear, (_, new, start) = told(stream.replay_done(old))
    assert (clear, start) == ("clear", 0)
    assert replayed(stream, new, 0, process=1) == [100_000]


def test_restarted_clears_and_fetches_everything() -> None:
    stream = joined(5)
    clear, (_, replay_id, start) = told(stream.restarted("process_start_time_seconds changed"))
    assert (clear, start) == ("clear", 0)
    assert replayed(stream, replay_id, 0, process=1) == [100_000]
    assert told(joined(3, can_replay=False).restarted("connection refused")) == ["clear"]


def test_restarted_before_anything_is_known() -> None:
    stream = Stream()
    assert told(stream.restarted("refused")) == ["clear", ("replay", 1, 0)]
    silent = Stream(can_replay=False)
    assert told(silent.restarted("refused")) == ["clear"]
    assert live(silent, 4) == [4]
    assert silent.partial
