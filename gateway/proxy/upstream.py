"""Connections to the workers: one pool each, so that a slow or dead worker ties up only its own."""

from __future__ import annotations

import asyncio
import io
import ssl
from typing import Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from gateway.proxy.timed import TimedBody

_OWN_HEADERS_OF_AIOHTTP = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_CACHED_URLS = 256
_LONGEST_HEADER_BYTES = 64 << 10
_PIECEWISE_ABOVE_BYTES = 1 << 20
"""Larger bodies are written in pieces, waiting for the worker to take them."""


class PoolSettings:
    """`pool_idle_s` must stay below the server's keep-alive (uvicorn: 5 s), or requests meet closing connections. `tls`
    is for https URLs: how to check certificates (True: against the system's CAs).
    """

    __slots__ = ("connect_timeout_s", "pool_idle_s", "request_timeout_s", "tls")

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        pool_idle_s: float,
        request_timeout_s: float,
        tls: ssl.SSLContext | bool = True,
    ) -> None:
        self.connect_timeout_s = connect_timeout_s
        self.pool_idle_s = pool_idle_s
        self.request_timeout_s = request_timeout_s
        self.tls = tls


class _CleanConnector(aiohttp.TCPConnector):
    """Does not use a pooled connection again on which bytes have come that nobody asked for: the next request would
    take them for its answer.
    """

    async def _get(self, key: Any, traces: Any) -> Any:
        conns = self._conns.get(key)
        if conns is not None:
            for pooled in [pooled for pooled in conns if pooled[0].should_close]:
                conns.remove(pooled)
                pooled[0].close()
            if not conns:
                del self._conns[key]
        return await super()._get(key, traces)


class Upstream:
    """One worker's connections. Answers come undecoded, redirects are not followed, cookies are not kept. `server_name`
    is what its certificate names, if not the URL's host.
    """

    def __init__(self, url: str, settings: PoolSettings, server_name: str | None = None) -> None:
        self.base_url = url.rstrip("/")
        self.server_name = server_name
        self._settings = settings
        self._session = self._new_session(keep=True)
        self._fresh: aiohttp.ClientSession | None = None
        self._urls: dict[str, URL] = {}
        self._users = 0
        self._retired = False
        self.deaf_until_s = 0.0
        """Until then the server is thought not to say 100 to Expect: 100-continue."""

    @property
    def session(self) -> aiohttp.ClientSession:
        return self._session

    async def send(
        self,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        body: bytes | TimedBody,
        *,
        fresh: bool = False,
        ask: bool = False,
    ) -> aiohttp.ClientResponse:
        """The answer as soon as its headers are here. `target`: path and query as they stand in a request line.

        `fresh`: on a new connection, which no server can be about to close. `ask`: the body goes out when the server
        has asked for it. Raises aiohttp.ClientError, OSError or TimeoutError.
        """
        session = self._session
        if fresh:
            if self._fresh is None:
                self._fresh = self._new_session(keep=False)
            session = self._fresh
        data: bytes | io.BytesIO | TimedBody | None = body or None
        if isinstance(body, bytes) and len(body) > _PIECEWISE_ABOVE_BYTES:
            data = io.BytesIO(body)
        return await session.request(
            method,
            self._url(target),
            headers=headers,
            data=data,
            allow_redirects=False,
            skip_auto_headers=_OWN_HEADERS_OF_AIOHTTP,
            expect100=ask,
            server_hostname=self.server_name,
        )

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

    async def close(self) -> None:
        """Cut whatever still runs."""
        await self._session.close()
        if self._fresh is not None:
            await self._fresh.close()

    def _url(self, target: str) -> URL:
        url = self._urls.get(target)
        if url is None:
            url = URL(self.base_url + target, encoded=True)
            if len(self._urls) < _CACHED_URLS:
                self._urls[target] = url
        return url

    def _new_session(self, *, keep: bool) -> aiohttp.ClientSession:
        settings = self._settings
        connector = (
            _CleanConnector(limit=0, keepalive_timeout=settings.pool_idle_s, ssl=settings.tls)
            if keep
            else aiohttp.TCPConnector(limit=0, force_close=True, ssl=settings.tls)
        )
        timeout = aiohttp.ClientTimeout(
            total=settings.request_timeout_s, connect=settings.connect_timeout_s, ceil_threshold=float("inf")
        )
        return aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            raise_for_status=False,
            trust_env=False,
            max_line_size=_LONGEST_HEADER_BYTES,
            max_field_size=_LONGEST_HEADER_BYTES,
        )


class UpstreamPool:
    """All workers' connections, by worker name."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._upstreams: dict[str, Upstream] = {}
        self._retiring: set[Upstream] = set()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def request_timeout_s(self) -> float:
        return self._settings.request_timeout_s

    def set(self, worker: str, url: str, server_name: str | None = None) -> Upstream:
        """The worker's connections; new ones if its URL or its name changed."""
        known = self._upstreams.get(worker)
        if known is not None and (known.base_url, known.server_name) == (url.rstrip("/"), server_name):
            return known
        self.remove(worker)
        upstream = self._upstreams[worker] = Upstream(url, self._settings, server_name)
        return upstream

    def get(self, worker: str) -> Upstream | None:
        return self._upstreams.get(worker)

    def remove(self, worker: str) -> None:
        """Give up a worker's connections; requests that still run there may end."""
        upstream = self._upstreams.pop(worker, None)
        if upstream is not None:
            self._retiring.add(upstream)
            if upstream.retire():
                self._close_soon(upstream)

    def release(self, upstream: Upstream) -> None:
        """An exchange with `upstream` is over."""
        if upstream.release():
            self._close_soon(upstream)

    async def close(self) -> None:
        """Cut whatever still runs."""
        for worker in list(self._upstreams):
            self.remove(worker)
        await asyncio.gather(*self._closing, *(upstream.close() for upstream in self._retiring))

    def _close_soon(self, upstream: Upstream) -> None:
        self._retiring.discard(upstream)
        task = asyncio.get_running_loop().create_task(upstream.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
