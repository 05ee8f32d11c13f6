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
    """What all handoffs work with. `nixl_of` names a worker's configured side channel."""

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
    rng: random.Random
