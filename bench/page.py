"""`python -m bench page`: what it costs a gateway that its page (`/debug/stream`) is watched.

Two gateways in processes of their own, in front of the same 64 workers that cost next to nothing, have the same ten
streamed answers a second. One of them has 10 viewers, then the other; the figure is the median over rounds of how much
more CPU time the watched one takes, as a share of one core. So what disturbs both at once is left out. Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from bench.demo.gateway import free_port
from bench.goals import Goal, judged
from bench.proxy.feed import Feed
from bench.proxy.processes import cpu_s
from bench.proxy.prompts import MODEL

TARGETS: list[Goal] = [("viewers_10_cpu_percent", "<=", 1.0), ("first_message_bytes", "<=", 65_536)]
N_WORKERS, N_VIEWERS = 64, 10
_PER_S = 10
_SCRAPE_S = 5.0
"""To read 64 pages of metrics takes more than what is measured here."""
_HOST = "127.0.0.1"
_SETTLE_S = 1.0
"""After viewers came or went, before the clock is read."""


class Watched(msgspec.Struct):
    """What one viewer was sent."""

    first_bytes: int = 0
    bytes: int = 0
    messages: int = 0


async def _view(http: aiohttp.ClientSession, url: str, seen: Watched) -> None:
    async with http.get(url) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: "):
                seen.first_bytes = seen.first_bytes or len(line)
                seen.messages += 1
            seen.bytes += len(line)


async def _ask(http: aiohttp.ClientSession, url: str) -> None:
    """Streamed answers, one after the other in time, whether earlier ones have ended or not. Raises what one raised."""
    rng = random.Random(1)
    shared = [[rng.randrange(32_000) for _ in range(1024)] for _ in range(8)]
    asked: set[asyncio.Task[None]] = set()
    try:
        while True:
            prompt = rng.choice(shared) + [rng.randrange(32_000) for _ in range(64)]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "stream": True, "seed": 10}
            asked.add(asyncio.create_task(_complete(http, url, body)))
            await asyncio.sleep(1 / _PER_S)
            for task in [task for task in asked if task.done()]:
                asked.discard(task)
                task.result()
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def _complete(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with http.post(url, json=body) as response:
        response.raise_for_status()
        await response.read()


@contextlib.asynccontextmanager
async def _watching(http: aiohttp.ClientSession, url: str, n: int) -> AsyncIterator[list[Watched]]:
    seen = [Watched() for _ in range(n)]
    tasks = [asyncio.create_task(_view(http, url, each)) for each in seen]
    try:
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Watcher(NamedTuple):
    """One of the two gateways."""

    process: subprocess.Popen[bytes]
    url: str
    admin: str


async def _difference(watched: Watcher, other: Watcher, duration_s: float) -> tuple[float, float]:
    """(share of a core that the first takes more than the second, that of the second)"""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    before = [cpu_s(each.process.pid) for each in (watched, other)]
    await asyncio.sleep(duration_s)
    after = [cpu_s(each.process.pid) for each in (watched, other)]
    first, second = ((b - a) / (loop.time() - began_s) for a, b in zip(before, after, strict=True))
    return first - second, second


async def _ready(http: aiohttp.ClientSession, admin: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{admin}/health") as response:
                    if (await response.json(content_type=None))["usable"] == N_WORKERS:
                        return
            await asyncio.sleep(0.2)


async def _measure(gateways: tuple[Watcher, Watcher], rounds: int, round_s: float) -> dict[str, float]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        for each in gateways:
            await _ready(http, each.admin)
        asking = [asyncio.create_task(_ask(http, f"{each.url}/v1/completions")) for each in gateways]
        more, alone, last = [], [], Watched()
        for _ in range(rounds):
            both = []
            for watched, other in (gateways, gateways[::-1]):
                async with _watching(http, f"{watched.admin}/debug/stream", N_VIEWERS) as seen:
                    await asyncio.sleep(_SETTLE_S)
                    difference, share = await _difference(watched, other, round_s)
                both.append(difference)
                alone.append(share)
                last = seen[0]
            more.append(100 * statistics.mean(both))
        for task in asking:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return {
        "viewers_10_cpu_percent": statistics.median(more),
        "viewers_10_cpu_percent_lowest": min(more),
        "viewers_10_cpu_percent_highest": max(more),
        "gateway_cpu_percent": 100 * statistics.median(alone),
        "first_message_bytes": last.first_bytes,
        "message_bytes": (last.bytes - last.first_bytes) / max(1, last.messages - 1),
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench page", description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--quick", action="store_true", help="two short rounds (figures are not comparable)")
    args = parser.parse_args(argv)
    if not sys.platform.startswith("linux"):
        print("bench: error: CPU clocks of processes are read, which needs Linux", file=sys.stderr)
        return 2
    figures = run(*((2, 2.0) if args.quick else (10, 5.0)))
    for name, value in figures.items():
        print(f"  {name:<34} {value:>12,.2f}")
    found = judged(figures, TARGETS)
    for target in found:
        print(f"{'met ' if target['met'] else 'MISS'}  {target['name']} {target['goal']}: {target['measured']}")
    if args.json:
        rounded = {name: round(value, 3) for name, value in figures.items()}
        print(json.dumps({"bench": "page", "figures": rounded, "targets": found}))
    return 0


def run(rounds: int, round_s: float) -> dict[str, float]:
    """The figures of so many rounds, each of `round_s` with viewers at one gateway and then at the other."""
    feed = Feed(N_WORKERS)
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        stack.callback(feed.close)
        command = [sys.executable, "-m", "bench.proxy.backend", "--workers", str(N_WORKERS)]
        backend = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
        stack.callback(_end, backend)
        assert backend.stdout is not None  # noqa: S101 - piped
        workers = [
            {"url": f"http://{_HOST}:{worker}", "name": f"worker-{i:02}", "events": events}
            for i, (worker, events) in enumerate(
                zip(json.loads(backend.stdout.readline())["ports"], feed.endpoints, strict=True)
            )
        ]
        gateways = (_gateway(Path(folder, "a.yaml"), workers), _gateway(Path(folder, "b.yaml"), workers))
        for each in gateways:
            stack.callback(_end, each.process)
        return asyncio.run(_measure(gateways, rounds, round_s))


def _gateway(file: Path, workers: list[dict[str, Any]]) -> Watcher:
    port, admin_port = free_port(), free_port()
    config = {
        "gateway": {"host": _HOST, "port": port, "admin_host": _HOST, "admin_port": admin_port},
        "workers": workers,
        "health": {"scrape_interval_s": _SCRAPE_S},
        "logging": {"level": "error"},
    }
    file.write_bytes(msgspec.json.encode(config))  # Which is YAML.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WARMROUTE_")}
    command = [sys.executable, "-m", "gateway", "gateway", "--config", str(file)]
    process = subprocess.Popen(command, env=environment)  # noqa: S603
    return Watcher(process, f"http://{_HOST}:{port}", f"http://{_HOST}:{admin_port}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
