"""Text fields of multipart/form-data bodies (RFC 7578), looked for near both ends only: between them is the file.

A field counts only where it is one: after a delimiter line of the body's own boundary, with a Content-Disposition that
names it. What a file says about `name="model"` is the file's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

WINDOW_BYTES = 64 << 10
"""So much of each end is looked at."""
_LONGEST_HEAD_BYTES = 4 << 10
_LONGEST_BOUNDARY = 256
_PARAMETER = re.compile(rb';\s*([^\s=;"]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))', re.DOTALL)
_DISPOSITION = re.compile(rb"^content-disposition[ \t]*:[ \t]*form-data[ \t]*(?=;)", re.IGNORECASE | re.MULTILINE)


def fields(content_type: str, body: bytes, names: frozenset[str]) -> dict[str, str]:
    """Those fields of `names` that were found, the last of each, as engines read them. Without a boundary, none."""
    wanted = {name.encode(): name for name in names}
    return {
        wanted[name]: body[start:end].decode("utf-8", "replace")
        for name, start, end in _found(content_type, body)
        if name in wanted
    }


def with_field(content_type: str, body: bytes, name: str, value: str) -> bytes:
    """The body with another value of a field, wherever it was found. Raises ValueError for one that no field can
    hold.
    """
    new = value.encode()
    if b"\r\n--" in new:
        raise ValueError("a value that may end its part")
    out, at = [], 0
    for found, start, end in _found(content_type, body):
        if found == name.encode() and start >= at:
            out += [body[at:start], new]
            at = end
    return b"".join([*out, body[at:]])


def _found(content_type: str, body: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, begin and end of the value, of each text field near an end of the body."""
    boundary = _parameters(content_type.encode("utf-8", "surrogateescape")).get(b"boundary", b"")
    if not 0 < len(boundary) <= _LONGEST_BOUNDARY:
        return
    windows = [(0, b"\r\n" + body)]
    if len(body) > 2 * WINDOW_BYTES:
        last = len(body) - WINDOW_BYTES
        windows = [(0, b"\r\n" + body[:WINDOW_BYTES]), (last + 2, body[last:])]
    for begins, window in windows:
        for name, start, end in _texts(window, b"\r\n--" + boundary):
            yield name, begins + start - 2, begins + end - 2


def _texts(window: bytes, delimiter: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The parts that lie in `window` from delimiter to delimiter and are no files."""
    at = window.find(delimiter)
    while at >= 0:
        start = at + len(delimiter)
        at = window.find(delimiter, start)
        while at >= 0 and not window.startswith((b"\r\n", b"--"), at + len(delimiter)):
            at = window.find(delimiter, at + 1)  # A longer line that only begins like it.
        if at < 0 or not window.startswith(b"\r\n", start):
            continue
        head_end = window.find(b"\r\n\r\n", start, min(at + 4, start + _LONGEST_HEAD_BYTES))
        disposition = None if head_end < 0 else _DISPOSITION.search(window, start + 2, head_end)
        if disposition is None:
            continue
        line_end = window.find(b"\r\n", disposition.end(), head_end + 2)
        parameters = _parameters(window[disposition.end() : line_end])
        if b"name" in parameters and b"filename" not in parameters and b"filename*" not in parameters:
            yield parameters[b"name"], head_end + 4, at


def _parameters(header: bytes) -> dict[bytes, bytes]:
    """`; name=value` and `; name="value"` of a header, by lower-case name."""
    out: dict[bytes, bytes] = {}
    for found in _PARAMETER.finditer(header):
        name, quoted, plain = found.groups()
        out.setdefault(name.lower(), plain if quoted is None else re.sub(rb"\\(.)", rb"\1", quoted, flags=re.DOTALL))
    return out
