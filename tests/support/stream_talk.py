"""A stream's side of a conversation in short: batches by number and process, actions as plain values."""

from __future__ import annotations

from typing import Any

from indexer import Apply, Clear, EventBatch, Join, Replay, Stream
from indexer.stream import Action
from tests.support.kv_feed import batch, payload, removed


def message(seq: int, process: int = 0) -> tuple[int, bytes, EventBatch]:
    """What process number `process` publishes as `seq`. Its first hash says so."""
    ts = 1000.0 * process + seq
    event = removed([process * 100_000 + seq])
    return seq, payload(event, ts=ts), batch(event, ts=ts)


def live(stream: Stream, seq: int, process: int = 0) -> list[Any]:
    return told(stream.live(*message(seq, process)))


def replayed(stream: Stream, replay_id: int, seq: int, process: int = 0) -> list[Any]:
    return told(stream.replayed(replay_id, *message(seq, process)))


def told(actions: list[Action]) -> list[Any]:
    """Actions in short: the number of an applied batch (100000 more per process), "clear", "join",
    ("replay", id, start).
    """
    out: list[Any] = []
    for action in actions:
        if isinstance(action, Apply):
            event: Any = action.batch.events[0]
            out.append(event.block_hashes[0])
        elif isinstance(action, Clear):
            assert action.reason
            out.append("clear")
        elif isinstance(action, Join):
            out.append("join")
        else:
            assert isinstance(action, Replay)
            out.append(("replay", action.id, action.start))
    return out


def joined(upto: int, **kwargs: Any) -> Stream:
    """A stream that has applied batches 0..upto-1 live."""
    stream = Stream(**kwargs)
    for seq in range(upto):
        assert live(stream, seq) == [seq]
    return stream


def ask(actions: list[Any]) -> int:
    """The id of the one replay asked for."""
    ((_, replay_id, _),) = [a for a in actions if isinstance(a, tuple)]
    return int(replay_id)
