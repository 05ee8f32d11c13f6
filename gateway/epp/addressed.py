"""A discovery as a picker sees it: Envoy is told an address and a port, so a worker's URL must be no more than that.

A name is resolved when its worker is told of. While that fails, and for a URL with a path, the worker is left out and
`problem` says so.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit, urlunsplit

import msgspec

from gateway.discovery import Discovery, Source
from gateway.sidecar.endpoint import endpoint_of
from scorer.types import ChangeKind, WorkerChange

_log = logging.getLogger(__name__)
_AGAIN_S = 5.0

Resolve = Callable[[str], Awaitable[str]]


async def resolve(host: str) -> str:
    """One of its addresses, an IPv4 one where there is any. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    first = min(found, key=lambda entry: entry[0] is not socket.AF_INET)
    return str(first[4][0])


class Addressed:
    """`discovery`, with addresses in all URLs."""

    def __init__(self, discovery: Discovery, resolve: Resolve = resolve, again_s: float = _AGAIN_S) -> None:
        self._discovery = discovery
        self._resolve = resolve
        self._again_s = again_s
        self._left_out: dict[str, tuple[WorkerChange, str]] = {}
        """By name, and why."""

    @property
    def source(self) -> Source:
        return self._discovery.source

    @property
    def problem(self) -> str | None:
        reasons = [f"{name} is left out: {why}" for name, (_, why) in sorted(self._left_out.items())]
        return "; ".join(filter(None, [self._discovery.problem, *reasons])) or None

    async def changes(self) -> AsyncIterator[WorkerChange]:
        told: asyncio.Queue[WorkerChange | None] = asyncio.Queue()
        following = asyncio.get_running_loop().create_task(self._follow(told))
        try:
            ended = False
            while not ended or self._left_out:
                try:
                    async with asyncio.timeout(self._again_s if self._left_out else None):
                        change = await told.get()
                except TimeoutError:
                    due = [change for change, _ in self._left_out.values()]
                else:
                    if change is None:
                        await following  # Raises what has ended it.
                        ended = True
                        continue
                    due = [change]
                for each in due:
                    found = await self._addressed(each)
                    if found is not None:
                        yield found
        finally:
            following.cancel()

    async def _follow(self, told: asyncio.Queue[WorkerChange | None]) -> None:
        try:
            async for change in self._discovery.changes():
                told.put_nowait(change)
        finally:
            told.put_nowait(None)

    async def _addressed(self, change: WorkerChange) -> WorkerChange | None:
        name = change.worker
        if change.url is not None and change.kind in (ChangeKind.ADDED, ChangeKind.CHANGED):
            url, place = urlsplit(change.url), endpoint_of(change.url)
            if url.path.strip("/"):
                self._leave_out(change, f"the path of {change.url} cannot be told to a proxy")
                return None
            if place is not None and isinstance(place.host, str):
                try:
                    address = await self._resolve(place.host)
                except OSError as exc:
                    self._leave_out(change, f"{place.host} has no address ({exc.strerror or exc})")
                    return None
                host = f"[{address}]" if ":" in address else address
                change = msgspec.structs.replace(
                    change,
                    url=urlunsplit(url._replace(netloc=f"{host}:{place.port}")),
                    server_name=change.server_name or place.host,
                )
        self._left_out.pop(name, None)
        return change

    def _leave_out(self, change: WorkerChange, why: str) -> None:
        if change.worker not in self._left_out:
            _log.error("worker %s is left out: %s", change.worker, why)
        self._left_out[change.worker] = change, why
