"""`/debug/cache`: what every worker and rank holds, how its events arrive, how well hits are predicted, and which
prefixes save most. Counts and keys only: no prompt text is kept anywhere.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gateway.core import Core

_TOP_PREFIXES = 32


def digests(core: Core) -> dict[str, Any]:
    """For `/debug/cache?digests`: what each rank's blocks come to, which is the same wherever the same is known. Every
    block is looked at: not for the event loop.
    """
    found: dict[str, dict[str, Any]] = {}
    for (worker, rank), (n_blocks, keys_sum) in sorted(core.index.digests().items()):
        found.setdefault(worker, {})[str(rank)] = {"blocks": n_blocks, "keys_sum": f"{keys_sum:016x}"}
    return found


def cache(core: Core) -> dict[str, Any]:
    index = core.index.stats()
    feeds = core.ingest.status()
    workers: dict[str, Any] = {}
    for name, worker in sorted(core.fleet.workers.items()):
        held = index["workers"].get(name, {})
        ranks: dict[str, Any] = {}
        for rank in sorted({*worker.loads, *(r for w, r in feeds if w == name), *map(int, held)}):
            feed = feeds.get((name, rank))
            ranks[str(rank)] = {
                "held": held.get(str(rank)),
                "events": None if feed is None else msgspec.to_builtins(feed),
            }
        hits = core.hits.workers.get(name)
        workers[name] = {
            "publishes_events": worker.publishes_events,
            "block_size": worker.block_size(),
            "kv_capacity_tokens": None if worker.stats is None else worker.stats.kv_capacity_tokens,
            "ranks": ranks,
            "hits": None if hits is None else msgspec.to_builtins(hits),
        }
    return {
        "index": {key: value for key, value in index.items() if key != "workers"},
        "event_intake": core.ingest.counters(),
        "event_replays": core.ingest.replay_levels(),
        "unmatched_topics": core.ingest.unmatched_topics(),
        "workers": workers,
        "handoffs": _handoffs(core),
        "top_prefixes": core.prefixes.top(_TOP_PREFIXES),
        "tokens": core.tokens.status(),
    }


def _handoffs(core: Core) -> dict[str, Any]:
    """Pairs of prefill and decode workers, and what is held for nobody."""
    now_s = time.monotonic()
    stranded = core.handoffs.releases.stranded
    return {
        "policy": core.config.pd.policy,
        "pairs": [
            {"prefill": prefill, "decode": decode, "state": pair.state(now_s), **msgspec.to_builtins(pair)}
            for (prefill, decode), pair in sorted(core.planner.pairs.pairs.items())
        ],
        "stranded_tokens": stranded.tokens(now_s),
        "stranded_tokens_ever": stranded.total_tokens,
    }
