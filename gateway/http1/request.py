"""One request on a client's connection, and its answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from multidict import CIMultiDict

from gateway.http1.chunked import BadChunk, Chunked
from gateway.http1.head import Head
from gateway.http1.rows import rows
from gateway.proxy.body import collect, unreadable
from gateway.proxy.errors import body_too_large
from gateway.proxy.incoming import Reply

if TYPE_CHECKING:
    from gateway.http1.connection import Connection

_JOINED_BELOW_BYTES = 16 << 10
"""Larger pieces are not copied to stand behind a head."""
_BODYLESS = frozenset({204, 304})
_REASONS = {int(status): status.phrase for status in HTTPStatus}


class RawRequest:
    """An `Incoming`."""

    __slots__ = ("_chunked", "_chunks_out", "_connection", "_head", "_headers", "_left", "_passing", "_pending",
                 "_pieces", "_unread_bytes", "_wrong", "closes", "is_answered", "is_leg", "is_read", "method",
                 "raw_headers")  # fmt: skip

    def __init__(self, connection: Connection, head: Head, passing: CIMultiDict[str], *, is_leg: bool) -> None:
        """`passing`: those of its headers that go on to a worker."""
        self._connection = connection
        self._head = head
        self.method = head.method
        self.raw_headers: Sequence[tuple[bytes, bytes]] = head.headers
        self._headers: CIMultiDict[str] | None = None
        self._passing = passing
        self.is_leg = is_leg
        self._pieces: list[bytes] = []
        self._chunked = Chunked() if head.length is None else None
        self._unread_bytes = head.length or 0
        self._wrong: BadChunk | None = None
        self.is_read = head.length == 0
        """The body is here to its last byte."""
        self._pending: bytes | None = None
        """The answer's head, which goes out with the first piece of its body."""
        self._chunks_out = False
        self._left: int | None = None
        """Of the answer's Content-Length."""
        self.closes = not head.keep_alive
        self.is_answered = False

    # ---- the request -------------------------------------------------------------------------------------------------

    @property
    def headers(self) -> CIMultiDict[str]:
        if self._headers is None:
            self._headers = CIMultiDict(
                (name.decode("ascii"), value.decode("utf-8", "surrogateescape")) for name, value in self.raw_headers
            )
        return self._headers

    def passing(self) -> CIMultiDict[str]:
        return self._passing.copy()

    @property
    def remote(self) -> str | None:
        return self._connection.remote

    @property
    def gone(self) -> bool:
        return self._connection.is_lost

    def sockname(self) -> tuple[str, int] | None:
        address = self._connection.transport.get_extra_info("sockname")
        return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None

    @property
    def n_chunks(self) -> int:
        return 0 if self._chunked is None else self._chunked.n_chunks

    def feed(self, data: bytes) -> bytes:
        """Bytes of the body, and perhaps of what comes after it, which is given back. What is given back of a body
        that is not whole is to be fed again, when others have had their turn.
        """
        if self._wrong is not None:
            return b""
        if self._chunked is not None:
            try:
                rest = self._chunked.feed(data, self._pieces)
            except BadChunk as exc:
                self._wrong = exc
                return b""
            self.is_read = self._chunked.is_over
            return rest
        n_bytes = len(data)
        if n_bytes <= self._unread_bytes:
            self._pieces.append(data)
            self._unread_bytes -= n_bytes
            self.is_read = not self._unread_bytes
            return b""
        self._pieces.append(data[: self._unread_bytes])
        rest = data[self._unread_bytes :]
        self._unread_bytes = 0
        self.is_read = True
        return rest

    def certificate_name(self) -> str | None:
        return self._connection.certificate_name()

    async def body(self, limit: int, least_bytes_per_s: int) -> bytes:
        if (self._head.length or 0) > limit:
            raise body_too_large(limit)
        if self.is_read:
            pieces = self._pieces
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self._pieces = []
            if len(body) > limit:
                raise body_too_large(limit)
            return body
        if self._head.expects and not self._pieces:
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return await collect(partial(self._readany, limit), limit, least_bytes_per_s)

    async def _readany(self, limit: int) -> bytes:
        while not self._pieces and not self.is_read:
            if self._wrong is not None:
                raise unreadable() from self._wrong
            if self._chunked is not None and self._chunked.n_bytes > limit:
                raise body_too_large(limit)  # What a chunk says it is need not be waited for.
            await self._connection.more()
        piece = b"".join(self._pieces)
        self._pieces.clear()
        return piece

    # ---- the answer --------------------------------------------------------------------------------------------------

    async def begin(self, status: int, reason: str, headers: CIMultiDict[str], *, close: bool) -> None:
        self._begin(status, reason, headers, close=close)

    def _begin(self, status: int, reason: str, headers: CIMultiDict[str], *, close: bool) -> None:
        if close:
            self.closes = True
        if status == 204:
            headers.popall("Content-Length", None)
        text = rows(headers)
        if status in _BODYLESS or self.method == "HEAD":
            self._left = 0
        elif (length := headers.get("Content-Length")) is not None:
            self._left = int(length)
        elif self._head.minor:
            self._chunks_out = True
            text += "Transfer-Encoding: chunked\r\n"
        else:
            self.closes = True
        if "Date" not in headers:
            text += f"Date: {_date()}\r\n"
        if self.closes:
            text += "Connection: close\r\n"
        elif not self._head.minor:
            text += "Connection: keep-alive\r\n"
        self._pending = f"HTTP/1.1 {status} {reason}\r\n{text}\r\n".encode("utf-8", "surrogateescape")

    async def write(self, piece: bytes) -> None:
        self._put(piece)
        if self._connection.room is not None:
            await self._connection.has_room()

    def _put(self, piece: bytes) -> None:
        connection = self._connection
        if connection.is_lost:
            raise ConnectionResetError("the client is gone")
        if self._left is not None:
            self._left -= len(piece)
            if self._left < 0:
                raise ValueError("more than was announced")
        elif self._chunks_out:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        if self._pending is not None:
            if len(piece) < _JOINED_BELOW_BYTES:
                piece = self._pending + piece
            else:
                connection.transport.write(self._pending)
            self._pending = None
        connection.transport.write(piece)

    async def end(self) -> None:
        self._end()
        if self._connection.room is not None:
            await self._connection.has_room()

    def _end(self) -> None:
        connection = self._connection
        if connection.is_lost:
            raise ConnectionResetError("the client is gone")
        last = b"0\r\n\r\n" if self._chunks_out else b""
        if self._pending is not None:
            last = self._pending + last
            self._pending = None
        if last:
            connection.transport.write(last)
        if self._left:
            self.abort()
            raise ConnectionResetError("less than was announced")
        self.is_answered = True

    def send(self, reply: Reply) -> None:
        """An answer of our own."""
        headers = reply.headers
        headers["Content-Length"] = str(len(reply.body))
        self._begin(reply.status, _REASONS.get(reply.status, ""), headers, close=reply.close or not self.is_read)
        if reply.body and self._left:
            self._put(reply.body)
        self._end()

    def would_wait(self, n_bytes: int) -> bool:
        return self._connection.would_wait(n_bytes)

    def unsent_bytes(self) -> int:
        return 0 if self._connection.is_lost else self._connection.transport.get_write_buffer_size()

    def close(self) -> None:
        self._connection.transport.close()

    def abort(self) -> None:
        self._connection.transport.abort()


_date_of = (0, "")


def _date() -> str:
    """Now, as in a Date header; made once a second."""
    global _date_of
    now_s = int(time.time())
    if _date_of[0] != now_s:
        _date_of = now_s, formatdate(now_s, usegmt=True)
    return _date_of[1]
