"""A model's name in a response, replaced while it streams by."""

from __future__ import annotations

import json
import re

_MOST_SPACES = 8
"""Of white space around the colon; more of it is no engine's, and would have to be held back."""
_SPACE = rb"[ \t\r\n]{0,%d}" % _MOST_SPACES
_KEY = b'"model"'


class Renamer:
    """`feed` gives back what it gets with the value of every key `model` that is `of` being `to`. It holds back only
    what may still become such a pair; with `last` nothing.

    In valid JSON the bytes `"model"` before a colon are a key, unless an escaped quote begins them.
    """

    def __init__(self, of: str, to: str) -> None:
        spellings = sorted({json.dumps(of), json.dumps(of, ensure_ascii=False)})
        names = [name.encode("utf-8", "surrogatepass") for name in spellings]
        colon = _SPACE + b":" + _SPACE
        either = b"|".join(map(re.escape, names))
        self._pair = re.compile(rb"(?<!\\)(" + re.escape(_KEY) + colon + rb")(?:" + either + rb")")
        begun = b"|".join(_begun(name) for name in names)
        beginning = _begun_then(_KEY, rb"%s(?::%s(?:%s)?)?" % (_SPACE, _SPACE, begun))
        self._beginning = re.compile(rb"(?<!\\)" + beginning + rb"\Z")
        self._longest = len(_KEY) + 2 * _MOST_SPACES + 1 + max(map(len, names))
        self._to = json.dumps(to).encode()
        self._held = b""
        self._before = b""

    def feed(self, data: bytes, last: bool) -> bytes:
        """`data` goes out as it is (the same object) where nothing was held and nothing changes."""
        text = self._before + self._held + data if self._before or self._held else data
        skip = len(self._before)
        cut = len(text)
        if not last:
            tail = max(0, cut - self._longest - 1)
            begun = self._beginning.search(text, max(tail, skip))
            cut = begun.start() if begun is not None else cut
        out, at = b"", skip
        for match in self._pair.finditer(text, skip, cut):
            out += text[at : match.end(1)] + self._to
            at = match.end()
        out += text[at:cut]
        self._held = text[cut:]
        self._before = text[cut - 1 : cut] if cut else b""
        return data if out == data else out


def _begun(literal: bytes) -> bytes:
    """A pattern for each beginning of `literal`, the whole included, longest first; one byte at least."""
    return _begun_then(literal, b"")


def _begun_then(literal: bytes, rest: bytes) -> bytes:
    """... and, where all of it is there, `rest`."""
    pattern = rest
    for byte in reversed([literal[i : i + 1] for i in range(1, len(literal))]):
        pattern = b"(?:" + re.escape(byte) + pattern + b")?"
    return re.escape(literal[:1]) + pattern
