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
_GRACE_S = 10.0
"""So long it may come at any rate."""


async def read_body(request: web.BaseRequest, limit: int, least_bytes_per_s: int = 0) -> bytes:
    """The whole body that aiohttp receives. Raises ApiError 413 as soon as it is known to be larger than `limit` bytes,
    408 if it does not come, or comes at less than `least_bytes_per_s` (see `collect`).
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
        return await collect(request.content.readany, limit, least_bytes_per_s)
    except (web.RequestPayloadError, aiohttp.ClientPayloadError) as exc:
        raise unreadable() from exc


def unreadable() -> ApiError:
    return ApiError(400, "The request body could not be read.", code="invalid_body")


async def collect(readany: Callable[[], Awaitable[bytes]], limit: int, least_bytes_per_s: int = 0) -> bytes:
    """What `readany` brings until it brings nothing, in time: after a grace it is given up as soon as all of it so far
    has come at less than `least_bytes_per_s` (0: at any rate). Raises ApiError.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    def due_s(size: int) -> float:
        due_s = min(began_s + _TIMEOUT_S, loop.time() + _SILENCE_S)
        return min(due_s, began_s + _GRACE_S + size / least_bytes_per_s) if least_bytes_per_s else due_s

    try:
        async with asyncio.timeout_at(due_s(0)) as limited:
            return await _read(readany, limit, lambda size: limited.reschedule(due_s(size)))
    except TimeoutError:
        slow = f", or came at less than {least_bytes_per_s} bytes a second" if least_bytes_per_s else ""
        raise ApiError(
            408,
            f"The request body did not arrive within {_TIMEOUT_S:g} s, or paused for {_SILENCE_S:g} s{slow}.",
            code="timeout",
        ) from None


async def _read(
    readany: Callable[[], Awaitable[bytes]], limit: int, heard: Callable[[int], None] | None = None
) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while piece := await readany():
        size += len(piece)
        if size > limit:
            raise body_too_large(limit)
        pieces.append(piece)
        if heard is not None:
            heard(size)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
