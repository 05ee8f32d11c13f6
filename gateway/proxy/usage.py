"""Usage, read off the end of an answer.

`usage` stands near the end of a whole answer and in one of the last events of a stream. The last `TAIL_BYTES` are kept
as the pieces they came in and looked at once, at the end: how the bytes were cut makes no difference.

Engines repeat what clients wrote, as JSON too: schemas of tools, metadata, messages. So only the answer's own member
counts, or that of the response in the event that ends it, wherever else something is called `usage`. An answer that is
neither JSON nor a stream of events says none: a transcription as plain text is what a client has spoken.
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
"""Of the last keys of that name, in what is not here from its beginning."""
_KEY = b'"usage"'
_USAGE = re.compile(rb'"usage"\s*:\s*(?=\{)')
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)
_TYPE = re.compile(rb'"type"\s*:\s*"([^"\\]*+)"')
_TELLING = re.compile(r"\s*(?:application/(?:[\w.+-]+\+)?json|text/event-stream)\s*(?:;|\Z)", re.IGNORECASE | re.ASCII)
_SHALLOW = re.compile(rb"\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\}")
"""An object that holds objects, but these none: as all usages of today."""
_WITHIN = frozenset({"response.completed", "response.incomplete", "response.failed", "message-end"})
"""Events of /v1/responses and /cohere/v2/chat whose usage is in their `response` or `delta`."""


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


class _Document(msgspec.Struct):
    """A whole answer, or what one event says."""

    usage: msgspec.Raw = msgspec.Raw()
    type: msgspec.Raw = msgspec.Raw()
    response: msgspec.Raw = msgspec.Raw()
    delta: msgspec.Raw = msgspec.Raw()


class Usage(msgspec.Struct, frozen=True):
    """None: the answer does not say."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


_decoder = msgspec.json.Decoder(_Usage)
_documents = msgspec.json.Decoder(_Document)


class UsageTail:
    """The end of one answer."""

    __slots__ = ("_head", "_is_cut", "_pieces", "_size", "_tells")

    def __init__(self, head: ResponseHead | None = None, content_type: str | None = "application/json") -> None:
        """`head` is shown its beginning; `content_type` is what its header says."""
        self._head = head
        self._tells = content_type is not None and _TELLING.match(content_type) is not None
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._is_cut = False

    def feed(self, piece: bytes) -> None:
        if self._head is not None:
            self._head.feed(piece)
        pieces = self._pieces
        pieces.append(piece)
        self._size += len(piece)
        while self._size - len(pieces[0]) >= TAIL_BYTES:
            self._size -= len(pieces.popleft())
            self._is_cut = True

    def ends_event(self) -> bool:
        """Whether an SSE stream stands between two events."""
        end = b"".join(self._pieces)[-4:]
        return end.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))

    def read(self) -> Usage | None:
        """What the answer, or the last event that says so, took. One of the wrong shape is ignored."""
        if not self._tells:
            return None
        kept = b"".join(self._pieces)
        tail = kept[-TAIL_BYTES:]
        at = tail.rfind(_KEY)
        if at < 0:
            return None
        is_cut = self._is_cut or len(kept) > TAIL_BYTES
        usage: Usage | None = None
        while usage is None and at >= 0:
            start = max(tail.rfind(b"\n", 0, at), tail.rfind(b"\r", 0, at)) + 1
            line = tail[start:].split(b"\n", 1)[0]
            if line.startswith(b"data:"):
                usage = _of_whole(line[5:])
            elif not _is_stream(tail):
                return _of_cut(tail) if is_cut else _of_whole(tail)
            if usage is None and not start and is_cut:
                usage = _of_cut(line)
            at = tail.rfind(_KEY, 0, start)
        return usage


def _is_stream(tail: bytes) -> bool:
    return any(end in tail and end + b"data:" in tail for end in (b"\n", b"\r"))


def _of_whole(data: bytes) -> Usage | None:
    try:
        document = _documents.decode(data)
        if document.usage:
            return _reduced(_decoder.decode(document.usage))
        if document.type and msgspec.json.decode(document.type) in _WITHIN:
            return _reduced(_decoder.decode(_documents.decode(document.response or document.delta).usage))
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError):
        pass
    return None


def _of_cut(data: bytes) -> Usage | None:
    """Of a document whose end is here. How deep a key stands shows in what is closed behind it: within a string every
    quote has a backslash before it, so that a key of that name is no text, and what follows it is outside of strings.
    """
    at = seen = len(data)
    depth, kind = 0, ""
    for _ in range(_MOST_TRIES):
        at = data.rfind(_KEY, 1, at)
        if at < 0:
            break
        if data[at - 1 : at] == b"\\":
            continue
        tokens = _TOKEN.findall(data, at, seen)
        depth += sum((token in b"}]") - (token in b"{[") for token in tokens)
        kind = _own_type(data, at, seen, depth) or kind
        seen = at
        if depth == 1 or (depth == 2 and kind in _WITHIN):
            found = _USAGE.match(data, at)
            end = None if found is None else _object_end(data, found.end())
            if found is None or end is None:
                continue
            try:
                return _reduced(_decoder.decode(data[found.end() : end]))
            except msgspec.MsgspecError:
                continue
    return None


def _own_type(data: bytes, start: int, end: int, depth: int) -> str:
    """The `type` between the two of the document itself; `depth` is that at `start`."""
    for token in _TOKEN.finditer(data, start, end):
        text = token.group()
        if text in b"{[":
            depth += 1
        elif text in b"}]":
            depth -= 1
        elif depth == 1 and text == b'"type"' and (found := _TYPE.match(data, token.start())):
            return found.group(1).decode("utf-8", "replace")
    return ""


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
