"""The parts that know the fleet, put together; every face (gateway, sidecar, picker) stands on one of these.

Discovery says which workers there are, the scraper and the event subscriptions what they hold and how they do. Here
that is carried into the fleet, the indexes, the tokenizers, health and the connection pool, all on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import aiohttp

from gateway.addresses import endpoint_leads_to_metadata, leads_to_metadata, resolver
from gateway.auth.door import own_account
from gateway.auth.source import KeySource
from gateway.config import Config
from gateway.debug.decisions import Decisions
from gateway.debug.hits import HitBook
from gateway.debug.metrics import Metrics
from gateway.debug.prefixes import TopPrefixes
from gateway.discovery import Discovery, Source
from gateway.discovery.roster import Roster
from gateway.engine.available import Available
from gateway.engine.capabilities import Capabilities
from gateway.engine.health import Health, HealthSettings, State
from gateway.engine.look_again import LookAgain
from gateway.engine.scraper import Scraper, ScrapeSettings
from gateway.engine.tokenizers import EngineTokenizers
from gateway.handoff.assembly import assemble
from gateway.handoff.pairing import Pairing
from gateway.indexservice.query import QueryLink
from gateway.indexservice.source import LinkMetrics, index_of
from gateway.learned import LearnedFile, learned_path
from gateway.leaving import Leaving
from gateway.proxy.holders import ResponseHolders
from gateway.proxy.peer import PoolSettings
from gateway.proxy.upstream import UpstreamPool
from gateway.publishing import Publishing
from gateway.queue.queue import Queue
from gateway.record.recorder import Recorder
from gateway.request import RequestReader, Slo
from gateway.right_of_way import RightOfWay
from gateway.siblings import Siblings
from gateway.stored import StoredResponses
from gateway.tenancy import Tenancy
from gateway.tls import client_context, trust_of_workers
from gateway.tokens import TokenService, TokenSettings
from scorer.cost import CostModel
from scorer.fleet import Fleet
from scorer.kind import EngineKind
from scorer.planner import Planner
from scorer.sessions import SessionSettings
from scorer.types import ChangeKind, EngineStats, RequestFacts, WorkerChange

if TYPE_CHECKING:
    from gateway.replicas import Replicas

_log = logging.getLogger(__name__)
_TICK_S = 0.5
_PROGRESS = ("prompt_tokens", "generation_tokens", "kv_usage", "running", "waiting", "prefill_time_sum_s")
# A reading this overdue was not just a little late.
_LATE_INTERVALS = 2.5
# Beyond it the comparison says more about the prior than about the engine.
_MAX_PACE = 100.0


class Core:
    """Create it inside a running event loop; `start`, then `follow` a discovery, at the end `close`."""

    def __init__(
        self,
        config: Config,
        *,
        rng: random.Random | None = None,
        retries: bool = True,
        tokenizes: bool = True,
        siblings: Siblings | None = None,
    ) -> None:
        """`retries`: a request is sent on when its worker does not answer, so that one may find out whether it does
        again. Else none goes to a worker whose metrics cannot be read, as long as there is another. `tokenizes`: False
        where no prompts come in. `siblings`: the other processes of this gateway, if it has several.
        """
        self.config = config
        self.rng = rng or random.Random()  # noqa: S311 - breaks ties, guards nothing
        self.fleet = Fleet()
        self.right_of_way = RightOfWay()
        self.index, self.link = index_of(config, self.rng, self.right_of_way)
        self.planner = Planner(
            self.fleet,
            self.index,
            policy=config.scorer.policy,
            pd_policy=config.pd.policy or "local",
            peers=config.pd.peers,
            optimistic_ttl_s=config.scorer.optimistic_ttl_s,
            sessions=session_settings(config),
        )
        keeps_learned = siblings is None or siblings.keeps_learned
        path = learned_path(config.learning, os.environ) if keeps_learned else None
        self.learned = LearnedFile(path, self.planner.calibration)
        self._learns_for_a_file = tokenizes and keeps_learned  # else there is nothing to learn from, or another does it
        self.tokens = TokenService(token_settings(config), rng=self.rng)
        self.metrics = Metrics(config.scorer.policy)
        self.hits = HitBook()
        self.prefixes = TopPrefixes()
        self.decisions = Decisions()
        self.recorder = Recorder()
        self.health = Health(_health_settings(config))
        tls = self.tls = client_context(config.tls)
        self.trust_of_workers = trust_of_workers(config.tls, tls)
        self.upstreams = UpstreamPool(
            PoolSettings(
                connect_timeout_s=config.gateway.connect_timeout_s,
                pool_idle_s=config.gateway.pool_idle_s,
                request_timeout_s=config.gateway.request_timeout_s,
                tls=tls,
                http=config.gateway.http,
                link_local=config.discovery.link_local,
            )
        )
        self.capabilities: dict[str, Capabilities] = {}
        self.stored = StoredResponses(config.gateway.stored_responses)
        self.keys = KeySource.of(
            config.auth,
            os.environ,
            self.metrics.registry,
            engine_key(config),
            own_account if siblings is None else siblings.account,
        )
        self.tenancy = Tenancy.of(config.tenancy, os.environ, keyed=self.keys is not None)
        self.holders = ResponseHolders(self.stored, self.upstreams, self._decoders, by_tenant=self.tenancy.by_tenant)
        self.look_again = LookAgain(
            lambda: self.scraper.read_models(self.fleet.workers), config.health.scrape_interval_s
        )
        self.reader = RequestReader(
            self.fleet,
            self.tokens,
            slo(config),
            session_header=config.scorer.session_header,
            holder_of=self.holders.find,
            look_again=self.look_again,
            try_unknown=config.gateway.unknown_models == "try",
            ask=self.link.ask if isinstance(self.link, QueryLink) else None,
            right_of_way=self.right_of_way,
        )
        self.up = Available(
            self.fleet.workers, self.available, None if retries else self._is_reachable, works=self._works
        )
        self.queue = Queue(
            config.queue, self.planner, self.up, self.metrics, self.rng, by_tenant=self.tenancy.by_tenant
        )
        self.handoffs = assemble(
            config.pd,
            planner=self.planner,
            upstreams=self.upstreams,
            health=self.health,
            hits=self.hits,
            registry=self.metrics.registry,
            available=self.up,
            nixl_of=self._nixl_of,
            told_lease_s=self._told_lease_s,
            rng=self.rng,
        )
        self.pairing = Pairing(
            self.fleet,
            self.planner.pairs,
            self.handoffs.engine_ids,
            self.handoffs.releases.stranded,
            self.handoffs.metrics,
            self.capabilities.get,
        )
        self.asleep: set[str] = set()
        self.discoveries: list[Discovery] = []
        self.ended_discoveries: list[str] = []
        """Why they ended before their time."""
        self.others_degraded: list[Callable[[], Iterable[tuple[str, str]]]] = []
        """(one of DEGRADATIONS, detail) of parts that only one face has."""
        self._changes: dict[str, WorkerChange] = {}
        self._asked_others: dict[str, asyncio.Task[None]] = {}
        """For what they have kept of a worker, before its events are followed."""
        self._out: set[str] = set()
        """Ejected and not back yet."""
        self.roster = Roster()
        self.leaving = Leaving(self.planner, self.roster.is_held)
        self._was_empty = False
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=config.gateway.pool_idle_s,
                ssl=tls,
                resolver=resolver(config.discovery.link_local),
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        headers = engine_headers(config)
        self.scraper = Scraper(
            self._session,
            self,
            ScrapeSettings(interval_s=config.health.scrape_interval_s),
            headers=headers,
            on_date=lambda worker, date: self.handoffs.clock.seen(worker, date),
        )
        self._tokenizers = EngineTokenizers(self.tokens, self._session, headers, self.is_well)
        self._tokenizes = tokenizes
        link_local = config.discovery.link_local
        self.publishing = Publishing(
            config.events, self.planner, self.link, link_local=link_local, right_of_way=self.right_of_way
        )
        if self.link is not None:
            self.others_degraded.append(self.link.degraded)
            self.metrics.registry.register(LinkMetrics(self.link))
        self.ingest = self.publishing.ingest
        self.replicas: Replicas | None = None
        """Who shares what is in flight with others, if anybody."""
        hub = None if siblings is None else siblings.hub
        if config.redis.url is not None or hub is not None:
            from gateway.replicas import Replicas  # Only who shares has to load the client.

            self.replicas = Replicas(
                config.redis,
                self.planner,
                self.stored,
                self.metrics.registry,
                self.rng,
                session_idle_s=config.scorer.session_idle_s,
                ingest=self.publishing.own,
                hub=hub,
            )
            self.others_degraded.append(self.replicas.degraded)

    async def start(self) -> None:
        if self._learns_for_a_file:
            self.learned.start()
        self.ingest.start()
        await self.tokens.start()
        self._tasks.append(self._loop.create_task(self._tick(), name="core tick"))
        if self.replicas is not None:
            self.replicas.start()

    def follow(self, discovery: Discovery) -> None:
        """Take in what a discovery says, from now on."""
        self.discoveries.append(discovery)
        self._tasks.append(self._loop.create_task(self._follow(discovery), name="core discovery"))

    async def take_all(self, discovery: Discovery) -> None:
        """Take in what a discovery says, to its end."""
        async for change in discovery.changes():
            _guarded(partial(self.take, discovery.source, change))

    def configure(self, config: Config) -> None:
        """Go by a configuration read again, of which nothing differs but what may change while this runs."""
        self.config = config
        self.reader.slo = slo(config)
        self.queue.configure(config.queue)
        self.health.settings = _health_settings(config)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for asking in self._asked_others.values():
            asking.cancel()
        await asyncio.gather(*self._tasks, *self._asked_others.values(), return_exceptions=True)
        if self.replicas is not None:
            await self.replicas.close()
        await self.learned.close()
        await self.look_again.close()
        await self.scraper.stop()
        await asyncio.to_thread(self.ingest.stop)
        await self.tokens.close()
        await self.handoffs.releases.close()
        await self.upstreams.close()
        await self._session.close()

    # ---- the fleet ---------------------------------------------------------------------------------------------------

    def available(self, worker: str) -> bool:
        """Whether requests may go there now: neither ejected nor asleep; who does not decode, and can be done without,
        must not be known to be down either.
        """
        if worker in self.asleep or not self.health.available(worker):
            return False
        known = self.fleet.workers.get(worker)
        return known is None or known.role.decodes or self.scraper.reachable(worker) is not False

    def is_well(self, worker: str) -> bool:
        """`available`, and its last scrapes do not say that it is down. Requests are tried there all the same when
        nobody else is left.
        """
        return self.available(worker) and self.scraper.reachable(worker) is not False

    def _works(self, worker: str) -> bool:
        return worker not in self.asleep and self.health.works(worker) and self._is_reachable(worker)

    def _is_reachable(self, worker: str) -> bool:
        return self.scraper.reachable(worker) is not False

    def _decoders(self) -> list[str]:
        return [worker.name for worker in self.fleet.workers.values() if worker.role.decodes]

    def _nixl_of(self, worker: str) -> str | None:
        change = self._changes.get(worker)
        return None if change is None else change.nixl_endpoint

    def _told_lease_s(self, worker: str) -> float | None:
        told = self.capabilities.get(worker)
        return None if told is None or told.settings is None else told.settings.lease_s

    def heard_since(self, worker: str, since_s: float) -> bool:
        """Whether its engine has answered a scrape since then."""
        known = self.fleet.workers.get(worker)
        return known is not None and known.stats is not None and known.stats.scraped_at_s >= since_s

    def index_note(self, facts: RequestFacts) -> str | None:
        """What the reason of a decision is to say of where the index comes from."""
        return None if self.link is None else self.link.note(facts)

    def cache_cleared(self, worker: str) -> None:
        """Its prefix cache was emptied, which the engine itself announces only with its next request."""
        self.ingest.forget(worker, "its cache was emptied")
        self.planner.forget_blocks(worker)

    async def models_changed(self, worker: str) -> None:
        """Adapters came or went: ask at once."""
        await self.scraper.read_models([worker])

    def take(self, source: Source, change: WorkerChange) -> None:
        """Take in what one source says of a worker."""
        for each in self.roster.take(source, change):
            self.apply(each)

    def apply(self, change: WorkerChange) -> None:
        """Take in one change of the fleet."""
        name = change.worker
        before = self._changes.get(name)
        if before is None and change.kind in (ChangeKind.DRAINING, ChangeKind.REMOVED):
            return
        self.fleet.apply(change)
        if change.kind is ChangeKind.REMOVED:
            self._forget(name)
            return
        if change.kind is ChangeKind.DRAINING:
            return
        self.leaving.stays(name)
        if change.url is None or self.is_out_of_bounds(change.url):
            why = "without a URL" if change.url is None else f"at {change.url}, which is nobody's worker"
            _log.error("discovery names worker %s %s; it is left out", name, why)
            self._forget(name)
            return
        self._changes[name] = change
        if before is not None and before.url != change.url:  # Another server under the same name.
            self._forget_engine(name)
        self.upstreams.set(name, change.url, change.server_name)
        self.health.add(name, time.monotonic(), _group(change, self.capabilities.get(name)))
        self.metrics.add_worker(name)
        self.hits.add_worker(name)
        if name in self.capabilities:
            self._meet(name, change.weight)
            self._subscribe(name)
        self.planner.configure_worker(name)
        self.scraper.add(name, change.url, change.server_name)

    def is_out_of_bounds(self, url: str) -> bool:
        """Whether no worker may be there."""
        return not self.config.discovery.link_local and leads_to_metadata(url)

    def endpoint_out_of_bounds(self, change: WorkerChange) -> str | None:
        """Which of its event endpoints no engine may have."""
        given = () if self.config.discovery.link_local else (change.events_endpoint, change.replay_endpoint)
        return next((each for each in given if each is not None and endpoint_leads_to_metadata(each)), None)

    def _forget(self, name: str) -> None:
        self.fleet.workers.pop(name, None)
        self._changes.pop(name, None)
        self.pairing.gone(name)
        self._out.discard(name)
        self.leaving.stays(name)
        self.roster.gone(name)
        self._forget_engine(name)
        self.scraper.remove(name)
        self.health.remove(name)
        self.upstreams.remove(name)
        self.metrics.remove_worker(name)
        self.hits.remove_worker(name)
        self.queue.forget(name)
        self.planner.configure_worker(name)
        self._declare_models()

    def _forget_engine(self, name: str) -> None:
        self.stored.lost(name)
        self.publishing.forget(name)
        if (asking := self._asked_others.pop(name, None)) is not None:
            asking.cancel()
        self.pairing.restarted(name)
        self.cache_cleared(name)
        self.capabilities.pop(name, None)
        self.asleep.discard(name)

    # ---- what the scraper reports ------------------------------------------------------------------------------------

    def on_stats(self, worker: str, stats: EngineStats) -> None:
        known = self.fleet.workers.get(worker)
        if known is None:
            return
        before = known.stats
        self.fleet.set_stats(worker, stats)
        if known.pulls.news:
            known.pulls.news = False
            _log.warning(
                "%s: by its engine's count, transfers take %.2g times what was thought; that is used from now on",
                worker,
                known.pulls.scale,
            )
        self.queue.scraped(known)
        self.health.checked(worker, True, stats.scraped_at_s)
        if before is None:
            self.pairing.compare(worker)
        if before is not None and (stats.nixl_failed or 0) > (before.nixl_failed or 0):
            self.pairing.transfers_failed(worker, stats.scraped_at_s)
        if before is not None and _worked(before, stats):
            self.health.progressed(worker, stats.scraped_at_s)
        self.health.paced(worker, _pace(stats, self.planner.cost, known.weight))
        if before is None or (before.block_size, before.kv_blocks) != (stats.block_size, stats.kv_blocks):
            self.planner.configure_worker(worker)

    def on_capabilities(self, worker: str, capabilities: Capabilities) -> None:
        known = self.fleet.workers.get(worker)
        if known is None:
            return
        self.capabilities[worker] = capabilities
        self._meet(worker, known.weight)
        self.fleet.set_capabilities(
            worker,
            models=capabilities.models,
            adapters=[adapter.name for adapter in capabilities.adapters],
            ranks=sorted(capabilities.event_sources or {}) or [self._changes[worker].rank],
            max_model_len=capabilities.max_model_len,
        )
        self.health.add(worker, time.monotonic(), _group(self._changes[worker], capabilities))
        self.planner.configure_worker(worker)
        self.pairing.compare(worker)
        self._subscribe(worker)
        self._declare_models()

    def _meet(self, worker: str, weight: float) -> None:
        if self.planner.calibration.meet(worker, _kind(self.capabilities[worker], weight)):
            _log.warning("%s is another kind of engine than it was; what was learned of it is forgotten", worker)

    def on_restart(self, worker: str, process_start_s: float | None) -> None:
        _log.info("%s restarted; what it held is forgotten", worker)
        self.stored.lost(worker)
        self.health.restarted(worker, time.monotonic())
        known = self.fleet.workers.get(worker)
        self.pairing.restarted(worker, math.inf if known is None or known.stats is None else known.stats.scraped_at_s)
        self.planner.forget_blocks(worker)
        self.publishing.restarted(worker, process_start_s)

    def on_sleep(self, worker: str, asleep: bool) -> None:
        if asleep:
            self.asleep.add(worker)
            self.cache_cleared(worker)
        else:
            self.asleep.discard(worker)

    def on_unreachable(self, worker: str, reason: str) -> None:
        """Told to health with every tick, as long as it lasts."""

    def _subscribe(self, worker: str) -> None:
        change = self._changes.get(worker)
        if change is None:
            return
        sources = self.capabilities[worker].event_sources or {}
        if self.replicas is None:
            self.publishing.subscribe(change, sources)
        elif worker not in self._asked_others:
            self._asked_others[worker] = self._loop.create_task(
                self._subscribe_from_saved(worker, self.replicas, sorted(sources) or [change.rank])
            )
        elif self._asked_others[worker].done():
            self.publishing.subscribe(change, sources)

    async def _subscribe_from_saved(self, worker: str, replicas: Replicas, ranks: list[int]) -> None:
        """With what other replicas have kept of it, if that is to be had soon."""
        saved = await replicas.saved(worker, ranks)
        change, capabilities = self._changes.get(worker), self.capabilities.get(worker)
        if change is not None and capabilities is not None:
            if self.publishing.own is not None:
                self.publishing.own.begin_with(worker, saved)
            self.publishing.subscribe(change, capabilities.event_sources or {})

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def _declare_models(self) -> None:
        if not self._tokenizes:
            return
        changes = self._changes.items()
        addresses = {name: (it.url, it.server_name) for name, it in changes if it.url is not None}
        self._tokenizers.declare(addresses, self.capabilities)

    # ---- tasks -------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            _guarded(self._watch_health)
            _guarded(self.publishing.watch)
            _guarded(self._watch_emptiness)
            _guarded(self._remove_drained)

    def _watch_health(self) -> None:
        now_s = time.monotonic()
        late_s = _LATE_INTERVALS * self.config.health.scrape_interval_s
        for name, scrape in self.scraper.status().items():
            self.health.late(name, scrape.age_s is not None and scrape.age_s > late_s)
            if scrape.reachable is False:
                self.health.checked(name, False, now_s, scrape.failed_s)
        for change in self.health.tick(now_s):
            level = logging.WARNING if change.state is State.EJECTED else logging.INFO
            _log.log(level, "%s is %s: %s", change.worker, change.state.value, change.reason)
            if change.state is State.EJECTED and change.worker not in self._out:
                self._out.add(change.worker)
                self.metrics.ejected(change.worker)  # A failed probe is no further outage.
            elif change.state is State.HEALTHY:
                self._out.discard(change.worker)
                self.scraper.read_now(change.worker)

    def _watch_emptiness(self) -> None:
        is_empty = not self.fleet.workers
        if is_empty and not self._was_empty:
            _log.warning("no worker is configured or discovered; requests are answered 503 until there is one")
        self._was_empty = is_empty

    async def _follow(self, discovery: Discovery) -> None:
        try:
            await self.take_all(discovery)
        except Exception as exc:
            _log.exception("a discovery ended unexpectedly; the workers known stay")
            self.ended_discoveries.append(f"{type(discovery).__name__} ended: {exc}")

    def _remove_drained(self) -> None:
        for name in list(self.leaving.due(time.monotonic())):
            _log.info("%s is gone", name)
            self.apply(WorkerChange(kind=ChangeKind.REMOVED, worker=name))


def _group(change: WorkerChange, capabilities: Capabilities | None) -> tuple[object, ...]:
    """Workers that can stand in for each other."""
    return change.role, frozenset(capabilities.models if capabilities is not None else ())


def _kind(capabilities: Capabilities, weight: float) -> EngineKind:
    return EngineKind(
        model=capabilities.root or next(iter(capabilities.models), None),
        kv_cache_dtype=capabilities.kv_cache_dtype,
        block_size=capabilities.block_size,
        kv_blocks=capabilities.kv_blocks,
        weight=weight,
    )


def _worked(before: EngineStats, now: EngineStats) -> bool:
    """Whether the engine core did anything between two readings. All of these come from its steps, so that one that
    hangs behind a live HTTP server shows the same numbers again; the KV cache grows while a long prompt is computed.
    """
    return any(getattr(before, name) != getattr(now, name) for name in _PROGRESS)


def _pace(stats: EngineStats, cost: CostModel, weight: float) -> float:
    """How many times its predicted prefill time the engine takes, by its own account; at least 1."""
    n = stats.prefill_time_count
    if not n or not stats.prefill_time_sum_s or stats.prompt_tokens is None:
        return 1.0
    prompt_tokens = stats.prompt_tokens / n
    cached_tokens = min(prompt_tokens, (stats.prefix_hits_tokens or 0.0) / n)
    predicted_s = cost.comp_s(round(prompt_tokens), round(cached_tokens), weight)
    return min(_MAX_PACE, max(1.0, stats.prefill_time_sum_s / n / predicted_s))


def _guarded(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception:
        _log.exception("unexpected; going on")


def _health_settings(config: Config) -> HealthSettings:
    return HealthSettings(eject_after_s=config.health.eject_after_s)


def token_settings(config: Config) -> TokenSettings:
    tokens = config.tokens
    return TokenSettings(
        mode=tokens.mode,
        tokenizer_paths={} if tokens.tokenizer is None else {"*": tokens.tokenizer},
        engine_budget_s=tokens.engine_budget_ms / 1000,
        check_rate=tokens.sample_check_rate,
    )


def engine_headers(config: Config) -> dict[str, str]:
    """What our own requests to the engines carry."""
    key = engine_key(config)
    return {"Authorization": f"Bearer {key}"} if key else {}


def engine_key(config: Config) -> str:
    """The engines' --api-key; empty: they have none."""
    return os.environ.get(config.engine_api_key_env, "").strip() if config.engine_api_key_env else ""


def session_settings(config: Config) -> SessionSettings:
    scorer = config.scorer
    return SessionSettings(mode=scorer.session_affinity, idle_s=scorer.session_idle_s, wait_s=scorer.session_wait_s)


def slo(config: Config) -> Slo:
    scorer = config.scorer
    return Slo(
        ttft_s=None if scorer.slo_ttft_ms is None else scorer.slo_ttft_ms / 1000,
        tpot_s=None if scorer.slo_tpot_ms is None else scorer.slo_tpot_ms / 1000,
    )
