"""A small language for the endpoint picker, like llm-d's: `Pool(P(queue=3, kv=0.2), ...)`, `request(...)`,
`expect_route(...)`. In memory; nothing is connected to.
"""

from __future__ import annotations

import io
import json
import random
import time
from dataclasses import dataclass
from typing import Any

from multidict import CIMultiDict

from gateway.config.schema import EppConfig, PdConfig, QueueConfig, TenancyConfig
from gateway.debug.hits import HitBook
from gateway.debug.metrics import Metrics
from gateway.debug.prefixes import TopPrefixes
from gateway.engine.available import Available
from gateway.engine.health import Health
from gateway.epp.metrics import EppMetrics
from gateway.epp.objectives import Objectives, read_objectives
from gateway.epp.parts import EppParts
from gateway.epp.picker import PlannedPicker
from gateway.epp.places import Places
from gateway.epp.rewrites import Rewrites, read_rewrites
from gateway.epp.unseen import Unseen
from gateway.extproc.types import Ask, Pick, Refusal
from gateway.handoff.assembly import assemble
from gateway.proxy.access import AccessLog
from gateway.proxy.holders import ResponseHolders
from gateway.proxy.parts import Parts
from gateway.proxy.peer import PoolSettings
from gateway.proxy.upstream import UpstreamPool
from gateway.queue.queue import Queue
from gateway.record.recorder import Recorder
from gateway.request import RequestReader
from gateway.stored import StoredResponses
from gateway.tenancy import Tenancy
from gateway.tokens import TokenService
from gateway.tracing.types import Tracing
from indexer import PrefixIndex, decode_batch
from scorer.fleet import Fleet
from scorer.planner import Planner
from scorer.types import ChangeKind, EngineStats, Role, WorkerChange
from tests.support.fleets import BLOCK
from tests.support.wire import stored

BASE = "foo"


@dataclass(frozen=True)
class P:
    """One endpoint of the pool: what its engine says of itself, and what it serves beside the base model."""

    queue: float = 0
    kv: float = 0.0
    adapters: tuple[str, ...] = ()
    running: float = 0
    ranks: int = 1
    role: Role = Role.BOTH
    nixl: bool = False
    kv_blocks: int = 4096
    asked: bool = True


def prefill(**changes: Any) -> P:
    return P(role=Role.PREFILL, nixl=True, **changes)


def decode(**changes: Any) -> P:
    return P(role=Role.DECODE, nixl=True, **changes)


@dataclass(frozen=True)
class Request:
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    method: str = "POST"
    path: str = "/v1/completions"
    subset: tuple[str, ...] | None = None

    def ask(self) -> Ask:
        return Ask(
            method=self.method,
            path=self.path,
            headers=CIMultiDict(self.headers),
            body=self.body,
            subset=self.subset,
        )


def request(
    prompt: Any = "test",
    model: str = BASE,
    *,
    path: str = "/v1/completions",
    method: str = "POST",
    subset: tuple[str, ...] | None = None,
    raw: bytes | None = None,
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> Request:
    """As llm-d's integration tests send it."""
    body = {"max_tokens": 100, "model": model, "prompt": prompt, "temperature": 0, **fields}
    given = {"hi": "mom", "x-request-id": "test-request-id", "content-type": "application/json", **(headers or {})}
    return Request(
        body=json.dumps(body, separators=(",", ":")).encode() if raw is None else raw,
        headers=tuple(given.items()),
        method=method,
        path=path,
        subset=subset,
    )


def get(path: str, **kwargs: Any) -> Request:
    return request(path=path, method="GET", raw=b"", **kwargs)


class Pool:
    """In a test: ``async with Pool(P(), P(queue=3)) as pool:``. The endpoints are 192.168.1.1:8000, .2 and so on, by
    the names p0, p1, ..., unless `urls` says where they are.
    """

    def __init__(
        self,
        *pods: P,
        urls: list[str] | None = None,
        epp: EppConfig | None = None,
        pd: PdConfig | None = None,
        queue: QueueConfig | None = None,
        tenancy: TenancyConfig | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self.pods = pods
        self.urls = urls or [f"http://192.168.1.{i + 1}:8000" for i in range(len(pods))]
        self.epp = epp or EppConfig()
        self.pd = pd or PdConfig(policy="local")
        self._queue = queue or QueueConfig()
        self._tenancy = Tenancy(tenancy or TenancyConfig(), "a secret of the tests")
        self.fleet = Fleet()
        self.index = PrefixIndex()
        self.planner = Planner(self.fleet, self.index, pd_policy=self.pd.policy or "local", peers=self.pd.peers)
        self.health = Health()
        self.metrics = Metrics("warmroute")
        self.hits = HitBook()
        self.stored = StoredResponses()
        self.log = io.StringIO()
        self.n_running = 0
        self._hashes = 0

    async def __aenter__(self) -> Pool:
        rng = random.Random(1)
        self.tokens = TokenService()
        self.access = AccessLog("json", self.log)
        self.upstreams = UpstreamPool(
            PoolSettings(connect_timeout_s=1.0, pool_idle_s=4.0, request_timeout_s=30.0, http="fast")
        )
        up = Available(self.fleet.workers, self.health.available)
        self.holders = ResponseHolders(
            self.stored, self.upstreams, lambda: list(self.fleet.workers), by_tenant=self._tenancy.by_tenant
        )
        self.queue = Queue(self._queue, self.planner, up, self.metrics, rng, by_tenant=self._tenancy.by_tenant)
        self.parts = Parts(
            planner=self.planner,
            reader=RequestReader(self.fleet, self.tokens, holder_of=self.holders.find),
            upstreams=self.upstreams,
            health=self.health,
            available=up,
            metrics=self.metrics,
            hits=self.hits,
            prefixes=TopPrefixes(),
            access=self.access,
            recorder=Recorder(),
            stored=self.stored,
            rng=rng,
            max_body_bytes=1 << 24,
            response_headers=True,
            handoffs=assemble(
                self.pd,
                planner=self.planner,
                upstreams=self.upstreams,
                health=self.health,
                hits=self.hits,
                registry=self.metrics.registry,
                available=up,
                nixl_of=lambda _: None,
                rng=rng,
            ),
            heard_since=lambda name, since_s: True,
            queue=self.queue,
            tenancy=self._tenancy,
            tracing=self._tracing,
        )
        counts = EppMetrics(self.metrics.registry)
        self.places = Places(self.fleet.workers)
        self.unseen = Unseen(self.fleet.workers, counts, 30.0)
        self.objectives = Objectives(read_objectives(self.epp.objectives))
        self.rewrites = Rewrites(read_rewrites(self.epp.rewrites))
        self.picker = PlannedPicker(
            EppParts(
                parts=self.parts,
                places=self.places,
                metrics=counts,
                unseen=self.unseen,
                began=lambda: self._count(1),
                over=lambda: self._count(-1),
            ),
            self.epp,
            objectives=self.objectives,
            rewrites=self.rewrites,
            find_holder=self.holders.find,
        )
        for i, pod in enumerate(self.pods):
            self.add(f"p{i}", pod, self.urls[i])
        return self

    async def __aexit__(self, *_: object) -> None:
        self.unseen.close()
        self.queue.close()
        await self.upstreams.close()
        await self.access.close()
        await self.tokens.close()

    def _count(self, n: int) -> None:
        self.n_running += n

    def add(self, name: str, pod: P, url: str) -> None:
        self.fleet.apply(WorkerChange(kind=ChangeKind.ADDED, worker=name, url=url, role=pod.role))
        if pod.asked:
            self.fleet.set_capabilities(name, models=[BASE], adapters=pod.adapters, ranks=range(pod.ranks))
        self.say(name, pod)
        self.fleet.workers[name].publishes_events = True
        self.planner.configure_worker(name)
        self.health.add(name, time.monotonic())
        self.upstreams.set(name, url)
        self.metrics.add_worker(name)
        self.hits.add_worker(name)

    def say(self, name: str, pod: P, *, age_s: float = -60.0) -> None:
        """What the endpoint's engine tells of itself now, which a slow machine does not make stale."""
        stats = EngineStats(
            scraped_at_s=time.monotonic() - age_s,
            running=pod.running,
            waiting=pod.queue,
            kv_usage=pod.kv,
            kv_blocks=pod.kv_blocks,
            block_size=BLOCK,
            nixl_bytes=0.0 if pod.nixl else None,
        )
        self.fleet.set_stats(name, stats)
        self.queue.scraped(self.fleet.workers[name])

    def hold(self, name: str, tokens: list[int], *, rank: int = 0) -> None:
        """The engine announces that it holds the full blocks of `tokens`."""
        self._hashes += 1
        hashes = [self._hashes << 32 | i for i in range(len(tokens) // BLOCK)]
        ids = tokens[: len(hashes) * BLOCK]
        self.index.apply(name, rank, decode_batch(stored(hashes, ids, block_size=BLOCK, rank=rank)))

    async def pick(self, asked: Request) -> Pick | Refusal:
        return await self.picker.pick(asked.ask())

    async def picked(self, asked: Request) -> Pick:
        verdict = await self.pick(asked)
        assert isinstance(verdict, Pick), verdict
        return verdict

    async def refused(self, asked: Request) -> Refusal:
        verdict = await self.pick(asked)
        assert isinstance(verdict, Refusal), verdict
        return verdict

    def endpoint(self, pod: int) -> str:
        return self.urls[pod].removeprefix("http://")

    async def expect_route(self, asked: Request, pod: int, *, model: str | None = None) -> Pick:
        """That it goes to the pod of that number, with the model changed to `model`, or with the bytes it came in."""
        pick = await self.picked(asked)
        assert pick.endpoints == (self.endpoint(pod),)
        if model is None:
            assert pick.body is None
        else:
            assert pick.body is not None
            assert json.loads(pick.body) == {**json.loads(asked.body), "model": model}
        return pick

    async def expect_refusal(self, asked: Request, status: int, dropped: str | None = None) -> Refusal:
        refusal = await self.refused(asked)
        assert refusal.status == status, refusal
        assert set(json.loads(refusal.body)["error"]) == {"message", "type", "param", "code"}
        assert refusal.headers.get("x-llm-d-request-dropped-reason") == dropped
        return refusal

    def load(self) -> dict[str, int]:
        """Booked requests by worker."""
        return {w.name: sum(load.requests for load in w.loads.values()) for w in self.fleet.workers.values()}

    def is_idle(self) -> bool:
        """Nothing booked, counted or assumed is left."""
        return (
            not any(self.load().values())
            and self.planner.in_flight() == 0
            and not any(self.health.state(name).in_flight for name in self.fleet.workers)
            and self.n_running == 0
            and self.queue.n_waiting == 0
        )

    async def records(self) -> list[dict[str, Any]]:
        """The access log so far."""
        await self.access.close()
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    def value(self, name: str, **labels: str) -> float:
        """A metric's value; 0 when there is no such series."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def answer(pick: Pick, *chunks: bytes, status: int = 200, served: str | None = None, **headers: str) -> None:
    """A whole response to it."""
    given = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    pick.watch.responded(status, CIMultiDict(given), served)
    for chunk in chunks:
        pick.watch.chunk(chunk)
    pick.watch.ended()
