"""The parts that know the fleet, put together; every face (gateway, sidecar, picker) stands on one of these.

Discovery says which workers there are, the scraper and the event subscriptions what they hold and how they do. Here
that is carried into the fleet, the indexes, the tokenizers, health and the connection pool, all on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from functools import partial

import aiohttp

from gateway.config import Config
from gateway.debug.hits import HitBook
from gateway.debug.metrics import Metrics
from gateway.debug.prefixes import TopPrefixes
from gateway.discovery import Discovery
from gateway.engine.capabilities import Capabilities
from gateway.engine.feed import IngestSettings
from gateway.engine.health import Health, HealthSettings, State
from gateway.engine.scraper import Scraper, ScrapeSettings
from gateway.engine.subscriber import EventIngest
from gateway.proxy.upstream import PoolSettings, UpstreamPool
from gateway.request import RequestReader, Slo
from gateway.tokens import EngineTokenize, TokenService, TokenSettings, aiohttp_tokenize
from indexer import EventBatch, PrefixIndex
from scorer.fleet import Fleet
from scorer.planner import Planner
from scorer.types import ChangeKind, EngineStats, WorkerChange

_log = logging.getLogger(__name__)
_TICK_S = 0.5
_KEEP_DRAINED_S = 60.0
_EVENTS_UP = frozenset({"connected", "listening"})


class Core:
    """Create it inside a running event loop; `start`, then `follow` a discovery, at the end `close`."""

    def __init__(self, config: Config, *, rng: random.Random | None = None) -> None:
        self.config = config
        self.rng = rng or random.Random()  # noqa: S311 - breaks ties, guards nothing
        self.fleet = Fleet()
        self.index = PrefixIndex(
            budget_bytes=config.index.budget_bytes,
            orphan_blocks=config.index.orphan_blocks,
            removal_mode=config.index.removal_mode,
        )
        self.planner = Planner(
            self.fleet, self.index, policy=config.scorer.policy, optimistic_ttl_s=config.scorer.optimistic_ttl_s
        )
        self.tokens = TokenService(token_settings(config), rng=self.rng)
        self.reader = RequestReader(self.fleet, self.tokens, slo(config))
        self.metrics = Metrics(config.scorer.policy)
        self.hits = HitBook()
        self.prefixes = TopPrefixes()
        self.health = Health(HealthSettings(eject_after_s=config.health.eject_after_s))
        self.upstreams = UpstreamPool(
            PoolSettings(
                connect_timeout_s=config.gateway.connect_timeout_s,
                pool_idle_s=config.gateway.pool_idle_s,
                request_timeout_s=config.gateway.request_timeout_s,
            )
        )
        self.capabilities: dict[str, Capabilities] = {}
        self.asleep: set[str] = set()
        self.discoveries: list[Discovery] = []
        self.ended_discoveries: list[str] = []
        """Why they ended before their time."""
        self._changes: dict[str, WorkerChange] = {}
        self._tokenize: dict[str, tuple[str, EngineTokenize]] = {}
        self._tokenizes: dict[str, str] = {}
        self._publishing: set[str] = set()
        self._drained_s: dict[str, float] = {}
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=config.gateway.pool_idle_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self.scraper = Scraper(self._session, self, ScrapeSettings(interval_s=config.health.scrape_interval_s))
        events = config.events
        self.ingest = EventIngest(
            self.index,
            bind_endpoint=events.bind_endpoint if events.mode == "bind" else None,
            settings=IngestSettings(
                replay_timeout_s=events.replay_timeout_s,
                replay_attempts=events.replay_attempts,
                buffer_batches=events.buffer_batches,
            ),
            on_batch=self._batch_arrived,
            on_clear=self._index_cleared,
        )

    async def start(self) -> None:
        self.ingest.start()
        await self.tokens.start()
        self._tasks.append(self._loop.create_task(self._tick(), name="core tick"))

    def follow(self, discovery: Discovery) -> None:
        """Take in what a discovery says, from now on."""
        self.discoveries.append(discovery)
        self._tasks.append(self._loop.create_task(self._follow(discovery), name="core discovery"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.scraper.stop()
        await asyncio.to_thread(self.ingest.stop)
        await self.tokens.close()
        await self.upstreams.close()
        await self._session.close()

    # ---- the fleet ---------------------------------------------------------------------------------------------------

    def available(self, worker: str) -> bool:
        """Whether requests may go there now: neither ejected nor asleep."""
        return worker not in self.asleep and self.health.available(worker)

    def cache_cleared(self, worker: str) -> None:
        """Its prefix cache was emptied, which the engine itself announces only with its next request."""
        self.index.clear(worker)
        self.planner.forget_blocks(worker)

    def models_changed(self, worker: str) -> None:
        """Adapters came or went: ask at once instead of within the models interval."""
        change = self._changes.get(worker)
        if change is not None and change.url is not None:
            self.scraper.remove(worker)
            self.scraper.add(worker, change.url)

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
        self._drained_s.pop(name, None)
        if change.kind is ChangeKind.DRAINING:
            return
        if change.url is None:
            _log.error("discovery names worker %s without a URL; it is left out", name)
            self._forget(name)
            return
        self._changes[name] = change
        if before is not None and before.url != change.url:  # Another server under the same name.
            self._forget_engine(name)
        self.upstreams.set(name, change.url)
        self.health.add(name, time.monotonic(), _group(change, self.capabilities.get(name)))
        self.metrics.add_worker(name)
        self.hits.add_worker(name)
        self.planner.configure_worker(name)
        self.scraper.add(name, change.url)
        if name in self.capabilities:
            self._subscribe(name)

    def _forget(self, name: str) -> None:
        self.fleet.workers.pop(name, None)
        self._changes.pop(name, None)
        self._forget_engine(name)
        self.scraper.remove(name)
        self.health.remove(name)
        self.upstreams.remove(name)
        self.metrics.remove_worker(name)
        self.hits.remove_worker(name)
        self.planner.configure_worker(name)
        self._declare_models()

    def _forget_engine(self, name: str) -> None:
        self.ingest.remove(name)
        self.cache_cleared(name)
        self.capabilities.pop(name, None)
        self._tokenize.pop(name, None)
        self.asleep.discard(name)
        self._publishing.discard(name)

    # ---- what the scraper reports ------------------------------------------------------------------------------------

    def on_stats(self, worker: str, stats: EngineStats) -> None:
        known = self.fleet.workers.get(worker)
        if known is None:
            return
        before = known.stats
        self.fleet.set_stats(worker, stats)
        self.health.checked(worker, True, stats.scraped_at_s)
        if before is not None and _worked(before, stats):
            self.health.progressed(worker, stats.scraped_at_s)
        if before is None or (before.block_size, before.kv_blocks) != (stats.block_size, stats.kv_blocks):
            self.planner.configure_worker(worker)

    def on_capabilities(self, worker: str, capabilities: Capabilities) -> None:
        if worker not in self.fleet.workers:
            return
        self.capabilities[worker] = capabilities
        self.fleet.set_capabilities(
            worker,
            models=capabilities.models,
            adapters=[adapter.name for adapter in capabilities.adapters],
            ranks=sorted(capabilities.event_sources or {}) or [0],
            max_model_len=capabilities.max_model_len,
        )
        self.health.add(worker, time.monotonic(), _group(self._changes[worker], capabilities))
        self.planner.configure_worker(worker)
        self._subscribe(worker)
        self._declare_models()

    def on_restart(self, worker: str, process_start_s: float | None) -> None:
        _log.info("%s restarted; what it held is forgotten", worker)
        self.health.restarted(worker, time.monotonic())
        self.planner.forget_blocks(worker)
        if any(name == worker for name, _ in self.ingest.status()):
            self.ingest.process_restarted(worker, "process start time", process_start_s)
        else:
            self.index.clear(worker)

    def on_sleep(self, worker: str, asleep: bool) -> None:
        if asleep:
            self.asleep.add(worker)
            self.cache_cleared(worker)
        else:
            self.asleep.discard(worker)

    def on_unreachable(self, worker: str, reason: str) -> None:
        """Told to health with every tick, as long as it lasts."""

    # ---- events ------------------------------------------------------------------------------------------------------

    def _subscribe(self, worker: str) -> None:
        """Where a key or discovery names an endpoint, it counts; further ranks follow on the ports after it (vLLM's
        own rule).
        """
        change, sources = self._changes.get(worker), self.capabilities[worker].event_sources or {}
        if change is None:
            return
        shared = self.config.events.mode == "bind"
        for rank in sorted(sources) or [0]:
            source = sources.get(rank)
            if change.events_endpoint is not None:
                self.ingest.add(
                    worker,
                    rank,
                    _port_after(change.events_endpoint, rank),
                    change.replay_endpoint and _port_after(change.replay_endpoint, rank),
                )
            elif shared and (source is None or source.engine_connects):
                self.ingest.add(
                    worker,
                    rank,
                    None,
                    source.replay_endpoint if source else None,
                    topic=source.topic or None if source else None,
                )
            elif source is not None and source.endpoint is not None and not source.engine_connects:
                self.ingest.add(worker, rank, source.endpoint, source.replay_endpoint)

    def _batch_arrived(self, worker: str, rank: int, batch: EventBatch) -> None:
        """In the ingest thread."""
        if worker not in self._publishing:
            self._loop.call_soon_threadsafe(self._set_publishing, worker, True)

    def _index_cleared(self, worker: str, rank: int, reason: str) -> None:
        """In the ingest thread."""
        self._loop.call_soon_threadsafe(self.planner.forget_blocks, worker, rank)

    def _set_publishing(self, name: str, publishing: bool) -> None:
        worker = self.fleet.workers.get(name)
        if worker is None or worker.publishes_events == publishing:
            return
        worker.publishes_events = publishing
        if publishing:
            self._publishing.add(name)
            self.planner.approximate.clear(name)  # From now on its own events speak for it.
        else:
            self._publishing.discard(name)
            _log.warning("the KV events of %s stopped; what it is sent is assumed to be cached instead", name)

    def _watch_events(self) -> None:
        up = {
            worker
            for (worker, _), feed in self.ingest.status().items()
            if feed.batches and feed.endpoint_state in _EVENTS_UP
        }
        for name in list(self.fleet.workers):
            self._set_publishing(name, name in up)

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def _declare_models(self) -> None:
        """Each model name is tokenised by one worker that serves it, the same one for as long as it does."""
        served: dict[str, list[str]] = {}
        for worker, capabilities in self.capabilities.items():
            for name in (*capabilities.models, *(adapter.name for adapter in capabilities.adapters)):
                served.setdefault(name, []).append(worker)
        for name in set(self._tokenizes) - set(served):
            del self._tokenizes[name]
            self.tokens.remove_model(name)
        for name, workers in served.items():
            if self._tokenizes.get(name) not in workers:
                self._tokenizes[name] = min(workers)
            worker = self._tokenizes[name]
            self.tokens.set_model(name, self.capabilities[worker].root, self._tokenizer_of(worker))

    def _tokenizer_of(self, worker: str) -> EngineTokenize | None:
        change = self._changes.get(worker)
        if change is None or change.url is None:
            return None
        known = self._tokenize.get(worker)
        if known is None or known[0] != change.url:
            known = self._tokenize[worker] = change.url, aiohttp_tokenize(self._session, change.url)
        return known[1]

    # ---- tasks -------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            _guarded(self._watch_health)
            _guarded(self._watch_events)
            _guarded(self._remove_drained)

    def _watch_health(self) -> None:
        now_s = time.monotonic()
        for name, scrape in self.scraper.status().items():
            if scrape.reachable is False:
                self.health.checked(name, False, now_s)
        for change in self.health.tick(now_s):
            level = logging.WARNING if change.state is State.EJECTED else logging.INFO
            _log.log(level, "%s is %s: %s", change.worker, change.state.value, change.reason)
            if change.state is State.EJECTED:
                self.metrics.ejected(change.worker)

    async def _follow(self, discovery: Discovery) -> None:
        try:
            async for change in discovery.changes():
                _guarded(partial(self.apply, change))
        except Exception as exc:
            _log.exception("a discovery ended unexpectedly; the workers known stay")
            self.ended_discoveries.append(f"{type(discovery).__name__} ended: {exc}")

    def _remove_drained(self) -> None:
        """A draining worker without work is kept for a while, with what is known of it, since many come back."""
        now_s = time.monotonic()
        for worker in list(self.fleet.workers.values()):
            if not worker.draining or any(load.requests for load in worker.loads.values()):
                self._drained_s.pop(worker.name, None)
            elif now_s - self._drained_s.setdefault(worker.name, now_s) > _KEEP_DRAINED_S:
                self.apply(WorkerChange(kind=ChangeKind.REMOVED, worker=worker.name))


def _group(change: WorkerChange, capabilities: Capabilities | None) -> tuple[object, ...]:
    """Workers that can stand in for each other."""
    return change.role, frozenset(capabilities.models if capabilities is not None else ())


def _worked(before: EngineStats, now: EngineStats) -> bool:
    """Whether the engine computed anything between two readings."""
    return (before.prompt_tokens, before.generation_tokens) != (now.prompt_tokens, now.generation_tokens)


def _guarded(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception:
        _log.exception("unexpected; going on")


def token_settings(config: Config) -> TokenSettings:
    tokens = config.tokens
    return TokenSettings(
        mode=tokens.mode,
        tokenizer_paths={} if tokens.tokenizer is None else {"*": tokens.tokenizer},
        engine_budget_s=tokens.engine_budget_ms / 1000,
        check_rate=tokens.sample_check_rate,
    )


def slo(config: Config) -> Slo:
    scorer = config.scorer
    return Slo(
        ttft_s=None if scorer.slo_ttft_ms is None else scorer.slo_ttft_ms / 1000,
        tpot_s=None if scorer.slo_tpot_ms is None else scorer.slo_tpot_ms / 1000,
    )


def _port_after(endpoint: str, rank: int) -> str:
    if rank == 0 or not endpoint.startswith("tcp://"):
        return endpoint
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}"
