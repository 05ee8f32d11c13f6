"""What the index takes in of raw frames, decoding included, with the collector set as in a process that serves."""

from __future__ import annotations

import random
import statistics
import time

from indexer import PrefixIndex, decode_batch

_WORKERS = 8
_FRAMES = 256
_BLOCKS = 224
"""In a frame."""


def measure_ingest(rounds: int) -> dict[str, float]:
    """Blocks per second of CPU time: stored in events of 16, and of 1 as decodes do; removed one in an event."""
    figures = {}
    for per_event in (16, 1):
        stored, removed = zip(*(_rates(per_event) for _ in range(rounds)), strict=True)
        figures[f"ingest_{per_event}_per_event_blocks_per_s"] = statistics.median(stored)
        if per_event == 16:
            figures["remove_1_per_event_blocks_per_s"] = statistics.median(removed)
    return figures


def _rates(per_event: int) -> tuple[float, float]:
    from bench.kv_frames import BLOCK_SIZE, VOCABULARY, frame, removal

    rng = random.Random(per_event)  # noqa: S311
    index = PrefixIndex()
    came, gone = [], []
    for i in range(_FRAMES):
        hashes = [rng.getrandbits(64) for _ in range(_BLOCKS)]
        ids = [rng.randrange(VOCABULARY) for _ in range(_BLOCKS * BLOCK_SIZE)]
        came.append((f"w{i % _WORKERS}", frame(hashes, None, ids, per_event)))
        gone.append((f"w{i % _WORKERS}", removal(hashes[::-1])))
    rates = _rate(index, came), _rate(index, gone)
    if index.stats()["entries"]:
        raise RuntimeError("the index kept what was removed")
    return rates


def _rate(index: PrefixIndex, frames: list[tuple[str, bytes]]) -> float:
    began_s = time.thread_time()
    for worker, payload in frames:
        index.apply(worker, 0, decode_batch(payload))
    return _FRAMES * _BLOCKS / (time.thread_time() - began_s)
