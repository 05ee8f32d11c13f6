"""A worker's answer to the client, chunk by chunk as it comes: nothing decoded, joined or cut anew."""

from __future__ import annotations

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict

from gateway.proxy.errors import UPSTREAM, error_body
from gateway.proxy.flight import Flight
from gateway.proxy.usage import UsageTail

_LINE_ENDS_PER_EVENT = 2
"""About a token each. Counting line ends gives the same number however the bytes are cut."""


class UpstreamBroke(Exception):
    """The worker's answer ended before its end; part of it has been relayed."""


class RelayedResponse(web.StreamResponse):
    """A response with the headers it was given, and no others of aiohttp's choosing than Date and the framing."""

    async def _prepare_headers(self) -> None:
        absent = [name for name in (hdrs.CONTENT_TYPE, hdrs.SERVER) if name not in self.headers]
        await super()._prepare_headers()
        for name in absent:
            self.headers.popall(name, None)


class Answer:
    """A worker's answer of which the headers and the first piece of the body (empty: there is no body) are here."""

    __slots__ = ("first", "response", "sent_bytes")

    def __init__(self, response: aiohttp.ClientResponse, first: bytes) -> None:
        self.response = response
        self.first = first
        self.sent_bytes = 0

    @property
    def status(self) -> int:
        return self.response.status

    @property
    def is_stream(self) -> bool:
        return self.response.headers.get("Content-Type", "").startswith("text/event-stream")

    def close(self) -> None:
        """Close the connection unless the answer was read to its end: that is what makes a worker stop."""
        self.response.close()

    async def relay(
        self,
        request: web.BaseRequest,
        headers: CIMultiDict[str],
        flight: Flight | None,
        tail: UsageTail | None,
        *,
        close: bool,
    ) -> web.StreamResponse:
        """Sends status, headers and body. With `close` the client's connection ends with it.

        Raises UpstreamBroke, or ConnectionError when the client is gone.
        """
        upstream = self.response
        response = RelayedResponse(status=upstream.status, reason=upstream.reason, headers=headers)
        if close:
            response.force_close()
        await response.prepare(request)
        read = upstream.content.readany
        count_lines = flight is not None and self.is_stream
        piece, line_ends = self.first, 0
        while piece:
            if tail is not None:
                tail.feed(piece)
            self.sent_bytes += len(piece)
            await response.write(piece)
            if count_lines and flight is not None:
                line_ends += piece.count(b"\n")
                flight.streamed(line_ends // _LINE_ENDS_PER_EVENT)
                line_ends %= _LINE_ENDS_PER_EVENT
            try:
                piece = await read()
            except (aiohttp.ClientError, OSError) as exc:
                if request.transport is None:
                    raise ConnectionResetError("the client is gone") from exc
                await self._break_off(request, response, tail)
                raise UpstreamBroke from exc
        await response.write_eof()
        return response

    async def _break_off(self, request: web.BaseRequest, response: web.StreamResponse, tail: UsageTail | None) -> None:
        """Let the client see that the answer is not whole: an error event where one fits, and no proper end."""
        if self.is_stream and tail is not None and tail.ends_event():
            body = error_body("The worker's answer broke off.", UPSTREAM, code="upstream_broke")
            await response.write(b"data: " + body + b"\n\n")
        if request.transport is not None:
            request.transport.close()
