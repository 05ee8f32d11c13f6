"""A discovery as a picker sees it: Envoy is told addresses, so that a worker's URL must have one.

A name is resolved when its worker is told of. Until that succeeds the worker is left out, and `problem` says so.
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
        self._unresolved: dict[str, WorkerChange] = {}

    @property
    def source(self) -> Source:
        return self._discovery.source

    @property
    def problem(self) -> str | None:
        if not self._unresolved:
            return self._discovery.problem
        urls = ", ".join(f"{name} ({change.url})" for name, change in sorted(self._unresolved.items()))
        problems = [self._discovery.problem, f"left out, because its host has no address now: {urls}"]
        return "; ".join(filter(None, problems))

    async def changes(self) -> AsyncIterator[WorkerChange]:
        told: asyncio.Queue[WorkerChange | None] = asyncio.Queue()
        following = asyncio.get_running_loop().create_task(self._follow(told))
        try:
            ended = False
            while not ended or self._unresolved:
                try:
                    async with asyncio.timeout(self._again_s if self._unresolved else None):
                        change = await told.get()
                except TimeoutError:
                    due = list(self._unresolved.values())
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
        name, place = change.worker, None if change.url is None else endpoint_of(change.url)
        stays = change.kind in (ChangeKind.ADDED, ChangeKind.CHANGED)
        if stays and change.url is not None and place is not None and isinstance(place.host, str):
            try:
                address = await self._resolve(place.host)
            except OSError as exc:
                if name not in self._unresolved:
                    _log.error("worker %s is left out: %s has no address: %s", name, place.host, exc.strerror or exc)
                self._unresolved[name] = change
                return None
            host = f"[{address}]" if ":" in address else address
            url = urlunsplit(urlsplit(change.url)._replace(netloc=f"{host}:{place.port}"))
            change = msgspec.structs.replace(change, url=url, server_name=change.server_name or place.host)
        self._unresolved.pop(name, None)
        return change
