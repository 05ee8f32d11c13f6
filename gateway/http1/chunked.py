"""A body in chunks (RFC 9112, 7.1), taken apart as it comes. Extensions and trailers are checked and dropped."""

from __future__ import annotations

import re

_LONGEST_LINE_BYTES = 4096
_LONGEST_TRAILER_BYTES = 16 << 10
_AT_ONCE = 2000
"""Chunks taken apart in one go, some 3 ms: of tiny ones a network's buffer holds a second's work."""
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,12})(?:;[\t -~\x80-\xff]*+)?+")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t -~\x80-\xff]*+")


class BadChunk(ValueError):
    """What came is no chunk."""


class Chunked:
    """`is_over` once the last chunk and the trailer have come; `n_chunks` have so far, and they say that they are
    `n_bytes` in all.
    """

    __slots__ = ("_held", "_in_trailer", "_left", "_trailer_bytes", "is_over", "n_bytes", "n_chunks")

    def __init__(self) -> None:
        self.is_over = False
        self.n_chunks = 0
        self.n_bytes = 0
        self._held = b""
        """The beginning of a line."""
        self._left = 0
        """Of a chunk's data and the line end after it; 0 between chunks."""
        self._in_trailer = False
        self._trailer_bytes = 0

    def feed(self, data: bytes, out: list[bytes]) -> bytes:
        """Data of the body goes to `out`; returns what came after its end, or, where that has not come, what is left
        of so many chunks that others should have their turn first. Raises BadChunk.
        """
        at = 0
        most = self.n_chunks + _AT_ONCE
        while not self.is_over and self.n_chunks < most:
            if self._left:
                at = self._take(data, at, out)
                if self._left:
                    return b""
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._held += data[at:]
                self._check_length(len(self._held))
                return b""
            line = self._held + data[at : end + 1]
            self._held = b""
            self._check_length(len(line))
            at = end + 1
            self._line(line)
        return data[at:]

    def _take(self, data: bytes, at: int, out: list[bytes]) -> int:
        """Of a chunk's data, then of the CRLF after it."""
        n_data = min(self._left - 2, len(data) - at)
        if n_data > 0:
            out.append(data[at : at + n_data])
            self._left -= n_data
            at += n_data
        while self._left in (1, 2) and at < len(data):
            if data[at] != (0x0D if self._left == 2 else 0x0A):
                raise BadChunk("a chunk that is longer than it says")
            self._left -= 1
            at += 1
        return at

    def _line(self, line: bytes) -> None:
        if not line.endswith(b"\r\n"):
            raise BadChunk("a bare line feed")
        line = line[:-2]
        if self._in_trailer:
            self._trailer_bytes += len(line) + 2
            if self._trailer_bytes > _LONGEST_TRAILER_BYTES or (line and not _TRAILER.fullmatch(line)):
                raise BadChunk("a malformed trailer")
            self.is_over = not line
            return
        found = _SIZE.fullmatch(line)
        if found is None:
            raise BadChunk("no size of a chunk")
        size = int(found.group(1), 16)
        self.n_chunks += 1
        if size:
            self._left = size + 2
            self.n_bytes += size
        else:
            self._in_trailer = True

    def _check_length(self, n_bytes: int) -> None:
        if n_bytes > _LONGEST_LINE_BYTES:
            raise BadChunk("too long a line")
