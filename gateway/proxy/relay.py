"""A worker's answer to the client, chunk by chunk as it comes: nothing decoded, joined or cut anew."""

from __future__ import annotations

import asyncio

from multidict import CIMultiDict

from gateway.handoff.cached import CachedTokens
from gateway.proxy.errors import UPSTREAM, error_body
from gateway.proxy.flight import Flight
from gateway.proxy.incoming import Incoming
from gateway.proxy.peer import UpstreamAnswer, UpstreamError
from gateway.proxy.usage import UsageTail

WRITE_STALL_S = 60.0
"""A client that takes nothing for so long is given up (nginx's send_timeout)."""
_LOOKS_PER_STALL = 8


class UpstreamBroke(Exception):
    """The worker's answer ended before its end; part of it has been relayed."""


class ClientStalled(Exception):
    """The client did not take its answer in time; the worker is not to blame."""


class Answer:
    """A worker's answer of which the headers and the first piece of the body (empty: there is no body) are here."""

    __slots__ = ("first", "is_stream", "rewriting", "sent_bytes", "upstream", "whole")

    def __init__(self, upstream: UpstreamAnswer, first: bytes) -> None:
        self.upstream = upstream
        self.is_stream = (upstream.header("Content-Type") or "").startswith("text/event-stream")
        self.first = first
        self.sent_bytes = 0
        self.rewriting: CachedTokens | None = None
        """Changes the stream on its way."""
        self.whole = False
        """`first` is all of it, and not what the worker said word for word."""

    def become(self, body: bytes) -> None:
        """The answer was read to its end and has changed."""
        self.first = body
        self.whole = True

    @property
    def status(self) -> int:
        return self.upstream.status

    def close(self) -> None:
        """Close the connection unless the answer was read to its end: that is what makes a worker stop."""
        self.upstream.close()

    async def relay(
        self,
        request: Incoming,
        headers: CIMultiDict[str],
        flight: Flight | None,
        tail: UsageTail | None,
        *,
        close: bool,
        deadline_s: float,
    ) -> None:
        """Sends status, headers and body. With `close` the client's connection ends with it. `deadline_s` (of the
        loop's clock) bounds the waits for the client; those for the worker end by its session's own.

        Raises UpstreamBroke, ClientStalled, or ConnectionError when the client is gone.
        """
        upstream, rewriting = self.upstream, self.rewriting
        if self.whole or rewriting is not None:
            headers.popall("Content-Length", None)
        if self.whole:
            headers["Content-Length"] = str(len(self.first))
        await request.begin(upstream.status, upstream.reason, headers, close=close)
        read = upstream.readany
        count_lines = flight is not None and self.is_stream
        piece = self.first
        while piece:
            if tail is not None:
                tail.feed(piece)
            out = piece if rewriting is None else rewriting.feed(piece)
            if out:
                self.sent_bytes += len(out)
                await _write(request, out, flight, deadline_s)
            if count_lines and flight is not None:
                flight.passed(piece)
            try:
                piece = await read()
            except (UpstreamError, OSError) as exc:
                if request.gone:
                    raise ConnectionResetError("the client is gone") from exc
                await self._break_off(request, tail)
                raise UpstreamBroke from exc
        if rewriting is not None and (rest := rewriting.end()):
            self.sent_bytes += len(rest)
            await _write(request, rest, flight, deadline_s)
        await _write(request, None, flight, deadline_s)

    async def _break_off(self, request: Incoming, tail: UsageTail | None) -> None:
        """Let the client see that the answer is not whole: an error event where one fits, and no proper end."""
        if self.is_stream and tail is not None and tail.ends_event():
            body = error_body("The worker's answer broke off.", UPSTREAM, code="upstream_broke")
            await request.write(b"data: " + body + b"\n\n")
        request.close()


async def _write(request: Incoming, piece: bytes | None, flight: Flight | None, deadline_s: float) -> None:
    """`piece`, or the end when it is None."""
    if not request.would_wait(len(piece or b"")):
        await (request.end() if piece is None else request.write(piece))
        return
    if flight is not None:
        flight.pause()
    try:
        await _write_watched(request, piece, deadline_s)
    except TimeoutError:
        raise ClientStalled from None
    finally:
        if flight is not None:
            flight.resume()


async def _write_watched(request: Incoming, piece: bytes | None, deadline_s: float) -> None:
    """Raises TimeoutError when nothing goes out for `WRITE_STALL_S`, or the deadline is over."""
    loop = asyncio.get_running_loop()
    left = request.unsent_bytes() + len(piece or b"")
    timer: asyncio.TimerHandle
    if loop.time() >= deadline_s:
        raise TimeoutError
    async with asyncio.timeout_at(min(deadline_s, loop.time() + WRITE_STALL_S)) as limit:

        def look() -> None:
            nonlocal left, timer
            now_left = request.unsent_bytes()
            if now_left < left:
                limit.reschedule(min(deadline_s, loop.time() + WRITE_STALL_S))
            left = now_left
            timer = loop.call_later(WRITE_STALL_S / _LOOKS_PER_STALL, look)

        timer = loop.call_later(WRITE_STALL_S / _LOOKS_PER_STALL, look)
        try:
            await (request.end() if piece is None else request.write(piece))
        finally:
            timer.cancel()
