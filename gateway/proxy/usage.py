"""Cached tokens, read off the end of an answer without taking it apart.

`usage` stands near the end of a whole answer and in one of the last events of a stream. The last `TAIL_BYTES` are kept
as the pieces they came in and searched once, at the end: how the bytes were cut makes no difference. A key in JSON is
`"usage":` with bare quotes, which text inside a JSON string never is.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.stored import ResponseHead

TAIL_BYTES = 32 << 10
_MOST_TRIES = 32
"""Of the last keys of that name; each costs a look at the 4 KB behind it."""
_USAGE = re.compile(rb'"usage"\s*:\s*(?=\{)')
_SHALLOW = re.compile(rb"\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\}")
"""An object that holds objects, but these none: as all usages of today."""


_Count = Annotated[int, Meta(ge=0, le=1 << 53)]
"""What an engine says is counted against keys: a number below 0 would give tokens back."""


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Tokens(msgspec.Struct):
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    """The fields of /v1/completions, /v1/responses, /v1/messages and /cohere/v2/chat."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None
    tokens: _Tokens | None = None


class Usage(msgspec.Struct, frozen=True):
    """None: the answer does not say."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


_decoder = msgspec.json.Decoder(_Usage)


class UsageTail:
    """The end of one answer."""

    __slots__ = ("_head", "_pieces", "_size")

    def __init__(self, head: ResponseHead | None = None) -> None:
        """`head` is shown its beginning."""
        self._head = head
        self._pieces: deque[bytes] = deque()
        self._size = 0

    def feed(self, piece: bytes) -> None:
        if self._head is not None:
            self._head.feed(piece)
        pieces = self._pieces
        pieces.append(piece)
        self._size += len(piece)
        while self._size - len(pieces[0]) >= TAIL_BYTES:
            self._size -= len(pieces.popleft())

    def ends_event(self) -> bool:
        """Whether an SSE stream stands between two events."""
        end = b"".join(self._pieces)[-4:]
        return end.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))

    def read(self) -> Usage | None:
        """The last well-formed `usage` object, or None. One of the wrong shape is ignored."""
        tail = b"".join(self._pieces)[-TAIL_BYTES:]
        at = len(tail)
        for _ in range(_MOST_TRIES):
            at = tail.rfind(b'"usage"', 0, at)
            if at < 0:
                break
            found = _USAGE.match(tail, at)
            end = None if found is None else _object_end(tail, found.end())
            if found is None or end is None:
                continue
            try:
                return _reduced(_decoder.decode(tail[found.end() : end]))
            except msgspec.MsgspecError:
                continue
        return None


def _object_end(data: bytes, start: int) -> int | None:
    """Past the brace that closes the one at `start`. Usage objects hold numbers only, so braces are all there is."""
    shallow = _SHALLOW.match(data, start, start + 4096)
    if shallow is not None:
        return shallow.end()
    depth = 0
    for brace in re.finditer(rb"[{}]", data[start : start + 4096]):
        depth += 1 if brace.group() == b"{" else -1
        if depth == 0:
            return start + brace.end()
    return None


def _reduced(usage: _Usage) -> Usage | None:
    if usage.prompt_tokens is not None:
        details = usage.prompt_tokens_details
        return Usage(usage.prompt_tokens, usage.completion_tokens, None if details is None else details.cached_tokens)
    if usage.input_tokens is None:
        tokens = usage.tokens
        return None if tokens is None else Usage(tokens.input_tokens, tokens.output_tokens)
    if usage.cache_read_input_tokens is not None:  # /v1/messages counts cached tokens apart from the others.
        cached, created = usage.cache_read_input_tokens, usage.cache_creation_input_tokens or 0
        return Usage(usage.input_tokens + cached + created, usage.output_tokens, cached)
    details = usage.input_tokens_details
    return Usage(usage.input_tokens, usage.output_tokens, None if details is None else details.cached_tokens)
