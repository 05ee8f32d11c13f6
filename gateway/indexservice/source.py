"""Where a face's index comes from."""

from __future__ import annotations

import random
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.config import Config
from gateway.engine.intake import Link
from gateway.indexservice.addresses import Addresses
from gateway.indexservice.link import ReplicaLink
from gateway.indexservice.query import AskedIndex, QueryLink
from gateway.right_of_way import RightOfWay
from indexer import PrefixIndex, Replica


def index_of(
    config: Config, rng: random.Random, right_of_way: RightOfWay | None = None
) -> tuple[PrefixIndex, Link | None]:
    """The index, and what feeds it if that is somebody else, who gives the `right_of_way`. Raises UserError."""
    index = config.index
    if index.source == "local":
        own = PrefixIndex(
            budget_bytes=index.budget_bytes, orphan_blocks=index.orphan_blocks, removal_mode=index.removal_mode
        )
        return own, None
    addresses = Addresses(index.service, rng)
    if index.service.mode == "query":
        asked = AskedIndex()
        return asked, QueryLink(addresses, asked, budget_s=index.service.budget_ms / 1000)
    replica = Replica(budget_bytes=index.budget_bytes)
    return replica, ReplicaLink(addresses, replica, right_of_way=right_of_way)


class LinkMetrics(Collector):
    """Counts of it are among those of the event intake."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def collect(self) -> Iterator[Metric]:
        text = "Whether an indexer is followed now; 0: what is known is of before."
        yield GaugeMetricFamily("warmroute_index_service_up", text, value=float(not self._link.is_stale))
