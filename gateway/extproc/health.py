"""grpc.health.v1, as proxies and kubelets ask for it."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from gateway.pb import health_pb2 as pb

SERVICE = "grpc.health.v1.Health"
_LIVENESS = "liveness"
_SERVING = pb.HealthCheckResponse.SERVING
_NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING

_Context = grpc.aio.ServicerContext[pb.HealthCheckRequest, pb.HealthCheckResponse]


def health_handler(ready: Callable[[], bool]) -> grpc.GenericRpcHandler:
    """`liveness` serves as long as it answers, every other name while `ready`: charts of llm-d ask for names of their
    own, and NOT_FOUND would have the pod killed. Watch is not implemented, as with llm-d: nobody uses it.
    """

    async def check(request: pb.HealthCheckRequest, context: _Context) -> pb.HealthCheckResponse:
        serving = request.service == _LIVENESS or ready()
        return pb.HealthCheckResponse(status=_SERVING if serving else _NOT_SERVING)

    method = grpc.unary_unary_rpc_method_handler(
        check,
        request_deserializer=pb.HealthCheckRequest.FromString,
        response_serializer=pb.HealthCheckResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"Check": method})
