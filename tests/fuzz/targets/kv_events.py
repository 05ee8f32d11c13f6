"""Event messages of ZMQ: frames, msgpack batches, the order of a stream, and the index that is fed with them."""

from __future__ import annotations

import base64
import json

from indexer import EventDecodeError, FrameError, PrefixIndex, decode_batch, parse_frames
from indexer.stream import Apply, Replay, Stream
from tests.fuzz.cut import packed, unpacked
from tests.support.kv_feed import Feed, as_array, cleared, payload, prompt, removed, stored
from tests.support.recorded import DATA

_RECORDED = json.loads((DATA / "vllm_0.32_kv_events.json").read_text(encoding="utf-8"))
_TOKENS = prompt(3)


def _frames(texts: list[str]) -> bytes:
    return packed(*map(base64.b64decode, texts))


SEEDS = [
    *(_frames(message["frames_b64"]) for message in _RECORDED["pub"]),
    *(_frames(frames) for replay in _RECORDED["replay"].values() for frames in replay),
    packed(b"", bytes(8), payload(Feed().event("w", _TOKENS), removed([5, 6], medium="CPU"), cleared(), rank=1)),
    packed(b"kv@w@m", bytes(7) + b"\x02", payload(as_array(stored([-1, 2], [1] * 8, b"x" * 32, medium="CPU")))),
    packed(b"", b"\xff" * 8, b""),
]
# fmt: off
WORDS = [
    b"BlockStored", b"BlockRemoved", b"AllBlocksCleared", b"type", b"token_ids", b"extra_keys", b"\xc0", b"\xcb",
    b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\x91", b"\x81", b"\xa9token_ids", b"\xcf" + b"\xff" * 8,
    b"\xd3" + b"\x80" + bytes(7), b"\xc4\x00",
]
# fmt: on


def fuzz_one(data: bytes) -> None:
    frames = unpacked(data, most=8)
    try:
        seq, body = parse_frames(frames)
    except FrameError:
        seq, body = 0, frames[-1] if frames else b""
    stream, feed = Stream(), Feed(PrefixIndex())
    try:
        batch = decode_batch(body)
    except EventDecodeError:
        assert stream.undecodable(max(0, seq)) == []
        return
    assert decode_batch(memoryview(body)).malformed == batch.malformed
    actions = stream.connected() + stream.live(max(0, seq), body, batch)
    assert any(isinstance(action, Replay) for action in actions)
    for _ in range(5):  # A replay that nobody answers ends in the batch being taken.
        for action in actions:
            if isinstance(action, Apply):
                feed.index.apply("w", 0, action.batch)
                feed.index.apply("w", 0, action.batch)
        asked = [action.id for action in actions if isinstance(action, Replay)]
        actions = [done for each in asked for done in stream.replay_failed(each)]
    assert stream.stats()["counters"]["applied_batches"] == 1
    feed.index.match(_TOKENS)
    feed.index.stats()
    feed.index.clear("w")
    feed.store("v", _TOKENS)
    assert feed.held(_TOKENS, "v") == 12
