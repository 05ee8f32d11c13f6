"""Moving KV from a prefill to a decode engine: what one pull takes, and the queue of pulls each decode engine has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Link:
    """The way between two servers. The defaults were measured between two H200 over NVLink with caches that had been
    in use for a while, so that no neighbouring blocks merge (docs/benchmarks.md): the transfer of a block costs
    ``max(bytes / bandwidth, per_descriptor_s * layers)``.
    """

    base_s: float = 0.002
    bytes_per_s: float = 343e9
    per_descriptor_s: float = 4.35e-6
    """0 where blocks lie next to each other and merge."""
    first_contact_s: float = 0.15
    """The handshake of a pair that has not talked yet."""
    post_base_s: float = 0.0007
    post_per_descriptor_s: float = 2.3e-6
    """Posting happens inside a step of the decode engine and makes it longer by so much."""
    enter_s: float = 0.002
    """So much longer is the step in which a pulled request begins."""
    hop_s: float = 0.002
    """From the prefill engine's answer to the request at the decode engine."""

    def transfer_s(self, n_bytes: float, descriptors: int) -> float:
        return self.base_s + max(n_bytes / self.bytes_per_s, self.per_descriptor_s * descriptors)

    def post_s(self, descriptors: int) -> float:
        merged = not self.per_descriptor_s
        return self.post_base_s + (0.0 if merged else self.post_per_descriptor_s * descriptors)


NVLINK = Link()
NVLINK_FRESH = Link(per_descriptor_s=0.0)
"""Caches that were never full: blocks lie in order and merge into 36 descriptors."""
RDMA_40GB = Link(base_s=0.005, bytes_per_s=40e9, per_descriptor_s=0.0, first_contact_s=0.15)
"""One NDR adapter's effective 40 GB/s and 5 ms, as in the published 1P+3D comparisons."""


class Pulling(NamedTuple):
    done_s: float
    post_s: float
    """How much longer the decode engine's step gets."""


class Transfers:
    """All pulls of a fleet. Those of one decode engine come one after the other."""

    def __init__(self, link: Link, links: Mapping[tuple[str, str], Link] | None = None) -> None:
        """`links`: those of pairs (prefill, decode) that have one of their own."""
        self._link = link
        self._links = links or {}
        self.bytes = 0.0
        self.busy_s = 0.0
        self._free_at_s: dict[str, float] = {}
        self._met: set[tuple[str, str]] = set()

    def link(self, prefill: str, decode: str) -> Link:
        return self._links.get((prefill, decode), self._link)

    def begin(self, prefill: str, decode: str, n_bytes: float, descriptors: int, now_s: float) -> Pulling:
        link = self.link(prefill, decode)
        start_s = max(now_s, self._free_at_s.get(decode, 0.0))
        if (prefill, decode) not in self._met:
            self._met.add((prefill, decode))
            start_s += link.first_contact_s
        took_s = link.transfer_s(n_bytes, descriptors)
        self._free_at_s[decode] = start_s + took_s
        self.bytes += n_bytes
        self.busy_s += took_s
        return Pulling(start_s + took_s, link.post_s(descriptors))

    def forget(self, worker: str) -> None:
        """It is a new process: everybody has to meet it again, and nothing is on its way to it."""
        self._met = {pair for pair in self._met if worker not in pair}
        self._free_at_s.pop(worker, None)
