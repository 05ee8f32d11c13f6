"""Envoy, the picker's server with a picker that does what requests ask of it, and pods: a world for many tests.

Pods and picker live on one event loop in a thread of their own; tests are plain functions which speak HTTP to Envoy.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec
import uvloop

from gateway.extproc.refusals import NO_ENDPOINTS, SATURATED, refusal
from gateway.extproc.server import PickerServer, PickerSettings
from gateway.extproc.types import Ask, Pick, Recall, Refusal
from gateway.proxy.errors import UNAVAILABLE, ApiError
from tests.support.envoy import Change, Envoy, fit, shipped
from tests.support.extproc import Watched

T = TypeVar("T")
PATIENCE_S = 60.0
CASE = "x-case"
DO = "x-do"


class Loop:
    """A thread that runs an event loop."""

    def __enter__(self) -> Self:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="world")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.loop.shutdown_asyncgens())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)


class Pods:
    """Engines on ports of their own. A path's query says how one answers: `?sse=N&gap=S`, `?trailers`, `?big=N`,
    `?early=STATUS`, `?silent` (nothing, until its client leaves), `?silent=stream` (the head alone),
    `?say=HEX&say=HEX...` (a chunk each; `&status=N&kind=CONTENT-TYPE&coding=gzip`); otherwise it is JSON that tells
    what arrived. A WebSocket gets back what it sends.
    """

    def __init__(self, number: int = 2) -> None:
        self._number = number
        self._servers: list[asyncio.Server] = []
        self.ports: tuple[int, ...] = ()
        self.hung_up: set[str] = set()
        """Cases whose client left while they were streaming, or silent."""
        self.silent: set[str] = set()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(f"127.0.0.1:{port}" for port in self.ports)

    async def start(self) -> None:
        for _ in range(self._number):
            self._servers.append(await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20))
        self.ports = tuple(server.sockets[0].getsockname()[1] for server in self._servers)

    async def stop(self) -> None:
        for server in self._servers:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._answer(reader, writer):
                await writer.drain()
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ", 2)
        headers = [(name.lower(), value.strip()) for name, _, value in (row.partition(":") for row in head[1:] if row)]
        one = dict(headers)
        query = parse_qs(urlsplit(target).query, keep_blank_values=True)
        port = writer.get_extra_info("sockname")[1]
        start = f"HTTP/1.1 200 OK\r\nx-served-by: 127.0.0.1:{port}\r\n"
        if "early" in query:
            writer.write(f"HTTP/1.1 {query['early'][0]} No\r\ncontent-length: 2\r\n\r\nno".encode())
            return False
        if one.get("upgrade", "").lower() == "websocket":
            switched = start.replace("200 OK", "101 Switching Protocols")
            writer.write((switched + "upgrade: websocket\r\nconnection: upgrade\r\n\r\n").encode())
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            return False
        body, trailers = await _body(reader, one)
        if "silent" in query:
            if query["silent"] == ["stream"]:
                writer.write((start + "content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n").encode())
            self.silent.add(one.get(CASE, ""))
            await reader.read(1)
            self.hung_up.add(one.get(CASE, ""))
            return False
        if "sse" in query:
            writer.write((start + "content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n").encode())
            for i in range(int(query["sse"][0])):
                event = b'data: {"model":"served","n":%d}\n\n' % i
                writer.write(b"%x\r\n%s\r\n" % (len(event), event))
                await writer.drain()
                await asyncio.sleep(float(query.get("gap", ["0"])[0]))
                if reader.at_eof():
                    self.hung_up.add(one.get(CASE, ""))
                    return False
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        elif "say" in query:
            start = start.replace("200 OK", f"{query.get('status', ['200'])[0]} Said")
            said = {"content-type": query.get("kind", [""])[0], "content-encoding": query.get("coding", [""])[0]}
            start += "".join(f"{name}: {value}\r\n" for name, value in said.items() if value)
            writer.write((start + "transfer-encoding: chunked\r\n\r\n").encode())
            for piece in query["say"]:
                writer.write(b"%x\r\n%s\r\n" % (len(piece) // 2, bytes.fromhex(piece)))
                await writer.drain()
                await asyncio.sleep(0.002)  # Or Envoy would see one piece.
            writer.write(b"0\r\n\r\n")
        elif "trailers" in query:
            writer.write((start + "trailer: x-t\r\ntransfer-encoding: chunked\r\n\r\n").encode())
            writer.write(b"2\r\n{}\r\n0\r\nx-t: of the pod\r\n\r\n")
        else:
            seen = {"method": method, "target": target, "length": len(body), "headers": headers, "trailers": trailers}
            text = b"a" * int(query["big"][0]) if "big" in query else json.dumps(seen | {"body": _head(body)}).encode()
            start += f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
            writer.write(start.encode() + text)
        return True


def _head(body: bytes) -> str:
    return body[:200].decode("latin-1")


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> tuple[bytes, list[str]]:
    if "chunked" not in headers.get("transfer-encoding", ""):
        return await reader.readexactly(int(headers.get("content-length", "0"))), []
    parts, trailers = [], []
    while size := int((await reader.readline()).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    while row := (await reader.readline()).strip():
        trailers.append(row.decode())
    return b"".join(parts), trailers


class Obedient:
    """A picker that does what a request's header `x-do` says: nothing (the first pod), `pod=N`, `at=ENDPOINTS`, `503`,
    `429`, `raise`, `hang`, `sleep=S`, `body=BYTES`, `rename`, `bad-header`, `set=JSON` (headers), `scores`, `recall`
    (by `recalls`). What became of each case is in `watches`.
    """

    def __init__(self, pods: Pods) -> None:
        self._pods = pods
        self.asks: dict[str, Ask] = {}
        self.watches: dict[str, Watched] = {}
        self.called_off: set[str] = set()
        self.recalls: dict[str, Recall] = {}

    async def pick(self, ask: Ask) -> Pick | Refusal:
        case = ask.headers.get(CASE, "")
        self.asks[case] = ask
        do, _, how = ask.headers.get(DO, "").partition("=")
        if do == "503":
            return refusal(ApiError(503, "none is ready", type_=UNAVAILABLE, code="none_ready"), NO_ENDPOINTS)
        if do == "429":
            return refusal(ApiError(429, "full", type_=UNAVAILABLE, code="full", retry_after_s=1), SATURATED)
        if do == "raise":
            raise RuntimeError("a bug")
        try:
            await asyncio.sleep(3600 if do == "hang" else float(how) if do == "sleep" else 0)
        except asyncio.CancelledError:
            self.called_off.add(case)
            raise
        if do == "recall":
            self.recalls[case] = Recall()
        allowed = ask.subset or self._pods.endpoints
        self.watches[case] = watch = Watched()
        return Pick(
            endpoints=tuple(how.split(",")) if do == "at" else (allowed[int(how) if do == "pod" else 0],),
            watch=watch,
            set_headers=_headers(do, how),
            body=b"b" * int(how) if do == "body" else None,
            rename=("served", "asked") if do == "rename" else None,
            scores=dict.fromkeys(allowed, 0.5) if do == "scores" else {},
            recall=self.recalls.get(case),
        )


def _headers(do: str, how: str) -> dict[str, str]:
    if do == "bad-header":
        return {"x-picked": "a\r\nb: c"}
    return dict(json.loads(how)) if do == "set" else {"x-picked": "yes"}


class Answer(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def seen(self) -> Any:
        """What the pod says of the request."""
        return json.loads(self.body)

    @property
    def reached(self) -> dict[str, str]:
        """The headers that reached the pod."""
        return dict(self.seen["headers"])

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


class EnvoyWorld:
    """One Envoy with one of our configurations (`change`d, if need be), its picker and pods."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        change: Change | None = None,
        settings: PickerSettings | None = None,
        pods: int = 2,
        pickers: int = 1,
    ) -> None:
        self._name = name
        self._folder = folder
        self._change = change
        self._settings = settings or PickerSettings(host="127.0.0.1", port=0, health_port=None, decision_timeout_s=1.0)
        self._loop = Loop()
        self._n_pickers = pickers
        self.pods = Pods(pods)
        self.picker = Obedient(self.pods)
        self.server = PickerServer(self.picker, self._settings)

    def __enter__(self) -> Self:
        self._loop.__enter__()
        try:
            self.run(self.pods.start())
            self.run(self.server.start())
            config = shipped(self._name)
            fit(config, picker=self.server.port, pods=self.pods.ports)
            if self._change is not None:
                self._change(config)
            self.envoy = Envoy(config, self._folder)
            self.envoy.__enter__()
            try:
                self.until(lambda: self._healthy(self._n_pickers))
            except BaseException:
                self.envoy.stop()
                raise
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.envoy.stop()
        self._leave()

    def _leave(self) -> None:
        self.run(self.server.close())
        self.run(self.pods.stop())
        self._loop.__exit__()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """On the event loop of picker and pods."""
        return self._loop.run(coroutine)

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s"
            time.sleep(0.01)

    def _healthy(self, number: int) -> bool:
        return self.envoy.stats("^cluster.picker.membership_healthy$") == {"cluster.picker.membership_healthy": number}

    def kill_picker(self) -> None:
        """As if its process had died."""
        self.run(self.server.close())

    def wait_for_health(self, healthy: int) -> None:
        """Until Envoy's worker acts upon it too."""
        self.until(lambda: self._healthy(healthy))
        self.until(lambda: (self.ask("health", do="503").status == 503) == bool(healthy))

    def revive_picker(self) -> None:
        """On the same port."""
        self._settings = msgspec.structs.replace(self._settings, port=self.server.port)
        self.server = PickerServer(self.picker, self._settings)
        self.run(self.server.start())
        self.wait_for_health(1)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.envoy.port), timeout=PATIENCE_S)

    def ask(
        self,
        case: str,
        *,
        method: str = "POST",
        path: str = "/v1/completions",
        body: Any = b'{"model":"m"}',
        do: str = "",
        headers: dict[str, str] | None = None,
        chunked: bool = False,
    ) -> Answer:
        """One request through Envoy."""
        connection = http.client.HTTPConnection("127.0.0.1", self.envoy.port, timeout=PATIENCE_S)
        sent = {"content-type": "application/json", CASE: case, **({DO: do} if do else {}), **(headers or {})}
        try:
            connection.request(method, path, body if method == "POST" else None, sent, encode_chunked=chunked)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def told(self, case: str) -> list[tuple[object, ...]]:
        """What the watch of a case was told, once it has heard the last."""
        self.until(lambda: bool(case in self.picker.watches and self.picker.watches[case].lasts))
        return self.picker.watches[case].told
