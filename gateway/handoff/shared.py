"""What all handoffs of a face work with."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from gateway.debug.handoffs import HandoffMetrics
from gateway.debug.hits import HitBook
from gateway.engine.available import Available
from gateway.engine.health import Health
from gateway.handoff.clock import AnswerClock
from gateway.handoff.connector import Connector
from gateway.handoff.engine_ids import EngineIds
from gateway.handoff.hosts import Hosts
from gateway.handoff.releases import Releases
from gateway.handoff.settings import HandoffSettings
from gateway.proxy.upstream import UpstreamPool
from scorer.planner import Planner


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """What all handoffs work with. `nixl_of` names a worker's configured side channel, `told_lease_s` the lease that
    its engine tells (None: it does not).
    """

    settings: HandoffSettings
    connector: Connector
    planner: Planner
    upstreams: UpstreamPool
    health: Health
    hits: HitBook
    metrics: HandoffMetrics
    releases: Releases
    engine_ids: EngineIds
    hosts: Hosts
    clock: AnswerClock
    available: Available
    nixl_of: Callable[[str], str | None]
    told_lease_s: Callable[[str], float | None]
    rng: random.Random

    def lease_s(self, worker: str) -> float:
        """How long a worker keeps blocks for others: as configured, or shorter where it says so."""
        told_s = self.told_lease_s(worker)
        return self.settings.lease_s if told_s is None else min(told_s, self.settings.lease_s)
