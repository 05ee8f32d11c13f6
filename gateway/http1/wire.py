"""One connection to a worker. Answers are read by llhttp (httptools), which is strict about their framing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from gateway.http1.answer import RawAnswer
from gateway.proxy.peer import Broken, Disconnected
from gateway.proxy.timed import TimedBody, TooLate

_LONGEST_HEAD_BYTES = 128 << 10
_BODYLESS = frozenset({204, 304})


class Wire(asyncio.Protocol):
    """`free(wire)` is called when an exchange is over and another may follow, `lost(wire)` when the connection is
    closed.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, free: Callable[[Wire], None], lost: Callable[[Wire], None]
    ) -> None:
        self._loop = loop
        self._free = free
        self._lost = lost
        self._transport: asyncio.Transport
        self._answer: RawAnswer | None = None
        self._sender: asyncio.Task[None] | None = None
        self._asked: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._is_held = False
        self._whole = True
        """The request has been written to its end."""
        self._no_body = False
        self._pieces: list[bytes] = []
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._reason = b""
        self._interim = False
        self._is_past_head = False
        self._to_close = False
        """The body ends with the connection."""
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)

    # ---- one exchange ------------------------------------------------------------------------------------------------

    def ask(self, method: str, head: bytes, body: bytes | TimedBody, *, ask: bool) -> RawAnswer:
        """Send a request. `ask`: its body when the server asks for it."""
        answer = self._answer = RawAnswer(self, self._loop)
        self._no_body = method == "HEAD"
        self._head_bytes = 0
        if ask or isinstance(body, TimedBody):
            self._whole = False
            self._transport.write(head)
            self._asked = self._loop.create_future() if ask else None
            self._sender = self._loop.create_task(self._send(body))
        elif len(body) > 1 << 14:  # Joining copies.
            self._transport.writelines((head, body))
        else:
            self._transport.write(head + body)
        return answer

    async def _send(self, body: bytes | TimedBody) -> None:
        try:
            if self._asked is not None:
                await self._asked
            if isinstance(body, TimedBody):
                await body.write_to(self.write, self.unsent_bytes)
            else:
                await self.write(body)
            self._whole = True
        except TooLate:
            self._fail(Broken("the request was not sent to its end: it was too late"))
        except ConnectionError:
            return  # Told by `connection_lost`.
        finally:
            self._sender = None

    async def write(self, piece: bytes) -> None:
        if self._transport.is_closing():
            raise ConnectionResetError("the connection is closed")
        self._transport.write(piece)
        if self._room is not None:
            await self._room

    def unsent_bytes(self) -> int:
        return 0 if self._transport.is_closing() else self._transport.get_write_buffer_size()

    def hold(self) -> None:
        """Read no more for now."""
        self._is_held = True
        self._transport.pause_reading()

    def go_on(self) -> None:
        if self._is_held:
            self._is_held = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def cut(self) -> None:
        """Nobody waits for the answer any more."""
        self._over()
        self._transport.abort()

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing()

    def give_up(self, error: Exception) -> None:
        if self._answer is not None:
            self._fail(error)

    def close(self) -> None:
        self._transport.close()

    # ---- what came ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by name.

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # Nobody asked for it: the next request would take it for its answer.
            self._transport.abort()
            return
        if not answer.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if self._answer is None:
                self._transport.abort()
            else:
                self._fail(Broken("what came is no HTTP answer"))
            return
        if self._answer is not None:
            self._feed()
            if not answer.status and self._head_bytes > _LONGEST_HEAD_BYTES:
                self._fail(Broken("the head of the answer is too long"))

    def eof_received(self) -> None:
        """The transport closes itself then."""

    def connection_lost(self, exc: Exception | None) -> None:
        answer = self._answer
        if answer is not None:
            self._feed()
            if not answer.status:
                self._fail(Disconnected("the worker closed the connection" if exc is None else str(exc)))
            elif exc is None and self._to_close:
                self._over()
                answer.ended()
            else:
                self._fail(Broken("the answer broke off"))
        self.resume_writing()
        self._lost(self)

    def pause_writing(self) -> None:
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    # ---- called by the parser ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._answer is None:
            raise Broken("a second answer")
        self._headers = []
        self._reason = b""
        self._interim = self._to_close = self._is_past_head = False

    def on_status(self, status: bytes) -> None:
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_past_head:  # Trailers go no further.
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 100 or status == 101:
            raise Broken("no status of an answer, or a change of protocols that nobody asked for")
        if 100 <= status < 200:
            self._interim = True
            return
        headers, self._is_past_head = self._headers, True
        has_length = has_coding = False
        for name, value in headers:
            if len(name) == 14 and name.lower() == b"content-length":
                has_length = True
            elif len(name) == 17 and name.lower() == b"transfer-encoding":
                if has_coding or value.lower() != b"chunked":
                    raise Broken("a transfer coding that is not known")
                has_coding = True
        self._to_close = not (has_length or has_coding or status in _BODYLESS)
        answer = self._answer
        if answer is not None:
            answer.begun(status, self._reason.decode("utf-8", "surrogateescape"), headers)
            if self._no_body:  # llhttp does not know, and would wait for one.
                self._finish(reusable=False)

    def on_message_complete(self) -> None:
        if self._interim:
            if self._asked is not None and not self._asked.done() and self._parser.get_status_code() == 100:
                self._asked.set_result(None)
            return
        self._finish(reusable=self._parser.should_keep_alive())

    # ------------------------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        pieces, answer = self._pieces, self._answer
        if pieces and answer is not None:
            answer.fed(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            pieces.clear()

    def _finish(self, *, reusable: bool) -> None:
        """The answer is whole."""
        answer = self._answer
        if answer is None:
            return
        self._feed()
        unsent = not self._whole or self._transport.get_write_buffer_size() > 0
        self._over()
        answer.ended()
        if reusable and not unsent and not self._transport.is_closing():
            self._free(self)
        else:
            self._transport.abort()

    def _fail(self, error: Exception) -> None:
        answer = self._answer
        self._over()
        if answer is not None:
            answer.failed(error)
        self._transport.abort()

    def _over(self) -> None:
        self.go_on()  # Whoever did not take it all will not say so any more.
        self._answer = self._asked = None
        self._whole = True
        self._pieces.clear()
        if self._sender is not None:
            self._sender.cancel()
