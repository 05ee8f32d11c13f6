"""The head that a connection brought last. The next one mostly differs in the length of its body alone."""

from __future__ import annotations

import re

from multidict import CIMultiDict

from gateway.http1.head import Head, parse_head
from gateway.proxy.headers import is_leg, request_headers

_LONGEST_KEPT_BYTES = 8 << 10
_LONGEST_LENGTH = 18
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*+([0-9]++)[ \t]*+(?=\r\n|\Z)", re.IGNORECASE)


class LastHead:
    """What is byte for byte the same was checked before, and is not read again."""

    __slots__ = ("_after", "_before", "_row", "head", "is_leg", "passing")

    def __init__(self) -> None:
        self.head: Head
        self.passing: CIMultiDict[str]
        """What of it goes on to a worker; to be copied, not changed."""
        self.is_leg = False
        self._before = b""
        self._after = b""
        self._row = 0

    def read(self, data: bytes) -> None:
        """Sets `head`, `passing` and `is_leg`. Raises BadHead."""
        before, after = self._before, self._after
        if before and data.startswith(before) and data.endswith(after):
            length = data[len(before) : len(data) - len(after)]
            if length.isdigit() and len(length) <= _LONGEST_LENGTH:
                method, target, minor, headers, _, keep_alive, expects = self.head
                headers = headers.copy()
                headers[self._row] = headers[self._row][0], length
                self.head = Head(method, target, minor, headers, int(length), keep_alive, expects)
                return
        self._before = b""
        head = self.head = parse_head(data)
        self.passing = request_headers(head.headers)
        self.is_leg = is_leg(head.headers)
        found = _LENGTH.search(data) if len(data) <= _LONGEST_KEPT_BYTES else None
        if found is not None:
            self._before, self._after = data[: found.start(1)], data[found.end(1) :]
            self._row = data.count(b"\r\n", 0, found.start(1)) - 1
