"""`warmroute replay-events FILE.jsonl`: feed recorded KV events to the index and answer the queries between them.

One JSON object per line:

    {"worker","rank","frames_b64":[topic,seq,payload]}        a live message; with a leading "" frame, a replayed one
    {"worker","rank","seq":n,"events":[...]}                   the same, decoded (bytes hashes as hex strings); seq may
    be left out {"clear":{"worker":"w1","rank":0}}                         forget a worker, or one of its ranks
    {"worker":"w1","models":["m","m-alias"],"loras":["a"]}     what a worker serves; without it any model name matches
    it {"query":{"tokens":[...],"model","lora","cache_salt","extra_keys"}}

Prints one line per query and a last line of statistics. A bad line is reported on standard error and costs nothing
else.
"""

from __future__ import annotations

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
    rank: int = 0
    frames_b64: list[str] | None = None
    seq: Annotated[int, msgspec.Meta(ge=0)] | None = None
    ts: float = 0.0
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
        self._decoder = msgspec.json.Decoder(_Line)

    def line(self, text: bytes | str) -> dict[str, Any] | None:
        """Take in one line; the answer, if it was a query. Raises LineError."""
        try:
            line = self._decoder.decode(text)
        except msgspec.ValidationError as error:
            raise LineError(str(error)) from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise LineError(f"not JSON: {error}") from None
        if line.query is not None:
            return self._query(line.query)
        if line.clear is not None:
            self.index.clear(line.clear.worker, line.clear.rank)
        elif line.worker is None:
            raise LineError("a line needs one of: worker with frames_b64, events or models; clear; query")
        elif line.frames_b64 is not None:
            self._frames(line.worker, line.rank, line.frames_b64)
        elif line.events is not None:
            self._events(line.worker, line)
        elif line.models is not None:
            self.index.set_worker(line.worker, models=line.models, loras=line.loras)
        else:
            raise LineError("a line with a worker needs frames_b64, events or models")
        return None

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
        events = [_with_hashes(event) for event in line.events or ()]
        try:
            payload = msgspec.msgpack.encode([line.ts, events, line.rank])
            batch = decode_batch(payload)
        except (OverflowError, ValueError, TypeError, RecursionError) as error:
            raise LineError(f"bad events: {error}") from None
        seq = self._stream((worker, line.rank)).next_seq if line.seq is None else line.seq
        self._batch(worker, line.rank, seq, payload, batch, replayed=False)

    def _batch(self, worker: str, rank: int, seq: int, payload: bytes, batch: EventBatch, replayed: bool) -> None:
        holder = (worker, rank if batch.data_parallel_rank is None else batch.data_parallel_rank)
        stream = self._stream(holder)
        if holder in self._replays and (replayed or stream.fills_gap(seq)):
            self._carry_out(holder, stream.replayed(self._replays[holder], seq, payload, batch))
            if holder in self._replays and not stream.fills_gap(stream.next_seq):
                self._carry_out(holder, stream.replay_done(self._replays.pop(holder)))
        else:
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
    parser.add_argument("file", metavar="FILE", help="JSON lines, or - for standard input")
    options = parser.parse(args)
    with nullcontext(sys.stdin.buffer) if options.file == "-" else open(options.file, "rb") as lines:
        return 1 if replay(lines) else 0
