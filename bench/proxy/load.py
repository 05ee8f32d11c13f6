"""Closed loops on raw connections: each sends its next request when its last answer is complete."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from bench.proxy import http1
from bench.proxy.prompts import FRESH_MARK

_CONNECT_S = 10.0
_RECONNECT_S = 0.05
_GRACE_S = 15.0
"""What has no end so long after the last request was sent, counts as failed."""
_HOST = "127.0.0.1"


def fresh(body: bytes, number: int) -> bytes:
    """`body` with `number` in place of its mark, if it has one."""
    return body.replace(FRESH_MARK, b"%016d" % number)


class Requests:
    """Whole requests, turn by turn. Where a body has `FRESH_MARK`, each is a number of its own."""

    def __init__(self, path: str, bodies: Sequence[bytes]) -> None:
        self._parts = [http1.post(path, _HOST, body).partition(FRESH_MARK) for body in bodies]
        self._turn = 0
        self._first = time.time_ns() % 10**15
        """No two loads ask the same."""

    def __len__(self) -> int:
        return len(self._parts)

    def next(self) -> bytes:
        before, mark, after = self._parts[self._turn % len(self._parts)]
        self._turn += 1
        if not mark:
            return before
        return b"%s%016d%s" % (before, self._first + self._turn, after)


@dataclass
class Result:
    """What came back. Times in seconds; `failures` by cause. Answers count when they are whole."""

    latencies_s: list[float] = field(default_factory=list)
    chunk_delays_s: list[float] = field(default_factory=list)
    finished: int = 0
    chunks: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


class _Client(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, load: Load, port: int) -> None:
        self.port = port
        self.sent_s = 0.0
        self._load = load
        self._answer = http1.Answer()
        self._waiting = False
        self._closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self) -> None:
        self._answer.next()
        self._waiting = True
        self.sent_s = time.perf_counter()
        self.transport.write(self._load.requests.next())

    def data_received(self, data: bytes) -> None:
        if not self._waiting:
            return
        load, answer = self._load, self._answer
        complete = answer.feed(data)
        if load.stamps:
            now_ns = time.monotonic_ns()
            load.result.chunk_delays_s += [
                (now_ns - int(stamp)) / 1e9 for stamp in http1.STAMP.findall(data) if int(stamp)
            ]
        if complete:
            self._complete()

    def _complete(self) -> None:
        self._waiting = False
        load, answer = self._load, self._answer
        load.ended(self, answer)
        if answer.closes:
            self._closed = True
            self.transport.close()
            load.lost(self)
        else:
            load.go_on(self)

    def give_up(self) -> None:
        """Stop waiting; the connection is of no use any more."""
        if self._waiting:
            self._waiting = False
            self._load.failed("no end")
        self._closed = True
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closed:
            return
        self._closed = True
        if self._waiting:
            self._waiting = False
            if self._answer.ended():
                self._load.ended(self, self._answer)
            else:
                self._load.failed("connection lost")
        self._load.lost(self)


class Load:
    """`concurrency` connections to `ports` in turn. ``async with Load(...) as load: result = await load.run(0.5)``.

    `chunks`: events each answer must have, 0 for answers that are not streamed. With `stamps`, how late each chunk
    arrives is noted too.
    """

    def __init__(
        self, ports: Sequence[int], requests: Requests, concurrency: int, *, chunks: int = 0, stamps: bool = False
    ) -> None:
        self.requests = requests
        self.stamps = stamps
        self.result = Result()
        self._ports = ports
        self._concurrency = concurrency
        self._chunks = chunks
        self._clients: set[_Client] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._until_s = 0.0
        self._left: int | None = None
        self._under_way = 0
        self._idle = asyncio.Event()

    async def __aenter__(self) -> Load:
        try:
            for i in range(self._concurrency):
                await self._connect(self._ports[i % len(self._ports)])
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._connecting:
            task.cancel()
        self._give_up()
        await asyncio.sleep(0)

    async def run(self, duration_s: float, *, at_most: int | None = None) -> Result:
        """Send for `duration_s`, or `at_most` requests where that is given, then wait for the rest."""
        self.result = Result()
        self._left = at_most
        self._idle.clear()
        with _no_collector():
            began_s = time.perf_counter()
            self._until_s = began_s + duration_s
            for client in list(self._clients):
                self.go_on(client)
            if self._under_way:
                self._idle.clear()
                try:
                    async with asyncio.timeout(duration_s + _GRACE_S):
                        await self._idle.wait()
                except TimeoutError:
                    self._give_up()
            self.result.wall_s = time.perf_counter() - began_s
        return self.result

    def go_on(self, client: _Client) -> None:
        if self._wanted():
            if self._left is not None:
                self._left -= 1
            self._under_way += 1
            client.send()
        elif not self._under_way:
            self._idle.set()

    def ended(self, client: _Client, answer: http1.Answer) -> None:
        result = self.result
        self._under_way -= 1
        if answer.status != 200:
            result.failures[f"status {answer.status}"] += 1
        elif answer.events != self._chunks or (self._chunks and not answer.done):
            result.failures["not all chunks"] += 1
        else:
            result.finished += 1
            result.chunks += answer.events
            result.latencies_s.append(time.perf_counter() - client.sent_s)

    def failed(self, why: str) -> None:
        self._under_way -= 1
        self.result.failures[why] += 1

    def lost(self, client: _Client) -> None:
        """A connection ended; another takes its place while there is something to send."""
        self._clients.discard(client)
        if self._wanted():
            self._under_way += 1
            task = asyncio.get_running_loop().create_task(self._replace(client.port))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        elif not self._under_way:
            self._idle.set()

    def _wanted(self) -> bool:
        return self._left > 0 if self._left is not None else time.perf_counter() < self._until_s

    async def _replace(self, port: int) -> None:
        client = None
        while client is None and self._wanted():
            try:
                client = await self._connect(port)
            except OSError:
                self.result.failures["connect"] += 1
                await asyncio.sleep(_RECONNECT_S)
        self._under_way -= 1
        if client is not None:
            self.go_on(client)
        elif not self._under_way:
            self._idle.set()

    async def _connect(self, port: int) -> _Client:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_S):
            _, client = await loop.create_connection(lambda: _Client(self, port), _HOST, port)
        self._clients.add(client)
        return client

    def _give_up(self) -> None:
        self._until_s, self._left = 0.0, None
        for client in list(self._clients):
            client.give_up()
        self._clients.clear()


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
