"""Micro-benchmarks of the served index, `PrefixIndex`, with everything on (hashing, lookups, memory, clears, growth),
of one decision of the planner, and, in processes that are set as the gateway's are, of the way from a request's body to
its plan (`gateway/measure/front.py`), of how late the event loop is beside KV events (`stall.py`) and of what the index
takes in (`ingest.py`).

Times are CPU time (`time.thread_time`; `time.process_time` from body to plan), medians of several rounds, because the
machine is shared; the event loop's lateness is wall-clock time. Block size is 16. `--tokenizer` names a model
directory; without it a BPE of 64,000 tokens is trained at the start, and text is made of words it has seen and others.
`python -m bench micro [--json] [--quick] [--tokenizer PATH]`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.decision import bench_decision
from bench.goals import Goal, judged
from bench.kv_frames import BLOCK_SIZE, VOCABULARY, frame, removal, tokens
from bench.text import train
from indexer import PrefixIndex, decode_batch
from indexer.keys import chain, forget_runs, root

TARGETS: list[Goal] = [
    ("lookup_2048_closed_ms", "<=", 0.4),
    ("lookup_2048_holes_ms", "<=", 0.7),
    ("decision_64x8_8k_ms", "<=", 0.5),
    ("body_to_plan_8k_turn_ms", "<=", 1.0),
    ("loop_p99_stall_ms", "<=", 2.0),
    ("ingest_16_per_event_blocks_per_s", ">=", 500_000),
    ("bytes_per_entry_1m", "<=", 250),
    ("clear_100k_ms", "<=", 1.0),
    ("longest_stall_5m_ms", "<=", 80.0),
]


def median_s(run: Callable[[], Any], rounds: int, before: Callable[[], None] = lambda: None) -> float:
    times = []
    for _ in range(rounds):
        before()
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def fill(
    index: PrefixIndex, worker: str, rng: random.Random, n_blocks: int, chain_blocks: int = 128
) -> list[list[int]]:
    """`n_blocks` background blocks in chains of their own; returns the chains' engine hashes."""
    chains = []
    while n_blocks > 0:
        n = min(chain_blocks, n_blocks)
        hashes = [rng.getrandbits(64) for _ in range(n)]
        ids = [rng.randrange(VOCABULARY) for _ in range(n * BLOCK_SIZE)]
        index.apply(worker, 0, decode_batch(frame(hashes, None, ids, n)))
        chains.append(hashes)
        n_blocks -= n
    return chains


def bench_hash(rounds: int) -> dict[str, float]:
    rng = random.Random(1)
    out = {}
    for n in (4096, 32768, 131072):
        data = tokens(rng, n).tobytes()
        seed = root(None, BLOCK_SIZE)
        blocks = n // BLOCK_SIZE
        run = partial(chain, seed, data, BLOCK_SIZE, 0, blocks, {})
        out[f"hash_{n // 1024}k_us"] = median_s(run, rounds) * 1e6
    return out


def bench_lookup(rounds: int, background_blocks: int) -> dict[str, float]:
    """Longest prefix of a prompt over a whole fleet, hashing included.

    "closed": every worker holds the first quarter (a shared system prompt), eight hold more, staggered up to all of it.
    "holes": the same with one block missing in each of the eight. "spread": the worst case, each worker ends at a depth
    of its own. The prompt is one nobody has asked for; "again": it, or one that begins as it does, was. The target
    figures are the slowest of the three fleet sizes.
    """
    out = {}
    for workers in (8, 64, 512):
        for depth in (256, 2048, 8192):
            rng = random.Random(depth + workers)
            for layout in ("closed", "spread"):
                index = PrefixIndex()
                prompt = tokens(rng, depth * BLOCK_SIZE)
                deep = {w * workers // 8: i + 1 for i, w in enumerate(range(8))}
                ends = [
                    max(1, depth * (w + 1) // workers)
                    if layout == "spread"
                    else max(depth // 4, depth * deep.get(w, 0) // 8)
                    for w in range(workers)
                ]
                held: list[list[int]] = []
                for w, n in enumerate(ends):
                    hashes = [rng.getrandbits(64) for _ in range(n)]
                    index.apply(f"w{w}", 0, decode_batch(frame(hashes, None, prompt[: n * BLOCK_SIZE].tolist(), n)))
                    held.append(hashes)
                for w in range(8):
                    fill(index, f"w{w}", rng, background_blocks // 8)
                found = {holder: match.gpu_tokens for holder, match in index.match(prompt).items()}
                if found != {(f"w{w}", 0): n * BLOCK_SIZE for w, n in enumerate(ends)}:
                    raise RuntimeError("the index answered wrongly")
                name = f"lookup_{depth}x{workers}_{layout}_ms"
                out[name] = 1e3 * median_s(partial(index.match, prompt), rounds, forget_runs)
                if layout == "closed":
                    out[name.replace("closed", "again")] = 1e3 * median_s(partial(index.match, prompt), rounds)
                    for w in deep:
                        index.apply(f"w{w}", 0, decode_batch(removal([held[w][len(held[w]) // 2]])))
                    holes_s = median_s(partial(index.match, prompt), rounds, forget_runs)
                    out[name.replace("closed", "holes")] = 1e3 * holes_s
    for kind in ("closed", "again", "holes", "spread"):
        out[f"lookup_2048_{kind}_ms"] = max(out[f"lookup_2048x{workers}_{kind}_ms"] for workers in (8, 64, 512))
    return out


def _rss_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def measure_memory(n_entries: int, sharers: int) -> dict[str, float]:
    """RSS growth per (block, worker) entry. Runs in a process of its own, as freed memory is not returned."""
    rng = random.Random(7)
    index = PrefixIndex(budget_bytes=64 << 30)
    fill(index, "warm", rng, 1000)
    gc.collect()
    before, accounted = _rss_bytes(), index.stats()["bytes"]
    n_blocks = n_entries // sharers
    while n_blocks > 0:
        n = min(128, n_blocks)
        ids = [rng.randrange(VOCABULARY) for _ in range(n * BLOCK_SIZE)]
        for w in range(sharers):
            hashes = [rng.getrandbits(64) for _ in range(n)]
            index.apply(f"w{w}", 0, decode_batch(frame(hashes, None, ids, n)))
        n_blocks -= n
    gc.collect()
    return {
        "bytes_per_entry": (_rss_bytes() - before) / n_entries,
        "accounted_bytes_per_entry": (index.stats()["bytes"] - accounted) / n_entries,
    }


def bench_memory(n_entries: int) -> dict[str, float]:
    out = {}
    for sharers in (1, 8):
        code = f"import json, bench.micro as m; print(json.dumps(m.measure_memory({n_entries}, {sharers})))"
        found = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)  # noqa: S603
        name = "" if sharers == 1 else f"_{sharers}_sharers"
        out[f"bytes_per_entry_1m{name}"] = found["bytes_per_entry"]
        out[f"accounted_bytes_per_entry_1m{name}"] = found["accounted_bytes_per_entry"]
    return out


def measured_by_gateway(*args: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures of the gateway, which nothing in here imports, and with what they were taken."""
    command = [sys.executable, "-m", "gateway.measure", *args]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)  # noqa: S603
    return found["figures"], found["used"]


def bench_clear(rounds: int) -> dict[str, float]:
    rng = random.Random(3)
    clears, sweeps = [], []
    for _ in range(rounds):
        index = PrefixIndex()
        fill(index, "w0", rng, 100_000)
        fill(index, "w1", rng, 20_000)
        start = time.thread_time()
        index.clear("w0")
        clears.append(time.thread_time() - start)
        while index.stats()["retired_holders"]:
            start = time.thread_time()
            index.sweep(128)
            sweeps.append(time.thread_time() - start)
    return {"clear_100k_ms": statistics.median(clears) * 1e3, "longest_sweep_slice_ms": max(sweeps) * 1e3}


def bench_growth(n_blocks: int, n_workers: int = 64) -> dict[str, float]:
    """Longest single `apply` of a frame of 128 blocks while the index grows, and longest lookup taken between."""
    rng = random.Random(5)
    index = PrefixIndex(budget_bytes=64 << 30)
    probe = tokens(rng, 512 * BLOCK_SIZE)
    index.apply("w0", 0, decode_batch(frame([rng.getrandbits(64) for _ in range(512)], None, probe.tolist(), 512)))
    longest_apply = longest_match = 0.0
    for i in range(n_blocks // 128):
        hashes = [rng.getrandbits(64) for _ in range(128)]
        ids = rng.choices(range(VOCABULARY), k=128 * BLOCK_SIZE)
        batch = decode_batch(frame(hashes, None, ids, 128))
        start = time.thread_time()
        index.apply(f"w{i % n_workers}", 0, batch)
        longest_apply = max(longest_apply, time.thread_time() - start)
        if i % 64 == 0:
            start = time.thread_time()
            index.match(probe)
            longest_match = max(longest_match, time.thread_time() - start)
    return {"longest_stall_5m_ms": longest_apply * 1e3, "longest_lookup_while_growing_ms": longest_match * 1e3}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench micro", description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds and smaller tables (figures are not comparable)"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="a model directory; without it a tokenizer is trained")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        return run(args.quick, args.json, args.tokenizer or str(train(Path(folder))), args.tokenizer)


def run(quick: bool, as_json: bool, model: str, given: str | None) -> int:
    """`model`: the directory of the tokenizer; `given`: the same if it was asked for."""
    scale = 10 if quick else 1
    rounds = 5 if quick else 31
    figures: dict[str, float] = {}
    with_what: dict[str, Any] = {"tokenizer": given or "trained here"}

    def by_gateway(what: str, *args: str) -> dict[str, float]:
        found, used = measured_by_gateway(what, *args)
        with_what.update(used)
        return found

    benches: list[tuple[str, Callable[[], dict[str, float]]]] = [
        ("hashing", lambda: bench_hash(rounds)),
        ("lookup", lambda: bench_lookup(rounds, 300_000 // scale)),
        ("decision", lambda: bench_decision(20 * rounds)),
        ("body to plan", lambda: by_gateway("front", model, str(rounds))),
        ("event loop beside KV events", lambda: by_gateway("stall", model, *(("2", "1") if quick else ("5", "2")))),
        ("ingest", lambda: by_gateway("ingest", str(3 if quick else 7))),
        ("memory", lambda: bench_memory(1_000_000 // scale)),
        ("clear", lambda: bench_clear(2 if quick else 5)),
        ("growth", lambda: bench_growth(5_000_000 // scale)),
    ]
    for title, bench in benches:
        print(f"{title}:", flush=True)
        found = bench()
        for name, value in found.items():
            print(f"  {name:<42} {value:>14,.3f}", flush=True)
        figures |= found
    print("with " + ", ".join(f"{name}: {value}" for name, value in with_what.items()))
    result = judged(figures, TARGETS)
    for target in result:
        print(f"{'met ' if target['met'] else 'MISS'}  {target['name']} {target['goal']}: {target['measured']}")
    if as_json:
        rounded = {name: round(value, 4) for name, value in figures.items()}
        print(json.dumps({"bench": "micro", "with": with_what, "figures": rounded, "targets": result}))
    return 0
