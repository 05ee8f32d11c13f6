"""What gRPC's own servers have in common: addresses, and calls whose question does not come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

_QUESTION_S = 10.0
"""Longest wait for the message of a call that has begun."""


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


async def question(context: Context, read: Callable[[bytes], T]) -> T:
    """The one message of a call that is served as a stream: gRPC waits for those of others as long as it takes, and
    writes a traceback for those it cannot `read`. Aborts the call.
    """
    try:
        async with asyncio.timeout(_QUESTION_S):
            raw = await context.read()
    except TimeoutError:
        return await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the question did not come")
    if not isinstance(raw, bytes):
        return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no question")
    try:
        return read(raw)
    except DecodeError:
        return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the question is not of the method's type")
