"""Client connections: what aiohttp itself would answer and log, in our own words and without a byte of the request."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from gateway.proxy import errors
from gateway.proxy.errors import ApiError, log_unexpected
from gateway.proxy.masked import Masked

_log = logging.getLogger(__name__)

CLIENT_KEEPALIVE_S = 75.0
"""Longer than the 60 s of common load balancers, so that they, not we, close idle connections."""
LINGER_S = 1.0
"""So long what a client still sends is read after its answer."""
_LONGEST_LINE_BYTES = 16 << 10
_LONGEST_HEADER_BYTES = 64 << 10


class Connection(web.RequestHandler):
    """aiohttp's errors quote what was received (keys, prompts) and go out as text/plain; these do not."""

    __slots__ = ()

    def set_parser(self, parser: Any, data_received_cb: Callable[[], None] | None = None) -> None:
        """From here on a WebSocket's frames come in."""
        super().set_parser(Masked(parser), data_received_cb)  # type: ignore[arg-type]

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status < 500:
            _log.info("a malformed request from %s was refused (%s)", request.remote, type(exc).__name__)
            error = ApiError(status, "The request is not valid HTTP.", code="malformed_request")
        else:
            if exc is not None:
                log_unexpected(_log, "unexpected; the request is given up", exc)
            error = ApiError(status, "The gateway failed.", type_=errors.INTERNAL, code="internal")
        if request.writer.output_size > 0:
            raise ConnectionError("part of an answer has been sent")
        response = error.response()
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        exc = kw.get("exc_info")
        if isinstance(exc, BaseException):
            log_unexpected(_log, "unexpected; the connection is given up", exc)


class ConnectionFactory(web.Server):
    """aiohttp's server, with connections of ours. Create it inside a running event loop."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=CLIENT_KEEPALIVE_S,
            lingering_time=LINGER_S,
            max_line_size=_LONGEST_LINE_BYTES,
            max_field_size=_LONGEST_HEADER_BYTES,
        )

    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)
