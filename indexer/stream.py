"""The order of one (worker, rank)'s event batches: every batch once, in sequence, in the right epoch.

A pure state machine: the caller owns the sockets and the clock, reports what happened, and carries out the returned
actions in order. It is in one of three phases:

    JOINING    nothing is known yet; the next batch decides
    LIVE       batches arrive in sequence and are applied at once
    REPLAYING  earlier batches are being fetched; live ones wait in a bounded buffer

An engine numbers its batches from 0 per process and repeats its latest ones on request. So a number that jumps ahead
is a gap (fetch it), one that goes back is a new process (clear, fetch from 0), and the same number again is either the
same batch (ignore) or, with another timestamp or content, a new process. An idle engine says nothing, so after a
reconnect the last batch is fetched again and compared; in doubt everything is cleared. When the engine's own history
is too short, what is known stays and the stream is marked `partial`. An engine that repeats nothing can be gone on
with only where its next batch has the very number that is due (`join`). When somebody says that the engine's cache was
emptied, what it published before is not asked for again: the stream goes on with the next batch, whatever its number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec
import xxhash

from indexer.events import EventBatch

SEQ_BYTES = 8
END_OF_REPLAY = -1
REMEMBERED_BATCHES = 256


class Apply(msgspec.Struct, frozen=True):
    """Give `batch` to the index."""

    batch: EventBatch


class Clear(msgspec.Struct, frozen=True):
    """Forget this (worker, rank) in the index: a new epoch began."""

    reason: str


class Replay(msgspec.Struct, frozen=True):
    """Ask the engine for its batches from `start` on; any replay asked for earlier is void. Report back with `id`."""

    id: int
    start: int


class Join(msgspec.Struct, frozen=True):
    """What was applied elsewhere is what the engine held before the batch that follows: nothing is missing between."""


Action = Apply | Clear | Replay | Join


class Phase(Enum):
    JOINING = "joining"
    LIVE = "live"
    REPLAYING = "replaying"


class FrameError(ValueError):
    """Frames that are no event message."""


class _Batch(msgspec.Struct, frozen=True):
    seq: int
    identity: tuple[float, int]
    batch: EventBatch


def parse_frames(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """(sequence number, payload) of a live message ``[topic, seq, payload]`` or a replayed one.

    Replayed messages are ``["", seq, payload]`` up to vLLM 0.25 and ``["", topic, seq, payload]`` later; the last one
    has the sequence END_OF_REPLAY. Raises FrameError for anything else.
    """
    if len(frames) < 2 or len(frames[-2]) != SEQ_BYTES:
        raise FrameError(f"expected [.., 8-byte sequence, payload], got frames of {[len(f) for f in frames]} bytes")
    seq = int.from_bytes(frames[-2], "big", signed=True)
    if seq < 0 or not frames[-1]:
        return END_OF_REPLAY, b""
    return seq, bytes(frames[-1])


class Stream:
    """One (worker, rank)'s stream. `can_replay` says whether the engine's replay endpoint is known.

    `buffer_batches` bounds how many live batches wait during a replay; `replay_attempts` how often a failed replay is
    asked for again before the gap is given up.
    """

    def __init__(self, *, can_replay: bool = True, buffer_batches: int = 10_000, replay_attempts: int = 3) -> None:
        self.can_replay = can_replay
        self.phase = Phase.JOINING
        self.partial = False
        self.epoch = 0
        self.next_seq = 0
        self.skips = False
        """Whether what was published before the next batch is to be left alone."""
        self.counters: Counter[str] = Counter()
        self._buffer_batches = buffer_batches
        self._replay_attempts = replay_attempts
        self._attempt = 0
        self._replay_id = 0
        self._published_seq = -1
        self._verifying = False
        self._mending = False
        self._buffer: deque[_Batch] = deque()
        self._seen: dict[int, tuple[float, int]] = {}
        self._from_s: float | None = None
        """When the engine made the first batch that counts, where its cache was emptied by hand before."""
        self._due: tuple[int, float, int] | None = None

    def position(self) -> tuple[int, float, int] | None:
        """(number of the next batch, time and hash of the one before), for `resume`. None where it cannot be gone on
        from here: nothing has been applied, something is missing, or a replay is under way.
        """
        known = self._seen.get(self.next_seq - 1)
        if self.phase is not Phase.LIVE or self.partial or self.skips or known is None:
            return None
        return self.next_seq, *known

    def resume(self, next_seq: int, last_ts: float, last_hash: int) -> None:
        """All before `next_seq` has been applied by somebody else. With the next connection the engine's history is
        asked whether that is so, and if it is not, or reaches not so far back, all begins anew.
        """
        self.next_seq = next_seq
        self._seen[next_seq - 1] = last_ts, last_hash

    def join(self, next_seq: int, last_ts: float, last_hash: int) -> None:
        """All before `next_seq` has been applied by somebody else who hears nothing any more, and nobody can be asked
        what came since. If the next batch is `next_seq`, nothing did; else what was applied is worth nothing. Until
        then nothing is believed.
        """
        if self.phase is Phase.JOINING and not self.can_replay and not self.skips:
            self._due = next_seq, last_ts, last_hash

    @property
    def is_due(self) -> bool:
        """Whether the next batch decides about what somebody else has applied."""
        return self._due is not None

    # ---- what happened ----------------------------------------------------------------------------------------------

    def connected(self) -> list[Action]:
        """A connection to the engine is up, for the first time or again."""
        if not self.can_replay or self.skips:
            return []
        # what came over the old connection may be of another process; if not, the replay brings it again
        self._buffer.clear()
        self._mending = False
        self._attempt = 0
        self._verifying = self.next_seq > 0
        return [self._ask(self.next_seq - 1 if self._verifying else 0)]

    def restarted(self, reason: str) -> list[Action]:
        """The engine is known to be a new process (its start time changed, or it refused a connection)."""
        actions: list[Action] = [self._new_epoch(reason)]
        self._buffer.clear()
        if self.can_replay:
            actions.append(self._ask(0))
        return actions

    def forgotten(self, reason: str) -> list[Action]:
        """The engine's cache was emptied by hand, of which its events may not tell yet."""
        self.counters["forgotten"] += 1
        self._due = None
        self.phase = Phase.LIVE
        self.skips = True
        self._buffer.clear()
        self._replay_id += 1
        self._attempt = 0
        self._verifying = self._mending = False
        return [Clear(reason)]

    def mend(self) -> list[Action]:
        """Something is missing since a replay was given up: ask once more, for all there is. If the engine's history
        goes back to its first batch all begins anew; otherwise nothing changes.
        """
        if not self.partial or not self.can_replay or self.skips or self.phase is not Phase.LIVE:
            return []
        self._verifying = False
        self._mending = True
        return [self._ask(0)]

    def live(self, seq: int, payload: bytes, batch: EventBatch) -> list[Action]:
        """A batch was published."""
        message = _Batch(seq, (batch.ts, xxhash.xxh3_64_intdigest(payload)), batch)
        if self.phase is Phase.REPLAYING:
            return self._live_while_replaying(message)
        if self.skips and self._seen.get(seq) != message.identity:
            self.skips = False
            self._from_s = message.identity[0]
            return [self._take(message)]
        if self.phase is Phase.JOINING and not self.can_replay:
            self.phase = Phase.LIVE
            due, self._due = self._due, None
            if due is not None and seq == due[0] and batch.ts >= due[1]:
                self.counters["joins"] += 1
                self.next_seq, self._seen[seq - 1] = seq, due[1:]
                return [Join(), self._take(message)]
            if due is not None:
                self.counters["joins_refused"] += 1
            if seq > 0:
                self._missed(seq)
            return [self._take(message)]
        self.phase = Phase.LIVE
        if seq == self.next_seq:
            return [self._take(message)]
        if seq > self.next_seq:
            self.counters["gaps"] += 1
            if self.can_replay:
                self._buffer.append(message)
                return [self._ask(self.next_seq)]
            self._missed(seq)
            return [self._take(message)]
        if self._seen.get(seq) == message.identity:
            self.counters["duplicates"] += 1
            return []
        return self._epoch_at(message)

    def replayed(self, replay_id: int, seq: int, payload: bytes, batch: EventBatch) -> list[Action]:
        """A batch of replay `replay_id` arrived."""
        if replay_id != self._replay_id or self.phase is not Phase.REPLAYING:
            return []
        message = _Batch(seq, (batch.ts, xxhash.xxh3_64_intdigest(payload)), batch)
        if self._mending:
            self._mending = False
            if seq > 0:
                return self._drain(may_ask=True)
            from_s = self._from_s
            self.counters["mended"] += 1
            begun = self._new_epoch("all that was missing can be read again")
            self._from_s, self.phase = from_s, Phase.REPLAYING
            return [begun, *self.replayed(replay_id, seq, payload, batch)]
        if self._verifying:
            self._verifying = False
            if self._seen.get(seq) == message.identity and seq == self.next_seq - 1:
                return []
            return self._start_over("the last batch before the reconnect is not in the engine's history")
        if seq < self.next_seq:
            if self._seen.get(seq, message.identity) == message.identity:
                self.counters["duplicates"] += 1
                return []
            return self._start_over("a replayed batch differs from the one applied")
        if seq > self.next_seq:
            self._missed(seq)
        if self._from_s is not None and message.identity[0] < self._from_s:
            self.next_seq = seq + 1
            self._seen[seq] = message.identity
            return []
        return [self._take(message)]

    def replay_done(self, replay_id: int) -> list[Action]:
        """Replay `replay_id` reached its end marker."""
        if replay_id != self._replay_id or self.phase is not Phase.REPLAYING:
            return []
        if self._mending:  # Not one batch.
            self._mending = False
            return self._drain(may_ask=True)
        if self._verifying:
            self._verifying = False
            return self._start_over("the engine's history ends before the last batch that was applied")
        self._attempt = 0
        return self._drain(may_ask=True)

    def replay_failed(self, replay_id: int) -> list[Action]:
        """Replay `replay_id` timed out or could not be sent. Asks again, in the end goes on without the gap."""
        if replay_id != self._replay_id or self.phase is not Phase.REPLAYING:
            return []
        self.counters["replay_failures"] += 1
        if self._mending:
            self._mending = False
            return self._drain(may_ask=False)
        self._attempt += 1
        if self._attempt < self._replay_attempts:
            return [self._ask(self.next_seq - 1 if self._verifying else self.next_seq)]
        self._attempt = 0
        actions: list[Action] = []
        if self._verifying:
            from_s = self._from_s
            actions.append(self._new_epoch("reconnected, and the engine's history cannot be read"))
            self._from_s = from_s  # It may be the same process.
        self.partial = True
        return actions + self._drain(may_ask=False)

    def undecodable(self, seq: int) -> list[Action]:
        """A live message had the number `seq` but no batch in it: what it said is lost."""
        self.counters["undecodable_batches"] += 1
        self.partial = True
        if self.phase is Phase.LIVE and seq == self.next_seq:
            self.next_seq = seq + 1
        return []

    def fills_gap(self, seq: int, ts: float | None = None) -> bool:
        """Whether the batch `seq`, made at `ts`, is one that the replay being waited for would bring: older, not
        newer.
        """
        if self.phase is not Phase.REPLAYING or not self._buffer:
            return False
        first = self._buffer[0]
        return self.next_seq <= seq < first.seq and (ts is None or ts <= first.identity[0])

    def stats(self) -> dict[str, Any]:
        return {
            "phase": self.phase.value,
            "partial": self.partial,
            "epoch": self.epoch,
            "next_seq": self.next_seq,
            "buffered_batches": len(self._buffer),
            "counters": dict(sorted(self.counters.items())),
        }

    # ---- rules ------------------------------------------------------------------------------------------------------

    def _live_while_replaying(self, message: _Batch) -> list[Action]:
        last_seq = self._buffer[-1].seq if self._buffer else self.next_seq - 1
        if message.seq <= last_seq:
            known = self._seen.get(message.seq)
            if known is None:
                known = next((b.identity for b in self._buffer if b.seq == message.seq), None)
            if known == message.identity:
                self.counters["duplicates"] += 1
                return []
            return self._epoch_at(message)
        if len(self._buffer) >= self._buffer_batches:
            # the engine still has it: dropped here it shows as a gap once the buffer is drained
            self.counters["buffer_overflows"] += 1
            return []
        self._buffer.append(message)
        return []

    def _epoch_at(self, message: _Batch) -> list[Action]:
        """`message` is from a new process."""
        actions: list[Action] = [self._new_epoch(f"sequence went back to {message.seq}")]
        self._buffer.clear()
        self._verifying = False
        if message.seq == 0 or not self.can_replay:
            self._replay_id += 1
            self.phase = Phase.LIVE
            if message.seq > 0:
                self._missed(message.seq)
            actions.append(self._take(message))
        else:
            self._buffer.append(message)
            actions.append(self._ask(0))
        return actions

    def _start_over(self, reason: str) -> list[Action]:
        return [self._new_epoch(reason), self._ask(0)]

    def _new_epoch(self, reason: str) -> Clear:
        self.epoch += 1
        self.counters["epochs"] += 1
        self.partial = self.skips = False
        self.next_seq = 0
        self._seen.clear()
        self._from_s = self._due = None
        self._verifying = self._mending = False
        self._attempt = 0
        if self.phase is not Phase.JOINING:
            self.phase = Phase.LIVE
        return Clear(reason)

    def _drain(self, may_ask: bool) -> list[Action]:
        """The replay is over; what came live meanwhile follows. A batch lost from that is a gap of its own."""
        self.phase = Phase.LIVE
        actions: list[Action] = []
        while self._buffer:
            message = self._buffer.popleft()
            if message.seq >= self.next_seq:
                if message.seq > self.next_seq:
                    # what was published before the replay was asked for, and did not come with it, is gone
                    if may_ask and message.seq > self._published_seq:
                        self.counters["gaps"] += 1
                        self._buffer.appendleft(message)
                        return [*actions, self._ask(self.next_seq)]
                    self._missed(message.seq)
                actions.append(self._take(message))
            elif self._seen.get(message.seq, message.identity) == message.identity:
                self.counters["duplicates"] += 1
            else:
                self._buffer.clear()
                return actions + self._start_over("a live batch differs from the replayed one")
        return actions

    def _missed(self, seq: int) -> None:
        """Batches from the expected one up to `seq` (exclusive) will never come."""
        self.counters["missing_batches"] += seq - self.next_seq
        self.partial = True

    def _take(self, message: _Batch) -> Apply:
        self.next_seq = message.seq + 1
        self._seen[message.seq] = message.identity
        if len(self._seen) > 2 * REMEMBERED_BATCHES:
            oldest_kept = self.next_seq - REMEMBERED_BATCHES
            self._seen = {seq: identity for seq, identity in self._seen.items() if seq >= oldest_kept}
        self.counters["applied_batches"] += 1
        return Apply(message.batch)

    def _ask(self, start: int) -> Replay:
        self.phase = Phase.REPLAYING
        self.counters["replays"] += 1
        self._replay_id += 1
        self._published_seq = self._buffer[-1].seq if self._buffer else self.next_seq - 1
        return Replay(self._replay_id, start)
