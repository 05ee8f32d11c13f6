"""One listening address of the data plane. It stands where `HttpServer` stands with `gateway.http: aiohttp`."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from gateway.http1.connection import Connection
from gateway.http1.expiry import Expiry
from gateway.proxy.connection import CLIENT_KEEPALIVE_S, LINGER_S
from gateway.proxy.incoming import Incoming, Reply
from gateway.proxy.routes import Route
from gateway.proxy.shared_socket import SharedSocket

Serve = Callable[[Incoming, Route, str], Awaitable[Reply | None]]

_BACKLOG = 4096
_HEAD_S = 30.0
"""Longest wait for the rest of a head; then it is answered 408."""
_CUT_S = 0.5


class Listener:
    """`serve` answers requests for what is in `ROUTES`; `pages` makes aiohttp's protocol for a connection that brings
    another one.
    """

    def __init__(
        self,
        serve: Serve,
        pages: web.Server,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        shared: Sequence[SharedSocket] = (),
    ) -> None:
        """`shared`: sockets that listen already, in place of `host` and `port`."""
        self.serve = serve
        self._pages = pages
        self.host = host
        self.port = port
        self._tls = tls
        self._shared = shared
        self._give: Callable[[socket.socket], None] | None = None
        self._server: asyncio.Server | None = None
        self.connections: set[Connection] = set()
        """Those that are open and not aiohttp's."""
        self._idle: Expiry[Connection] = Expiry(CLIENT_KEEPALIVE_S, _drop)
        self._heads: Expiry[Connection] = Expiry(_HEAD_S, Connection.refuse_late)
        self._ending: Expiry[Connection] = Expiry(LINGER_S, _drop)

    async def start(self) -> None:
        """Raises OSError when the address is taken."""
        loop = asyncio.get_running_loop()
        if self._shared:
            for each in self._shared:
                each.listen(lambda: Connection(self, loop), self._tls, lambda: len(self.connections))
            self.port = self._shared[0].port
            return
        self._server = await loop.create_server(
            lambda: Connection(self, loop), self.host, self.port, backlog=_BACKLOG, ssl=self._tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self._tls is None else 'https'}://{host}:{self.port}"

    async def stop_accepting(self) -> None:
        for each in self._shared:
            each.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def give_away(self, give: Callable[[socket.socket], None]) -> None:
        """Connections that wait for a request go there, now and as soon as they do."""
        self._give = give
        for connection in list(self.connections):
            self._give_one(connection)

    @property
    def keeps_some(self) -> bool:
        """Whether there are connections that cannot be given away (now): aiohttp's, and those with a request, a part of
        one, or no beginning yet.
        """
        return bool(self._pages.connections or self.connections) or any(each.is_connecting for each in self._shared)

    @property
    def n_heads(self) -> int:
        """Requests whose head is half there."""
        return len(self._heads)

    def refuse_heads(self) -> None:
        """They are not waited for any more: we go down."""
        for connection in self._heads.take_all():
            connection.refuse_draining()

    def _give_one(self, connection: Connection) -> None:
        if self._give is not None and (sock := connection.detach()) is not None:
            self._give(sock)

    async def close(self) -> None:
        """Cut what still runs."""
        await self.stop_accepting()
        tasks = [connection.task for connection in self.connections if connection.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CUT_S)
        for connection in list(self.connections):
            connection.transport.abort()
        for expiry in (self._idle, self._heads, self._ending):
            expiry.close()
        await self._pages.shutdown(_CUT_S)

    # ---- called by connections ---------------------------------------------------------------------------------------

    def pages(self) -> web.RequestHandler:
        return self._pages()

    def opened(self, connection: Connection) -> None:
        self.connections.add(connection)
        self.idles(connection)

    def begins(self, connection: Connection) -> None:
        self._idle.discard(connection)

    def waits_for_head(self, connection: Connection) -> None:
        self._heads.add_once(connection)

    def has_head(self, connection: Connection) -> None:
        self._heads.discard(connection)

    def idles(self, connection: Connection) -> None:
        self._idle.add(connection)
        if self._give is not None:
            asyncio.get_running_loop().call_soon(self._give_one, connection)

    def lingers(self, connection: Connection) -> None:
        self._ending.add(connection)

    def closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._idle.discard(connection)
        self._heads.discard(connection)
        self._ending.discard(connection)


def _drop(connection: Connection) -> None:
    connection.transport.abort()
