"""Latency histograms with the buckets of vLLM 0.32."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

_TTFT_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                         20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_ITL_BOUNDS_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                        40.0, 80.0)  # fmt: skip
_REQUEST_BOUNDS_S: Final = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
                            240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip

_NIXL_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_NIXL_BOUNDS_BYTES: Final = tuple(2.0 ** (10 + power) for power in range(1, 25, 2))
_NIXL_BOUNDS_DESCRIPTORS: Final = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)


class Histogram:
    """Counts by upper bound, as Prometheus wants them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative (le, count) pairs ending in +Inf."""
        rows: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            running += count
            rows.append((bound, float(running)))
        return rows


@dataclass(slots=True)
class Latencies:
    """The latency histograms of vLLM that a gateway reads, in seconds of the loop's clock."""

    ttft: Histogram = field(default_factory=lambda: Histogram(_TTFT_BOUNDS_S))
    inter_token: Histogram = field(default_factory=lambda: Histogram(_ITL_BOUNDS_S))
    e2e: Histogram = field(default_factory=lambda: Histogram(_REQUEST_BOUNDS_S))
    queue: Histogram = field(default_factory=lambda: Histogram(_REQUEST_BOUNDS_S))
    prefill: Histogram = field(default_factory=lambda: Histogram(_REQUEST_BOUNDS_S))
    decode: Histogram = field(default_factory=lambda: Histogram(_REQUEST_BOUNDS_S))


@dataclass(slots=True)
class Transfers:
    """One entry per finished NIXL pull: seconds, bytes, descriptors."""

    xfer_time: Histogram = field(default_factory=lambda: Histogram(_NIXL_BOUNDS_S[1:]))
    post_time: Histogram = field(default_factory=lambda: Histogram(_NIXL_BOUNDS_S))
    bytes: Histogram = field(default_factory=lambda: Histogram(_NIXL_BOUNDS_BYTES))
    descriptors: Histogram = field(default_factory=lambda: Histogram(_NIXL_BOUNDS_DESCRIPTORS))
