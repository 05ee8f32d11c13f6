"""JSON objects taken apart one level deep: each value stays the bytes it came in.

So a number keeps its spelling, and a body of tens of megabytes costs one pass (24 MB: 23 ms) instead of a decoding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

LENIENT_BYTES = 1 << 20
"""Python's own parser, which reads what msgspec does not, is for texts up to this size."""

Fields = dict[str, msgspec.Raw]

_decoder = msgspec.json.Decoder(Fields)
_lenient = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
_MEMBER = re.compile(rb'[ \t\n\r]*([{,])[ \t\n\r]*("(?:[^"\\]|\\.)*")[ \t\n\r]*:[ \t\n\r]*')
_END = re.compile(rb"[ \t\n\r]*\}[ \t\n\r]*\Z")
_OBJECT = re.compile(rb"[\s\x00\xef\xbb\xbf\xfe\xff]*\{")
"""Byte order marks, and the other half of a wide space."""


class NotAnObject(ValueError):
    """The bytes are no JSON object, or none that can be read here."""


def split(raw: bytes | msgspec.Raw) -> Fields:
    """The members of the object; of a name that comes twice the last, as engines read it. Raises NotAnObject.

    What only Python's parser reads (NaN, lone surrogates, a byte order mark, UTF-16) is read up to `LENIENT_BYTES`:
    engines use that parser.
    """
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        pass
    raw = bytes(raw)
    if len(raw) > LENIENT_BYTES:
        raise NotAnObject("too large to be read leniently")
    try:
        return _split_leniently(raw.decode(json.detect_encoding(raw), "surrogatepass"))
    except (ValueError, RecursionError) as exc:
        raise NotAnObject(exc.msg if isinstance(exc, json.JSONDecodeError) else "it cannot be read") from None


def join(fields: Mapping[str, msgspec.Raw]) -> bytes:
    """The object again, without the spaces between its members."""
    try:
        return msgspec.json.encode(fields)
    except UnicodeEncodeError:  # A lone surrogate in a name.
        return b"{" + b",".join(json.dumps(name).encode() + b":" + bytes(fields[name]) for name in fields) + b"}"


def piece(value: Any) -> msgspec.Raw:
    """`value` as JSON; what is raw already stays as it is, inside lists and dicts too."""
    if isinstance(value, msgspec.Raw):
        return value
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except UnicodeEncodeError:
        return msgspec.Raw(json.dumps(value).encode())


def with_member(raw: bytes, name: str, value: bytes) -> bytes:
    """`raw`, an object, with the member `name` (plain ASCII) set to `value`; every other byte stays, but in an object
    that has a name twice or is of another encoding. Raises NotAnObject.
    """
    fields = split(raw)
    quoted = b'"%b"' % name.encode()
    if name not in fields:
        if json.detect_encoding(raw).startswith("utf-8"):
            end = raw.rindex(b"}")
            return raw[:end] + (b"," if fields else b"") + quoted + b":" + value + raw[end:]
    elif (place := _place(raw, fields, name)) is not None:
        return raw[: place[0]] + value + raw[place[1] :]
    fields[name] = msgspec.Raw(value)
    return join(fields)


def looks_like_object(raw: bytes) -> bool:
    """Whether the first thing in `raw`, in any encoding of JSON, is a brace."""
    return _OBJECT.match(raw) is not None


def _place(raw: bytes, fields: Fields, name: str) -> tuple[int, int] | None:
    """Where in `raw`, which was split into `fields`, the value of that member begins and ends: gone through member by
    member, since what is further inside may look like it, thousands of times. None where the members are not these one
    after the other: one is there twice, or it is another encoding.
    """
    at, mark, place = 0, b"{", None
    for each, value in fields.items():
        key = _MEMBER.match(raw, at)
        if key is None or key[1] != mark or _text(key[2]) != each:
            return None
        there = bytes(value)
        start, at = key.end(), key.end() + len(there)
        if not raw.startswith(there, start):
            return None
        if each == name:
            place = start, at
        mark = b","
    return place if _END.match(raw, at) is not None else None


def _text(quoted: bytes) -> str | None:
    try:
        text: str = json.loads(quoted)
    except ValueError:
        return None
    return text


def _split_leniently(text: str) -> Fields:
    fields: Fields = {}
    at = _after(text, 0, "{")
    if text[at : at + 1] == "}":
        at += 1
    else:
        while True:
            name, at = _lenient.raw_decode(text, at)
            if not isinstance(name, str):
                raise NotAnObject("a name must be a string")
            start = _after(text, at, ":")
            _, at = _lenient.raw_decode(text, start)
            fields[name] = msgspec.Raw(text[start:at].encode("utf-8", "surrogatepass"))
            at = _spaces(text, at)
            if text[at : at + 1] == "}":
                at += 1
                break
            at = _after(text, at, ",")
    if _spaces(text, at) != len(text):
        raise NotAnObject("there is more after the object")
    return fields


def _after(text: str, at: int, mark: str) -> int:
    """Past `mark` and the spaces around it."""
    at = _spaces(text, at)
    if text[at : at + 1] != mark:
        raise NotAnObject(f"expected '{mark}'")
    return _spaces(text, at + 1)


def _spaces(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
