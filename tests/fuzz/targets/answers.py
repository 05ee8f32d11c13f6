"""What is read off answers that pass, whole ones and streams: usages, beginnings, ids, names; cut anywhere."""

from __future__ import annotations

import json

from gateway.extproc.rename import Renamer
from gateway.handoff.cached import CachedTokens
from gateway.handoff.opening import MOST_BYTES, Opening, State
from gateway.proxy.usage import UsageTail
from gateway.stored import ResponseHead
from tests.fuzz.cut import cut, seeds
from tests.support.recorded import load, sse

_KINDS = ("chat", "completions", "messages", "responses", "generate")
_PD = load("pd")

SEEDS = [
    bytes([i]) + seed
    for i, kind in enumerate(_KINDS[:4])
    for seed in seeds(
        sse(_PD["decode_streams"][kind]),
        sse(_PD["failed_streams"][kind]),
        json.dumps(_PD["prefill"][kind]).encode(),
        load("http")["calls"]["stream_usage"]["response"].encode(),
    )
]
# fmt: off
WORDS = [
    b"data: ", b"\n\n", b"\r\n", b"\r", b'"usage":', b'{"usage": {"prompt_tokens": 9, "completion_tokens": 1}}',
    b'"prompt_tokens_details": {"cached_tokens": 3}', b'"cached_tokens": ', b'"error": {}', b"event: error\n",
    b'{"id": "resp_1"', b'"response": {', b'"model": "tiny"', b'"model"', b"\\", b"\xef\xbb\xbf", b"{", b"}",
    b"[DONE]", b"null", b"-1", b"1e9",
]
# fmt: on


def fuzz_one(data: bytes) -> None:
    kind = _KINDS[(data[0] if data else 0) % len(_KINDS)]
    whole, pieces = cut(data[1:])
    assert _usage([whole]) == _usage(pieces)
    assert _ids([whole]) == _ids(pieces)
    assert _renamed([whole]) == _renamed(pieces)
    if len(whole) < MOST_BYTES // 2:
        assert _opening([whole]) == _opening(pieces)
    for cached_tokens in (None, 3):
        for add_absent in (False, True):
            one, many = (CachedTokens(kind, cached_tokens, add_absent=add_absent) for _ in range(2))
            corrected = one.feed(whole) + one.end()
            assert b"".join(map(many.feed, pieces)) + many.end() == corrected
            assert corrected.count(b"\n") == whole.count(b"\n")
            if b'"usage"' not in whole:
                assert corrected == whole
            CachedTokens(kind, cached_tokens, add_absent=add_absent).whole(whole)


def _usage(pieces: list[bytes]) -> object:
    tail = UsageTail()
    for piece in pieces:
        tail.feed(piece)
    return tail.read(), tail.ends_event()


def _ids(pieces: list[bytes]) -> list[str]:
    found: list[str] = []
    head = ResponseHead(found.append)
    for piece in pieces:
        head.feed(piece)
    assert len(found) <= 1
    return found


def _renamed(pieces: list[bytes]) -> bytes:
    renamer = Renamer("tiny", "told")
    return b"".join(renamer.feed(piece, False) for piece in pieces) + renamer.feed(b"", True)


def _opening(pieces: list[bytes]) -> tuple[State, bytes | None]:
    opening = Opening()
    for piece in pieces:
        opening.feed(piece)
    return opening.end(), opening.error
