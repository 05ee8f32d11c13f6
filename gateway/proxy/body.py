"""A request's body, whole and bounded."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from gateway.proxy.errors import ApiError, body_too_large

_TIMEOUT_S = 120.0
"""Longest wait for one body: 64 MiB at 5 Mbit/s."""


async def read_body(request: web.BaseRequest, limit: int) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it is known to be larger than `limit` bytes,
    408 if it does not come.
    """
    length = request.content_length
    if length is not None and length > limit:
        raise body_too_large(limit)
    if not request.can_read_body:
        return b""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if request.content.is_eof():
        return await _read(request, limit)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await _read(request, limit)
    except TimeoutError:
        raise ApiError(408, f"The request body did not arrive within {_TIMEOUT_S:g} s.", code="timeout") from None


async def _read(request: web.BaseRequest, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    try:
        while piece := await request.content.readany():
            size += len(piece)
            if size > limit:
                raise body_too_large(limit)
            pieces.append(piece)
    except (web.RequestPayloadError, aiohttp.ClientPayloadError) as exc:
        raise ApiError(400, "The request body could not be read.", code="invalid_body") from exc
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
