"""Fake vLLM servers to be examined by doctor, and ways to break one of them."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from bench.engine.server import FakeVllm
from gateway.doctor.examine import Options, examine
from gateway.doctor.findings import Finding, Report, Severity

PATIENT = Options(timeout_s=5.0)
QUICK = Options(timeout_s=2.0)
"""For what is expected not to come."""


async def diagnose(*urls: str, options: Options = PATIENT) -> Report:
    return await examine(urls, options, rng=random.Random(7))


async def look(engine: FakeVllm, options: Options = PATIENT) -> dict[str, Finding]:
    """Findings about one engine by code."""
    report = await diagnose(engine.url, options=options)
    return {finding.code: finding for finding in report.findings}


def problems(found: dict[str, Finding]) -> set[str]:
    return {code for code, finding in found.items() if finding.severity >= Severity.WARNING}


def rewrite(engine: FakeVllm, change: Callable[[dict[str, Any]], None], rank: int = 0) -> None:
    """Change every event of a rank before it is published."""
    publisher = engine.publishers[rank]
    publish = publisher.publish

    def changed(payload: bytes) -> None:
        ts, events, name = msgspec.msgpack.decode(payload)
        for event in events:
            change(event)
        publish(msgspec.msgpack.encode([ts, events, name]))

    publisher.publish = changed  # type: ignore[method-assign]


def silence(engine: FakeVllm, rank: int = 0) -> None:
    engine.publishers[rank].publish = lambda payload: None  # type: ignore[method-assign]


@asynccontextmanager
async def serving(routes: dict[str, Callable[[web.Request], Any]]) -> AsyncIterator[str]:
    """A small HTTP server of a test's own."""
    app = web.Application()
    for path, handler in routes.items():
        app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def babbling(text: bytes) -> AsyncIterator[int]:
    """A TCP server that sends `text` to everyone; its port."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(text)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
