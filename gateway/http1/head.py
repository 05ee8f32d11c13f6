"""The head of a request: RFC 9112 to the letter, and refused where two readers could understand it differently.

Nothing is repaired: no bare line ends, no folded lines, no space before a colon, one framing only.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LONGEST_LINE_BYTES = 16 << 10
LONGEST_HEAD_BYTES = 64 << 10
MOST_HEADERS = 128

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_LINE = re.compile(rb"(%b) ([!-\"$-~]++) HTTP/1\.([01])" % _TOKEN)
_OTHER_VERSION = re.compile(rb"%b [!-~]++ HTTP/(?!1\.[01])[0-9]\.[0-9]" % _TOKEN)
_ROWS = re.compile(rb"(?:\r\n%b:[\t -~\x80-\xff]*+)*+" % _TOKEN)
_BEGINNING = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,32}(?: [!-~]*+(?: [ -~]*+)?)?\r?\Z")
_ABSOLUTE = re.compile(r"https?://[^/?#@]++(/.*+)", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,18}")
_HOST = re.compile(rb"[0-9A-Za-z\-._~!$&'()*+,;=%:\[\]]*+")

_CONTENT_LENGTH, _TRANSFER_ENCODING, _CONNECTION, _EXPECT, _HOST_NAME = range(1, 6)
_MEANT_FOR_US = {
    b"content-length": _CONTENT_LENGTH,
    b"transfer-encoding": _TRANSFER_ENCODING,
    b"connection": _CONNECTION,
    b"expect": _EXPECT,
    b"host": _HOST_NAME,
}

_MOST_NAMES = 1024
_LONGEST_KEPT_BYTES = 64
_kinds: dict[bytes, int] = {}
"""Of names seen so far: the same few come with every request. 0: nothing to us."""


class BadHead(ValueError):
    """Why there is no request; `status` is what to answer."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class Head(NamedTuple):
    """`length` None: the body comes in chunks. `target`: path and query as sent, of an absolute one too."""

    method: str
    target: str
    minor: int
    headers: list[tuple[bytes, bytes]]
    length: int | None
    keep_alive: bool
    expects: bool
    """100-continue."""


NO_HEAD = Head("", "", 1, [], 0, keep_alive=False, expects=False)
"""Of what is answered without having been read."""


def check_beginning(data: bytes | bytearray, start: int) -> None:
    """For a head that is not whole yet: raises BadHead when it cannot become one. `start`: what was checked before."""
    line_end = data.find(b"\r\n", 0, LONGEST_LINE_BYTES + 2)
    if line_end < 0:
        if len(data) > LONGEST_LINE_BYTES:
            raise BadHead("the request line is too long", 431)
        if not _BEGINNING.match(data):
            raise BadHead("no request line")
    if len(data) > LONGEST_HEAD_BYTES:
        raise BadHead("the headers are too long", 431)
    at = data.find(b"\n", start)
    while at >= 0:
        if at == 0 or data[at - 1] != 0x0D:
            raise BadHead("a bare line feed")
        at = data.find(b"\n", at + 1)


def parse_head(data: bytes) -> Head:
    """`data` up to the empty line, without it. Raises BadHead."""
    if len(data) > LONGEST_HEAD_BYTES:
        raise BadHead("the headers are too long", 431)
    end = data.find(b"\r\n")
    if end < 0:
        end = len(data)
    if end > LONGEST_LINE_BYTES:
        raise BadHead("the request line is too long", 431)
    line = _LINE.fullmatch(data, 0, end)
    if line is None:
        if _OTHER_VERSION.fullmatch(data, 0, end):
            raise BadHead("a version of HTTP that is not spoken here", 505)
        raise BadHead("no request line")
    if not _ROWS.fullmatch(data, end):
        raise BadHead("a malformed header")
    method, raw_target, digit = line.groups()
    minor = 1 if digit == b"1" else 0
    length: int | None = 0
    framed = chunked = expects = False
    hosts = 0
    tokens: list[bytes] = []
    headers: list[tuple[bytes, bytes]] = []
    for row in data[end + 2 :].split(b"\r\n") if end < len(data) else ():
        name, _, value = row.partition(b":")
        value = value.strip(b" \t")
        headers.append((name, value))
        kind = _kinds.get(name)
        if kind is None:
            kind = _kind(name)
        if not kind:
            continue
        if kind == _HOST_NAME:
            hosts += 1
            if not _HOST.fullmatch(value):
                raise BadHead("a malformed host")
        elif kind == _CONTENT_LENGTH:
            if framed or not _LENGTH.fullmatch(value):
                raise BadHead("more than one length, or one that is no number")
            framed = True
            length = int(value)
        elif kind == _TRANSFER_ENCODING:
            if chunked or value.lower() != b"chunked" or not minor:
                raise BadHead("a transfer coding that is not known", 501 if minor and not chunked else 400)
            chunked = True
        elif kind == _CONNECTION:
            tokens += [token.strip(b" \t") for token in value.lower().split(b",")]
        else:
            expects = expects or (minor == 1 and value.lower() == b"100-continue")
    if len(headers) > MOST_HEADERS:
        raise BadHead("too many headers", 431)
    if hosts > 1 or (not hosts and minor):
        raise BadHead("no host, or more than one")
    if chunked:
        if framed:
            raise BadHead("two framings")
        length = None
    target = raw_target.decode("ascii")
    if target[0] != "/" and (absolute := _ABSOLUTE.fullmatch(target)):
        target = absolute.group(1)
    keep_alive = b"close" not in tokens if minor else b"keep-alive" in tokens and b"close" not in tokens
    return Head(method.decode("ascii"), target, minor, headers, length, keep_alive, expects)


def _kind(name: bytes) -> int:
    kind = _MEANT_FOR_US.get(name.lower(), 0)
    if len(_kinds) < _MOST_NAMES and len(name) <= _LONGEST_KEPT_BYTES:
        _kinds[name] = kind
    return kind
