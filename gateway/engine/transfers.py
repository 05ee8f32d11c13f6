"""What an engine has counted of the KV that it fetched through NIXL: vLLM's `vllm:nixl_*` series."""

from __future__ import annotations

import re
from collections import defaultdict

import msgspec

_SERIES = re.compile(r"^vllm:nixl_(\w+?)(?:\{[^\n]*\})?[ \t]+([^ \t\r\n]+)", re.MULTILINE)
_MOST = 1e24


class NixlCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Over all ranks, since the engine's start. `expired` and `late` are about what it computed for others: prompts
    that nobody fetched in time, and fetches that came when the blocks were given to somebody else.
    """

    transfers: int = 0
    n_bytes: int = 0
    seconds: float = 0.0
    descriptors: int = 0
    failed: int = 0
    expired: int = 0
    late: int = 0

    def since(self, before: NixlCounts) -> NixlCounts:
        names = self.__struct_fields__
        return NixlCounts(**{name: max(0, getattr(self, name) - getattr(before, name)) for name in names})


def parse_nixl(text: str) -> NixlCounts | None:
    """Out of `/metrics`; None where there is no NIXL connector."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, number in _SERIES.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        if 0 <= value < _MOST:
            sums[name] += value
    if "bytes_transferred_sum" not in sums:
        return None
    return NixlCounts(
        transfers=int(sums["xfer_time_seconds_count"]),
        n_bytes=int(sums["bytes_transferred_sum"]),
        seconds=sums["xfer_time_seconds_sum"],
        descriptors=int(sums["num_descriptors_sum"]),
        failed=int(sums["num_failed_transfers_total"]),
        expired=int(sums["num_kv_expired_reqs_total"]),
        late=int(sums["num_notifications_after_expiry_total"]),
    )
