"""What an indexer counts beside what every face does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.indexservice.publisher import Publisher

if TYPE_CHECKING:
    from gateway.indexservice.server import IndexServer

_COUNTED = {
    "watches": "Copies that were begun or gone on with.",
    "resumed": "Those that could go on where they had been.",
    "snapshots": "Snapshots read.",
    "cut": "Watchers cut off because they were too slow.",
    "matches": "Prompts looked up for others.",
    "refused": "Questions that were none.",
    "turned_away": "Copies and questions refused, as there were too many at once.",
    "unauthenticated": "Calls without the token.",
}


class IndexerMetrics(Collector):
    def __init__(self, server: IndexServer, publisher: Publisher) -> None:
        self._server = server
        self._publisher = publisher

    def collect(self) -> Iterator[Metric]:
        counts, history = self._server.counts, self._publisher.history
        yield _gauge("watchers", "Copies that are being kept.", counts.watchers)
        yield _gauge("ready", "Whether it knows enough to be asked.", float(self._server.is_serving()))
        yield _gauge("history_bytes", "Latest changes kept for watchers.", history.bytes)
        for name, text in _COUNTED.items():
            yield _counter(name, text, getattr(counts, name))
        yield _counter("deltas", "Deltas made.", history.sequence)
        yield _counter("overflows", "Times more changed at once than can be told.", self._publisher.overflows)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"warmroute_indexer_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"warmroute_indexer_{name}", text, value=value)
