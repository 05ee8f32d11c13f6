"""What the handlers of all requests share."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from gateway.auth.door import Door
from gateway.debug.decisions import Decisions
from gateway.debug.hits import HitBook
from gateway.debug.metrics import Metrics
from gateway.debug.prefixes import TopPrefixes
from gateway.engine.available import Available
from gateway.engine.health import Health
from gateway.handoff.shared import Shared
from gateway.proxy.access import AccessLog
from gateway.proxy.background import Background
from gateway.proxy.incoming import Sender
from gateway.proxy.upstream import UpstreamPool
from gateway.queue.queue import Queue
from gateway.record.recorder import Recorder
from gateway.request import RequestReader
from gateway.right_of_way import RightOfWay
from gateway.sidecar.hints import Hints, no_hints
from gateway.stored import StoredResponses
from gateway.tenancy import NO_TENANCY, Tenancy
from gateway.tracing.types import Tracing
from scorer.planner import Planner
from scorer.types import Plan, RequestFacts


class Draining(Protocol):
    """Tells whether the server is going down: connections are not kept, and, `cutting`, what runs is ended."""

    draining: bool
    cutting: bool

    def admit(self) -> None:
        """Take one of the places for requests whose body is here. Raises ApiError when there is none."""
        ...

    def leave(self) -> None:
        """Give a place back."""
        ...


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler works with.

    `heard_since(worker, since_s)`: whether its engine has answered anything of ours since then. `sent(worker, rank,
    new_tokens)` is told of each prompt that goes somewhere to be computed, `unsent(worker, rank)` of each of them that
    was not. `index_note` is what the reason of a decision is to say of where the index comes from. `hints` reads what
    somebody in front of us has settled. `unreachable_status` answers for a worker that cannot be connected to. `door`
    None: requests need no key. `background` follows responses of keys that go on after their answer.
    """

    planner: Planner
    reader: RequestReader
    upstreams: UpstreamPool
    health: Health
    available: Available
    metrics: Metrics
    hits: HitBook
    prefixes: TopPrefixes
    access: AccessLog
    recorder: Recorder
    stored: StoredResponses
    rng: random.Random
    max_body_bytes: int
    min_body_bytes_per_s: int = 0
    response_headers: bool
    handoffs: Shared
    heard_since: Callable[[str, float], bool]
    sent: Callable[[str, int, int], None] = lambda worker, rank, new_tokens: None
    unsent: Callable[[str, int], None] = lambda worker, rank: None
    index_note: Callable[[RequestFacts], str | None] = lambda facts: None
    hints: Callable[[Sender], Hints] = no_hints
    unreachable_status: int = 502
    queue: Queue | None = None
    tenancy: Tenancy = NO_TENANCY
    door: Door | None = None
    background: Background | None = None
    tracing: Tracing | None = None
    decisions: Decisions = msgspec.field(default_factory=Decisions)
    right_of_way: RightOfWay = msgspec.field(default_factory=RightOfWay)

    def plan(self, facts: RequestFacts, available: Collection[str] | None) -> Plan:
        """As `Planner.plan`, now."""
        self.right_of_way.take()
        return self.planner.plan(facts, available, time.monotonic(), self.rng)
