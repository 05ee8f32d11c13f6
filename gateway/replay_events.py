"""`warmroute replay-events FILE.jsonl`: feed recorded KV events to the index and answer the queries between them.

The lines it reads are described in `LINES`, which is also the command's help, and in docs/replay-events.md.
"""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Annotated, Any

import msgspec

from gateway.cli import Parser
from indexer import (
    Apply,
    Clear,
    EventBatch,
    EventDecodeError,
    PrefixIndex,
    Replay,
    Stream,
    decode_batch,
    parse_frames,
)
from indexer.stream import END_OF_REPLAY, Action

LINES = """
one JSON object per line, each of one kind:
  {"worker","rank","frames_b64":[topic,seq,payload]}    a live message; with a leading "" frame, a replayed one
  {"worker","rank","seq":n,"events":[...]}               the same, decoded (bytes hashes in hex); seq may be left out
  {"worker","models":["m","m-alias"],"loras":["a"]}      what a worker serves; without it any model name matches it
  {"clear":{"worker","rank"}}                            forget a worker, or one of its ranks, and where its stream was
  {"query":{"tokens":[...],"model","lora","cache_salt","extra_keys"}}
prints one line per query and a last line of statistics; a bad line is named on standard error and costs nothing else
"""
_KINDS = ("query", "clear", "frames_b64", "events", "models")


class LineError(ValueError):
    """A line that cannot be used."""


class _Query(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None
    lora: str | int | None = None
    cache_salt: str | None = None
    extra_keys: list[Any] | None = None


class _Clear(msgspec.Struct, forbid_unknown_fields=True):
    worker: str
    rank: int | None = None


class _Line(msgspec.Struct):
    worker: str | None = None
    rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    frames_b64: list[str] | None = None
    seq: Annotated[int, msgspec.Meta(ge=0)] | None = None
    ts: float | None = None
    events: list[Any] | None = None
    models: list[str] | None = None
    loras: list[str] = []
    clear: _Clear | None = None
    query: _Query | None = None


class Replayer:
    """Keeps the index and one Stream per (worker, rank). A gap is filled by replayed lines, if the recording has
    them.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self._streams: dict[tuple[str, int], Stream] = {}
        self._replays: dict[tuple[str, int], int] = {}
        self._undecodable = 0
        self._made_s = 0.0
        self._decoder = msgspec.json.Decoder(_Line)

    def line(self, text: bytes | str) -> dict[str, Any] | None:
        """Take in one line; the answer, if it was a query. Raises LineError."""
        try:
            line = self._decoder.decode(text)
        except msgspec.ValidationError as error:
            raise LineError(str(error)) from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise LineError(f"not JSON: {error}") from None
        kinds = [kind for kind in _KINDS if getattr(line, kind) is not None]
        if len(kinds) != 1:
            raise LineError(f"a line needs exactly one of {', '.join(_KINDS)}, not {' and '.join(kinds) or 'none'}")
        if line.query is not None:
            return self._query(line.query)
        if line.clear is not None:
            self._clear(line.clear)
        elif line.worker is None:
            raise LineError(f"{kinds[0]} needs a worker")
        elif line.frames_b64 is not None:
            self._frames(line.worker, line.rank, line.frames_b64)
        elif line.events is not None:
            self._events(line.worker, line)
        elif line.models is not None:
            self.index.set_worker(line.worker, models=line.models, loras=line.loras)
        return None

    def _clear(self, clear: _Clear) -> None:
        """What waited for a replay is forgotten with the rest, and the stream may begin anywhere again."""
        for holder in [h for h in self._streams if h[0] == clear.worker and clear.rank in (None, h[1])]:
            del self._streams[holder]
            self._replays.pop(holder, None)
        self.index.clear(clear.worker, clear.rank)

    def stats(self) -> dict[str, Any]:
        streams: dict[str, dict[str, Any]] = {}
        for (worker, rank), stream in sorted(self._streams.items()):
            streams.setdefault(worker, {})[str(rank)] = stream.stats()
        return {**self.index.stats(), "streams": streams, "undecodable_messages": self._undecodable}

    def _query(self, query: _Query) -> dict[str, Any]:
        self._give_up_replays()
        try:
            found = self.index.match(
                query.tokens,
                model=query.model,
                lora=query.lora,
                cache_salt=query.cache_salt,
                extra_keys=query.extra_keys,
            )
        except ValueError as error:
            raise LineError(str(error)) from None
        match: dict[str, dict[str, dict[str, int]]] = {}
        for (worker, rank), held in sorted(found.items()):
            match.setdefault(worker, {})[str(rank)] = {
                "gpu_tokens": held.gpu_tokens,
                "cpu_tokens": held.cpu_tokens,
                "disk_tokens": held.disk_tokens,
            }
        return {"match": match}

    def _frames(self, worker: str, rank: int, encoded: list[str]) -> None:
        try:
            frames = [base64.b64decode(frame, validate=True) for frame in encoded]
            seq, payload = parse_frames(frames)
        except ValueError as error:
            raise LineError(f"bad frames_b64: {error}") from None
        replayed = not frames[0] and (len(frames) > 3 or not payload)
        if seq == END_OF_REPLAY:
            for holder in [h for h in self._replays if h[0] == worker]:
                self._carry_out(holder, self._streams[holder].replay_done(self._replays.pop(holder)))
            return
        try:
            batch = decode_batch(payload)
        except EventDecodeError as error:
            self._undecodable += 1
            self._stream((worker, rank)).undecodable(seq)
            raise LineError(str(error)) from None
        self._batch(worker, rank, seq, payload, batch, replayed)

    def _events(self, worker: str, line: _Line) -> None:
        stream = self._stream((worker, line.rank))
        seq = stream.next_seq if line.seq is None else line.seq
        events = []
        for event in line.events or ():
            try:
                events.append(msgspec.Raw(msgspec.msgpack.encode(_with_hashes(event))))
            except (OverflowError, ValueError, TypeError, RecursionError):
                events.append(_UNREADABLE)
        # a recording without times: each line is made later than the last, and a repeated line is the same message
        if seq != stream.next_seq - 1:
            self._made_s += 1
        ts = self._made_s if line.ts is None else line.ts
        payload = msgspec.msgpack.encode([ts, events, line.rank])
        self._batch(worker, line.rank, seq, payload, decode_batch(payload), replayed=False, timed=line.ts is not None)

    def _batch(
        self,
        worker: str,
        rank: int,
        seq: int,
        payload: bytes,
        batch: EventBatch,
        replayed: bool,
        timed: bool = True,
    ) -> None:
        holder = (worker, rank if batch.data_parallel_rank is None else batch.data_parallel_rank)
        stream = self._stream(holder)
        if holder in self._replays and (replayed or stream.fills_gap(seq, batch.ts if timed else None)):
            self._carry_out(holder, stream.replayed(self._replays[holder], seq, payload, batch))
            if holder in self._replays and not stream.fills_gap(stream.next_seq):
                self._carry_out(holder, stream.replay_done(self._replays.pop(holder)))
        elif not replayed or seq >= stream.next_seq:
            self._carry_out(holder, stream.live(seq, payload, batch))

    def _stream(self, holder: tuple[str, int]) -> Stream:
        stream = self._streams.get(holder)
        if stream is None:
            stream = self._streams[holder] = Stream(replay_attempts=1)
        return stream

    def _carry_out(self, holder: tuple[str, int], actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Apply):
                self.index.apply(*holder, action.batch)
            elif isinstance(action, Clear):
                self.index.clear(*holder)
            elif isinstance(action, Replay):
                self._replays[holder] = action.id

    def _give_up_replays(self) -> None:
        """A recording cannot be asked: what it does not bring before the next query is missing."""
        while self._replays:
            holder, replay_id = self._replays.popitem()
            self._carry_out(holder, self._streams[holder].replay_failed(replay_id))

    def finish(self) -> None:
        """The recording ends here."""
        self._give_up_replays()


_UNREADABLE = msgspec.Raw(msgspec.msgpack.encode(["BlockStored"]))
"""In place of an event that no message could hold: it is counted as malformed where the others are."""


def _with_hashes(event: Any) -> Any:
    """A decoded event with its hex-string hashes as bytes, as an engine would have sent them."""
    if isinstance(event, dict):
        event = dict(event)
        for name in ("block_hashes", "parent_block_hash"):
            if name in event:
                event[name] = _hash(event[name])
    elif isinstance(event, list) and len(event) > 1 and event[0] in ("BlockStored", "BlockRemoved"):
        event = [event[0], _hash(event[1]), *event[2:]]
        if event[0] == "BlockStored" and len(event) > 2:
            event[2] = _hash(event[2])
    return event


def _hash(value: Any) -> Any:
    if isinstance(value, list):
        return [_hash(item) for item in value]
    if isinstance(value, str):
        try:
            return bytes.fromhex(value)
        except ValueError:
            return value
    return value


def replay(lines: Iterable[bytes | str], index: PrefixIndex | None = None) -> int:
    """Run `lines` through an index, printing answers; returns how many lines were bad."""
    replayer = Replayer(index or PrefixIndex())
    bad = 0
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            answer = replayer.line(text)
        except LineError as error:
            bad += 1
            print(f"warmroute: line {number}: {error}", file=sys.stderr)
            answer = {"error": str(error), "line": number} if b'"query"' in _bytes(text) else None
        if answer is not None:
            print(msgspec.json.encode(answer).decode())
    replayer.finish()
    print(msgspec.json.encode({"stats": {**replayer.stats(), "bad_lines": bad}}).decode())
    return bad


def _bytes(text: bytes | str) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def main(args: Sequence[str]) -> int:
    """Exit code 0, or 1 when some line could not be used."""
    parser = Parser("warmroute replay-events", "Feed recorded KV events to the index and answer queries (JSON lines).")
    parser.epilog = LINES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", metavar="FILE", help="JSON lines, or - for standard input")
    options = parser.parse(args)
    with nullcontext(sys.stdin.buffer) if options.file == "-" else open(options.file, "rb") as lines:
        return 1 if replay(lines) else 0
