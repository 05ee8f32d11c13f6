"""Going on from what another process has heard of an engine that repeats nothing."""

import pytest

from indexer import Stream
from tests.support.stream_talk import joined, live, told


def due(next_seq: int = 5) -> Stream:
    """One that would go on from where another is after so many batches."""
    position = joined(next_seq, can_replay=False).position()
    assert position is not None
    stream = Stream(can_replay=False)
    stream.join(*position)
    return stream


def test_the_batch_that_is_due_shows_that_nothing_is_missing() -> None:
    stream = due()
    assert live(stream, 5) == ["join", 5]
    assert live(stream, 6) == [6]
    assert live(stream, 4) == []  # The last that the other had, once more.
    assert (stream.partial, stream.stats()["counters"]["joins"]) == (False, 1)
    assert stream.position() is not None


@pytest.mark.parametrize("seq", [0, 3, 4, 6, 100])
def test_any_other_batch_makes_it_worthless(seq: int) -> None:
    stream = due()
    assert live(stream, seq) == [seq]
    assert not stream.is_due
    assert stream.partial == (seq > 0)
    assert stream.stats()["counters"]["joins_refused"] == 1
    assert live(stream, seq + 1) == [seq + 1]


def test_a_batch_made_before_the_last_that_was_heard_is_of_another_process() -> None:
    later = joined(5, can_replay=False)
    position = later.position()
    assert position is not None
    stream = Stream(can_replay=False)
    stream.join(position[0], position[1] + 10.0, position[2])
    assert live(stream, 5) == [5]
    assert stream.partial


def test_what_could_not_be_read_may_have_been_the_one_that_was_due() -> None:
    stream = due()
    assert told(stream.undecodable(5)) == []
    assert live(stream, 6) == [6]
    assert stream.partial


@pytest.mark.parametrize("what", ["restarted", "forgotten"])
def test_nothing_is_gone_on_with_after_the_engine_is_known_to_be_empty(what: str) -> None:
    stream = due()
    assert told(getattr(stream, what)("for a test")) == ["clear"]
    assert not stream.is_due
    assert live(stream, 5) == [5]


def test_who_can_be_asked_is_asked() -> None:
    stream = Stream(can_replay=True)
    stream.join(5, 4.0, 1)
    assert not stream.is_due


def test_who_has_heard_something_himself_goes_by_that() -> None:
    stream = joined(2, can_replay=False)
    stream.join(5, 4.0, 1)
    assert not stream.is_due
    assert live(stream, 2) == [2]
