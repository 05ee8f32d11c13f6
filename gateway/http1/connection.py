"""A client's connection: one request after the other, as long as they are inference; with the first that is not, it
goes on to aiohttp.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from typing import TYPE_CHECKING, cast

from multidict import CIMultiDict

from gateway.http1.head import NO_HEAD, BadHead, check_beginning
from gateway.http1.last_head import LastHead
from gateway.http1.request import RawRequest
from gateway.proxy.errors import ApiError, draining, log_unexpected
from gateway.proxy.incoming import Reply
from gateway.proxy.routes import ROUTES, Route
from gateway.tls import name_in

if TYPE_CHECKING:
    from gateway.http1.listener import Listener

_log = logging.getLogger(__name__)
_MOST_UNSENT_BYTES = 256 << 10
"""Above, an answer's next piece waits."""
_MAY_WAIT_ABOVE_BYTES = _MOST_UNSENT_BYTES // 2
"""A head and the framing come on top."""
_MOST_AHEAD_BYTES = 64 << 10
"""Of what a client sends before it has its answer; then it is not read any more until it has."""
_MANY_CHUNKS = 20_000
"""Few clients cut a body into more; they wait between one lot and the next, so that others have most of the time."""
_BETWEEN_LOTS_S = 0.012


_EMPTY_LINES = re.compile(rb"(?:\r\n)*+")


class Connection(asyncio.Protocol):
    def __init__(self, listener: Listener, loop: asyncio.AbstractEventLoop) -> None:
        self._listener = listener
        self._loop = loop
        self.transport: asyncio.Transport
        self.remote: str | None = None
        self.is_lost = False
        self.room: asyncio.Future[None] | None = None
        """Set while the client takes too little."""
        self.task: asyncio.Task[None] | None = None
        self._request: RawRequest | None = None
        self._more: asyncio.Future[None] | None = None
        self.ahead: bytes | bytearray = b""
        """Received and not looked at."""
        self._unfed = b""
        """Of the request's body, waiting for its turn."""
        self._checked = 0
        self._last = LastHead()
        self.is_held = False
        self._is_ending = False
        self._certificate_name: str | None = None

    # ---- called by the transport -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by name.
        self.transport.set_write_buffer_limits(high=_MOST_UNSENT_BYTES)
        address = transport.get_extra_info("peername")
        self.remote = str(address[0]) if isinstance(address, tuple) else None
        self._listener.opened(self)

    def data_received(self, data: bytes) -> None:
        request = self._request
        if request is not None:
            if self._unfed:
                self._unfed += data
                return
            if not request.is_read:
                data = request.feed(data)
                self._wake()
                if data and not request.is_read:
                    self._feed_later(request, data)
                    return
            if data:
                self.ahead = self.ahead + data if self.ahead else data
                if len(self.ahead) > _MOST_AHEAD_BYTES and not self.is_held:
                    self.is_held = True
                    self.transport.pause_reading()
            return
        if self._is_ending:
            return
        if not self.ahead:
            self._listener.begins(self)
            self.ahead = data
        elif isinstance(self.ahead, bytearray):
            self.ahead += data
        else:
            self.ahead = bytearray(self.ahead) + data
        self._next()

    def _feed_later(self, request: RawRequest, data: bytes) -> None:
        self._unfed = data
        if not self.is_held:
            self.is_held = True
            self.transport.pause_reading()
        self._loop.call_later(_BETWEEN_LOTS_S if request.n_chunks > _MANY_CHUNKS else 0.0, self._feed_on, request)

    def _feed_on(self, request: RawRequest) -> None:
        data, self._unfed = self._unfed, b""
        if self.is_lost or self._request is not request:
            return
        self.data_received(data)
        if self.is_held and not self._unfed and len(self.ahead) <= _MOST_AHEAD_BYTES:
            self.is_held = False
            self.transport.resume_reading()

    def eof_received(self) -> None:
        """A client that has left and one that only sends no more look the same. Returning closes the transport."""
        if self._request is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._listener.closed(self)
        if self.task is not None:
            self.task.cancel()
        self.resume_writing()

    def pause_writing(self) -> None:
        self.room = self._loop.create_future()

    def resume_writing(self) -> None:
        room, self.room = self.room, None
        if room is not None and not room.done():
            room.set_result(None)

    # ---- for another process -----------------------------------------------------------------------------------------

    def detach(self) -> socket.socket | None:
        """The connection, which is no longer ours; None: it cannot be given away now."""
        transport = self.transport
        is_idle = self._request is None and not self.ahead and not self._is_ending and not self.is_lost
        if not is_idle or transport.is_closing() or transport.get_extra_info("sslcontext") is not None:
            return None
        if transport.get_write_buffer_size():
            return None
        transport.pause_reading()
        sock = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._is_ending = True
        self._listener.closed(self)
        transport.abort()  # Of ours only: the client sees nothing while the other is open.
        return sock

    # ---- for its request ---------------------------------------------------------------------------------------------

    def certificate_name(self) -> str | None:
        if self._certificate_name is None:
            self._certificate_name = name_in(self.transport.get_extra_info("peercert"))
        return self._certificate_name

    async def more(self) -> None:
        """Until something has come."""
        self._more = self._loop.create_future()
        try:
            await self._more
        finally:
            self._more = None

    def would_wait(self, n_bytes: int) -> bool:
        return not self.is_lost and self.transport.get_write_buffer_size() + n_bytes > _MAY_WAIT_ABOVE_BYTES

    async def has_room(self) -> None:
        """Until the client takes what it is sent. Raises ConnectionResetError when it is gone."""
        while self.room is not None:
            await asyncio.shield(self.room)
        if self.is_lost:
            raise ConnectionResetError("the client is gone")

    # ---- one after the other -----------------------------------------------------------------------------------------

    def _next(self) -> None:
        """Serve the request that has come, if its head has."""
        data = self.ahead
        if data[:1] == b"\r":  # RFC 9112, 2.2: empty lines after a body, from clients of long ago.
            data = data[_end_of_empty_lines(data) :]
            self.ahead, self._checked = data, 0
            if not data or data == b"\r":
                self._listener.waits_for_head(self)
                return
        try:
            end = data.find(b"\r\n\r\n", max(0, self._checked - 3))
            if end < 0:
                check_beginning(data, self._checked)
                self._checked = len(data)
                self._listener.waits_for_head(self)
                return
            if isinstance(data, bytearray):
                data = bytes(data)
            self._last.read(data[:end])
        except BadHead as exc:
            self._refuse_malformed(exc)
            return
        target = self._last.head.target
        route = ROUTES.get(target.partition("?")[0])
        if route is None:
            self._hand_over(data)
            return
        self._listener.has_head(self)
        self._checked = 0
        self._start(route, target, data[end + 4 :])

    def _start(self, route: Route, target: str, rest: bytes) -> None:
        last = self._last
        request = self._request = RawRequest(self, last.head, last.passing, is_leg=last.is_leg)
        if rest and not request.is_read:
            rest = request.feed(rest)
        self.ahead = rest
        if rest and not request.is_read:
            self.ahead = b""
            self._feed_later(request, rest)
        self.task = self._loop.create_task(self._serve(request, route, target))

    async def _serve(self, request: RawRequest, route: Route, target: str) -> None:
        try:
            reply = await self._listener.serve(request, route, target)
            if reply is not None:
                request.send(reply)
        except ConnectionError:
            pass  # `is_answered` tells.
        except Exception as exc:
            log_unexpected(_log, "unexpected; the connection is given up", exc)
        finally:
            self._request = self.task = None
            self._served(request)

    def _served(self, request: RawRequest) -> None:
        if self.is_lost:
            return
        if not request.is_answered:
            if not self.transport.is_closing():
                self.transport.abort()
            return
        if request.closes or not request.is_read:
            self._end(unread=not request.is_read or bool(self.ahead))
            return
        self._listener.idles(self)
        if self.is_held:
            self.is_held = False
            self.transport.resume_reading()
        if self.ahead:
            self._listener.begins(self)
            self._next()

    def _hand_over(self, data: bytes) -> None:
        self._listener.closed(self)
        self._is_ending = True
        protocol = self._listener.pages()
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        protocol.data_received(data)

    # ---- requests that come to nothing -------------------------------------------------------------------------------

    def refuse_late(self) -> None:
        """The rest of a head did not come in time."""
        if not self.ahead.strip(b"\r\n"):  # Empty lines after a body: nothing was asked.
            self.transport.abort()
            return
        _log.info("the head of a request from %s did not come in time", self.remote)
        self._refuse(ApiError(408, "The head of the request did not come in time.", code="request_timeout"))

    def refuse_draining(self) -> None:
        """The rest of a head is not waited for any more."""
        self._refuse(draining())

    def _refuse_malformed(self, why: BadHead) -> None:
        _log.info("a malformed request from %s was refused (%s)", self.remote, why)
        self._refuse(ApiError(why.status, "The request is not valid HTTP.", code="malformed_request"))

    def _refuse(self, error: ApiError) -> None:
        self._listener.has_head(self)
        reply = Reply.of(error)
        reply.close = True
        request = RawRequest(self, NO_HEAD, CIMultiDict(), is_leg=False)
        request.send(reply)
        self._end(unread=True)

    def _end(self, *, unread: bool) -> None:
        """Close. Where the client may still be sending, its bytes are taken for a moment: a reset, which is what they
        would meet, takes the answer from it.
        """
        self._is_ending = True
        self.ahead = self._unfed = b""
        if not unread:
            self.transport.close()
            return
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self.is_held:
            self.is_held = False
            self.transport.resume_reading()
        self._listener.lingers(self)

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)


def _end_of_empty_lines(data: bytes | bytearray) -> int:
    found = _EMPTY_LINES.match(data)
    return 0 if found is None else found.end()
