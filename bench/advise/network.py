"""What moving KV between servers takes, and how large blocks should be for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from bench.sim.transfers import NVLINK, RDMA_40GB, Link

LINES_GBPS: Final = (25, 100, 200, 400)
DEFAULT_GBPS: Final = 400.0
USABLE: Final = 0.8
"""Share of a line's rate that transfers reach: 40 GB/s over one adapter of 400 Gb/s, as published for NDR."""
BLOCK_SIZES: Final = (16, 32, 64, 128)
"""Of vLLM's block sizes, those that transfers were measured with (and 32)."""
GOOD: Final = 0.9
"""Of the bandwidth: what a block size should reach to be recommended."""


def line_s(n_bytes: float, gbps: float) -> float:
    """At the line's full rate."""
    return n_bytes * 8 / (gbps * 1e9)


def link(gbps: float | None) -> Link:
    """None: NVLink inside one host, as measured. Descriptors cost what they were measured to cost there: posting one is
    the CPU's work, on any network. NIXL over UCX; over plain TCP it is for tests only.
    """
    if gbps is None:
        return NVLINK
    return replace(RDMA_40GB, bytes_per_s=USABLE * gbps * 1e9 / 8, per_descriptor_s=NVLINK.per_descriptor_s)


@dataclass(frozen=True, slots=True)
class BlockSize:
    """One block of one layer of one rank is one descriptor. `efficiency`: share of the bandwidth that is reached when
    no blocks lie next to each other, as in a cache that has been in use for a while.
    """

    tokens: int
    descriptor_bytes: float
    efficiency: float
    post_s: float
    """By how much a decode step is held up by posting the pull of one usual prompt."""
    lost_tokens: float
    """Prompt tokens computed again on each hit because only whole blocks are found: half a block on average."""


def block_sizes(
    layer_bytes_per_token: float, layers: int, prompt_tokens: float, tensor_parallel: int, way: Link
) -> list[BlockSize]:
    """`layer_bytes_per_token`: one layer's, on one rank. Transfers of a server's ranks go side by side, each over its
    share of `way`.
    """
    found = []
    for tokens in BLOCK_SIZES:
        n_bytes = tokens * layer_bytes_per_token
        moving_s = n_bytes * tensor_parallel / way.bytes_per_s
        descriptors = layers * prompt_tokens / tokens
        efficiency = min(1.0, moving_s / way.per_descriptor_s)
        found.append(BlockSize(tokens, n_bytes, efficiency, way.post_s(round(descriptors)), tokens / 2))
    return found


def best(sizes: Sequence[BlockSize]) -> BlockSize:
    """The smallest that reaches nearly all of the bandwidth, else the largest."""
    return next((size for size in sizes if size.efficiency >= GOOD), sizes[-1])
