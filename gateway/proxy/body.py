"""A request's body, whole and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from gateway.proxy.errors import ApiError, body_too_large

_TIMEOUT_S = 120.0
"""Longest wait for one body: 64 MiB at 5 Mbit/s."""
_SILENCE_S = 10.0
"""Longest wait for the next piece of it."""


async def read_body(request: web.BaseRequest, limit: int) -> bytes:
    """The whole body that aiohttp receives. Raises ApiError 413 as soon as it is known to be larger than `limit` bytes,
    408 if it does not come.
    """
    length = request.content_length
    if length is not None and length > limit:
        raise body_too_large(limit)
    if not request.can_read_body:
        return b""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        if request.content.is_eof():
            return await _read(request.content.readany, limit)
        return await collect(request.content.readany, limit)
    except (web.RequestPayloadError, aiohttp.ClientPayloadError) as exc:
        raise unreadable() from exc


def unreadable() -> ApiError:
    return ApiError(400, "The request body could not be read.", code="invalid_body")


async def collect(readany: Callable[[], Awaitable[bytes]], limit: int) -> bytes:
    """What `readany` brings until it brings nothing, in time. Raises ApiError."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + _TIMEOUT_S
    try:
        async with asyncio.timeout(_SILENCE_S) as silence:
            return await _read(readany, limit, lambda: silence.reschedule(min(end_s, loop.time() + _SILENCE_S)))
    except TimeoutError:
        raise ApiError(
            408,
            f"The request body did not arrive within {_TIMEOUT_S:g} s, or paused for {_SILENCE_S:g} s.",
            code="timeout",
        ) from None


async def _read(readany: Callable[[], Awaitable[bytes]], limit: int, heard: Callable[[], None] | None = None) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while piece := await readany():
        size += len(piece)
        if size > limit:
            raise body_too_large(limit)
        pieces.append(piece)
        if heard is not None:
            heard()
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
