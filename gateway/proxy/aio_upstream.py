"""Connections to a worker by aiohttp (`gateway.http: aiohttp`)."""

from __future__ import annotations

import io
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_writer import StreamWriter
from aiohttp.payload import Payload
from multidict import CIMultiDict
from yarl import URL

from gateway.addresses import resolver
from gateway.proxy.peer import Broken, Disconnected, NoConnection, PoolSettings, Upstream, UpstreamAnswer
from gateway.proxy.timed import TimedBody

_OWN_HEADERS_OF_AIOHTTP = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_CACHED_URLS = 256
_LONGEST_HEADER_BYTES = 64 << 10
_PIECEWISE_ABOVE_BYTES = 1 << 20
"""Larger bodies are written in pieces, waiting for the worker to take them."""


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


class _Timed(Payload):
    """A `TimedBody` as aiohttp takes it."""

    _autoclose = True

    def __init__(self, body: TimedBody) -> None:
        super().__init__(body)
        self._size = body.size

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise NotImplementedError

    async def write(self, writer: AbstractStreamWriter) -> None:
        transport = writer.transport if isinstance(writer, StreamWriter) else None

        def unsent_bytes() -> int:
            if transport is None or transport.is_closing():
                return 0
            return transport.get_write_buffer_size()

        await self._value.write_to(writer.write, unsent_bytes)


class AioAnswer(UpstreamAnswer):
    __slots__ = ("_response", "raw_headers", "reason", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.reason = response.reason or ""
        self.raw_headers = response.raw_headers

    def header(self, name: str) -> str | None:
        return self._response.headers.get(name)

    async def readany(self) -> bytes:
        try:
            return await self._response.content.readany()
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as exc:
            raise Broken(str(exc)) from exc

    def close(self) -> None:
        self._response.close()


class AioUpstream(Upstream):
    def __init__(self, url: str, settings: PoolSettings, server_name: str | None = None) -> None:
        super().__init__(url, settings, server_name)
        self._session = self._new_session(keep=True)
        self._fresh: aiohttp.ClientSession | None = None
        self._urls: dict[str, URL] = {}

    @property
    def idle_connections(self) -> int:
        connector = self._session.connector
        pools = () if connector is None else connector._conns.values()
        return sum(not protocol.should_close for pool in pools for protocol, _ in pool)

    async def send(
        self,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        body: bytes | TimedBody,
        *,
        fresh: bool = False,
        ask: bool = False,
    ) -> AioAnswer:
        session = self._session
        if fresh:
            if self._fresh is None:
                self._fresh = self._new_session(keep=False)
            session = self._fresh
        data: bytes | io.BytesIO | _Timed | None
        if isinstance(body, TimedBody):
            data = _Timed(body)
        else:
            data = io.BytesIO(body) if len(body) > _PIECEWISE_ABOVE_BYTES else body or None
        try:
            response = await session.request(
                method,
                self._url(target),
                headers=headers,
                data=data,
                allow_redirects=False,
                skip_auto_headers=_OWN_HEADERS_OF_AIOHTTP,
                expect100=ask,
                server_hostname=self.server_name,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            cause = exc.os_error if isinstance(exc, aiohttp.ClientConnectorError) else exc
            raise NoConnection(str(exc), refused=isinstance(cause, ConnectionRefusedError)) from exc
        except UnicodeError:
            raise NoConnection("its host is no name that can be looked up") from None
        except TimeoutError:
            raise
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as exc:
            raise Disconnected(str(exc)) from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise Broken(str(exc)) from exc
        return AioAnswer(response)

    async def close(self) -> None:
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
        names = resolver(settings.link_local)
        connector = (
            _CleanConnector(limit=0, keepalive_timeout=settings.pool_idle_s, ssl=settings.tls, resolver=names)
            if keep
            else aiohttp.TCPConnector(limit=0, force_close=True, ssl=settings.tls, resolver=names)
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
