"""All workers from start to end: identify each, see where events are read, then follow and probe each.

Every worker has its deadline, and what was found before it counts. Nothing that goes wrong with one stops another.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress

import aiohttp
import msgspec

from gateway.admin_client import token_headers
from gateway.config.schema import Config
from gateway.doctor.catalogue import finding
from gateway.doctor.clock import Offset, judge_clock, judge_clocks
from gateway.doctor.events import RankSeen, judge, judge_mode, judge_reuse
from gateway.doctor.fetch import Answer, Http
from gateway.doctor.findings import Finding, Report
from gateway.doctor.fleet import judge_fleet
from gateway.doctor.gateway import examine_gateway
from gateway.doctor.identity import PATHS, Identity, identify
from gateway.doctor.probe import Outcome, Prober, probe_length
from gateway.doctor.tap import Tap, connect_error, is_up, until
from gateway.doctor.team import examine_team
from gateway.doctor.tokenizer import check_tokenizer, tokenizer_path
from gateway.doctor.transfers import judge_transfers, kv_shape
from gateway.engine.capabilities import EventSource
from gateway.engine.settings import PATH as SERVER_INFO
from gateway.engine.settings import Settings, parse_settings
from gateway.engine.transfers import parse_nixl
from gateway.tls import client_context
from scorer.types import Role

_DEADLINE_TIMEOUTS = 20.0
"""A worker's deadline in timeouts: connecting, one replay, and two tries of a probe are all slow at the most."""
_WORKERS_AT_ONCE = 16


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`timeout_s` bounds each single wait. `events` and `replays`: addresses of rank 0 by worker, where they are given;
    one with `*` for a host is listened at. `headers` go with every request. `roles` and `nixl` (workers[].nixl) by
    worker, and `config`, are the gateway's.
    """

    timeout_s: float = 5.0
    tokenizer: str | None = None
    events: Mapping[str, str] = {}
    replays: Mapping[str, str] = {}
    probe: bool = True
    headers: Mapping[str, str] = {}
    deadline_s: float | None = None
    roles: Mapping[str, Role] = {}
    nixl: Mapping[str, str] = {}
    config: Config = Config()
    admin: str | None = None
    """Admin address of a gateway that runs."""


_KEEP_ALIVE_S = 2.0
"""Shorter than uvicorn's 5 s, or a pooled connection may be closed under a request."""


async def examine(urls: Sequence[str], options: Options, *, rng: random.Random, repeated: Sequence[str] = ()) -> Report:
    """Findings about the workers at `urls`, each given once; `repeated` are those that were given more often."""
    found: dict[str, list[Finding]] = {url: [] for url in urls}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=client_context(options.config.tls))
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        visits = [Visit(Http(session, url, options.timeout_s, options.headers), options, found[url]) for url in urls]
        await asyncio.gather(*(visit.guard(visit.identify()) for visit in visits))
        plan = {visit.url: visit.sources for visit in visits}
        uses = Counter(s.endpoint for ranks in plan.values() for s in ranks.values() if s.engine_connects)
        shared = {at: Tap(options.timeout_s, at) for at, n in uses.items() if n > 1 and at is not None}
        slots = asyncio.Semaphore(_WORKERS_AT_ONCE)
        try:
            await asyncio.gather(*(visit.follow(shared, rng, slots) for visit in visits))
        finally:
            for tap in shared.values():
                await tap.close()
        fleet = judge_fleet([visit.me for visit in visits], plan, repeated)
        fleet += await _together(visits, options, rng)
        if options.admin is not None:
            fleet += await examine_gateway(Http(session, options.admin, options.timeout_s, token_headers()))
        await asyncio.gather(*(visit.guard(visit.count()) for visit in visits if visit.me.nixl is not None))
    # At the end, when every answer has narrowed down what can be said.
    fleet += judge_clocks([(visit.url, visit.offset) for visit in visits])
    for visit in visits:
        fleet += judge_clock(visit.me, visit.offset, margin_s=options.config.pd.lease_margin_s)
    for each in fleet:
        if each.worker:
            found[each.worker].append(each)
    return Report(found, [each for each in fleet if not each.worker])


async def _together(visits: Sequence[Visit], options: Options, rng: random.Random) -> list[Finding]:
    found: list[Finding] = []
    deadline_s = options.deadline_s or _DEADLINE_TIMEOUTS * options.timeout_s
    check = examine_team(
        [visit.me for visit in visits],
        {visit.url: visit.http for visit in visits},
        options.config.pd,
        {visit.url: visit.sources for visit in visits},
        found,
        rng,
        probe=options.probe,
        timeout_s=options.timeout_s,
        deadline_s=deadline_s,
    )
    await guarded(check, 2 * deadline_s, "", found)
    return found


async def guarded(check: Awaitable[None], deadline_s: float, url: str, found: list[Finding]) -> None:
    """Await `check` up to the deadline; whatever ends it early becomes a finding."""
    try:
        async with asyncio.timeout(deadline_s):
            await check
    except TimeoutError:
        found.append(finding("check-incomplete", url, f"it was not done after {deadline_s:g} s"))
    except Exception as error:  # a fault of ours must not hide what else there is to say
        found.append(finding("check-failed", url, f"{type(error).__name__} in a check"))


class Visit:
    """One worker; findings are added to `found` as they come."""

    def __init__(self, http: Http, options: Options, found: list[Finding]) -> None:
        self.url = http.url
        self.http = http
        self.me = Identity(url=http.url, usable=False, role=options.roles.get(http.url, Role.BOTH))
        self.sources: dict[int, EventSource] = {}
        self.offset = Offset()
        self._options = options
        self._found = found
        self._deadline_s = options.deadline_s or _DEADLINE_TIMEOUTS * options.timeout_s
        http.on_answer = self._dated

    def _dated(self, answer: Answer) -> None:
        if answer.date_s is not None:
            self.offset.heard(answer.date_s, answer.sent_s, answer.came_s)

    async def guard(self, check: Awaitable[None]) -> None:
        await guarded(check, self._deadline_s, self.url, self._found)

    async def identify(self) -> None:
        answers = await asyncio.gather(*(self.http.get(path) for path in PATHS))
        self.me, found = identify(self.url, dict(zip(PATHS, answers, strict=True)), self.me.role)
        self._found += found
        if not self.me.usable:
            return
        options = self._options
        self.me.nixl_address = options.nixl.get(self.url)
        self.sources = sources_of(self.me, options.events.get(self.url), options.replays.get(self.url))
        if self.me.nixl is not None or self.me.role is not Role.BOTH:
            self.me.settings = await self._settings()
            self.me.kv_shape = await asyncio.to_thread(kv_shape, self.me)

    async def _settings(self) -> Settings | None:
        """A page for development, which takes an engine a second and may fail there."""
        answer = await self.http.get(SERVER_INFO)
        if isinstance(answer, Answer) and answer.status == 200:
            with suppress(msgspec.MsgspecError):
                return parse_settings(answer.body)
        return None

    async def count(self) -> None:
        """What it has transferred by now, the probes included."""
        answer = await self.http.get("/metrics")
        if isinstance(answer, Answer):
            self.me.nixl = parse_nixl(answer.body.decode(errors="replace")) or self.me.nixl
        self._found += judge_transfers(self.me)

    async def follow(self, shared: Mapping[str, Tap], rng: random.Random, slots: asyncio.Semaphore) -> None:
        models = self.me.models
        if not self.me.usable or models is None:
            return
        async with slots:
            path = tokenizer_path(self._options.tokenizer, models.root)
            await asyncio.gather(
                self.guard(self._events(models.models[0], shared, rng)),
                self.guard(self._tokenizer(models.models[0], path)),
            )

    async def _tokenizer(self, model: str, path: str | None) -> None:
        self._found += await check_tokenizer(self.http, model, path)

    # ---- events and probes ------------------------------------------------------------------------------------------

    async def _events(self, model: str, shared: Mapping[str, Tap], rng: random.Random) -> None:
        if self.me.stats is not None and self.me.stats.prefix_caching is False:
            return
        if not self.sources:
            self._found.append(self._no_events())
        self._found += judge_mode(self.url, self.sources, self._options.config.events)
        own = Tap(self._options.timeout_s)
        try:
            taps = {rank: shared.get(s.endpoint or "", own) for rank, s in self.sources.items()}
            for rank, source in self.sources.items():
                if source.endpoint is not None:
                    taps[rank].follow(self.url, rank, source)
            await self._started(set(taps.values()))
            outcomes = await self._probe(model, taps, rng)
            seen = [await self._seen(rank, taps[rank], outcomes.get(rank)) for rank in sorted(self.sources)]
            self._judge(seen, outcomes, set(taps.values()))
        finally:
            await own.close()

    def _no_events(self) -> Finding:
        if self.me.sources is None:
            return finding("events-unannounced", self.url, "it has no /kv_event_sources, and no --events was given")
        return finding("events-off", self.url, "KV events are switched off")

    async def _started(self, taps: set[Tap]) -> None:
        """Wait until the ingest threads know what to follow, and then for the streams."""
        for tap in taps:
            wanted = sum(source.endpoint is not None for source in self.sources.values())
            await until(lambda tap=tap, n=wanted: len(tap.status(self.url)) >= min(n, 1), 1.0)  # type: ignore[misc]
            await tap.ready(self.url)

    async def _probe(self, model: str, taps: Mapping[int, Tap], rng: random.Random) -> dict[int, Outcome]:
        stats, models = self.me.stats, self.me.models
        n_tokens = probe_length(
            None if stats is None else stats.block_size, None if models is None else models.max_model_len
        )
        if not self._options.probe or n_tokens is None:
            said = "--no-probe was given" if n_tokens is not None else "not even two blocks fit into max_model_len"
            self._found.append(finding("probe-skipped", self.url, said))
            return {}
        several = self._n_ranks > 1
        prober = Prober(self.http, model, n_tokens, pick_rank=several, rng=rng)

        async def one(rank: int) -> tuple[int, Outcome]:
            source = self.sources.get(rank)
            tap = taps[rank] if source is not None and source.endpoint is not None else None
            if tap is not None and not self._is_connected(tap, rank):
                tap = None
            outcome, ids = await prober.run(rank, tap)
            if tap is not None and outcome.failure is None and not outcome.matched and not outcome.announced:
                outcome.undelivered = source is not None and await self._is_replayed(source, rank, ids)
            return rank, outcome

        return dict(await asyncio.gather(*(one(rank) for rank in sorted(self.sources) or [0])))

    @property
    def _n_ranks(self) -> int:
        return max(self.me.n_ranks, len(self.sources))

    def _is_connected(self, tap: Tap, rank: int) -> bool:
        actual = self._actual(tap, rank)
        status = tap.status(self.url).get(actual)
        return status is not None and is_up(status)

    def _actual(self, tap: Tap, rank: int) -> int:
        """The rank its batches name, where a server with a single one calls it otherwise."""
        known = tap.status(self.url)
        return next(iter(known)) if len(self.sources) == 1 and len(known) == 1 else rank

    async def _is_replayed(self, source: EventSource, rank: int, ids: Sequence[int]) -> bool:
        """Whether the engine's history holds what never came live."""
        if source.replay_endpoint is None or source.engine_connects:
            return False
        tap = Tap(self._options.timeout_s)
        try:
            tap.follow(self.url, rank, source)
            await until(lambda: bool(tap.status(self.url)), 1.0)
            await tap.ready(self.url)
            return bool(tap.matches(self.url, ids))
        finally:
            await tap.close()

    async def _seen(self, rank: int, tap: Tap, outcome: Outcome | None) -> RankSeen:
        source, timeout_s = self.sources[rank], self._options.timeout_s
        actual = self._actual(tap, rank)
        status = tap.status(self.url).get(actual)
        seen = RankSeen(rank=actual, source=source, status=status, heard=tap.heard(self.url, actual), outcome=outcome)
        if source.endpoint is not None and not source.engine_connects and not seen.is_connected:
            seen.connect_error = await connect_error(source.endpoint, timeout_s)
        if source.replay_endpoint is not None and seen.is_connected:
            seen.replay_connect_error = await connect_error(source.replay_endpoint, timeout_s)
        seen.index = tap.index.stats()["workers"].get(self.url, {}).get(str(actual), {})
        if self.me.stats is not None and self.me.stats.kv_blocks:
            seen.kv_blocks = self.me.stats.kv_blocks // self._n_ranks
        return seen

    def _judge(self, seen: Sequence[RankSeen], outcomes: Mapping[int, Outcome], taps: set[Tap]) -> None:
        if seen:
            block_size = None if self.me.stats is None else self.me.stats.block_size
            self._found += judge(
                self.url,
                seen,
                n_ranks=self._n_ranks,
                block_size=block_size,
                bad_messages=sum(tap.bad_messages() for tap in taps),
                rank_conflicts=sum(tap.rank_conflicts() for tap in taps),
            )
        for rank, outcome in outcomes.items():
            self._found += judge_reuse(self.url, outcome, rank=rank if self._n_ranks > 1 else None)


def sources_of(me: Identity, events: str | None, replay: str | None) -> dict[int, EventSource]:
    """Where the events of each rank are read: as the engine says, or `events` and `replay` with the port counted up."""
    announced = dict(me.sources or {})
    ranks = sorted(announced) or list(me.engines) or [0]
    if events is None:
        if replay is None:
            return announced
        return {
            rank: msgspec.structs.replace(source, replay_endpoint=_at_rank(replay, rank - ranks[0]))
            for rank, source in announced.items()
        }
    known = EventSource()
    return {
        rank: EventSource(
            endpoint=events if is_listening(events) else _at_rank(events, rank - ranks[0]),
            replay_endpoint=_at_rank(replay, rank - ranks[0]) if replay else announced.get(rank, known).replay_endpoint,
            topic=announced.get(rank, known).topic,
            engine_connects=is_listening(events),
        )
        for rank in ranks
    }


def is_listening(endpoint: str) -> bool:
    """Whether an address given by hand is one to listen at."""
    return endpoint.startswith("tcp://*:")


def _at_rank(endpoint: str, rank: int) -> str:
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}" if port.isdigit() else endpoint
