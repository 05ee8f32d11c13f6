"""ext_proc and health on grpc.aio, the reference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from gateway.extproc import health
from gateway.extproc.stream import METHOD, SERVICE, BrokenOff, Shared, Stream
from gateway.extproc.tls import Identity
from gateway.pb import ext_proc_pb2 as pb
from gateway.pb import health_pb2
from gateway.rpc import Context, bind, host_port, question

_WINDOW_BYTES = 1 << 20
"""Of what a proxy may send ahead on one stream."""
_Context = grpc.aio.ServicerContext[pb.ProcessingRequest, pb.ProcessingResponse]


class GrpcioPort:
    """One listening address. `shared` None: of health alone."""

    def __init__(
        self, shared: Shared | None, ready: Callable[[], bool], most_bytes: int, identity: Identity | None
    ) -> None:
        self._identity = identity
        self._server = grpc.aio.server(options=_options(most_bytes))
        handlers = [health_handler(ready)] if shared is None else [_process(shared), health_handler(ready)]
        self._server.add_generic_rpc_handlers(handlers)

    async def start(self, host: str, port: int) -> int:
        """The port it has. Raises OSError."""
        credentials = None if self._identity is None else self._identity.credentials()
        bound = bind(self._server, host_port(host, port), credentials)
        await self._server.start()
        return bound

    def retire(self) -> None:
        """Nothing: grpcio can ask for new connections only while it refuses them."""

    async def close(self) -> None:
        await self._server.stop(None)


def _process(shared: Shared) -> grpc.GenericRpcHandler:
    async def process(_: object, context: _Context) -> None:
        await _Process(shared, context).run()

    method = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: method})


def health_handler(ready: Callable[[], bool]) -> grpc.GenericRpcHandler:
    async def check(_: object, context: Context) -> None:
        request = await question(context, health_pb2.HealthCheckRequest.FromString)
        await context.write(health.answer(request, ready))

    method: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
        check, response_serializer=health_pb2.HealthCheckResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(health.SERVICE, {health.METHOD: method})


class _Process(Stream):
    """`run` it once."""

    def __init__(self, shared: Shared, context: _Context) -> None:
        super().__init__(shared)
        self._context = context
        self._writing: asyncio.Future[None] | None = None
        """Done when whoever writes has written all there was."""

    async def run(self) -> None:
        """Returns when the proxy has ended the stream and needed nothing more of us; aborts it otherwise."""
        try:
            try:
                await self._talk()
            finally:
                await self._written()
        except BrokenOff as exc:
            await self._context.abort(grpc.StatusCode.INTERNAL, str(exc))
        finally:
            self.over()

    async def _talk(self) -> None:
        """Raises BrokenOff."""
        try:
            while (message := await self._read()) is not None:
                self.received(message)
                await self.flush()
        except (BrokenOff, grpc.aio.AbortError):
            raise
        except Exception as exc:
            raise self.failed(exc) from None
        self.ended()

    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        return self._context.invocation_metadata() or ()

    async def _read(self) -> pb.ProcessingRequest | None:
        """None: the proxy says no more."""
        message: object = await self._context.read()
        return message if isinstance(message, pb.ProcessingRequest) else None

    async def flush(self) -> None:
        """Whoever comes first writes for all, so that answers go out in order."""
        if self._writing is not None:
            return
        writing = self._writing = asyncio.get_running_loop().create_future()
        try:
            while self.outgoing:
                await self._context.write(self.outgoing.popleft())
        finally:
            self._writing = None
            writing.set_result(None)

    async def _written(self) -> None:
        """Until nobody writes: gRPC takes no end of a stream in the middle of a message, and drops it with an error."""
        if self._writing is not None:
            await asyncio.wait([self._writing])


def _options(most_bytes: int) -> list[tuple[str, Any]]:
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
