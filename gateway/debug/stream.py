"""`/debug/stream`: server-sent events with what has changed, for everybody who watches.

One snapshot a tick, whoever watches, and none while nobody does. Who is slow misses ticks and is told everything when
it is back; nothing waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from gateway.debug.state import Snapshot
from gateway.proxy import errors
from gateway.proxy.errors import SERVER_NAME, ApiError

_log = logging.getLogger(__name__)

PATH = "/debug/stream"
TICK_S = 1.0
MOST_VIEWERS = 32
_STALLED_S = 20.0
_RETRY_MS = 1000
_WHOLE = ("head", "hits", "ttft_ms", "itl_ms", "prefixes", "warnings", "more_warnings")
"""Sections that are sent as they are when anything in them has changed."""
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
    "Server": SERVER_NAME,
}


class Frame:
    """One tick, ready to be sent to who has seen the tick before (`update`) and to who has not (`full`)."""

    def __init__(self, number: int, snapshot: Snapshot, before: Snapshot | None) -> None:
        self.number = number
        self.snapshot = snapshot
        self.taken_s = time.monotonic()
        self._before = before
        self._full: bytes | None = None
        self._update: bytes | None = None

    def full(self) -> bytes:
        if self._full is None:
            self._full = _event({"full": True, **msgspec.structs.asdict(self.snapshot)})
        return self._full

    def update(self) -> bytes:
        if self._before is None:
            return self.full()
        if self._update is None:
            self._update = _event(changes(self._before, self.snapshot))
        return self._update

    def forget(self) -> None:
        """What came before it; the next tick has come."""
        self._before = None


class Stream:
    """`take` makes a snapshot."""

    def __init__(self, take: Callable[[], Snapshot], *, tick_s: float = TICK_S, most: int = MOST_VIEWERS) -> None:
        self._take = take
        self._tick_s = tick_s
        self._most = most
        self._frame: Frame | None = None
        self._ticked = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._ended = False
        self.viewers = 0

    def snapshot(self) -> Snapshot:
        """At most a tick old."""
        frame = self._frame
        if frame is not None and time.monotonic() - frame.taken_s < self._tick_s:
            return frame.snapshot
        return self._advance().snapshot

    async def page(self, request: web.BaseRequest) -> web.StreamResponse:
        """Events until the viewer leaves or we go down. Raises ApiError."""
        if request.method != "GET":
            raise errors.method_not_allowed(request.method, PATH, frozenset({"GET"}))
        if self._ended:
            raise errors.draining()
        if self.viewers >= self._most:
            message = f"{self._most} viewers watch already, and more are not allowed; close a page that is not needed."
            raise ApiError(
                503, message, type_=errors.UNAVAILABLE, code="too_many_viewers", retry_after_s=10 * self._tick_s
            )
        self.snapshot()  # What was seen last may be long ago.
        response = web.StreamResponse(headers=_HEADERS)
        response.force_close()
        self.viewers += 1
        try:
            await response.prepare(request)
            await self._send(response)
            await response.write_eof()
        except (ConnectionError, TimeoutError):
            pass  # The viewer has left, or takes nothing any more.
        finally:
            self.viewers -= 1
        return response

    def end(self) -> None:
        """End all streams, and begin no others."""
        self._ended = True
        self._wake()
        if self._ticker is not None:
            self._ticker.cancel()

    async def _send(self, response: web.StreamResponse) -> None:
        seen = None
        await response.write(b"retry: %d\n\n" % _RETRY_MS)
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick(), name="debug stream")
        while not self._ended:
            ticked, frame = self._ticked, self._frame
            if frame is not None and frame.number != seen:
                data = frame.update() if seen == frame.number - 1 else frame.full()
                async with asyncio.timeout(_STALLED_S):
                    await response.write(data)
                seen = frame.number
            else:
                await ticked.wait()

    async def _tick(self) -> None:
        try:
            while self.viewers:
                try:
                    self._advance()
                except Exception as exc:
                    errors.log_unexpected(_log, "unexpected; the page misses a tick", exc)
                await asyncio.sleep(self._tick_s)
        finally:
            self._ticker = None

    def _advance(self) -> Frame:
        before = self._frame
        number, known = (1, None) if before is None else (before.number + 1, before.snapshot)
        frame = self._frame = Frame(number, self._take(), known)
        if before is not None:
            before.forget()
        self._wake()
        return frame

    def _wake(self) -> None:
        ticked, self._ticked = self._ticked, asyncio.Event()
        ticked.set()


def changes(before: Snapshot, now: Snapshot) -> dict[str, Any]:
    """What is to be told to who knows `before`: sections that changed; of workers and decisions, those that did."""
    out: dict[str, Any] = {"at_s": now.at_s}
    for name in _WHOLE:
        value = getattr(now, name)
        if value != getattr(before, name):
            out[name] = value
    known_workers = {row.name: row for row in before.workers}
    if changed := [row for row in now.workers if known_workers.pop(row.name, None) != row]:
        out["workers"] = changed
    if known_workers:
        out["gone"] = sorted(known_workers)
    known = {row.number: row for row in before.decisions}
    if fresh := [row for row in now.decisions if known.get(row.number) != row]:
        out["decisions"] = fresh
    return out


def encoded(value: Any) -> bytes:
    """JSON. Lone surrogates, which request ids may bring, become "?"."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_writable(msgspec.to_builtins(value)))


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list) else value
