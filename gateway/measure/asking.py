"""An indexer asked by several clients, watched by many, its index kept in Redis: for `python -m bench scale`.

Each is a process that takes its orders from stdin and answers with a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from typing import Any

import grpc
import msgspec
from prometheus_client import CollectorRegistry

from gateway.config.schema import RedisConfig
from gateway.engine.subscriber import EventIngest
from gateway.indexservice.server import SERVICE
from gateway.indexservice.wire import packed
from gateway.pb import indexer_pb2 as pb
from indexer import PrefixIndex
from indexer.keys import chain, root

_PROMPTS = 64
_OPTIONS = [("grpc.max_receive_message_length", 8 << 20), ("grpc.use_local_subchannel_pool", 1)]
_POLL_S = 0.1
_TIMEOUT_S = 10.0
_BUDGET_BYTES = 64 << 30


def ask_indexer(held: str, address: str) -> None:
    """For each line ``keys|tokens CLIENTS SECONDS``: how long answers take, and how many there are a second."""
    asyncio.run(_ask(held, address))


async def _ask(held_text: str, address: str) -> None:
    from bench.kv_frames import BLOCK_SIZE
    from bench.scale.held import Held, questions

    held = msgspec.json.decode(held_text, type=Held)
    asked: dict[str, list[bytes]] = {"keys": [], "tokens": []}
    for prompt in questions(held, _PROMPTS):
        ids = prompt.tobytes()
        keys = packed(chain(root(None, BLOCK_SIZE), ids, BLOCK_SIZE, 0, held.prompt_blocks, {}))
        asked["keys"].append(pb.MatchRequest(block_keys=keys, block_size=BLOCK_SIZE).SerializeToString())
        asked["tokens"].append(pb.MatchRequest(token_ids=ids).SerializeToString())
    sharers = min(held.sharers, held.workers)
    async with _channel(address) as channel:
        method: Any = channel.unary_unary(f"/{SERVICE}/Match", None, pb.MatchResponse.FromString)
        for kind in asked.values():
            answer = await method(kind[0])
            if len(answer.holdings) != sharers:
                raise RuntimeError(f"{len(answer.holdings)} workers hold a prompt whose beginning {sharers} share")
        print(json.dumps({"ready": True}), flush=True)
        async for kind, clients, seconds in orders():
            print(json.dumps(await _load(method, asked[kind], int(clients), float(seconds))), flush=True)


async def _load(method: Any, requests: list[bytes], clients: int, seconds: float) -> dict[str, float]:
    took_s: list[float] = []
    until_s = time.monotonic() + seconds

    async def one(i: int) -> None:
        while (began_s := time.monotonic()) < until_s:
            await method(requests[i % len(requests)])
            took_s.append(time.monotonic() - began_s)
            i += 1

    await asyncio.gather(*(one(i * 7) for i in range(clients)))
    return {
        "answers": len(took_s),
        "per_s": len(took_s) / seconds,
        "p50_ms": statistics.median(took_s) * 1e3,
        "p99_ms": sorted(took_s)[int(len(took_s) * 0.99)] * 1e3,
    }


def watch_indexer(address: str) -> None:
    """For each line ``N`` so many watchers that read and do nothing else, from where the index is now; those of the
    line before are ended.
    """
    asyncio.run(_watch(address))


async def _watch(address: str) -> None:
    watchers: list[_Watcher] = []
    async for (n,) in orders():
        read_bytes = 0
        for watcher in watchers:
            await watcher.caught_up()
            read_bytes += watcher.read_bytes
            await watcher.close()
        watchers = [_Watcher(address) for _ in range(int(n))]
        for watcher in watchers:
            await watcher.start()
        print(json.dumps({"watching": len(watchers), "read_bytes": read_bytes}), flush=True)


class _Watcher:
    def __init__(self, address: str) -> None:
        self._channel = _channel(address)
        self._latest = b""
        self._task: asyncio.Task[None] | None = None
        self.read_bytes = 0

    async def start(self) -> None:
        self._task = asyncio.create_task(self._read(await self._stats()))
        await self.caught_up()

    async def caught_up(self) -> None:
        """Until it has read what is there now."""
        there = (await self._stats()).sequence
        while self._sequence() < there:  # noqa: ASYNC110 - of a stream that says something every second
            await asyncio.sleep(_POLL_S / 10)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    async def _read(self, at: pb.StatsResponse) -> None:
        watch: Any = self._channel.unary_stream(f"/{SERVICE}/Watch", pb.WatchRequest.SerializeToString, None)
        async for update in watch(pb.WatchRequest(instance=at.instance, sequence=at.sequence)):
            self._latest = update
            self.read_bytes += len(update)

    async def _stats(self) -> pb.StatsResponse:
        stats: Any = self._channel.unary_unary(
            f"/{SERVICE}/Stats", pb.StatsRequest.SerializeToString, pb.StatsResponse.FromString
        )
        answer: pb.StatsResponse = await stats(pb.StatsRequest())
        return answer

    def _sequence(self) -> int:
        update = pb.Update.FromString(self._latest)
        numbers = [delta.sequence for delta in update.deltas]
        return max(numbers, default=max(update.sequence, update.begin.sequence if self._latest else -1))


def keep_snapshots(workers: str, copies: int, redis_url: str) -> None:
    """Follow the engines that the file names until all is known, then put all of it into Redis, once."""
    asyncio.run(_keep(workers, copies, redis_url))


async def _keep(path: str, copies: int, redis_url: str) -> None:
    from gateway.replicas.counts import Counts
    from gateway.replicas.link import clients
    from gateway.replicas.schema import Keys
    from gateway.replicas.snapshots import Snapshots

    index = PrefixIndex(budget_bytes=_BUDGET_BYTES)
    ingest = EventIngest(index)
    ingest.start()
    with open(path, encoding="utf-8") as file:  # noqa: ASYNC230 - before anything runs
        workers = json.load(file)
    for worker in workers:
        ingest.add(worker["name"], 0, worker["events"], worker["replay"])
    while index.stats()["entries"] < copies or any(feed.phase != "live" for feed in ingest.status().values()):  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    config = RedisConfig(url=redis_url)
    client = clients(config, lambda: None)(_TIMEOUT_S)
    registry = CollectorRegistry()
    snapshots = Snapshots("bench", Keys(config.prefix, config.fleet), ingest, Counts(registry))
    began_s, cpu_s = time.monotonic(), time.process_time()
    for _ in workers:
        await snapshots.turn(client)
    told = {
        "wrote_s": time.monotonic() - began_s,
        "cpu_s": time.process_time() - cpu_s,
        "bytes": registry.get_sample_value("warmroute_replicas_sent_bytes_total"),
    }
    await client.aclose()
    ingest.stop()
    print(json.dumps(told), flush=True)


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, _OPTIONS)


async def orders() -> Any:
    """The words of each line on stdin."""
    loop = asyncio.get_running_loop()
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        yield line.split()
