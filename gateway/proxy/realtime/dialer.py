"""WebSockets to workers."""

from __future__ import annotations

import asyncio
import ssl

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from gateway.addresses import resolver
from gateway.proxy.realtime.ending import CLOSE_TIMEOUT_S, ClientSocket

UPGRADE_TIMEOUT_S = 10.0
_OWN_HEADERS = ("Sec-WebSocket-Key", "Sec-WebSocket-Version", "Sec-WebSocket-Extensions")


class Dialer:
    """Opens them. `largest_bytes` bounds a message; `link_local`: whether addresses of a link may be asked."""

    def __init__(
        self, *, tls: ssl.SSLContext | bool, connect_timeout_s: float, largest_bytes: int, link_local: bool
    ) -> None:
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._largest_bytes = largest_bytes
        self._link_local = link_local
        self._http: aiohttp.ClientSession | None = None

    async def open(self, url: str, target: str, headers: CIMultiDict[str]) -> ClientSocket:
        """Of the worker at `url`, asked for `target` (path and query). Raises what aiohttp does, and TimeoutError."""
        offered = [
            each.strip() for row in headers.popall("Sec-WebSocket-Protocol", []) for each in row.split(",") if each
        ]
        for name in _OWN_HEADERS:
            headers.popall(name, None)
        async with asyncio.timeout(UPGRADE_TIMEOUT_S):
            return await self._session().ws_connect(
                URL(url.rstrip("/") + target, encoded=True),
                protocols=offered,
                headers=headers,
                autoclose=False,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S),
                max_msg_size=self._largest_bytes,
            )

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, force_close=True, ssl=self._tls, resolver=resolver(self._link_local)
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                trace_configs=[_not_elsewhere()],
            )
        return self._http

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


def _not_elsewhere() -> aiohttp.TraceConfig:
    """`ws_connect` follows redirects: a worker could have us ask anybody."""

    async def refuse(_: object, __: object, redirect: aiohttp.TraceRequestRedirectParams) -> None:
        answer = redirect.response
        raise aiohttp.WSServerHandshakeError(answer.request_info, (), status=answer.status, message="a redirect")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    return trace
