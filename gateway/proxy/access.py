"""One line per request, written by a thread: a full pipe behind standard error must not hold up a token."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

_FLUSH_AFTER_S = 0.05
_ATOMIC_BYTES = 4096
"""PIPE_BUF: so much a pipe takes at once or not at all."""
_MOST_LINES = 20_000
"""Kept at most while the writer is held up; later ones are dropped and counted."""


class Record(msgspec.Struct, kw_only=True, gc=False, omit_defaults=True):
    """No prompt text, no query string (some clients put keys there), no header but the request id."""

    request_id: str
    trace_id: str | None = None
    """With tracing."""
    client: str | None = None
    tenant: str | None = None
    """Of its API key; what a header says may be secret."""
    method: str
    path: str
    status: int
    worker: str | None = None
    rank: int | None = None
    model: str | None = None
    policy: str | None = None
    tokens: str | None = None
    prompt_tokens: int | None = None
    choice: str | None = None
    """Where the prompt is computed: local or remote."""
    pd_reason: str | None = None
    prefill: str | None = None
    """The prefill worker, with `choice` local one that did not do."""
    prefill_ms: float | None = None
    predicted_cached_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    overhead_ms: float | None = None
    queued_ms: float | None = None
    """Spent waiting for a worker with room; None: it did not have to."""
    ttft_ms: float | None = None
    # By a factory, so that they are shown when they are 0.
    duration_ms: float = msgspec.field(default_factory=float)
    sent_bytes: int = msgspec.field(default_factory=int)
    retries: int = msgspec.field(default_factory=int)
    cut: str | None = None
    """Why the answer did not reach its end."""
    error: str | None = None


_PLAIN = re.compile(r"[!#-~]+").fullmatch
_LABELS = [None if name in ("method", "path", "status") else f"{name}=" for name in Record.__struct_fields__]
"""None: said at the beginning of a line."""
_second = (0, "")


class AccessLog:
    """Lines are collected and written together every `_FLUSH_AFTER_S`. `dropped` counts what there was no room for."""

    def __init__(self, format_: Literal["text", "json"], stream: TextIO | None = None, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.dropped = 0
        self._json = format_ == "json"
        self._stream = sys.stderr if stream is None else stream
        self._records: list[tuple[float, Record]] = []
        self._flush: asyncio.Task[None] | None = None

    def write(self, record: Record) -> None:
        if not self.enabled:
            return
        if len(self._records) >= _MOST_LINES:
            self.dropped += 1
            return
        self._records.append((time.time(), record))
        if self._flush is None:
            self._flush = asyncio.get_running_loop().create_task(self._flush_later())

    async def close(self) -> None:
        """Write what is left."""
        if self._flush is not None:
            await self._flush
        if self._records:
            self._write(self._take())

    async def _flush_later(self) -> None:
        try:
            while self._records:
                await asyncio.sleep(_FLUSH_AFTER_S)
                await asyncio.to_thread(self._write, self._take())
        finally:
            self._flush = None

    def _take(self) -> list[tuple[float, Record]]:
        records, self._records = self._records, []
        return records

    def _write(self, records: list[tuple[float, Record]]) -> None:
        try:
            for piece in _pieces(self._line(time_s, record) for time_s, record in records):
                self._stream.write(piece)
                self._stream.flush()
        except (OSError, ValueError):
            self.dropped += len(records)

    def _line(self, time_s: float, record: Record) -> str:
        if self._json:
            try:
                members = msgspec.json.encode(record)
            except UnicodeEncodeError:
                members = msgspec.json.encode(_shown(record))
            return f'{{"time":"{told(time_s)}",{members[1:].decode()}\n'
        parts = [told(time_s), _word(record.method), _word(record.path), str(record.status)]
        # For every request, so that what is usual, short plain words, takes one match each.
        for label, value in zip(_LABELS, msgspec.structs.astuple(record), strict=True):
            if label is not None and value is not None:
                shown = value if type(value) is not str or _PLAIN(value) else _word(value)
                parts.append(f"{label}{shown}")
        return " ".join(parts) + "\n"


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """The lines in few pieces, of which each is written whole, whoever else writes to the same pipe."""
    piece: list[str] = []
    n_bytes = 0
    for line in lines:
        size = len(line) if line.isascii() else len(line.encode("utf-8", "replace"))
        if piece and n_bytes + size > _ATOMIC_BYTES:
            yield "".join(piece)
            piece, n_bytes = [], 0
        piece.append(line)
        n_bytes += size
    if piece:
        yield "".join(piece)


def told(time_s: float) -> str:
    """In UTC; what is before the milliseconds is made once a second."""
    global _second
    whole_s, rest_us = divmod(round(time_s * 1e6), 1_000_000)
    second = _second
    if second[0] != whole_s:
        second = _second = whole_s, datetime.fromtimestamp(whole_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.")
    return f"{second[1]}{rest_us // 1000:03d}+00:00"


def _shown(record: Record) -> dict[str, Any]:
    """What there is to tell."""
    fields = msgspec.structs.asdict(record)
    return {name: _clean(value) for name, value in fields.items() if value is not None}


def _clean(value: Any) -> Any:
    """Bytes that were no UTF-8 came as lone surrogates, which nothing can be written with."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) and not value.isascii() else value


def _word(text: str) -> str:
    """As it is when it is one plain word, else as a JSON string: no client can write a second line, nor control a
    terminal.
    """
    if _PLAIN(text):
        return text
    text = _clean(text)
    if _PLAIN(text):
        return text
    quoted = msgspec.json.encode(text).decode()
    return quoted if quoted.isprintable() else json.dumps(text)
