"""A model's name in a response, replaced while it streams by."""

from __future__ import annotations

import json
import re

_MOST_SPACES = 8
"""Of white space around the colon; more of it is no engine's, and would have to be held back."""
_SPACES = rb"[ \t\r\n]{0,%d}" % _MOST_SPACES
_KEY = b'"model"'
_BETWEEN = re.compile(rb"%s%s(:%s)?" % (_KEY, _SPACES, _SPACES))


class Renamer:
    """`feed` gives back what it gets with the value of every key `model` that is `of` being `to`. It holds back only
    what may still become such a pair; with `last` nothing.

    In valid JSON the bytes `"model"` before a colon are a key, unless an escaped quote begins them.
    """

    def __init__(self, of: str, to: str) -> None:
        spellings = sorted({json.dumps(of), json.dumps(of, ensure_ascii=False)})
        self._names = [name.encode("utf-8", "surrogatepass") for name in spellings]
        either = b"|".join(map(re.escape, self._names))
        self._pair = re.compile(rb"(?<!\\)(%s%s:%s)(?:%s)" % (_KEY, _SPACES, _SPACES, either))
        self._longest = len(_KEY) + 2 * _MOST_SPACES + 1 + max(map(len, self._names))
        self._to = json.dumps(to).encode()
        self._held = b""
        self._before = b""

    def feed(self, data: bytes, last: bool) -> bytes:
        """`data` goes out as it is (the same object) where nothing was held and nothing changes."""
        text = self._before + self._held + data if self._before or self._held else data
        at = len(self._before)
        parts: list[bytes] = []
        for match in self._pair.finditer(text, at):
            parts += (text[at : match.end(1)], self._to)
            at = match.end()
        cut = len(text) if last else self._beginning(text, at)
        out = b"".join((*parts, text[at:cut]))
        self._held = text[cut:]
        self._before = text[max(cut - 1, 0) : cut]
        return data if out == data else out

    def _beginning(self, text: bytes, start: int) -> int:
        """Where in `text` a pair begins that may still be completed; its end if there is none."""
        at = text.find(b'"', max(start, len(text) - self._longest))
        while at >= 0:
            if text[at - 1 : at] != b"\\" and self._may_become(text[at:]):
                return at
            at = text.find(b'"', at + 1)
        return len(text)

    def _may_become(self, rest: bytes) -> bool:
        if len(rest) <= len(_KEY):
            return _KEY.startswith(rest)
        after = _BETWEEN.match(rest)
        if after is None or len(rest) == after.end():
            return after is not None
        value = rest[after.end() :]
        return after[1] is not None and any(name.startswith(value) and name != value for name in self._names)
