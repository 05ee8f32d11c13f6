"""Addresses that gRPC's own server listens on."""

from __future__ import annotations

import grpc


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """`address`: host:port or unix:PATH. The port it has. Raises OSError where it cannot listen there."""
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as exc:
        raise OSError(str(exc)) from None
