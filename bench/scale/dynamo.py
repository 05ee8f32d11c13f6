"""`python -m dynamo.indexer` out of an environment of its own, fed by the same engines and asked over HTTP.

It listens on all addresses while it runs, which it offers no choice about.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import statistics
import subprocess
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.kv_frames import BLOCK_SIZE
from bench.scale.fleet import Fleet, Process, free_ports, until

_HASHES = (
    "import json, sys; from dynamo.llm import compute_block_hash_for_seq as f;"
    "json.dump([[h - (1 << 64) if h >> 63 else h for h in f(ids, int(sys.argv[1]))] for ids in json.load(sys.stdin)],"
    " sys.stdout)"
)
_MODEL = "m"


class Dynamo:
    """Follows every worker once it is made; what they send from then on it knows."""

    def __init__(self, fleet: Fleet, python: Path, threads: int = 4) -> None:
        """Raises RuntimeError where it does not start."""
        self._python = python
        (self.port,) = free_ports(1)
        command = [str(python), "-m", "dynamo.indexer", "--port", str(self.port), "--threads", str(threads)]
        self.process: Process = fleet.start("dynamo.indexer", command)
        until(self._is_up, self.process)
        for number, worker in enumerate(fleet.workers):
            body = {
                "instance_id": number + 1,
                "endpoint": worker["events"],
                "model_name": _MODEL,
                "block_size": BLOCK_SIZE,
            }
            status, text = self._call("POST", "/register", body)
            if status not in (200, 201):
                raise RuntimeError(f"dynamo.indexer does not follow {worker['name']}: {status} {text[:200]!r}")
        until(lambda: self._followed() >= len(fleet.workers), self.process)

    def applied(self) -> int:
        """Stored events that it has taken in."""
        text = self._call("GET", "/metrics")[1].decode()
        found = re.findall(r'kv_cache_events_applied\{event_type="stored",status="ok"\} (\d+)', text)
        return sum(map(int, found))

    def bodies(self, kind: str, prompts: Sequence[array[int]]) -> list[bytes]:
        """Questions by ``tokens``, or by ``keys``, its own."""
        ids = [prompt.tolist() for prompt in prompts]
        if kind == "tokens":
            path, name, values = "/query", "token_ids", ids
        else:
            told = subprocess.run(  # noqa: S603
                [str(self._python), "-c", _HASHES, str(BLOCK_SIZE)],
                input=json.dumps(ids),
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            path, name, values = "/query_by_hash", "block_hashes", json.loads(told.stdout)
        return [_request(path, {"model_name": _MODEL, name: each}) for each in values]

    async def load(self, bodies: Sequence[bytes], clients: int, seconds: float, holders: int) -> dict[str, float]:
        """Each client on a connection of its own. Raises RuntimeError for an answer without `holders` workers in it."""
        took_s: list[float] = []
        until_s = time.monotonic() + seconds

        async def one(i: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
            answer = b""
            while (began_s := time.monotonic()) < until_s:
                writer.write(bodies[i % len(bodies)])
                answer = await _answer(reader)
                took_s.append(time.monotonic() - began_s)
                i += 1
            writer.close()
            if answer and len(json.loads(answer)["scores"]) != holders:
                raise RuntimeError(f"dynamo.indexer answers otherwise: {answer[:300]!r}")

        await asyncio.gather(*(one(i * 7) for i in range(clients)))
        return {
            "answers": len(took_s),
            "per_s": len(took_s) / seconds,
            "p50_ms": statistics.median(took_s) * 1e3,
            "p99_ms": sorted(took_s)[int(len(took_s) * 0.99)] * 1e3,
        }

    def _followed(self) -> int:
        workers = json.loads(self._call("GET", "/workers")[1])
        return sum(it["status"] == "active" for worker in workers for it in worker["listeners"].values())

    def _is_up(self) -> bool:
        try:
            return self._call("GET", "/health")[0] == 200
        except OSError:
            return False

    def _call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _request(path: str, body: Any) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: l\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = re.search(rb"content-length: (\d+)", head)
    if not head.startswith(b"http/1.1 200") or length is None:
        raise RuntimeError(f"dynamo.indexer answers {head[:100]!r}")
    return await reader.readexactly(int(length[1]))
