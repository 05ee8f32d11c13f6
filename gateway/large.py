"""Large bodies, read in a thread and only as far as a decision needs them.

JSON decoders hold the interpreter's lock, so a thread alone keeps nobody from waiting: what is decoded is bounded too.
A body is first taken apart into undecoded fields, about 20 times as fast as decoding it whole (14 MiB of short
messages: 23 ms against 573 ms); what has more in it than `_MOST_*` is left out, and the request is then placed by its
size.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import msgspec

from gateway.handoff.bodies import is_takeable

LARGE_BYTES = 256 << 10
MOST_TOKENS = 262_144
"""As many are matched: a longer prompt is placed by its beginning."""

_MOST_FIELDS = 1024
_MOST_BRACKETS = 100_000
_MOST_COMMAS = 1_000_000
_MOST_QUOTES = 400_000
_LENIENT_BYTES = 4 << 20
"""Python's own parser, which reads what msgspec does not (lone surrogates), is for fields up to this size."""
_ID_FIELDS = {"completions": "prompt", "generate": "token_ids"}
_ARRAY_OF_IDS = re.compile(rb"\[\s*\d")
_BYTES_PER_ID = 8
_LONGEST_NAMED_BYTES = 64 << 10

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Named(msgspec.Struct):
    """What a body that is not taken apart is placed by: everything else in it is skipped."""

    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    stream: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    previous_response_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Whose response that is must be looked at, however large the body."""


_named = msgspec.json.Decoder(_Named)


class LargeBody(NamedTuple):
    """`left_out`: some field was too costly or could not be read. `cut_tokens`: given ids beyond `MOST_TOKENS`."""

    fields: dict[str, Any]
    left_out: bool
    cut_tokens: int


def decode_large(body: bytes, kind: str | None) -> LargeBody | None:
    """The fields of the JSON object in `body`; None if it is none. `kind` None: the prompt is not looked at."""
    try:
        if not is_takeable(body):
            return _by_name(_named.decode(body))
        raws = _fields.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return _leniently(body)
    wanted = set(raws)
    if kind is None or len(raws) > _MOST_FIELDS:
        wanted &= set(_Named.__struct_fields__)
    ids_field = None if "truncate_prompt_tokens" in raws else _ID_FIELDS.get(kind or "")
    fields: dict[str, Any] = {}
    left_out, cut_tokens = len(raws) > _MOST_FIELDS, 0
    budget = _Budget()
    for name in wanted:
        piece = bytes(raws[name])
        try:
            if name == ids_field and _ARRAY_OF_IDS.match(piece):
                fields[name], cut_tokens = _first_ids(piece)
            elif budget.allows(piece):
                fields[name] = _decoded(piece)
            else:
                left_out = True
        except (ValueError, RecursionError):
            left_out = True
    return LargeBody(fields, left_out, cut_tokens)


def _by_name(named: _Named) -> LargeBody:
    fields: dict[str, Any] = {}
    for name in named.__struct_fields__:
        value = getattr(named, name)
        if value is not msgspec.UNSET and len(value_bytes := bytes(value)) <= _LONGEST_NAMED_BYTES:
            fields[name] = msgspec.json.decode(value_bytes)
    return LargeBody(fields, left_out=True, cut_tokens=0)


def _leniently(body: bytes) -> LargeBody | None:
    if len(body) > _LENIENT_BYTES or not is_takeable(body) or not _Budget().allows(body):
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return LargeBody(fields, left_out=False, cut_tokens=0) if isinstance(fields, dict) else None


class _Budget:
    """What may still be decoded of one body. Text may hold the marks that are counted; so the bounds are wide."""

    def __init__(self) -> None:
        self._brackets, self._commas, self._quotes = _MOST_BRACKETS, _MOST_COMMAS, _MOST_QUOTES

    def allows(self, piece: bytes) -> bool:
        if piece.startswith(b'"'):
            return True
        brackets = piece.count(b"{") + piece.count(b"[")
        commas, quotes = piece.count(b","), piece.count(b'"')
        if brackets > self._brackets or commas > self._commas or quotes > self._quotes:
            return False
        self._brackets -= brackets
        self._commas -= commas
        self._quotes -= quotes
        return True


def _decoded(piece: bytes) -> Any:
    try:
        return msgspec.json.decode(piece)
    except msgspec.MsgspecError:
        if len(piece) > _LENIENT_BYTES:
            raise
        return json.loads(piece)


def _first_ids(piece: bytes) -> tuple[Any, int]:
    """The first `MOST_TOKENS` of an array of token ids, and how many were cut off. Raises ValueError."""
    n_ids = piece.count(b",") + 1
    if n_ids > MOST_TOKENS:
        end = piece.rfind(b",", 0, MOST_TOKENS * _BYTES_PER_ID)
        if end < 0:
            raise ValueError("no ids")
        piece = piece[:end] + b"]"
    ids = _decoded(piece)[:MOST_TOKENS]
    return ids, n_ids - len(ids)
