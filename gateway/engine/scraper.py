"""Reads every worker's metrics once a second, and at its (re)start what it is.

One task per worker, so that a slow worker is late for itself only; a bound on requests at once, so that a large fleet
does not open all its connections in the same moment. A failed reading keeps the last one, whose age then grows. A
worker that cannot be reached is asked ever more rarely, up to `retry_max_s`, and learned anew when it answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Protocol, TypeVar

import aiohttp
import msgspec

from gateway.engine.capabilities import (
    Capabilities,
    EventSource,
    Models,
    parse_event_sources,
    parse_models,
    parse_version,
)
from gateway.engine.metrics import Scrape, parse_metrics
from gateway.engine.settings import PATH as SERVER_INFO
from gateway.engine.settings import Settings, parse_settings
from scorer.types import EngineStats

log = logging.getLogger(__name__)

_STALE_INTERVALS = 3.0
_MAX_BODY_BYTES = 16 << 20
# A worker that is several processes shows older start times again, which is no restart.
_START_TOLERANCE_S = 0.01
_T = TypeVar("_T")
_COUNTERS = ("prompt_tokens", "generation_tokens", "prefix_queries_tokens")


class ScrapeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`timeout_s` bounds one request. `failures` in a row make a worker that was well unreachable; `models_interval_s`
    is how often its list of models is read again at most, because adapters come and go at run time: with each reading.
    """

    interval_s: float = 1.0
    timeout_s: float = 2.0
    at_once: int = 64
    failures: int = 2
    models_interval_s: float = 0.0
    retry_max_s: float = 5.0


class Listener(Protocol):
    """What the scraper reports, from the event loop. An exception in here is logged and stops nothing."""

    def on_stats(self, worker: str, stats: EngineStats) -> None: ...

    def on_capabilities(self, worker: str, capabilities: Capabilities) -> None:
        """At the first answer, after a restart, and whenever they changed."""

    def on_restart(self, worker: str, process_start_s: float | None) -> None:
        """It is a new process, with an empty cache. Its capabilities follow."""

    def on_sleep(self, worker: str, asleep: bool) -> None:
        """It was put to sleep, which emptied its cache without an event, or woken up."""

    def on_unreachable(self, worker: str, reason: str) -> None:
        """Once per outage; the next `on_stats` ends it."""


class WorkerScrape(msgspec.Struct, frozen=True, kw_only=True):
    """How reading one worker goes. Times are monotonic seconds."""

    url: str
    reachable: bool | None
    stale: bool
    age_s: float | None
    failures: int
    failed_s: float | None
    """When the last reading that failed was begun, while none succeeded since."""
    reason: str | None
    stats: EngineStats | None
    capabilities: Capabilities | None


class _Failed(Exception):
    """The worker's answer could not be had; the text says why."""


class _Worker:
    def __init__(self, name: str, url: str, server_name: str | None) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.server_name = server_name
        self.scrape: Scrape | None = None
        self.capabilities: Capabilities | None = None
        self.reachable: bool | None = None
        self.reason: str | None = None
        self.not_learned: str | None = None
        """Why the capabilities could not be read, though the worker answers."""
        self.failures = 0
        self.failed_s: float | None = None
        self.hurry = asyncio.Event()
        self.must_learn = True
        self.models_due_s = 0.0
        self.learning = asyncio.Lock()
        """The later of two lists of models has to be the later one told."""
        self.task: asyncio.Task[None] | None = None


class Scraper:
    """`session` is the caller's, and so are its connection limits; `headers` go with every request. `on_date` is told
    what Date each answer bears.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        listener: Listener,
        settings: ScrapeSettings | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        on_date: Callable[[str, str | None], None] = lambda worker, date: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._session = session
        self._listener = listener
        self._settings = settings or ScrapeSettings()
        self._headers = dict(headers or {})
        self._on_date = on_date
        self._now = now
        self._slots = asyncio.Semaphore(self._settings.at_once)
        self._retry_slots = asyncio.Semaphore(max(1, self._settings.at_once // 4))
        """For workers that failed last, so that many dead ones cannot hold up the living."""
        self._workers: dict[str, _Worker] = {}

    def add(self, name: str, url: str, server_name: str | None = None) -> None:
        """Start reading a worker. Needs a running event loop; another URL under the same name replaces it.
        `server_name` is what its certificate names, if not the URL's host.
        """
        known = self._workers.get(name)
        if known is not None:
            if (known.url, known.server_name) == (url.rstrip("/"), server_name):
                return
            self.remove(name)
        worker = self._workers[name] = _Worker(name, url, server_name)
        worker.task = asyncio.get_running_loop().create_task(self._follow(worker), name=f"scrape {name}")

    def remove(self, name: str) -> None:
        worker = self._workers.pop(name, None)
        if worker is not None and worker.task is not None:
            worker.task.cancel()

    async def stop(self) -> None:
        tasks = [worker.task for worker in self._workers.values() if worker.task is not None]
        self._workers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def read_now(self, name: str) -> None:
        """Do not wait for the next reading of a worker to be due."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.hurry.set()

    async def read_models(self, names: Iterable[str]) -> None:
        """Read anew what these workers serve; who does not answer keeps what is known of it."""
        workers = [self._workers[name] for name in names if name in self._workers]
        await asyncio.gather(*(self._learn_again(worker) for worker in workers))

    async def _learn_again(self, worker: _Worker) -> None:
        if worker.scrape is None or worker.must_learn or worker.reachable is not True:
            return  # Its next reading brings everything.
        worker.models_due_s = 0.0
        await self._learn(worker, worker.scrape)

    def reachable(self, name: str) -> bool | None:
        """None: not known (yet)."""
        worker = self._workers.get(name)
        return None if worker is None else worker.reachable

    def status(self) -> dict[str, WorkerScrape]:
        now_s = self._now()
        return {name: self._status(worker, now_s) for name, worker in self._workers.items()}

    def status_of(self, name: str) -> WorkerScrape | None:
        worker = self._workers.get(name)
        return None if worker is None else self._status(worker, self._now())

    def _status(self, worker: _Worker, now_s: float) -> WorkerScrape:
        stats = worker.scrape.stats if worker.scrape is not None else None
        age_s = None if stats is None else max(0.0, now_s - stats.scraped_at_s)
        return WorkerScrape(
            url=worker.url,
            reachable=worker.reachable,
            stale=age_s is None or age_s > _STALE_INTERVALS * self._settings.interval_s,
            age_s=age_s,
            failures=worker.failures,
            failed_s=worker.failed_s,
            reason=worker.reason or worker.not_learned,
            stats=stats,
            capabilities=worker.capabilities,
        )

    # ---- one worker -------------------------------------------------------------------------------------------------

    async def _follow(self, worker: _Worker) -> None:
        due_s = self._now()
        while True:
            worker.hurry.clear()
            began_s = self._now()
            try:
                await self._read(worker)
            except _Failed as failed:
                self._failed(worker, str(failed), began_s)
            except Exception:
                self.counters["unexpected"] += 1
                log.exception("reading %s failed unexpectedly", worker.name)
            interval_s = self._settings.interval_s
            if worker.reachable is False:
                interval_s = min(interval_s * 2 ** min(worker.failures - 1, 10), self._settings.retry_max_s)
            due_s = max(due_s + interval_s, self._now())  # a late reading does not make the next ones hurry
            with suppress(TimeoutError):
                await asyncio.wait_for(worker.hurry.wait(), due_s - self._now())

    async def _read(self, worker: _Worker) -> None:
        text = (await self._get(worker, "/metrics")).decode(errors="replace")
        scrape = parse_metrics(text, self._now())
        before = worker.scrape
        worker.scrape = scrape
        if before is not None and restarted(before.stats, scrape.stats):
            self.counters["restarts"] += 1
            worker.must_learn = True
            self._tell(lambda: self._listener.on_restart(worker.name, scrape.stats.process_start_s))
        if worker.reachable is not True:
            worker.reachable = worker.must_learn = True
            log.info("%s answers at %s", worker.name, worker.url)
        worker.failures, worker.reason, worker.failed_s = 0, None, None
        self.counters["scrapes"] += 1
        if scrape.asleep is not None and scrape.asleep != (before is not None and before.asleep is True):
            asleep = scrape.asleep
            self._tell(lambda: self._listener.on_sleep(worker.name, asleep))
        self._tell(lambda: self._listener.on_stats(worker.name, scrape.stats))
        await self._learn(worker, scrape)

    def _failed(self, worker: _Worker, reason: str, began_s: float) -> None:
        self.counters["failures"] += 1
        worker.failures += 1
        worker.failed_s = began_s
        worker.reason = reason
        if worker.reachable is None or (worker.reachable and worker.failures >= self._settings.failures):
            worker.reachable = False
            log.warning("%s cannot be reached: %s", worker.name, reason)
            self._tell(lambda: self._listener.on_unreachable(worker.name, reason))

    async def _learn(self, worker: _Worker, scrape: Scrape) -> None:
        """Bring the capabilities up to date. What fails is kept as it was and asked for again with the next reading."""
        async with worker.learning:
            await self._learn_in_turn(worker, scrape)

    async def _learn_in_turn(self, worker: _Worker, scrape: Scrape) -> None:
        if not worker.must_learn and self._now() < worker.models_due_s:
            return
        old = worker.capabilities or Capabilities()
        version, sources, settings = old.version, old.event_sources, old.settings
        try:
            if worker.must_learn:
                models, version, sources = await asyncio.gather(
                    self._models(worker), self._version(worker), self._event_sources(worker)
                )
                settings = await self._settings_of(worker) if scrape.stats.nixl_bytes is not None else None
            else:
                models = await self._models(worker)
        except _Failed as failed:
            self.counters["failed_learning"] += 1
            if worker.not_learned != str(failed):
                worker.not_learned = str(failed)
                log.warning("%s does not say what it is: %s", worker.name, failed)
            return
        worker.not_learned = None
        stats = scrape.stats
        new = Capabilities(
            models=models.models,
            adapters=models.adapters,
            root=models.root,
            max_model_len=models.max_model_len,
            version=version,
            event_sources=sources,
            block_size=stats.block_size,
            kv_blocks=stats.kv_blocks,
            prefix_caching=stats.prefix_caching,
            kv_cache_dtype=scrape.kv_cache_dtype,
            settings=settings,
        )
        tell = worker.must_learn or new != worker.capabilities
        worker.capabilities = new
        worker.must_learn = False
        worker.models_due_s = self._now() + self._settings.models_interval_s
        if tell:
            self._tell(lambda: self._listener.on_capabilities(worker.name, new))

    async def _models(self, worker: _Worker) -> Models:
        return _decoded(parse_models, "/v1/models", await self._get(worker, "/v1/models"))

    async def _version(self, worker: _Worker) -> str | None:
        body = await self._get_if_there(worker, "/version")
        return None if body is None else _decoded(parse_version, "/version", body)

    async def _settings_of(self, worker: _Worker) -> Settings | None:
        """Of those who hand KV over: a page for development, which costs the server a second and may fail there."""
        with suppress(_Failed):
            body = await self._get_if_there(worker, SERVER_INFO)
            return None if body is None else _decoded(parse_settings, SERVER_INFO, body)
        return None

    async def _event_sources(self, worker: _Worker) -> dict[int, EventSource] | None:
        body = await self._get_if_there(worker, "/kv_event_sources")
        if body is None:
            return None
        return _decoded(lambda text: parse_event_sources(text, worker.url), "/kv_event_sources", body)

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def is_healthy(self, name: str) -> bool:
        """Ask a worker's `/health` now; False as well for one that is not known."""
        worker = self._workers.get(name)
        if worker is None:
            return False
        with suppress(_Failed):
            await self._get(worker, "/health")
            return True
        return False

    async def _get_if_there(self, worker: _Worker, path: str) -> bytes | None:
        """None when the engine has no such path (404, 405, 501)."""
        status, body = await self._ask(worker, path)
        if status in (404, 405, 501):
            return None
        return _good(path, status, body)

    async def _get(self, worker: _Worker, path: str) -> bytes:
        return _good(path, *await self._ask(worker, path))

    async def _ask(self, worker: _Worker, path: str) -> tuple[int, bytes]:
        async with self._retry_slots if worker.failures else self._slots:
            try:
                async with (
                    asyncio.timeout(self._settings.timeout_s),
                    self._session.get(
                        worker.url + path,
                        headers=self._headers,
                        allow_redirects=False,
                        server_hostname=worker.server_name,
                    ) as response,
                ):
                    self._on_date(worker.name, response.headers.get("Date"))
                    return response.status, await _bounded(response.content, path)
            except TimeoutError:
                raise _Failed(f"{path}: no answer within {self._settings.timeout_s:g} s") from None
            except (aiohttp.ClientError, OSError, UnicodeError) as error:
                raise _Failed(f"{path}: {type(error).__name__}: {error}") from None

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            self.counters["failed_callbacks"] += 1
            log.exception("a scrape listener failed")


def restarted(before: EngineStats, after: EngineStats) -> bool:
    """Whether two readings are of different processes: a later start time or, where that is not told, a counter that
    went back.
    """
    if before.process_start_s is not None and after.process_start_s is not None:
        return after.process_start_s > before.process_start_s + _START_TOLERANCE_S
    pairs = [(getattr(before, name), getattr(after, name)) for name in _COUNTERS]
    return any(old is not None and new is not None and new < old for old, new in pairs)


async def _bounded(content: aiohttp.StreamReader, path: str) -> bytes:
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise _Failed(f"{path}: an answer of more than {_MAX_BODY_BYTES} bytes")
    return bytes(body)


def _good(path: str, status: int, body: bytes) -> bytes:
    if status != 200:
        raise _Failed(f"{path}: status {status}")
    return body


def _decoded(parse: Callable[[bytes], _T], path: str, body: bytes) -> _T:
    try:
        return parse(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _Failed(f"{path}: not what was expected: {error}") from None
