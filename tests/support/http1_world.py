"""Both sides of HTTP/1.1 connections on transports without sockets: a client that is served, a worker that is asked."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httptools
from multidict import CIMultiDict

from gateway.http1.connection import Connection
from gateway.http1.listener import Listener
from gateway.http1.wire import Wire
from gateway.proxy.errors import ApiError
from gateway.proxy.incoming import Incoming, Reply
from gateway.proxy.routes import Route
from tests.support.memory_transport import MemoryTransport


async def turns(n: int = 6) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


class Echo:
    """Answers with what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []
        self.running = 0

    async def serve(self, request: Incoming, route: Route, target: str) -> Reply:
        self.running += 1
        try:
            body = await request.body(1 << 20, 0)
        except ApiError as exc:
            return Reply.of(exc)
        finally:
            self.running -= 1
        said = request.method, target, body.decode("latin-1")
        self.asked.append(said)
        return Reply(200, CIMultiDict({"Content-Type": "application/json"}), json.dumps(said).encode())


class Page(asyncio.Protocol):
    """Stands for aiohttp's."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class Pages:
    def __init__(self) -> None:
        self.n_made = 0

    def __call__(self) -> Page:
        self.n_made += 1
        return Page()

    async def shutdown(self, timeout_s: float) -> None: ...


class Client:
    def __init__(self) -> None:
        self.echo = Echo()
        self.pages = Pages()
        self.listener = Listener(self.echo.serve, cast(Any, self.pages), "127.0.0.1", 0)
        self.connection = Connection(self.listener, asyncio.get_running_loop())
        self.transport = MemoryTransport(self.connection)

    def send(self, data: bytes) -> None:
        if not self.transport.is_closed:
            self.transport.protocol.data_received(data)

    def answers(self) -> list[tuple[int, Any]]:
        """(status, body) of each, read by llhttp; what is no HTTP raises."""
        heard: list[tuple[int, Any]] = []
        body = bytearray()

        class Reader:
            def on_body(self, piece: bytes) -> None:
                body.extend(piece)

            def on_message_complete(self) -> None:
                if parser.get_status_code() != 100:
                    heard.append((parser.get_status_code(), json.loads(bytes(body))))
                body.clear()

        parser = httptools.HttpResponseParser(Reader())
        parser.feed_data(bytes(self.transport.written))
        return heard

    def leave(self) -> None:
        if not self.transport.is_closed:
            self.transport.close()


class Worker:
    def __init__(self) -> None:
        self.freed: list[Wire] = []
        self.lost: list[Wire] = []
        self.wire = Wire(asyncio.get_running_loop(), self.freed.append, self.lost.append)
        self.transport = MemoryTransport(self.wire)
        self.answer = self.wire.ask("POST", b"POST / HTTP/1.1\r\n\r\n", b"{}", ask=False)

    async def read(self) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
        await self.answer.head()
        body = await self.answer.read()
        return self.answer.status, body or b"", list(self.answer.raw_headers)
