"""GET /v1/realtime: a WebSocket, passed through to a worker that serves its model."""

from gateway.proxy.realtime.page import Realtime
from gateway.proxy.realtime.session import PATH

__all__ = ["PATH", "Realtime"]
