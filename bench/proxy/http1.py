"""As much of HTTP/1.1 as both ends of this benchmark need, on plain bytes."""

from __future__ import annotations

import re

HEAD_END = b"\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
CLOSE = re.compile(rb"\r\nconnection:[ \t]*close", re.IGNORECASE)
LAST_CHUNK = b"\r\n0\r\n\r\n"
EVENT = b"data: "
DONE = b"data: [DONE]"
STAMP = re.compile(rb"chatcmpl-t(\d{16,20})")
"""Nanoseconds of CLOCK_MONOTONIC, which the backend puts in the id of every chunk."""


class Answer:
    """Reads one response after the other.

    The end of a chunked body is recognised by its last bytes: no payload of this benchmark has a CRLF in it.
    `events` counts server-sent events, `[DONE]` left out.
    """

    __slots__ = ("_carry", "_chunked", "_head", "_left", "_reading", "closes", "done", "events", "status")

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._head = b""
        self._reading = False
        self._carry = b""
        self._left: int | None = None
        self._chunked = False
        self.status = 0
        self.events = 0
        self.done = False
        self.closes = False

    def next(self) -> None:
        """Forget the response that was read."""
        self._begin()

    @property
    def begun(self) -> bool:
        return self._reading or bool(self._head)

    def feed(self, data: bytes) -> bool:
        """Whether the response is complete with these bytes."""
        if not self._reading:
            if self._head:
                data = self._head + data
            end = data.find(HEAD_END)
            if end < 0:
                self._head = data
                return False
            data = self._start(data[: end + 2], data[end + 4 :])
        if self._left is not None:
            self._left -= len(data)
            return self._left <= 0
        return self._scan(data)

    def _start(self, head: bytes, rest: bytes) -> bytes:
        self._reading = True
        self._head = b""
        self.status = int(head[9:12])
        self.closes = CLOSE.search(head) is not None
        length = LENGTH.search(head)
        if length is not None:
            self._left = int(length[1])
        else:
            self._chunked = CHUNKED.search(head) is not None
            self._carry = b"\r\n"
        return rest

    def _scan(self, data: bytes) -> bool:
        carry = self._carry
        joined = carry + data
        self.events += joined.count(EVENT) - carry.count(EVENT)
        if DONE in joined and not self.done:
            self.done = True
            self.events -= 1
        # A marker may be split over two reads, but none is longer than this.
        self._carry = joined[-len(DONE) :]
        return self._chunked and joined.endswith(LAST_CHUNK)

    def ended(self) -> bool:
        """The connection was closed: whether that ends the response as it should."""
        return self._reading and self._left is None and not self._chunked


def post(path: str, host: str, body: bytes) -> bytes:
    """A request as the clients of OpenAI's API send it."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nAccept: */*\r\n"
        f"Authorization: Bearer none\r\nUser-Agent: bench\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def response(status: str, content_type: str, body: bytes) -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ndate: Thu, 01 Jan 1970 00:00:00 GMT\r\nserver: uvicorn\r\n"
        f"content-length: {len(body)}\r\ncontent-type: {content_type}\r\n\r\n"
    ).encode() + body


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)
