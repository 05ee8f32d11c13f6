"""A large fleet as one process, as far as an index sees it: KV events, replays and pages to scrape of every worker.

`python -m bench.scale.engines HELD` (JSON of `Held`) says ``{"workers": [...]}`` once they listen, then for each line
on stdin, until there are no more: ``fill`` sends all that is held, ``RATE SECONDS`` so many changes a second, and both
are answered with what was sent.
"""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import sys
import threading
import time
from typing import Any

import aiohttp
import msgspec
import zmq

from bench.engine.config import FakeVllmConfig
from bench.engine.publisher import replay_frames, seq_bytes
from bench.engine.server import FakeVllm
from bench.scale.held import CHAIN_BLOCKS, Held

PAGES = ("/metrics", "/v1/models", "/version", "/health")
_TICK_MS = 2
_REPLAYED_AT_ONCE = 64
"""Batches of one answer between two looks at what else is asked."""
_MOST_SOCKETS = 16_384


class Pages(asyncio.Protocol):
    """The pages of an idle engine, as whole answers: the same for each worker."""

    def __init__(self, answers: dict[bytes, bytes]) -> None:
        self._answers = answers
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of a TCP server
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._seen += data
        while (end := self._seen.find(b"\r\n\r\n")) >= 0:
            path = self._seen.split(b" ", 2)[1]
            self._seen = self._seen[end + 4 :]
            self._transport.write(self._answers.get(path, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"))


async def _read_pages() -> dict[bytes, bytes]:
    answers = {}
    async with FakeVllm(FakeVllmConfig(model="tiny")) as engine, aiohttp.ClientSession() as session:
        for path in PAGES:
            async with session.get(engine.url + path) as response:
                body, kind = await response.read(), response.headers.get("Content-Type", "text/plain")
            head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
            answers[path.encode()] = head.encode() + body
    return answers


async def _serve_pages(answers: dict[bytes, bytes], sockets: list[socket.socket], ready: threading.Event) -> None:
    loop = asyncio.get_running_loop()
    for each in sockets:
        await loop.create_server(lambda: Pages(answers), sock=each)
    ready.set()
    await asyncio.Event().wait()


class Engines:
    """One worker's stream is `batches[w]`, then `churn[w]` in a circle; `sent[w]` batches of it are out."""

    def __init__(self, held: Held) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(2)
        self.context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        self.publishers = [self._socket(zmq.PUB) for _ in range(held.workers)]
        self.routers = [self._socket(zmq.ROUTER) for _ in range(held.workers)]
        self.batches = held.batches()
        self.churn = [held.churn(worker) for worker in range(held.workers)]
        self.sent = [0] * held.workers
        self._next = 0
        self._poller = zmq.Poller()
        self._at = {router: worker for worker, router in enumerate(self.routers)}
        self._replays: list[tuple[int, bytes, int]] = []
        """(worker, who asks, the batch to go on with)"""
        for router in self.routers:
            self._poller.register(router, zmq.POLLIN)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        it = self.context.socket(kind)
        it.setsockopt(zmq.SNDHWM, 0)
        it.setsockopt(zmq.LINGER, 0)
        it.bind("tcp://127.0.0.1:*")
        return it

    def payload(self, worker: int, seq: int) -> bytes:
        batches = self.batches[worker]
        if seq < len(batches):
            return batches[seq]
        churn = self.churn[worker]
        return churn[(seq - len(batches)) % len(churn)]

    def publish(self, worker: int) -> None:
        seq = self.sent[worker]
        self.sent[worker] = seq + 1
        self.publishers[worker].send_multipart([b"", seq_bytes(seq), self.payload(worker, seq)])

    def fill(self) -> dict[str, Any]:
        """All that is held, a batch of each worker in turn."""
        began_s = time.monotonic()
        n = 0
        for i in range(max(map(len, self.batches))):
            for worker, batches in enumerate(self.batches):
                if i < len(batches):
                    self.publish(worker)
                    n += 1
        return {"batches": n, "elapsed_s": time.monotonic() - began_s}

    def run(self, rate: float, seconds: float) -> dict[str, Any]:
        """`rate` blocks a second, as many stored as removed."""
        began_s, cpu_s, n = time.monotonic(), time.process_time(), 0
        while (elapsed_s := time.monotonic() - began_s) < seconds:
            due = int(rate * elapsed_s / (2 * CHAIN_BLOCKS))
            for _ in range(due - n):
                self.publish(self._next)
                self._next = (self._next + 1) % len(self.sent)
            n = max(n, due)
            self.look(_TICK_MS)
        blocks = n * 2 * CHAIN_BLOCKS
        return {"batches": n, "blocks": blocks, "elapsed_s": elapsed_s, "cpu_s": time.process_time() - cpu_s}

    def look(self, wait_ms: int) -> None:
        """Answer some of what is asked."""
        for router, _ in self._poller.poll(0 if self._replays else wait_ms):
            who, *rest = router.recv_multipart()
            self._replays.append((self._at[router], who, int.from_bytes(rest[-1], "big")))
        waiting, self._replays = self._replays, []
        for worker, who, start in waiting:
            stop = min(start + _REPLAYED_AT_ONCE, self.sent[worker])
            frames = replay_frames([(seq, self.payload(worker, seq)) for seq in range(start, stop)], b"", True)
            is_over = stop >= self.sent[worker]
            for parts in frames if is_over else frames[:-1]:
                self.routers[worker].send_multipart([who, *parts])
            if not is_over:
                self._replays.append((worker, who, stop))


def main(text: str) -> None:
    held = msgspec.json.decode(text, type=Held)
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(held.workers)]
    ready = threading.Event()
    pages = asyncio.run(_read_pages())
    threading.Thread(target=lambda: asyncio.run(_serve_pages(pages, listening, ready)), daemon=True).start()
    engines = Engines(held)
    ready.wait()
    workers = [
        {
            "name": f"w{worker}",
            "url": f"http://127.0.0.1:{listening[worker].getsockname()[1]}",
            "events": engines.publishers[worker].getsockopt_string(zmq.LAST_ENDPOINT),
            "replay": engines.routers[worker].getsockopt_string(zmq.LAST_ENDPOINT),
        }
        for worker in range(held.workers)
    ]
    print(json.dumps({"workers": workers}), flush=True)
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=lambda: _read_lines(lines), daemon=True).start()
    while True:
        engines.look(_TICK_MS)
        if lines.empty():
            continue
        line = lines.get().strip()
        if not line:
            return
        told = engines.fill() if line == "fill" else engines.run(*map(float, line.split()))
        print(json.dumps(told), flush=True)


def _read_lines(lines: queue.Queue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put("")


if __name__ == "__main__":
    main(sys.argv[1])
