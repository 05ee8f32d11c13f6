"""Ports that speak gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from gateway.errors import UserError


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def listen(
    handlers: Sequence[grpc.GenericRpcHandler],
    address: str,
    credentials: grpc.ServerCredentials | None,
    options: Sequence[tuple[str, Any]],
) -> tuple[grpc.aio.Server, int]:
    """A server on `address` (host:port or unix:PATH), and the port it has got. Raises UserError if it has none."""
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers(handlers)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError:
        raise UserError(f"cannot listen on {address}: it is in use, or not an address of this machine") from None
    await server.start()
    return server, bound
