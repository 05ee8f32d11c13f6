"""Requests that aiohttp received: the admin port, pages, and everything with `gateway.http: aiohttp`."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import hdrs, web
from multidict import CIMultiDict, MultiMapping

from gateway.proxy.body import read_body
from gateway.proxy.headers import is_leg, request_headers
from gateway.proxy.incoming import Reply
from gateway.tls import name_in

_MAY_WAIT_ABOVE_BYTES = 32 << 10
"""Below asyncio's and uvloop's high-water mark of 64 KiB, up to which a write never waits."""


class RelayedResponse(web.StreamResponse):
    """A response with the headers it was given, and no others of aiohttp's choosing than Date and the framing."""

    async def _prepare_headers(self) -> None:
        absent = [name for name in (hdrs.CONTENT_TYPE, hdrs.SERVER) if name not in self.headers]
        await super()._prepare_headers()
        for name in absent:
            self.headers.popall(name, None)


def sockname_of(request: web.BaseRequest) -> tuple[str, int] | None:
    address = None if request.transport is None else request.transport.get_extra_info("sockname")
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None


class AioIncoming:
    """An `Incoming`."""

    __slots__ = ("_request", "_response")

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._response: RelayedResponse | None = None

    @property
    def method(self) -> str:
        return self._request.method

    @property
    def raw_headers(self) -> Sequence[tuple[bytes, bytes]]:
        return self._request.raw_headers

    @property
    def headers(self) -> MultiMapping[str]:
        return self._request.headers

    @property
    def is_leg(self) -> bool:
        return is_leg(self._request.raw_headers)

    def passing(self) -> CIMultiDict[str]:
        return request_headers(self._request.raw_headers)

    @property
    def remote(self) -> str | None:
        return self._request.remote

    @property
    def gone(self) -> bool:
        return self._request.transport is None

    def sockname(self) -> tuple[str, int] | None:
        return sockname_of(self._request)

    def certificate_name(self) -> str | None:
        transport = self._request.transport
        return None if transport is None else name_in(transport.get_extra_info("peercert"))

    @property
    def is_read(self) -> bool:
        return not self._request.can_read_body or self._request.content.is_eof()

    async def body(self, limit: int, least_bytes_per_s: int) -> bytes:
        return await read_body(self._request, limit, least_bytes_per_s)

    async def begin(self, status: int, reason: str, headers: CIMultiDict[str], *, close: bool) -> None:
        response = self._response = RelayedResponse(status=status, reason=reason, headers=headers)
        if close:
            response.force_close()
        await response.prepare(self._request)

    async def write(self, piece: bytes) -> None:
        await self._begun.write(piece)

    async def end(self) -> None:
        await self._begun.write_eof()

    def would_wait(self, n_bytes: int) -> bool:
        return self._request.transport is not None and self.unsent_bytes() + n_bytes > _MAY_WAIT_ABOVE_BYTES

    def unsent_bytes(self) -> int:
        transport = self._request.transport
        return 0 if transport is None else transport.get_write_buffer_size()

    def close(self) -> None:
        self._response = None
        if self._request.transport is not None:
            self._request.transport.close()

    def abort(self) -> None:
        self._response = None
        if self._request.transport is not None:
            self._request.transport.abort()

    def response(self, reply: Reply | None) -> web.StreamResponse:
        """What aiohttp is to be given; `reply` None: the answer was sent, or broken off."""
        if reply is not None:
            response = web.Response(status=reply.status, headers=reply.headers, body=reply.body)
            if reply.close:
                response.force_close()
            return response
        if self._response is not None:
            return self._response
        nothing = web.Response()  # aiohttp finds the connection closed and writes nothing.
        nothing.force_close()
        return nothing

    @property
    def _begun(self) -> RelayedResponse:
        assert self._response is not None  # noqa: S101 - begun before
        return self._response
