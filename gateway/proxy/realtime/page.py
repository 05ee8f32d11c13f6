"""The page of /v1/realtime."""

from __future__ import annotations

import ssl

from aiohttp import web

from gateway.proxy import errors
from gateway.proxy.parts import Parts
from gateway.proxy.realtime.dialer import Dialer
from gateway.proxy.realtime.session import PATH, Session
from gateway.proxy.server import DataPlane

_LARGEST_MESSAGE_BYTES = 16 << 20
"""uvicorn's limit, and so vLLM's."""


class Realtime:
    """The page. `longest_s` bounds one session."""

    def __init__(
        self,
        parts: Parts,
        plane: DataPlane,
        *,
        tls: ssl.SSLContext | bool,
        connect_timeout_s: float,
        longest_s: float,
        link_local: bool = False,
    ) -> None:
        self._parts = parts
        self._plane = plane
        self._longest_s = longest_s
        self._largest_bytes = min(parts.max_body_bytes, _LARGEST_MESSAGE_BYTES)
        self._dialer = Dialer(
            tls=tls, connect_timeout_s=connect_timeout_s, largest_bytes=self._largest_bytes, link_local=link_local
        )

    async def page(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method != "GET":
            raise errors.method_not_allowed(request.method, PATH, frozenset({"GET"}))
        with self._plane.busy():
            session = Session(
                self._parts,
                self._plane,
                self._dialer,
                request,
                longest_s=self._longest_s,
                largest_bytes=self._largest_bytes,
            )
            return await session.serve()

    async def close(self) -> None:
        await self._dialer.close()
