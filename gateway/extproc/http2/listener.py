"""Sockets for calls: one listening address, and its connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Mapping
from typing import cast

from gateway.extproc.complaints import Complaints
from gateway.extproc.http2.calls import Calls, Method
from gateway.extproc.http2.connection import Connection
from gateway.proxy.errors import log_unexpected

_log = logging.getLogger(__name__)
_complaints = Complaints(_log, "a proxy's connection is closed")

_BACKLOG = 1024
_FIRST_S = 20.0
"""For a connection to say that it speaks HTTP/2, and before it for its TLS handshake."""
_LEAVE_S = 0.5
"""For a client that was told good-bye to hang up; with what it has under way unread, it would not learn of it."""
_SILENT_S = 60
"""A client that answers no probe so long, or takes nothing, is gone: its machine may be, and say nothing."""
_GONE = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", _SILENT_S // 2),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", _SILENT_S // 6),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", _SILENT_S * 1000),
)


class Listener:
    """`methods` by path, with messages of up to `most_bytes`. `tls` offers `h2` (ALPN)."""

    def __init__(self, methods: Mapping[str, Method], most_bytes: int, tls: ssl.SSLContext | None = None) -> None:
        self._methods = methods
        self._most_bytes = most_bytes
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()

    async def start(self, host: str, port: int) -> int:
        """The port it has. Raises OSError where it cannot be had."""
        loop = asyncio.get_running_loop()
        # None shares it with another process: proxies have one connection for each thread, not one for each process.
        self._server = await loop.create_server(
            lambda: _Link(self, loop),
            host,
            port,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else _FIRST_S,
            backlog=_BACKLOG,
            reuse_port=False,
        )
        for listening in self._server.sockets:
            for level, option, value in _GONE:
                if hasattr(socket, option):  # Connections inherit it.
                    listening.setsockopt(level, getattr(socket, option), value)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def retire(self) -> None:
        """Ask whoever is connected to connect anew, and serve what comes meanwhile."""
        for link in list(self._links):
            link.retire()

    async def close(self) -> None:
        """Cut what still runs."""
        if self._server is None:
            return
        self._server.close()
        for link in list(self._links):
            link.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                while self._links:
                    await asyncio.gather(*(link.gone.wait() for link in self._links))
        for link in list(self._links):
            link.cut()
        self._server = None

    def connected(self, link: _Link) -> Connection:
        self._links.add(link)
        calls = Calls(self._methods, self._most_bytes, link.soon)
        return Connection(calls.accept)

    def disconnected(self, link: _Link) -> None:
        self._links.discard(link)


class _Link(asyncio.Protocol):
    def __init__(self, listener: Listener, loop: asyncio.AbstractEventLoop) -> None:
        self._listener = listener
        self._loop = loop
        self._connection: Connection | None = None
        self._transport: asyncio.Transport | None = None
        self._soon = False
        self._limit: asyncio.TimerHandle | None = None
        """Of the first words, or of the last."""
        self._left = False
        self.gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connection = self._listener.connected(self)
        self._limit = self._loop.call_later(_FIRST_S, self._no_first)
        self._write()

    def data_received(self, data: bytes) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            connection.receive(data)
        except Exception as exc:  # One connection's, and nobody else's.
            log_unexpected(_log, "a proxy's connection is closed", exc)
            connection.close()
        self._write()

    def eof_received(self) -> bool:
        return False  # Whoever sends no more has nothing to end its streams with.

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.disconnected(self)
        if self._limit is not None:
            self._limit.cancel()
        if self._connection is not None:
            self._connection.lose()
        self._connection = self._transport = None
        self.gone.set()

    def pause_writing(self) -> None:
        """What is not taken makes no room for more."""
        if self._transport is not None and not self._left and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def soon(self) -> None:
        """Write what was sent, once for all that is sent by now."""
        if not self._soon:
            self._soon = True
            self._loop.call_soon(self._flush)

    def retire(self) -> None:
        if self._connection is not None:
            self._connection.retire()
            self._write()

    def leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._write()

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        self._soon = False
        self._write()

    def _write(self) -> None:
        connection, transport = self._connection, self._transport
        if connection is None or transport is None or self._left:
            return
        if connection.out:
            transport.write(b"".join(connection.out))
            connection.out.clear()
        if connection.closed:
            if connection.fault:
                _complaints.tell(connection.fault)
            self._hang_up(transport)

    def _hang_up(self, transport: asyncio.Transport) -> None:
        """Once the client has, or after a while: sockets with unread bytes would take back what was written last."""
        self._left = True
        if transport.is_closing():
            return
        if self._limit is not None:
            self._limit.cancel()
        self._limit = self._loop.call_later(_LEAVE_S, self.cut)
        transport.resume_reading()
        if transport.can_write_eof():
            with contextlib.suppress(OSError):  # It has hung up, and we have not heard of it yet.
                transport.write_eof()

    def _no_first(self) -> None:
        if self._connection is not None and not self._connection.begun:
            self.leave()
