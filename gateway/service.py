"""What the HTTP faces (gateway, sidecar) share: a core behind listeners, served, drained and closed."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import msgspec

from gateway.auth.admin import AdminToken, check_reach, is_loopback
from gateway.cli import Parser
from gateway.config import Config, load_config
from gateway.config.flags import Aliases, add_config_flags, flags_of, parse_flags
from gateway.config.schema import AuthConfig, KubernetesConfig
from gateway.core import Core, engine_headers
from gateway.debug.faces import AdminPort, Faces
from gateway.discovery import Discovery, DnsDiscovery, FileDiscovery, RenewedList, StaticDiscovery
from gateway.discovery.kubernetes import KubernetesDiscovery, RewriteRule, access_of
from gateway.errors import UserError
from gateway.http1.listener import Listener
from gateway.logs import PATH as LOG_LEVEL
from gateway.logs import Level, logs_requests, set_up_logging
from gateway.proxy.access import AccessLog
from gateway.proxy.admin import EngineControls
from gateway.proxy.background import Background
from gateway.proxy.parts import Parts
from gateway.proxy.realtime import Realtime
from gateway.proxy.reset import IndexReset
from gateway.proxy.routes import CONTROLS, RESET, WORKERS
from gateway.proxy.server import DataPlane, HttpServer, raise_file_limit
from gateway.proxy.workers import WorkersPage
from gateway.reload import KeyPath, Reloading, Source, with_keys
from gateway.siblings import Siblings
from gateway.sidecar.hints import HintReader, no_hints
from gateway.tls import ServingCertificate, TrustOfWorkers, admin_certificate, client_context, serving_certificate
from gateway.tracing.start import start as start_tracing

_log = logging.getLogger(__name__)


_SWITCH_INTERVAL_S = 0.0001
"""How long a thread that takes in events or makes tokens may hold up the loop. Beside 100,000 blocks/s stored and as
many removed 0.1 ms takes the loop's p99 lateness to 1.1 ms, where 0.5 leaves it at 2.9; with 0.05 the thread falls
behind.
"""
_GC_THRESHOLDS = (20_000, 20, 50)
"""Requests leave no cycles behind; the collector need not look after each few."""
_UPKEEP_S = 5.0
_LOOK_S = 0.05
_GOING_DOWN = "the gateway is going down"


class Service:
    """In a running event loop: ``async with Gateway(config) as gateway:``. Leaving cuts what still runs; `drain`
    first to let it end. A face adds its pages, listens at least once, and says where its workers come from.
    """

    foreign_sections: ClassVar[tuple[str, ...]] = ()
    """Of the configuration: those that this face does not read."""
    changes_workers: ClassVar[bool] = False
    """Whether an operator may add workers to it, and remove them."""
    hears_clients: ClassVar[bool] = True
    """Not through a proxy that only asks."""

    def __init__(
        self,
        core: Core,
        hints: HintReader | None,
        *,
        admin_host: str,
        admin_port: int,
        admin_token: AdminToken | None,
        controlled: Callable[[], list[str]],
        unreachable_status: int = 502,
        siblings: Siblings | None = None,
    ) -> None:
        """`hints` None: nobody in front of us has a say. `admin_token` as `admin_token_of` gives it; `controlled` names
        the workers that engine controls on the admin port reach; `siblings`: the other processes of this gateway.
        Raises UserError.
        """
        self.core = core
        self.config = config = core.config
        self.access = AccessLog(config.logging.format, enabled=logs_requests(config.logging.level))
        self.log_level = Level(config.logging.level, self.access)
        name = self.face_name
        scheme = "http" if config.tls.cert is None else "https"
        self.tracing = start_tracing(
            config.tracing, name, core.metrics.registry, scheme=scheme if self.hears_clients else None
        )
        core.others_degraded.append(self._traces_lost)
        self._background: Background | None = None
        if core.keys is not None:
            self._background = Background(
                core.upstreams, core.metrics.registry, longest_s=config.gateway.request_timeout_s
            )
        self.plane = DataPlane(
            Parts(
                planner=core.planner,
                right_of_way=core.right_of_way,
                reader=core.reader,
                upstreams=core.upstreams,
                health=core.health,
                available=core.up,
                metrics=core.metrics,
                hits=core.hits,
                prefixes=core.prefixes,
                decisions=core.decisions,
                access=self.access,
                recorder=core.recorder,
                stored=core.stored,
                rng=core.rng,
                max_body_bytes=config.gateway.max_body_bytes,
                min_body_bytes_per_s=config.gateway.min_body_bytes_per_s,
                response_headers=config.gateway.response_headers,
                handoffs=core.handoffs,
                heard_since=core.heard_since,
                sent=core.publishing.sent,
                unsent=core.publishing.unsent,
                index_note=core.index_note,
                hints=no_hints if hints is None else hints.read,
                unreachable_status=unreachable_status,
                queue=core.queue,
                tenancy=core.tenancy,
                door=None if core.keys is None else core.keys.door,
                background=self._background,
                tracing=self.tracing,
            ),
            max_concurrency=config.gateway.max_concurrency,
            places=None if siblings is None else siblings.places,
        )
        self.realtime = Realtime(
            self.plane.parts,
            self.plane,
            tls=core.tls,
            connect_timeout_s=config.gateway.connect_timeout_s,
            longest_s=config.gateway.request_timeout_s,
            link_local=config.discovery.link_local,
        )
        self.faces = Faces(
            core,
            self.access,
            draining=lambda: self.plane.draining,
            in_flight=lambda: self.plane.in_flight,
            name=self.shown_name,
            hints=hints,
        )
        controls = EngineControls(core.upstreams, controlled, cleared=core.cache_cleared, changed=core.models_changed)
        self.admin_token = admin_token
        self.admin = AdminPort(
            {**dict.fromkeys(CONTROLS, controls.page), **self.faces.private()},
            admin_host,
            admin_token,
            engine_headers(config),
        )
        self.admin.pages[RESET] = IndexReset(core, controls).page
        self.admin.pages[LOG_LEVEL] = self.log_level.page
        workers = WorkersPage(core, changes_list=self.changes_workers)
        self.admin.pages[WORKERS] = workers.page
        self.admin.prefixes[WORKERS + "/"] = workers.below
        # On the loopback it stays plain HTTP: a token does not travel.
        self._admin_certificate = (
            None if is_loopback(admin_host) else admin_certificate(config.tls, config.admin.client_ca)
        )
        tls = None if self._admin_certificate is None else self._admin_certificate.context
        self._admin = self.admin_server(admin_host, admin_port, tls)
        self.listeners: list[HttpServer | Listener] = []
        self.certificate = serving_certificate(config.tls)
        if core.keys is not None:
            core.others_degraded.append(core.keys.degraded)
        core.others_degraded.append(self._certificates_rejected)
        self._upkeep: asyncio.Task[None] | None = None
        self._reloading: Reloading | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """Workers, certificates and configurations being renewed."""

    def listen(self, host: str, port: int) -> None:
        """The data plane there, with TLS if there is a certificate."""
        tls = None if self.certificate is None else self.certificate.context
        self.listeners.append(self.plane.listener(self.config.gateway.http, host, port, tls))

    @property
    def face_name(self) -> str:
        """In traces."""
        return type(self).__name__.lower()

    @property
    def shown_name(self) -> str:
        """On pages for people."""
        return self.face_name

    def admin_server(self, host: str, port: int, tls: ssl.SSLContext | None) -> HttpServer:
        return HttpServer(self.admin.handle, host, port, tls)

    @property
    def ports(self) -> list[int]:
        return [server.port for server in self.listeners]

    @property
    def port(self) -> int:
        return self.listeners[0].port

    @property
    def admin_port(self) -> int:
        return self._admin.port

    async def start(self) -> None:
        """Listen. Workers may be down, late or none: they are served as they come. Raises UserError or OSError."""
        await self.core.start()
        for discovery in self.discoveries():
            self.core.follow(discovery)
        for server in (*self.listeners, self._admin):
            await server.start()
        self._upkeep = asyncio.get_running_loop().create_task(self._keep_up(), name="upkeep")
        self.tell_start()

    def tell_start(self) -> None:
        _log.info("serving on %s, admin on %s", ", ".join(server.url for server in self.listeners), self._admin.url)

    async def drain(self, timeout_s: float) -> int:
        """Stop accepting and wait for what runs, and for heads that are half there; returns how many requests are left.
        Heads that are not there by then are answered 503.
        """
        self.plane.draining = True
        for server in self.listeners:
            await server.stop_accepting()
        until_s = time.monotonic() + timeout_s
        while True:
            while self._awaits_heads and time.monotonic() < until_s:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(_LOOK_S)
            await asyncio.sleep(0)  # A request whose head has just come is counted from its task's first step on.
            left = await self.plane.drain(max(0.0, until_s - time.monotonic()))
            if not self._awaits_heads or time.monotonic() >= until_s:
                break
        for server in self.listeners:
            server.refuse_heads()
        self.core.recorder.end(_GOING_DOWN)
        return left

    @property
    def _awaits_heads(self) -> bool:
        return any(server.n_heads for server in self.listeners)

    async def close(self) -> None:
        self.core.queue.close()  # Who still waits is answered instead of cut.
        self.core.recorder.end(_GOING_DOWN)
        self.faces.stream.end()
        tasks = [*self._tasks, *filter(None, [self._upkeep])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in (*self.listeners, self._admin):
            await server.close()
        await self.realtime.close()
        if self._background is not None:
            await self._background.close()
        await self.core.close()
        await self.access.close()
        if self.tracing is not None:
            await self.tracing.close()

    def _traces_lost(self) -> Iterator[tuple[str, str]]:
        if self.tracing is not None and (problem := self.tracing.problem) is not None:
            yield "traces_lost", problem

    def _certificates_rejected(self) -> Iterator[tuple[str, str]]:
        for each in self._certificates():
            if each.problem is not None:
                yield "certificate_rejected", f"the last good {each.what} is in force: {each.problem}"

    def _certificates(self) -> Iterator[ServingCertificate | TrustOfWorkers]:
        for each in (self.certificate, self._admin_certificate, self.core.trust_of_workers):
            if each is not None:
                yield each

    async def _renew_certificates(self, *, at_once: bool = False) -> None:
        for each in self._certificates():
            if await asyncio.to_thread(each.look, at_once=at_once):
                each.take()

    def discoveries(self) -> list[Discovery]:
        """Where its workers come from. Raises UserError."""
        raise NotImplementedError

    def as_seen(self, discovery: Discovery) -> Discovery:
        """`discovery` as this face takes it in."""
        return discovery

    def follow_config(self, given: Config, source: Source) -> Reloading:
        """Take `source` again whenever it changes; `given` is what it was at the start."""
        self._reloading = Reloading(given, source, self._take_config, self.core.metrics, foreign=self.foreign_sections)
        self.core.others_degraded.append(self._reloading.degraded)
        return self._reloading

    def _take_config(self, given: Config, changed: frozenset[KeyPath]) -> None:
        """Put the keys `changed` of it in force. Raises UserError, having changed nothing."""
        before, config = self.config, with_keys(self.config, given, changed)
        renewed = self.as_seen(RenewedList(before.workers, config.workers))
        self.config = config
        self.core.configure(config)
        self.plane.max_concurrency = config.gateway.max_concurrency
        if ("logging", "level") in changed:
            self.log_level.set(config.logging.level)
        self.soon(self.core.take_all(renewed))

    def soon(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` in a task, which ends with the service at the latest."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def reload(self) -> None:
        """Somebody says that files have changed: they are read at once."""
        if self._reloading is not None:
            self.soon(self._reloading.reload())
        if self.core.keys is not None:
            self.core.keys.reload()
        self.soon(self._renew_certificates(at_once=True))

    def upkeep(self) -> None:
        """Called every few seconds; a face's own chores."""

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(_UPKEEP_S)
            try:
                await self._renew_certificates()
                if self._reloading is not None:
                    await self._reloading.look()
                if self.core.keys is not None:
                    await self.core.keys.look()
                self.upkeep()
            except Exception:
                _log.exception("unexpected; going on")

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def known_workers(
    config: Config,
    *,
    objectives: Callable[[Mapping[str, int]], None] | None = None,
    rewrites: Callable[[Sequence[RewriteRule]], None] | None = None,
) -> list[Discovery]:
    """Those that the configuration names, those of its workers file, those found by DNS and those of Kubernetes, which
    has objectives and rewrites too, for who wants them. Raises UserError.
    """
    found: list[Discovery] = [StaticDiscovery(config.workers)]
    if config.workers_file is not None:
        found.append(FileDiscovery(config.workers_file))
    if config.discovery.dns:
        found.append(DnsDiscovery(config.discovery.dns, interval_s=config.discovery.interval_s))
    kubernetes = config.kubernetes
    if _is_followed(kubernetes):
        access = access_of(kubernetes)
        found.append(KubernetesDiscovery(kubernetes, access, objectives=objectives, rewrites=rewrites))
    return found


def is_any_known(config: Config) -> bool:
    """Whether the configuration says where workers are."""
    return bool(config.workers or config.workers_file or config.discovery.dns or _is_followed(config.kubernetes))


def _is_followed(kubernetes: KubernetesConfig) -> bool:
    return kubernetes.pool is not None or kubernetes.selector is not None


def with_policy(config: Config, policy: str) -> Config:
    """`config` with the disaggregation policy in force, which differs from face to face."""
    return msgspec.structs.replace(config, pd=msgspec.structs.replace(config.pd, policy=policy))


def admin_token_of(config: Config, host: str, key: str) -> AdminToken | None:
    """Of an admin port that listens on `host`, as `key` says. Raises UserError, also where there must be one."""
    token = AdminToken.of(config.admin, os.environ)
    check_reach(host, key, token, config.admin, is_tls=config.tls.cert is not None)
    return token


def without_keys(config: Config, face: str) -> Config:
    """For a face behind somebody who authenticates."""
    if config.auth != AuthConfig():
        _log.warning("auth.* is not for the %s, which demands no keys: who is in front of it must", face)
    return msgspec.structs.replace(config, auth=AuthConfig())


def tune_interpreter() -> None:
    """For a process that serves: threads give way sooner, and what is there by now is not collected."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def run(
    face: Callable[[Config], Service], args: Sequence[str], *, prog: str, description: str, aliases: Aliases
) -> int:
    """A command that serves until it is told to stop."""
    config, source = configuration_of(args, prog=prog, description=description, aliases=aliases)
    if config.gateway.processes > 1:
        print(f"{prog}: gateway.processes is for warmroute gateway alone; this is one process", file=sys.stderr)
    return serve_config(face, config, source)


def configuration_of(args: Sequence[str], *, prog: str, description: str, aliases: Aliases) -> tuple[Config, Source]:
    """What a command's arguments, the environment and the file they name say, checked as far as that is possible before
    anything is opened. Raises UserError.
    """
    parser = Parser(prog=prog, description=description)
    add_config_flags(parser, aliases)
    options, given, unknown = parse_flags(parser, args)

    def read() -> Config:
        return load_config(options.config, os.environ, given, unknown, flags_of(parser))

    config = read()
    for check in (serving_certificate, client_context):
        check(config.tls)
    admin_certificate(config.tls, config.admin.client_ca)
    return config, Source(read=read, file=options.config or os.environ.get("WARMROUTE_CONFIG") or None)


def set_up_process(config: Config, name: str | None = None) -> None:
    """For one that serves. `name`: what it is called in logs, where there are several."""
    set_up_logging(config, name)
    raise_file_limit()
    tune_interpreter()


def serve_config(face: Callable[[Config], Service], config: Config, source: Source) -> int:
    """In this process. Raises UserError."""
    set_up_process(config)
    import uvloop

    try:
        return uvloop.run(serve(face, config, source))
    except OSError as exc:
        raise UserError(f"cannot listen: {exc.strerror or exc}") from exc


async def serve(face: Callable[[Config], Service], config: Config, source: Source) -> int:
    """Until SIGTERM or SIGINT, then drain; a second signal cuts at once. SIGHUP: see `reload`."""
    loop = asyncio.get_running_loop()
    stop, cut = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (cut if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with face(config) as service:
        service.follow_config(config, source)
        loop.add_signal_handler(signal.SIGHUP, service.reload)
        await stop.wait()
        timeout_s = service.config.gateway.drain_timeout_s
        _log.info("draining for up to %g s", timeout_s)
        drained = loop.create_task(service.drain(timeout_s))
        cut_short = loop.create_task(cut.wait())
        await asyncio.wait({drained, cut_short}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, cut_short):
            task.cancel()
        await asyncio.gather(drained, cut_short, return_exceptions=True)
    return 0
