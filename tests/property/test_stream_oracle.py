"""A stream against a simulated publisher that restarts, loses, repeats and forgets, and answers replays slowly.

What has been applied since the last Clear must always be batches of one process, in order, each once. After all is
delivered they are that process's batches 0..n without exception, if its history reaches back that far; otherwise
whatever is missing has made the stream `partial`.

The one thing asked of the caller is that `connected` is reported before anything that came over that connection.
"""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from indexer import Apply, Clear, EventBatch, Replay, Stream
from indexer.stream import Action
from tests.support import IN_CI
from tests.support.kv_feed import batch, payload, removed

OPS = ("publish",) * 8 + ("deliver",) * 6 + ("answer",) * 3 + ("bring",) * 6
OPS += ("lose", "lose", "duplicate", "fail", "reconnect", "restart", "told", "mend", "mend")
SEEDED_LOOPS = 6000 if IN_CI else 700

Message = tuple[int, bytes, EventBatch]


class Engine:
    """The current process: its batches so far, and the latest of them that a replay can bring."""

    def __init__(self, history_batches: int) -> None:
        self.process = 0
        self.n_batches = 0
        self.history: deque[Message] = deque(maxlen=history_batches)

    def restart(self) -> None:
        self.process += 1
        self.n_batches = 0
        self.history.clear()

    def publish(self) -> Message:
        seq = self.n_batches
        self.n_batches += 1
        event, ts = removed([self.process * 1_000_000 + seq]), float(self.process * 1000 + seq)
        message = (seq, payload(event, ts=ts), batch(event, ts=ts))
        self.history.append(message)
        return message


class Link:
    """The network between them. Live batches and replay answers arrive when an operation says so, in order."""

    def __init__(self, stream: Stream, history_batches: int) -> None:
        self.stream = stream
        self.engine = Engine(history_batches)
        self.live: deque[Message] = deque()
        self.delivered: Message | None = None
        self.requests: deque[Replay] = deque()
        self.answers: deque[tuple[int, Message | None]] = deque()
        self.last_id = 0
        self.applied: list[int] = []
        self.do(self.stream.connected())

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Apply):
                event = action.batch.events[0]
                number = event.block_hashes[0]
                if self.applied:
                    assert number // 1_000_000 == self.applied[-1] // 1_000_000, "two processes in one epoch"
                    assert number > self.applied[-1], "out of order or twice"
                self.applied.append(number)
            elif isinstance(action, Clear):
                self.applied = []
            else:
                self.requests.append(action)
                self.last_id = action.id

    def step(self, op: str) -> None:
        getattr(self, f"op_{op}")()

    def op_publish(self) -> None:
        self.live.append(self.engine.publish())

    def op_deliver(self) -> None:
        if self.live:
            self.delivered = self.live.popleft()
            self.do(self.stream.live(*self.delivered))

    def op_lose(self) -> None:
        if self.live:
            self.live.popleft()

    def op_duplicate(self) -> None:
        if self.delivered is not None:
            self.do(self.stream.live(*self.delivered))

    def op_answer(self) -> None:
        """The engine answers a request with what it has by now."""
        if self.requests:
            request = self.requests.popleft()
            self.answers += [(request.id, m) for m in self.engine.history if m[0] >= request.start]
            self.answers.append((request.id, None))

    def op_bring(self) -> None:
        if self.answers:
            replay_id, message = self.answers.popleft()
            if message is None:
                self.do(self.stream.replay_done(replay_id))
            else:
                self.do(self.stream.replayed(replay_id, *message))

    def op_fail(self) -> None:
        """The replay timed out; what it still brings is void."""
        self.do(self.stream.replay_failed(self.last_id))

    def op_reconnect(self) -> None:
        self.live.clear()
        self.requests.clear()
        self.answers.clear()
        self.delivered = None
        self.do(self.stream.connected())

    def op_mend(self) -> None:
        self.do(self.stream.mend())

    def op_restart(self) -> None:
        self.engine.restart()
        self.op_reconnect()

    def op_told(self) -> None:
        """The restart was noticed elsewhere, too."""
        self.engine.restart()
        self.do(self.stream.restarted("start time changed"))
        self.op_reconnect()

    def settle(self) -> None:
        """Nothing is lost any more, and the engine has more to say."""
        for _ in range(2):
            self.op_publish()
            while self.live or self.requests or self.answers:
                self.op_deliver()
                self.op_answer()
                self.op_bring()

    def expected(self) -> list[int]:
        return [self.engine.process * 1_000_000 + seq for seq in range(self.engine.n_batches)]


def run_whole_history(ops: list[str], buffer_batches: int) -> None:
    link = Link(Stream(buffer_batches=buffer_batches, replay_attempts=1_000_000), history_batches=100_000)
    for op in ops:
        link.step(op)
    link.settle()
    assert link.applied == link.expected()
    assert not link.stream.partial
    assert link.stream.phase.value == "live"


def run_short_history(ops: list[str], history_batches: int, buffer_batches: int) -> bool:
    """Whether something was missing in the end."""
    link = Link(Stream(buffer_batches=buffer_batches, replay_attempts=2), history_batches)
    for op in ops:
        link.step(op)
    link.settle()
    missing = sorted(set(link.expected()) - set(link.applied))
    assert set(link.applied) <= set(link.expected())
    assert link.applied[-1] == link.expected()[-1]
    assert not missing or link.stream.partial
    assert link.stream.phase.value == "live"
    return bool(missing)


def run_mended(ops: list[str]) -> bool:
    """Whether there was anything to mend. With the whole history everything is."""
    link = Link(Stream(replay_attempts=2), history_batches=100_000)
    for op in ops:
        link.step(op)
    link.settle()
    was_partial = link.stream.partial
    link.op_mend()
    link.settle()
    assert link.applied == link.expected()
    assert not link.stream.partial
    return was_partial


operations = st.lists(st.sampled_from(OPS), max_size=80)


@given(operations, st.sampled_from([1, 2, 5, 1000]))
def test_a_whole_history_ends_complete(ops: list[str], buffer_batches: int) -> None:
    run_whole_history(ops, buffer_batches)


@given(operations, st.integers(1, 6), st.sampled_from([1, 3, 1000]))
def test_a_short_history_or_failing_replays_end_partial(
    ops: list[str], history_batches: int, buffer_batches: int
) -> None:
    run_short_history(ops, history_batches, buffer_batches)


@given(operations)
def test_what_was_given_up_is_mended(ops: list[str]) -> None:
    run_mended(ops)


def test_seeded_runs() -> None:
    rng = random.Random(7)
    partial = mended = 0
    for _ in range(SEEDED_LOOPS):
        ops = rng.choices(OPS, k=rng.randint(10, 150))
        run_whole_history(ops, rng.choice([1, 2, 5, 1000]))
        mended += run_mended(ops)
        partial += run_short_history(ops, rng.randint(1, 6), rng.choice([1, 3, 1000]))
    assert mended > SEEDED_LOOPS // 50, "too little was given up to test anything"
    assert partial > SEEDED_LOOPS // 20, "the short histories were not short enough to test anything"


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(OPS)), max_size=120))
def test_two_interleaved_ranks_are_two_streams(steps: list[tuple[int, str]]) -> None:
    links = [Link(Stream(replay_attempts=1_000_000), 100_000) for _ in range(2)]
    for rank, op in steps:
        links[rank].step(op)
    for link in links:
        link.settle()
        assert link.applied == link.expected()


def test_a_history_that_was_long_enough_when_asked_is_complete_forever() -> None:
    """Losing single batches within the history's reach, over thousands of batches, never leaves a hole."""
    rng = random.Random(3)
    link = Link(Stream(), history_batches=50)
    for _ in range(4000):
        link.op_publish()
        link.step("lose" if rng.random() < 0.1 else "deliver")
        link.op_answer()
        for _ in range(3):
            link.op_bring()
    link.settle()
    assert link.applied == link.expected()
    assert not link.stream.partial
