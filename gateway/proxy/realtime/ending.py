"""How a session ends: close codes, what a message means for it, and what the other side is told."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import aiohttp
from aiohttp import WSMsgType, web

NORMAL = 1000
GOING_AWAY = 1001
POLICY = 1008
TOO_BIG = 1009
FAILED = 1011
RESTART = 1012
TRY_LATER = 1013
_NO_CLOSE_FRAME = 1006
_SENDABLE = range(1000, 5000)
_NEVER_SENT = frozenset({0, 1005, _NO_CLOSE_FRAME, 1015})
_LONGEST_REASON_BYTES = 120
CLOSE_TIMEOUT_S = 1.0

ServerSocket = web.WebSocketResponse
ClientSocket = aiohttp.ClientWebSocketResponse
Socket = ServerSocket | ClientSocket


class Close(NamedTuple):
    """Why a session ends: what both sides are told, and what the log says (None: it ended as it should)."""

    code: int
    reason: str = ""
    cut: str | None = None
    worker_broke: bool = False


class Ended(Exception):
    """The session is over before a worker has taken it."""

    def __init__(self, close: Close) -> None:
        super().__init__(close.reason)
        self.close = close


def ending(message: aiohttp.WSMessage, source: Socket) -> Close | None:
    """What `message` means for the session if it is no content."""
    if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
        return None
    if message.type is WSMsgType.CLOSE:
        return Close(message.data or 0, message.extra or "")
    if message.type is WSMsgType.ERROR and isinstance(message.data, aiohttp.WebSocketError):
        lost = "client_left" if isinstance(source, web.WebSocketResponse) else "upstream_broke"
        return Close(int(message.data.code), "", "too_large" if message.data.code == TOO_BIG else lost)
    return broke(source)


def broke(side: Socket) -> Close:
    """It is gone without a word."""
    if isinstance(side, web.WebSocketResponse):
        return Close(GOING_AWAY, "", "client_left")
    return Close(RESTART, "the worker's connection broke; connect again", "upstream_broke", worker_broke=True)


async def close_side(side: Socket, close: Close) -> None:
    code, reason = as_sent(close)
    with suppress(ConnectionError, aiohttp.ClientError, RuntimeError, TimeoutError):
        await side.close(code=code, message=reason)


def as_sent(close: Close) -> tuple[int, bytes]:
    """What a close frame may say: the other side may have been told a code that is none, or a longer reason, which is
    not cut within a character.
    """
    code = close.code if close.code in _SENDABLE and close.code not in _NEVER_SENT else NORMAL
    reason = close.reason.encode("utf-8", "replace")[:_LONGEST_REASON_BYTES]
    return code, reason.decode("utf-8", "ignore").encode()
