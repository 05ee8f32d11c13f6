"""Who may ask an indexer, and how much of it at once."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

_HEADER = "authorization"
_SCHEME = "Bearer "
MOST_WATCHERS = 1024
"""Copies that are kept or read at once: each holds what it has not taken yet."""
MOST_MATCHES = 256
"""Questions at once beside them: each is up to 8 MiB."""


def credentials(token: str | None) -> tuple[tuple[str, str], ...] | None:
    """What goes with each call to an indexer that demands `token`."""
    return None if token is None else ((_HEADER, _SCHEME + token),)


class TokenDemanded(grpc.aio.ServerInterceptor):
    """Calls of `service` without the token are UNAUTHENTICATED, and `told`; others (health) need none. Compared in
    constant time.
    """

    def __init__(self, token: str, service: str, told: Callable[[], None]) -> None:
        self._expected = (_SCHEME + token).encode()
        self._prefix = f"/{service}/"
        self._told = told

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._prefix) or self._is_in(details):
            return handler
        self._told()
        return grpc.stream_stream_rpc_method_handler(_refuse)  # For the question of any other it would be waited.

    def _is_in(self, details: grpc.HandlerCallDetails) -> bool:
        given = [value for name, value in details.invocation_metadata or () if name == _HEADER]
        if len(given) != 1:
            return False
        value = given[0] if isinstance(given[0], bytes) else given[0].encode("utf-8", "surrogateescape")
        return hmac.compare_digest(value, self._expected)


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this indexer wants its token (index.service.token_file)")
