"""A worker's server as the proxy sees it: what can be sent there, what comes back, and how that can fail.

`aio_upstream.py` and `gateway/http1/upstream.py` are two ways to do it.
"""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Self

from multidict import CIMultiDict

from gateway.proxy.timed import TimedBody

Http = Literal["fast", "aiohttp"]


class UpstreamError(Exception):
    """No answer, or no whole one. A wait that took too long is a TimeoutError instead."""


class NoConnection(UpstreamError):
    """None could be opened in time. `refused`: nobody listens there."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


class Disconnected(UpstreamError):
    """The connection ended before an answer's head was here: perhaps it was about to be closed as idle."""


class Broken(UpstreamError):
    """What came is not an answer, or not all of it."""


class UpstreamAnswer(ABC):
    """An answer whose head is here. The body comes undecoded."""

    __slots__ = ()
    status: int
    reason: str
    raw_headers: Sequence[tuple[bytes, bytes]]

    @abstractmethod
    def header(self, name: str) -> str | None:
        """The first of that name."""

    @abstractmethod
    async def readany(self) -> bytes:
        """What has come of the body, at least a byte; nothing at its end. Raises UpstreamError or TimeoutError."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection unless the answer was read to its end: that is what makes a worker stop."""

    async def read(self, limit: int | None = None) -> bytes | None:
        """The whole body; None if it is longer than `limit` bytes."""
        pieces: list[bytes] = []
        size = 0
        while piece := await self.readany():
            size += len(piece)
            if limit is not None and size > limit:
                self.close()
                return None
            pieces.append(piece)
        return b"".join(pieces)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class PoolSettings:
    """`pool_idle_s` must stay below the server's keep-alive (uvicorn: 5 s), or requests meet closing connections. `tls`
    is for https URLs: how to check certificates (True: against the system's CAs). `link_local`: addresses as of
    `gateway.addresses` may be connected to.
    """

    __slots__ = ("connect_timeout_s", "http", "link_local", "pool_idle_s", "request_timeout_s", "tls")

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        pool_idle_s: float,
        request_timeout_s: float,
        tls: ssl.SSLContext | bool = True,
        http: Http = "fast",
        link_local: bool = False,
    ) -> None:
        self.connect_timeout_s = connect_timeout_s
        self.pool_idle_s = pool_idle_s
        self.request_timeout_s = request_timeout_s
        self.tls = tls
        self.http = http
        self.link_local = link_local


class Upstream(ABC):
    """One worker's connections. Answers come undecoded, redirects are not followed, cookies are not kept. `server_name`
    is what its certificate names, if not the URL's host.
    """

    def __init__(self, url: str, settings: PoolSettings, server_name: str | None = None) -> None:
        self.base_url = url.rstrip("/")
        self.server_name = server_name
        self._settings = settings
        self._users = 0
        self._retired = False
        self.deaf_until_s = 0.0
        """Until then the server is thought not to say 100 to Expect: 100-continue."""

    @property
    @abstractmethod
    def idle_connections(self) -> int:
        """Kept for the next exchange, and fit for it."""

    @abstractmethod
    async def send(
        self,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        body: bytes | TimedBody,
        *,
        fresh: bool = False,
        ask: bool = False,
    ) -> UpstreamAnswer:
        """The answer as soon as its head is here. `target`: path and query as they stand in a request line.

        `fresh`: on a new connection, which no server can be about to close. `ask`: the body goes out when the server
        has asked for it. Raises UpstreamError or TimeoutError.
        """

    @abstractmethod
    async def close(self) -> None:
        """Cut whatever still runs."""

    def acquire(self) -> None:
        """One more exchange uses it; each is followed by one `release`."""
        self._users += 1

    def release(self) -> bool:
        """Whether it can be closed now: it is retired and this was its last user."""
        self._users -= 1
        return self._retired and not self._users

    def retire(self) -> bool:
        """No new exchanges will come. Whether it can be closed now."""
        self._retired = True
        return not self._users
