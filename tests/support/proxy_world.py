"""A data plane in front of upstreams that a test scripts byte by byte, or of fake engines."""

from __future__ import annotations

import asyncio
import io
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from gateway.auth.door import Door
from gateway.auth.keys import Key
from gateway.config.schema import PdConfig, QueueConfig, TenancyConfig
from gateway.debug.hits import HitBook
from gateway.debug.metrics import Metrics
from gateway.debug.prefixes import TopPrefixes
from gateway.engine.available import Available
from gateway.engine.health import Health
from gateway.handoff.assembly import assemble
from gateway.proxy.access import AccessLog
from gateway.proxy.background import Background
from gateway.proxy.holders import PREFIX as RESPONSES
from gateway.proxy.holders import ResponseHolders
from gateway.proxy.parts import Parts
from gateway.proxy.peer import Http, PoolSettings
from gateway.proxy.realtime import PATH as REALTIME
from gateway.proxy.realtime import Realtime
from gateway.proxy.server import DataPlane
from gateway.proxy.stored_pages import StoredPages
from gateway.proxy.upstream import UpstreamPool
from gateway.queue.queue import Queue
from gateway.record.recorder import Recorder
from gateway.request import RequestReader
from gateway.sidecar.hints import NO_HINTS
from gateway.stored import StoredResponses
from gateway.tenancy import Tenancy
from gateway.tokens import TokenService
from gateway.tracing.types import Tracing
from indexer import PrefixIndex
from scorer.fleet import Fleet
from scorer.planner import Planner
from scorer.types import ChangeKind, EngineStats, Role, WorkerChange

HTTP: Http = "fast"
"""How worlds speak HTTP that are not told (see tests/support/planes.py)."""

Script = Callable[["Call"], Awaitable[None]]


class Call:
    """One request as a stub upstream received it, and the means to answer."""

    def __init__(self, head: bytes, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.head = head
        self.body = body
        self.reader = reader
        self.writer = writer
        self.hung_up = asyncio.Event()

    @property
    def line(self) -> str:
        return self.head.split(b"\r\n", 1)[0].decode()

    @property
    def headers(self) -> list[tuple[str, str]]:
        rows = self.head.decode("latin-1").split("\r\n")[1:]
        return [(name, value.strip()) for name, _, value in (row.partition(":") for row in rows if row)]

    def header(self, name: str) -> str | None:
        return next((v for n, v in self.headers if n.lower() == name.lower()), None)

    async def send(self, data: bytes) -> None:
        if self.writer.transport.is_closing():  # uvloop's would raise RuntimeError.
            raise ConnectionResetError
        self.writer.write(data)
        await self.writer.drain()

    async def ok(self, body: bytes = b"{}", *headers: str, status: str = "200 OK") -> None:
        rows = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
        await self.send("\r\n".join(rows).encode() + b"\r\n\r\n" + body)

    async def begin_stream(self) -> None:
        await self.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def wait_hang_up(self) -> None:
        """Until the peer closes or resets."""
        try:
            while await self.reader.read(1024):
                pass
        except ConnectionError:
            pass
        self.hung_up.set()

    def reset(self) -> None:
        self.writer.transport.abort()


class Stub:
    """An upstream that runs `script` for each request; keep-alive until the script closes the writer."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.continues = True
        """Whether it asks for bodies that wait to be asked for."""
        self.calls: list[Call] = []
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Stub:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if self.continues and b"\r\nexpect: 100-continue" in head.lower():
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                length = next(
                    (int(r.split(b":")[1]) for r in head.lower().split(b"\r\n") if r.startswith(b"content-length:")), 0
                )
                call = Call(head[:-4], await reader.readexactly(length), reader, writer)
                self.calls.append(call)
                await self.script(call)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()


class World:
    """`workers`: name -> URL. All serve `model`. In a test: ``async with World({"a": stub.url}) as world:``."""

    def __init__(
        self,
        workers: dict[str, str],
        *,
        model: str = "m",
        policy: str = "warmroute",
        ranks: int = 1,
        max_body_bytes: int = 1 << 20,
        max_concurrency: int = 64,
        min_body_bytes_per_s: int = 1024,
        pool_idle_s: float = 4.0,
        request_timeout_s: float = 30.0,
        response_headers: bool = True,
        http: Http | None = None,
        pd: PdConfig | None = None,
        roles: dict[str, Role] | None = None,
        queue: QueueConfig | None = None,
        tenancy: TenancyConfig | None = None,
        keys: tuple[Key, ...] = (),
        engine_key: str = "",
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self.pd = pd or PdConfig()
        self._queue = queue or QueueConfig()
        self._said = 0
        self.tenancy = Tenancy(tenancy or TenancyConfig(), "a secret of the tests", keyed=bool(keys))
        self._keys = keys, engine_key
        self.fleet = Fleet()
        self.planner = Planner(self.fleet, PrefixIndex(), policy=policy, pd_policy=self.pd.policy or "local")
        self.tokens = TokenService()
        self.health = Health()
        self.down: set[str] = set()
        self.frozen: set[str] = set()
        """Workers whose engines answer no scrape."""
        self.hints = NO_HINTS
        self.metrics = Metrics(policy)
        self.hits = HitBook()
        self.stored = StoredResponses()
        self.log = io.StringIO()
        self._settings = PoolSettings(
            connect_timeout_s=1.0,
            pool_idle_s=pool_idle_s,
            request_timeout_s=request_timeout_s,
            http=http or HTTP,
        )
        self._workers = workers
        self._roles = roles or {}
        self._model = model
        self._ranks = ranks
        self._limits = (max_body_bytes, min_body_bytes_per_s, max_concurrency, response_headers)
        self.access = AccessLog("json", self.log)

    async def __aenter__(self) -> World:
        body_bytes, bytes_per_s, concurrency, response_headers = self._limits
        self.upstreams = UpstreamPool(self._settings)
        up = Available(self.fleet.workers, lambda name: name not in self.down and self.health.available(name))
        self.handoffs = assemble(
            self.pd,
            planner=self.planner,
            upstreams=self.upstreams,
            health=self.health,
            hits=self.hits,
            registry=self.metrics.registry,
            available=up,
            nixl_of=lambda _: None,
            rng=random.Random(1),
        )
        self.holders = ResponseHolders(
            self.stored, self.upstreams, lambda: list(self.fleet.workers), by_tenant=self.tenancy.by_tenant
        )
        keys, engine_key = self._keys
        self.door = Door(keys, self.metrics.registry, engine_key=engine_key) if keys else None
        self.background: Background | None = None
        if self.door is not None:
            longest_s = self._settings.request_timeout_s
            self.background = Background(self.upstreams, self.metrics.registry, longest_s=longest_s)
        self.queue = Queue(
            self._queue, self.planner, up, self.metrics, random.Random(1), by_tenant=self.tenancy.by_tenant
        )
        self.parts = Parts(
            planner=self.planner,
            reader=RequestReader(self.fleet, self.tokens, holder_of=self.holders.find),
            upstreams=self.upstreams,
            health=self.health,
            available=up,
            metrics=self.metrics,
            hits=self.hits,
            prefixes=TopPrefixes(),
            access=self.access,
            recorder=Recorder(),
            stored=self.stored,
            rng=random.Random(1),
            max_body_bytes=body_bytes,
            min_body_bytes_per_s=bytes_per_s,
            response_headers=response_headers,
            handoffs=self.handoffs,
            heard_since=lambda name, since_s: name not in self.frozen,
            hints=lambda request: self.hints,
            queue=self.queue,
            tenancy=self.tenancy,
            door=self.door,
            background=self.background,
            tracing=self._tracing,
        )
        for name, url in self._workers.items():
            self.add(name, url)
        self.plane = DataPlane(self.parts, max_concurrency=concurrency)
        self.plane.prefixes = {RESPONSES: StoredPages(self.plane, self.holders).page}
        self.realtime = Realtime(
            self.parts, self.plane, tls=True, connect_timeout_s=1.0, longest_s=self._settings.request_timeout_s
        )
        self.plane.pages = {REALTIME: self.realtime.page}
        self.server = self.plane.listener(self._settings.http, "127.0.0.1", 0)
        await self.server.start()
        self.http = aiohttp.ClientSession(auto_decompress=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        await self.server.close()
        await self.realtime.close()
        if self.background is not None:
            await self.background.close()
        await self.handoffs.releases.close()
        await self.upstreams.close()
        await self.access.close()
        await self.tokens.close()

    def add(self, name: str, url: str, model: str | None = None, adapters: tuple[str, ...] = ()) -> None:
        role = self._roles.get(name, Role.BOTH)
        self.fleet.apply(WorkerChange(kind=ChangeKind.ADDED, worker=name, url=url, role=role))
        nixl_bytes = 0.0 if self._roles else None
        self.fleet.set_stats(name, EngineStats(scraped_at_s=0.0, block_size=16, nixl_bytes=nixl_bytes))
        models = [model or self._model]
        self.fleet.set_capabilities(name, models=models, adapters=adapters, ranks=range(self._ranks))
        self.planner.configure_worker(name)
        self.health.add(name, time.monotonic())
        self.upstreams.set(name, url)
        self.metrics.add_worker(name)
        self.hits.add_worker(name)

    def say(self, name: str, *, waiting: float, running: float | None = None, age_s: float = -60.0) -> None:
        """What the worker's engine tells of itself now, which a slow machine does not make stale; without `running`, a
        number that moves.
        """
        self._said += 1
        if running is None:
            running = 1 + self._said % 2
        stats = EngineStats(scraped_at_s=time.monotonic() - age_s, block_size=16, running=running, waiting=waiting)
        self.fleet.set_stats(name, stats)
        self.queue.scraped(self.fleet.workers[name])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, bytes, Any]:
        """(status, body, headers) of an answer read to its end."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(
            self.url + path, data=data, headers={"Content-Type": "application/json", **headers}
        ) as response:
            return response.status, await response.read(), response.headers

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.server.port)

    def load(self) -> dict[str, int]:
        """Booked requests by worker."""
        return {
            worker.name: sum(load.requests for load in worker.loads.values()) for worker in self.fleet.workers.values()
        }

    def is_idle(self) -> bool:
        """Nothing booked, counted or assumed is left."""
        return (
            not any(self.load().values())
            and self.planner.in_flight() == 0
            and not any(self.health.state(name).in_flight for name in self.fleet.workers)
            and self.plane.in_flight == 0
            and self.queue.n_waiting == 0
        )

    def value(self, name: str, **labels: str) -> float:
        """A metric's value; 0 when there is no such series."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def records(self) -> list[dict[str, Any]]:
        await self.access.close()
        return [json.loads(line) for line in self.log.getvalue().splitlines()]


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.002)


def raw_request(body: bytes, *headers: str, line: str = "POST /v1/completions HTTP/1.1", length: bool = True) -> bytes:
    rows = [line, "Host: gateway.example", "Content-Type: application/json", *headers]
    if length:
        rows.append(f"Content-Length: {len(body)}")
    return "\r\n".join(rows).encode("latin-1") + b"\r\n\r\n" + body
