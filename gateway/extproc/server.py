"""The picker's ports: external processing with its health, and health by itself. On grpc.aio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import msgspec

from gateway.extproc.health import health_handler
from gateway.extproc.session import Session
from gateway.extproc.stream import Context, Counts, Stream
from gateway.extproc.types import Picker
from gateway.pb import ext_proc_pb2 as pb
from gateway.rpc import host_port, listen

_log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = "Process"
_ENVELOPE_BYTES = 1 << 20
"""What a message has beside a body: headers, metadata."""

_WINDOW_BYTES = 1 << 20
"""Of what a proxy may send ahead on one stream."""


class PickerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """host: an address, IPv6 without brackets. port 0: any free one. health_port: a second one for health alone,
    without TLS; None: there is none. decision_timeout_s: after it a request is answered 503. sees_responses: False
    where the proxy is configured to show none.
    """

    host: str = "0.0.0.0"  # noqa: S104
    port: int = 9002
    health_port: int | None = 9003
    credentials: grpc.ServerCredentials | None = None
    max_body_bytes: int = 8 << 20
    decision_timeout_s: float = 30.0
    sees_responses: bool = True


class PickerServer:
    """In a running event loop: `start`, later `drain` and `close`. `ready` says whether health is to be SERVING; while
    draining it never is.
    """

    def __init__(self, picker: Picker, settings: PickerSettings, ready: Callable[[], bool] = lambda: True) -> None:
        self._picker = picker
        self._settings = settings
        self._ready = ready
        self.counts = Counts()
        self.draining = False
        self.port = 0
        self.health_port = 0
        self._servers: list[grpc.aio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Raises UserError where a port cannot be had."""
        settings = self._settings
        health = health_handler(lambda: self._ready() and not self.draining)
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        picking = grpc.method_handlers_generic_handler(SERVICE, {METHOD: process})
        self.port = await self._serve([picking, health], settings.port, settings.credentials)
        if settings.health_port is not None:
            self.health_port = await self._serve([health], settings.health_port, None)
        _log.info("picking endpoints on %s, health on %s too", self.port, self.health_port or "no port")

    async def drain(self, least_s: float, most_s: float) -> int:
        """Health says NOT_SERVING from now on, while requests are served as before: a proxy needs a few checks to see
        it. Ends after `least_s` once no stream is left, at the latest after `most_s`; returns how many are left.
        """
        self.draining = True
        await asyncio.sleep(min(least_s, most_s))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), most_s - least_s)
        return self.counts.open

    async def close(self) -> None:
        """Cut what still runs."""
        self.draining = True
        await asyncio.gather(*(server.stop(None) for server in self._servers))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(
        self, handlers: Sequence[grpc.GenericRpcHandler], port: int, credentials: grpc.ServerCredentials | None
    ) -> int:
        address = host_port(self._settings.host, port)
        server, bound = await listen(handlers, address, credentials, self._options())
        self._servers.append(server)
        return bound

    def _options(self) -> list[tuple[str, Any]]:
        # A body that is a little over the limit should be refused by us, who say why.
        most_bytes = 2 * self._settings.max_body_bytes + _ENVELOPE_BYTES
        return [
            # Two processes on one port would get connections, not requests, by turns: Envoy has one for each thread.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", most_bytes),
            ("grpc.max_send_message_length", most_bytes),
            # Windows of a fixed size: to find the best one gRPC pings the proxy all the time, which costs both sides
            # more than a tenth of a request.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
            # A proxy may probe an idle connection as often as it likes.
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
        ]

    async def _process(self, _: object, context: Context) -> None:
        session = Session(max_body_bytes=self._settings.max_body_bytes, sees_responses=self._settings.sees_responses)
        stream = Stream(session, context, self._picker, self._settings.decision_timeout_s, self.counts, self._tasks)
        self._idle.clear()
        try:
            await stream.run()
        finally:
            if not self.counts.open:
                self._idle.set()
