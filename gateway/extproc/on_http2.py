"""ext_proc and health on our own HTTP/2: a tenth of what grpcio takes for a message (docs/envoy.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from google.protobuf.message import DecodeError

from gateway.extproc import health
from gateway.extproc.http2.calls import INTERNAL, Call, Method
from gateway.extproc.http2.listener import Listener
from gateway.extproc.stream import METHOD, SERVICE, BrokenOff, Shared, Stream
from gateway.extproc.tls import Identity
from gateway.pb import ext_proc_pb2 as pb
from gateway.pb import health_pb2


class Http2Port:
    """One listening address. `shared` None: of health alone."""

    def __init__(
        self, shared: Shared | None, ready: Callable[[], bool], most_bytes: int, identity: Identity | None
    ) -> None:
        methods: dict[str, Method] = {f"/{health.SERVICE}/{health.METHOD}": lambda call: _Check(call, ready)}
        if shared is not None:
            methods[f"/{SERVICE}/{METHOD}"] = lambda call: _Process(call, shared)
        self._listener = Listener(methods, most_bytes, None if identity is None else identity.context())

    async def start(self, host: str, port: int) -> int:
        """The port it has. Raises OSError."""
        return await self._listener.start(host, port)

    def retire(self) -> None:
        """Ask connected proxies to connect anew, and serve what comes meanwhile."""
        self._listener.retire()

    async def close(self) -> None:
        await self._listener.close()


class _Process(Stream):
    def __init__(self, call: Call, shared: Shared) -> None:
        super().__init__(shared)
        self._call = call

    def message(self, raw: bytes) -> None:
        try:
            message = pb.ProcessingRequest.FromString(raw)
        except DecodeError:
            self._shared.counts.broken += 1
            self._call.abort(INTERNAL, "a message is no ProcessingRequest")
            return
        try:
            self.received(message)
        except BrokenOff as exc:
            self._call.abort(INTERNAL, str(exc))
            return
        self._send()

    def half_closed(self) -> None:
        try:
            self.ended()
        except BrokenOff as exc:
            self._call.abort(INTERNAL, str(exc))
            return
        self._call.finish()

    def lost(self) -> None:
        self.over()

    def metadata(self) -> Iterable[tuple[str, str]]:
        return self._call.fields

    async def flush(self) -> None:
        self._send()
        self._call.flush()

    def _send(self) -> None:
        outgoing, send = self.outgoing, self._call.send
        while outgoing:
            send(outgoing.popleft().SerializeToString())


class _Check:
    def __init__(self, call: Call, ready: Callable[[], bool]) -> None:
        self._call = call
        self._ready = ready
        self._answered = False

    def message(self, raw: bytes) -> None:
        try:
            request = health_pb2.HealthCheckRequest.FromString(raw)
        except DecodeError:
            self._call.abort(INTERNAL, "the message is no HealthCheckRequest")
            return
        if not self._answered:
            self._answered = True
            self._call.send(health.answer(request, self._ready).SerializeToString())

    def half_closed(self) -> None:
        if self._answered:
            self._call.finish()
        else:
            self._call.abort(INTERNAL, "there was no HealthCheckRequest")

    def lost(self) -> None: ...
