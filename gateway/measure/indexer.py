"""The index as a service: what a lookup over gRPC takes, how many blocks a copy can follow, and how soon it begins.

An indexer of made-up workers in a process of its own, its questions and its copy in this one.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import grpc

from gateway.config.schema import IndexServiceConfig
from gateway.indexservice.addresses import Addresses
from gateway.indexservice.link import ReplicaLink
from gateway.indexservice.publisher import Publisher
from gateway.indexservice.server import SERVICE, IndexServer, Settings
from gateway.indexservice.wire import packed
from gateway.pb import indexer_pb2 as pb
from indexer import PrefixIndex, Replica, decode_batch
from indexer.keys import chain, root

PROMPT_BLOCKS = 2048
BLOCKS_PER_FRAME = 32
_BUDGET_BYTES = 8 << 30
_CONCURRENCY = 8


def serve_indexer(n_workers: int, n_blocks: int, socket: str) -> None:
    """Says ``{"port": ...}``, then for each line ``RATE SECONDS`` on stdin stores and removes so many blocks
    a second.
    """
    asyncio.run(_serve(n_workers, n_blocks, socket))


async def _serve(n_workers: int, n_blocks: int, socket: str) -> None:
    from bench.kv_frames import BLOCK_SIZE, frame, tokens

    rng = random.Random(3)  # noqa: S311
    index = PrefixIndex(budget_bytes=_BUDGET_BYTES)
    hashes: list[list[int]] = []
    shared = tokens(rng, PROMPT_BLOCKS * BLOCK_SIZE).tolist()
    for worker in range(n_workers):
        own = [rng.getrandbits(63) for _ in range(PROMPT_BLOCKS)]
        hashes.append(own)
        index.apply(f"w{worker}", 0, decode_batch(frame(own, None, shared, BLOCKS_PER_FRAME)))
        for _ in range(max(0, n_blocks - PROMPT_BLOCKS) // 256):
            part = [rng.getrandbits(63) for _ in range(256)]
            ids = array("I", rng.randbytes(4 * 256 * BLOCK_SIZE)).tolist()
            index.apply(f"w{worker}", 0, decode_batch(frame(part, None, ids, BLOCKS_PER_FRAME)))
    publisher = Publisher(index, dict, history_bytes=64 << 20, digest_interval_s=30.0)
    server = IndexServer(index, publisher, Settings(socket=socket))
    publisher.start()
    await server.start()
    print(json.dumps({"port": server.port, "prompt": shared}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        rate, seconds = map(float, line.split())
        frames = await loop.run_in_executor(None, churn, rng, [f"w{i}" for i in range(4)])
        before_s = time.process_time()
        fed = await loop.run_in_executor(None, _feed, index, frames, rate, seconds)
        publisher.flush()
        fed |= {"cpu_s": time.process_time() - before_s, "sequence": publisher.history.sequence}
        print(json.dumps(fed), flush=True)
    await server.close()
    await publisher.close()


def churn(rng: random.Random, workers: Sequence[str]) -> list[tuple[str, bytes]]:
    """Prompts of 32 blocks stored and removed again, as vLLM announces them."""
    from bench.kv_frames import BLOCK_SIZE, frame, removal

    found = []
    for _ in range(512):
        worker = workers[rng.randrange(len(workers))]
        own = [rng.getrandbits(63) for _ in range(BLOCKS_PER_FRAME)]
        ids = array("I", rng.randbytes(4 * BLOCKS_PER_FRAME * BLOCK_SIZE)).tolist()
        found.append((worker, frame(own, None, ids, BLOCKS_PER_FRAME)))
        found.append((worker, removal(own[::-1])))
    return found


def _feed(index: PrefixIndex, frames: list[tuple[str, bytes]], rate: float, seconds: float) -> dict[str, Any]:
    """`rate` blocks a second, stored and removed ones alike; 0: as fast as it goes."""
    began_s, cpu_s, blocks = time.monotonic(), time.thread_time(), 0
    while (elapsed_s := time.monotonic() - began_s) < seconds:
        for worker, payload in frames:
            index.apply(worker, 0, decode_batch(payload))
            blocks += BLOCKS_PER_FRAME
            if rate and blocks > rate * (time.monotonic() - began_s):
                time.sleep(0.002)
            if time.monotonic() - began_s > seconds:
                break
    return {"blocks": blocks, "elapsed_s": elapsed_s, "feeding_cpu_s": time.thread_time() - cpu_s}


def measure_indexer(n_workers: int, n_blocks: int, seconds: float) -> tuple[dict[str, float], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder) / "indexer.sock")
        command = [sys.executable, "-m", "gateway.measure", "serve-indexer", str(n_workers), str(n_blocks), socket]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018
        try:
            told = json.loads(process.stdout.readline())
            figures = asyncio.run(_ask(told, f"unix:{socket}", f"127.0.0.1:{told['port']}", seconds))
            figures |= _copy(f"unix:{socket}", process.stdin, process.stdout, seconds)
        finally:
            process.terminate()
            process.wait()
    return figures, {"workers": n_workers, "blocks_per_worker": n_blocks, "prompt_blocks": PROMPT_BLOCKS}


async def _ask(told: dict[str, Any], socket: str, port: str, seconds: float) -> dict[str, float]:
    from bench.kv_frames import BLOCK_SIZE

    ids = array("I", told["prompt"]).tobytes()
    keys = packed(chain(root(None, BLOCK_SIZE), ids, BLOCK_SIZE, 0, PROMPT_BLOCKS, {}))
    by_keys = pb.MatchRequest(block_keys=keys, block_size=BLOCK_SIZE)
    by_tokens = pb.MatchRequest(token_ids=ids)
    figures: dict[str, float] = {}
    for where, address in (("unix", socket), ("tcp", port)):
        async with grpc.aio.insecure_channel(address) as channel:
            match = channel.unary_unary(
                f"/{SERVICE}/Match", pb.MatchRequest.SerializeToString, pb.MatchResponse.FromString
            )
            for what, request in (("keys", by_keys), ("tokens", by_tokens)):
                assert (await match(request)).holdings  # noqa: S101
                taken = await _one_by_one(match, request, seconds / 8)
                name = f"match_{what}_{where}"
                figures[f"{name}_p50_us"] = statistics.median(taken) * 1e6
                figures[f"{name}_p99_us"] = sorted(taken)[int(len(taken) * 0.99)] * 1e6
                figures[f"{name}_per_s"] = await _many(match, request, seconds / 8)
    return figures


async def _one_by_one(match: Any, request: pb.MatchRequest, seconds: float) -> list[float]:
    taken = []
    until_s = time.monotonic() + seconds
    while (began_s := time.monotonic()) < until_s:
        await match(request)
        taken.append(time.monotonic() - began_s)
    return taken


async def _many(match: Any, request: pb.MatchRequest, seconds: float) -> float:
    until_s = time.monotonic() + seconds

    async def ask() -> int:
        n = 0
        while time.monotonic() < until_s:
            await match(request)
            n += 1
        return n

    return sum(await asyncio.gather(*(ask() for _ in range(_CONCURRENCY)))) / seconds


def _copy(address: str, ask: IO[str], answers: IO[str], seconds: float) -> dict[str, float]:
    replica = Replica(budget_bytes=_BUDGET_BYTES)
    rng = random.Random(1)  # noqa: S311
    link = ReplicaLink(Addresses(IndexServiceConfig(addresses=(address,)), rng), replica)
    began_s, cpu_s = time.monotonic(), time.process_time()
    link.start()
    _wait(lambda: link.is_live)
    figures = {
        "snapshot_s": time.monotonic() - began_s,
        "snapshot_copy_cpu_s": time.process_time() - cpu_s,
        "snapshot_blocks": float(link.counters()["copy_blocks"]),
    }
    for name, rate in (("watch_100k", 100_000.0), ("watch_most", 0.0)):
        before, cpu_s, began_s = link.counters()["copy_blocks"], time.process_time(), time.monotonic()
        ask.write(f"{rate} {seconds}\n")
        ask.flush()
        fed = json.loads(answers.readline())
        _wait(lambda fed=fed: link.sequence >= fed["sequence"])
        blocks = link.counters()["copy_blocks"] - before
        elapsed_s = time.monotonic() - began_s
        figures |= {
            f"{name}_blocks_per_s": blocks / elapsed_s,
            f"{name}_behind_ms": (elapsed_s - fed["elapsed_s"]) * 1e3,
            f"{name}_ingest_us_per_block": fed["feeding_cpu_s"] / fed["blocks"] * 1e6,
            f"{name}_telling_us_per_block": (fed["cpu_s"] - fed["feeding_cpu_s"]) / fed["blocks"] * 1e6,
            f"{name}_copying_us_per_block": (time.process_time() - cpu_s) / blocks * 1e6,
        }
    figures["copies_cut"] = float(link.counters().get("copy_cut_off", 0))
    link.stop()
    return figures


def _wait(condition: Any, within_s: float = 120.0) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError
        time.sleep(0.002)
