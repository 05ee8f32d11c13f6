"""The parts of the handoff put together from the configuration."""

from __future__ import annotations

import random
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from gateway.config.schema import PdConfig
from gateway.debug.handoffs import HandoffMetrics
from gateway.debug.hits import HitBook
from gateway.engine.available import Available
from gateway.engine.health import Health
from gateway.handoff.clock import AnswerClock
from gateway.handoff.connector import Connector, NixlPull
from gateway.handoff.engine_ids import EngineIds
from gateway.handoff.hosts import Hosts
from gateway.handoff.releases import Releases
from gateway.handoff.settings import HandoffSettings
from gateway.handoff.shared import Shared
from gateway.proxy.upstream import UpstreamPool
from scorer.planner import Planner

_CONNECTORS: dict[str, Callable[[], Connector]] = {"nixl": NixlPull}


def assemble(
    pd: PdConfig,
    *,
    planner: Planner,
    upstreams: UpstreamPool,
    health: Health,
    hits: HitBook,
    registry: CollectorRegistry,
    available: Available,
    nixl_of: Callable[[str], str | None],
    rng: random.Random,
    told_lease_s: Callable[[str], float | None] = lambda worker: None,
) -> Shared:
    """`nixl_of(worker)`: its configured side channel. `told_lease_s(worker)`: the lease its engine tells."""
    metrics = HandoffMetrics(registry)
    return Shared(
        settings=HandoffSettings.from_config(pd),
        connector=_CONNECTORS[pd.connector](),
        planner=planner,
        upstreams=upstreams,
        health=health,
        hits=hits,
        metrics=metrics,
        releases=Releases(upstreams, metrics, available.decoders),
        engine_ids=EngineIds(pd.lease_s),
        hosts=Hosts(),
        clock=AnswerClock(),
        available=available,
        nixl_of=nixl_of,
        told_lease_s=told_lease_s,
        rng=rng,
    )
