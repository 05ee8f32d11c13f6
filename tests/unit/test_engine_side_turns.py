"""The loop of the ingest thread gives way to other threads."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import zmq

from gateway.engine import turns
from gateway.engine.turns import Inbox, Turns


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses.append(self.now_s)
        self.now_s += seconds


@pytest.mark.parametrize(("message_s", "most_between_s"), [(0.0001, 0.0004), (0.002, 0.0021)])
def test_it_pauses_while_messages_never_end(
    message_s: float, most_between_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receiving frees the interpreter's lock so often and so shortly that nobody else would ever get it."""
    clock = Clock()
    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    loop = Turns(time.monotonic)
    taken: list[float] = []

    def take(frames: list[bytes]) -> None:
        clock.now_s += message_s
        taken.append(clock.now_s)
        if len(taken) == 100:
            loop.stop()

    try:
        push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        pull.bind("inproc://messages")
        push.connect("inproc://messages")
        for _ in range(100):
            push.send(b"m")
        inbox = Inbox(pull, take, lambda error: None)
        loop.watch(inbox)
        loop.run()
    finally:
        context.destroy(linger=0)
    assert len(taken) == 100
    between = [b - a for a, b in zip([0.0, *clock.pauses], clock.pauses, strict=False)]
    assert len(clock.pauses) >= 100 * message_s / most_between_s - 1
    assert max(between) <= most_between_s
