"""What to run at which size, computed from measured unit costs and a stated load: no figure in it is made by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

SIZES = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
HEADS = (
    "GPUs",
    "requests/s",
    "changes/s",
    "cells",
    "indexers",
    "gateways",
    "cores",
    "GB each",
    "start s",
    "first to give",
)


_SELDOM_S = 5.0
_BUDGET_BYTES = 2 << 30


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Of one GPU, which is a worker: requests and new tokens a second, answers' chunks, blocks that it holds. Its pages
    are read once in `scrape_s`.
    """

    requests_per_s: float = 1.0
    new_tokens_per_s: float = 2_000.0
    chunks_per_request: float = 250.0
    blocks: int = 20_000
    block_size: int = 16
    scrape_s: float = 1.0

    @property
    def changes_per_s(self) -> float:
        """Every new block displaces one."""
        return 2 * self.new_tokens_per_s / self.block_size


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """`busy`: of the one core that a Python process has, so much is planned with; `gb`: of one process; `start_s`: of a
    process that begins with nothing.
    """

    busy: float = 0.6
    gb: float = 16.0
    start_s: float = 60.0


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """CPU microseconds and bytes, each of one: block that changes, worker whose pages are read,
    request, chunk, copy of a block.
    """

    indexer_us_per_change: float
    copy_us_per_change: float
    fanout_us_per_change: float
    indexer_us_per_reading: float
    gateway_us_per_reading: float
    start_us_per_copy: float
    snapshot_us_per_copy: float
    bytes_per_copy: float
    accounted_bytes_per_copy: float
    request_us: float
    chunk_us: float

    @classmethod
    def of(cls, figures: Mapping[str, float]) -> Costs:
        """Raises KeyError for one that is not there."""
        return cls(
            indexer_us_per_change=figures["indexer_us_per_change"],
            copy_us_per_change=figures["gateway_us_per_change"],
            fanout_us_per_change=figures["fanout_us_per_change"],
            indexer_us_per_reading=figures["indexer_us_per_reading"],
            gateway_us_per_reading=figures["gateway_us_per_reading"],
            start_us_per_copy=figures["replay_start_us_per_copy"],
            snapshot_us_per_copy=figures["snapshot_start_us_per_copy"],
            bytes_per_copy=figures["replay_bytes_per_copy"],
            accounted_bytes_per_copy=figures["replay_accounted_bytes_per_copy"],
            request_us=figures["gateway_request_us"],
            chunk_us=figures["gateway_chunk_us"],
        )


class Size(NamedTuple):
    """What a fleet of `gpus` needs. `gateways`, `indexers`: of all cells together. `first`: what gives first when it
    grows.
    """

    gpus: int
    requests_per_s: float
    changes_per_s: float
    cells: int
    indexers: int
    gateways: int
    cores: float
    gb: float
    start_s: float
    first: str


class Gateway(NamedTuple):
    """One of a cell of so many workers: what it takes of its core before the first request, and requests a second."""

    fixed: float
    requests_per_s: float


def gateway_of(costs: Costs, load: Load, limits: Limits, workers: int, *, copies: bool) -> Gateway:
    """`copies`: by an indexer; else it takes the engines' events itself."""
    per_change = costs.copy_us_per_change if copies else costs.indexer_us_per_change
    fixed = workers * (costs.gateway_us_per_reading / load.scrape_s + load.changes_per_s * per_change) / 1e6
    per_request_s = (costs.request_us + load.chunks_per_request * costs.chunk_us) / 1e6
    return Gateway(fixed, max(0.0, limits.busy - fixed) / per_request_s)


def most_workers(costs: Costs, load: Load, limits: Limits) -> dict[str, float]:
    """How many workers one cell has at most, by what would give way beyond."""
    followed = load.changes_per_s * (costs.indexer_us_per_change + 2 * costs.fanout_us_per_change)
    copied = load.changes_per_s * costs.copy_us_per_change + costs.gateway_us_per_reading / load.scrape_s
    return {
        "what an indexer follows": limits.busy * 1e6 / (followed + costs.indexer_us_per_reading / load.scrape_s),
        # Half of what a gateway may take is for requests: with more, each new gateway would bring ever less.
        "what a gateway follows": limits.busy / 2 * 1e6 / copied,
        "memory": limits.gb * 1e9 / (load.blocks * costs.bytes_per_copy),
        "the start": limits.start_s * 1e6 / (load.blocks * costs.start_us_per_copy),
    }


def size(gpus: int, costs: Costs, load: Load, limits: Limits) -> Size:
    bounds = most_workers(costs, load, limits)
    first = min(bounds, key=bounds.__getitem__)
    cells = math.ceil(gpus / max(1, math.floor(bounds[first])))
    workers = math.ceil(gpus / cells)
    asked = workers * load.requests_per_s
    alone = gateway_of(costs, load, limits, workers, copies=False)
    if asked <= 2 * alone.requests_per_s and workers <= bounds[first] / 4:
        # Two, so that one may be lost; they take the events themselves.
        gateway, indexers, n = alone, 0, 1 if gpus == 1 else 1 + math.ceil(asked / alone.requests_per_s)
    else:
        gateway = gateway_of(costs, load, limits, workers, copies=True)
        indexers, n = 2, 1 + math.ceil(asked / gateway.requests_per_s)
    per_request_s = (costs.request_us + load.chunks_per_request * costs.chunk_us) / 1e6
    reading_us = costs.indexer_us_per_reading / load.scrape_s
    followed = workers * (load.changes_per_s * costs.indexer_us_per_change + reading_us) / 1e6
    told = workers * load.changes_per_s * costs.fanout_us_per_change * n / 1e6 if indexers else 0.0
    cores = asked * per_request_s + n * gateway.fixed + indexers * followed + told
    start_us = costs.snapshot_us_per_copy if indexers else costs.start_us_per_copy
    copies = workers * load.blocks
    if cells == 1:
        first = "nothing" if workers < bounds[first] / 4 else first
    return Size(
        gpus=gpus,
        requests_per_s=gpus * load.requests_per_s,
        changes_per_s=gpus * load.changes_per_s,
        cells=cells,
        indexers=indexers * cells,
        gateways=n * cells,
        cores=cores * cells,
        gb=copies * costs.bytes_per_copy / 1e9,
        start_s=copies * start_us / 1e6,
        first=first,
    )


def lines(figures: Mapping[str, float], load: Load | None = None, limits: Limits | None = None) -> Iterator[str]:
    """Markdown. Raises KeyError for a figure that is not there."""
    load, limits = load or Load(), limits or Limits()
    costs = Costs.of(figures)
    yield f"| {' | '.join(HEADS)} |"
    yield "|" + "---|" * len(HEADS)
    for gpus in SIZES:
        it = size(gpus, costs, load, limits)
        cells = (
            f"{it.gpus:,}",
            f"{it.requests_per_s:,.0f}",
            f"{it.changes_per_s:,.0f}",
            f"{it.cells:,}",
            f"{it.indexers:,}" if it.indexers else "none",
            f"{it.gateways:,}",
            f"{it.cores:.2f}" if it.cores < 1 else f"{it.cores:,.1f}" if it.cores < 100 else f"{it.cores:,.0f}",
            f"{it.gb:.2f}" if it.gb < 1 else f"{it.gb:.1f}",
            f"{it.start_s:.1f}" if it.start_s < 10 else f"{it.start_s:.0f}",
            it.first,
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    seldom = msgspec.structs.replace(load, scrape_s=_SELDOM_S)
    yield f"| one cell has at most so many workers | pages read once in {load.scrape_s:g} s | once in {_SELDOM_S:g} s |"
    yield "|---|---|---|"
    bounds = most_workers(costs, seldom, limits)
    for what, workers in sorted(most_workers(costs, load, limits).items(), key=lambda item: item[1]):
        yield f"| by {what} | {workers:,.0f} | {bounds[what]:,.0f} |"
    accounted = _BUDGET_BYTES / (load.blocks * costs.accounted_bytes_per_copy)
    yield f"| by index.budget_bytes, unless it is raised | {accounted:,.0f} | {accounted:,.0f} |"
    yield ""
    one = gateway_of(costs, load, limits, 1, copies=True).requests_per_s
    yield f"One gateway process with little to follow: {one:,.0f} requests/s; N processes of one, N times that."
