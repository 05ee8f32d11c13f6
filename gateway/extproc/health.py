"""grpc.health.v1, as proxies and kubelets ask for it."""

from __future__ import annotations

from collections.abc import Callable

from gateway.pb import health_pb2 as pb

SERVICE = "grpc.health.v1.Health"
METHOD = "Check"
_LIVENESS = "liveness"
_SERVING = pb.HealthCheckResponse.SERVING
_NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING


def answer(request: pb.HealthCheckRequest, ready: Callable[[], bool]) -> pb.HealthCheckResponse:
    """`liveness` serves as long as it answers, every other name while `ready`: charts of llm-d ask for names of their
    own, and NOT_FOUND would have the pod killed. Watch is not implemented, as with llm-d: nobody uses it.
    """
    serving = request.service == _LIVENESS or ready()
    return pb.HealthCheckResponse(status=_SERVING if serving else _NOT_SERVING)
