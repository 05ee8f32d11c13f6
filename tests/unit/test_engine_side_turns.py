"""The loop of the ingest thread: order, closing in the middle, and no receiving between two pieces of work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from gateway.engine import turns
from gateway.engine.turns import MESSAGES_PER_TURN, Inbox, Turns

N = 3 * MESSAGES_PER_TURN + 1


@contextmanager
def queued(
    loop: Turns, take: Callable[[int], None], drained: Callable[[], None], payload: bytes = b""
) -> Iterator[tuple[Inbox, list[str]]]:
    """An inbox with N numbered messages, and a journal of what the loop does with them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    journal: list[str] = []

    class Pull:
        """Stands for the socket in the inbox."""

        def __init__(self, socket: zmq.Socket[bytes]) -> None:
            self._socket = socket
            self.close = socket.close

        def getsockopt(self, option: int) -> int:
            return int(self._socket.getsockopt(option))

        def recv_multipart(self, flags: int) -> list[bytes]:
            frames = self._socket.recv_multipart(flags)
            journal.append("receive")
            return frames

    def taken(frames: list[bytes]) -> None:
        journal.append("take")
        take(int(frames[0]))

    try:
        push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        pull.bind("inproc://messages")
        push.connect("inproc://messages")
        for i in range(N):
            push.send_multipart([str(i).encode(), payload])
        inbox = Inbox(Pull(pull), taken, lambda error: None, drained)  # type: ignore[arg-type]
        loop.watch(inbox)
        yield inbox, journal
    finally:
        context.destroy(linger=0)


def test_messages_are_taken_in_order_and_the_end_is_told_after_the_last() -> None:
    loop = Turns(time.monotonic)
    seen: list[int] = []
    at_end: list[int] = []

    def drained() -> None:
        at_end.append(len(seen))
        loop.stop()

    with queued(loop, seen.append, drained):
        loop.run()
    assert seen == list(range(N))
    assert at_end[0] == N


def test_receiving_is_not_mixed_with_work() -> None:
    """Each receive frees the interpreter's lock too shortly for others to take it, and keeps them from asking."""
    loop = Turns(time.monotonic)
    with queued(loop, lambda _: None, loop.stop) as (_, journal):
        loop.run()
    runs = "".join(what[0] for what in journal).replace("tr", "t r").split()
    assert [run.count("t") for run in runs] == [MESSAGES_PER_TURN] * 3 + [1]


def test_large_messages_are_received_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_BYTES_PER_TURN", 1000)
    loop = Turns(time.monotonic)
    with queued(loop, lambda _: None, loop.stop, payload=b"x" * 600) as (_, journal):
        loop.run()
    runs = "".join(what[0] for what in journal).replace("tr", "t r").split()
    assert max(run.count("r") for run in runs) == 2


def test_what_was_received_before_a_close_is_dropped() -> None:
    loop = Turns(time.monotonic)
    seen: list[int] = []
    inboxes: list[Inbox] = []

    def take(number: int) -> None:
        seen.append(number)
        if number == 2:
            loop.close(inboxes[0])
            loop.stop()

    with queued(loop, take, lambda: None) as (inbox, _):
        inboxes.append(inbox)
        loop.run()
    assert seen == [0, 1, 2]
    assert inbox.is_closed


def test_a_message_that_cannot_be_taken_stops_no_other() -> None:
    loop = Turns(time.monotonic)
    seen: list[int] = []

    def take(number: int) -> None:
        seen.append(number)
        if number == 1:
            raise ValueError

    with queued(loop, take, loop.stop):
        loop.run()
    assert seen == list(range(N))
    assert loop.errors == {"ValueError": 1}


def test_it_gives_way_before_it_receives_and_before_it_works() -> None:
    given: list[int] = []
    loop = Turns(time.monotonic, lambda: given.append(len(journal)))
    with queued(loop, lambda _: None, loop.stop) as (_, journal):
        loop.run()
    assert set(given) == set(range(2 * N))
