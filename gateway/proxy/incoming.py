"""A client's request as the proxy sees it, and the way its answer goes back.

`aio_incoming.py` and `gateway/http1/request.py` are two ways to do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from multidict import CIMultiDict, MultiMapping

from gateway.proxy.errors import ApiError


class Sender(Protocol):
    """What hint headers are read from (`gateway.sidecar.hints`)."""

    @property
    def headers(self) -> MultiMapping[str]: ...

    def sockname(self) -> tuple[str, int] | None:
        """Address and port of our end of the connection."""


class Incoming(Sender, Protocol):
    """One request. Its answer: `begin`, any number of `write`, `end`."""

    @property
    def method(self) -> str: ...
    @property
    def raw_headers(self) -> Sequence[tuple[bytes, bytes]]: ...
    @property
    def is_leg(self) -> bool:
        """Whether a face of ours has sent it to have a prompt computed."""

    def passing(self) -> CIMultiDict[str]:
        """Those of its headers that go on to a worker, to be changed at will."""

    @property
    def remote(self) -> str | None:
        """The client's address."""

    @property
    def gone(self) -> bool:
        """Whether the client's connection is."""

    def certificate_name(self) -> str | None:
        """Whom the client's certificate names."""

    @property
    def is_read(self) -> bool:
        """Whether the body is here to its last byte."""

    async def body(self, limit: int, least_bytes_per_s: int) -> bytes:
        """The whole body. Raises ApiError 413 as soon as it is known to be longer than `limit` bytes, 408 if it does
        not come, or comes more slowly than that.
        """

    async def begin(self, status: int, reason: str, headers: CIMultiDict[str], *, close: bool) -> None:
        """With these headers and no others but Date and the framing's: by their Content-Length, else chunked, or for
        HTTP/1.0 by the end of the connection. `close`: the connection ends with the answer.
        """

    async def write(self, piece: bytes) -> None:
        """Returns when there is room for more. Raises ConnectionError when the client is gone."""

    async def end(self) -> None: ...

    def would_wait(self, n_bytes: int) -> bool:
        """Whether there is no room for so many bytes."""

    def unsent_bytes(self) -> int:
        """Of what was written, how much lies in our own buffer."""

    def close(self) -> None:
        """End the connection after what was written."""

    def abort(self) -> None:
        """End the connection at once."""


class Reply:
    """An answer of our own, whole."""

    __slots__ = ("body", "close", "headers", "status")

    def __init__(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.close = False

    @classmethod
    def of(cls, error: ApiError, path: str = "") -> Reply:
        """In the shape of the API at `path`."""
        return cls(error.status, error.headers(), error.body_for(path))
