"""The picker's ports: external processing with its health, and health by itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Literal

import msgspec

from gateway.errors import UserError
from gateway.extproc.on_grpcio import GrpcioPort
from gateway.extproc.on_http2 import Http2Port
from gateway.extproc.stream import METHOD as METHOD
from gateway.extproc.stream import SERVICE as SERVICE
from gateway.extproc.stream import Counts, Shared
from gateway.extproc.tls import Identity
from gateway.extproc.types import Picker

_log = logging.getLogger(__name__)

_ENVELOPE_BYTES = 1 << 20
"""What a message has beside a body: headers, metadata."""
_DECIDED_S = 0.05
"""Enough for decisions that wait for nothing any more, and for proxies to take them."""
_PORTS: dict[str, type[Http2Port] | type[GrpcioPort]] = {"fast": Http2Port, "grpcio": GrpcioPort}


class PickerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """host: an address, IPv6 without brackets. port 0: any free one. health_port: a second one for health alone,
    without TLS; None: there is none. identity: to speak TLS with. decision_timeout_s: after it a request is answered
    503. sees_responses: False where the proxy is configured to show none. hears_context: whether it matters what trace
    the proxy's questions belong to. grpc: what speaks it.
    """

    host: str = "0.0.0.0"  # noqa: S104
    port: int = 9002
    health_port: int | None = 9003
    identity: Identity | None = None
    max_body_bytes: int = 8 << 20
    decision_timeout_s: float = 30.0
    sees_responses: bool = True
    hears_context: bool = False
    grpc: Literal["fast", "grpcio"] = "fast"


class PickerServer:
    """In a running event loop: `start`, later `drain` and `close`. `ready` says whether health is to be SERVING; while
    draining it never is.
    """

    def __init__(self, picker: Picker, settings: PickerSettings, ready: Callable[[], bool] = lambda: True) -> None:
        self._settings = settings
        self._ready = ready
        self._shared = Shared(
            picker,
            deadline_s=settings.decision_timeout_s,
            max_body_bytes=settings.max_body_bytes,
            sees_responses=settings.sees_responses,
            hears_context=settings.hears_context,
        )
        self.draining = False
        self.port = 0
        self.health_port = 0
        self._ports: list[Http2Port | GrpcioPort] = []

    @property
    def counts(self) -> Counts:
        return self._shared.counts

    @property
    def decision_timeout_s(self) -> float:
        """Of requests that come from now on; may be set while it serves."""
        return self._shared.deadline_s

    @decision_timeout_s.setter
    def decision_timeout_s(self, within_s: float) -> None:
        self._shared.deadline_s = within_s

    async def start(self) -> None:
        """Raises UserError where a port cannot be had."""
        settings = self._settings
        self.port = await self._serve(self._shared, settings.port, settings.identity)
        if settings.health_port is not None:
            self.health_port = await self._serve(None, settings.health_port, None)
        _log.info("picking endpoints on %s, health on %s too", self.port, self.health_port or "no port")

    async def drain(self, least_s: float, most_s: float) -> int:
        """Health says NOT_SERVING from now on, while requests are served as before: a proxy needs a few checks to see
        it. One that makes none (it has a single address for all replicas) is asked after `least_s` to connect anew.
        Ends then once no stream is left, at the latest after `most_s`; returns how many are left.
        """
        self.draining = True
        await asyncio.sleep(min(least_s, most_s))
        for port in self._ports:
            port.retire()
        await self._idle(most_s - least_s)
        return self.counts.open

    async def close(self) -> None:
        """Cut what still runs, but for what is decided by now: that is answered."""
        self.draining = True
        if self._shared.tasks:
            decided, _ = await asyncio.wait(self._shared.tasks, timeout=_DECIDED_S)
            if decided:  # Whoever hears it has time to take it before the end of its connection.
                await self._idle(_DECIDED_S)
        await asyncio.gather(*(port.close() for port in self._ports))
        await self._idle(_DECIDED_S)
        for task in self._shared.tasks:
            task.cancel()
        await asyncio.gather(*self._shared.tasks, return_exceptions=True)

    async def _idle(self, most_s: float) -> None:
        """Returns once no stream is left, or after `most_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._shared.idle.wait(), most_s)

    async def _serve(self, shared: Shared | None, number: int, identity: Identity | None) -> int:
        settings = self._settings
        # A body that is a little over the limit should be refused by us, who say why.
        most_bytes = 2 * settings.max_body_bytes + _ENVELOPE_BYTES
        port = _PORTS[settings.grpc](shared, self._is_serving, most_bytes, identity)
        try:
            bound = await port.start(settings.host, number)
        except OSError:
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            text = f"cannot listen on {host}:{number}: it is in use, or not an address of this machine"
            raise UserError(text) from None
        self._ports.append(port)
        return bound

    def _is_serving(self) -> bool:
        return self._ready() and not self.draining
