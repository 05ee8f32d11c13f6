"""`warmroute sidecar`: the face in a decode pod, wire-compatible with llm-d's sidecar."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import msgspec
from aiohttp import web

from gateway.config import Config
from gateway.config.flags import SIDECAR_ALIASES
from gateway.config.schema import QueueConfig, RedisConfig, TenancyConfig
from gateway.core import Core
from gateway.discovery import Discovery, StaticDiscovery
from gateway.proxy.aio_incoming import AioIncoming
from gateway.proxy.realtime import PATH as REALTIME
from gateway.service import Service, admin_token_of, is_any_known, known_workers, run, with_policy, without_keys
from gateway.sidecar.hints import HintReader
from gateway.sidecar.passing import Passing
from gateway.sidecar.pod import Pod
from gateway.sidecar.prefillers import Prefillers
from gateway.sidecar.targets import Targets
from gateway.tls import scheme_of_workers

_log = logging.getLogger(__name__)
_HINTED = "header"
_REFUSED = 503
"""For an engine that refuses connections, as llm-d answers; it is starting or gone, and other pods are not."""


class Sidecar(Service):
    """One listener for each of the pod's engines, whose requests are decoded there; prefill workers from the
    configuration and from hint headers.
    """

    foreign_sections = ("queue", "tenancy", "auth", "epp", "redis", "indexer")

    def __init__(self, config: Config) -> None:
        settings, pd = config.sidecar, config.pd
        # Where only hints may send a prompt elsewhere, the policy is that of the hints.
        config = with_policy(config, pd.policy if pd.policy and pd.no_hint == "decide" else _HINTED)
        # Whoever sent it here has chosen this pod, and knows whose it is.
        config = without_keys(config, "sidecar")
        config = msgspec.structs.replace(
            config, queue=QueueConfig(enabled=False), tenancy=TenancyConfig(), redis=RedisConfig()
        )
        admin_token = admin_token_of(config, settings.admin_host, "sidecar.admin_host")
        core = Core(config)
        self.pod = pod = Pod(settings.engine, settings.data_parallel_size, lambda: self.ports)
        if not (pd.allow or is_any_known(config)):
            _log.warning(
                "no prefill target is allowed: hints are answered 403 until pd.allow or prefill workers are set"
            )
        self.targets = Targets(core.fleet, core.apply, pd.allow, scheme=scheme_of_workers(config.tls))
        reader = HintReader(
            self.targets,
            core.metrics.registry,
            core.rng,
            pod=pod,
            ranks=self._ranks,
            sampling=settings.prefiller_sampling,
        )
        super().__init__(
            core,
            reader,
            admin_host=settings.admin_host,
            admin_port=settings.admin_port,
            admin_token=admin_token,
            controlled=lambda: pod.names,
            unreachable_status=_REFUSED,
        )
        passing = Passing(
            core.upstreams,
            self._engine_of,
            cleared=core.cache_cleared,
            changed=core.models_changed,
            draining=lambda: self.plane.draining,
            max_body_bytes=config.gateway.max_body_bytes,
            min_body_bytes_per_s=config.gateway.min_body_bytes_per_s,
        )
        own = self.faces.public()
        self.plane.pages = {path: passing.unless_unknown(own[path]) for path in ("/livez", "/readyz")}
        self.plane.pages["/health"] = passing.health
        self.plane.pages[REALTIME] = self.realtime.page
        self.plane.fallback = passing.page
        for rank in range(settings.data_parallel_size):
            self.listen(settings.host, settings.port + rank if settings.port else 0)

    def discoveries(self) -> list[Discovery]:
        others = known_workers(self.config)
        return [StaticDiscovery(self.pod.engines), *map(self.as_seen, others)]

    def as_seen(self, discovery: Discovery) -> Discovery:
        return Prefillers(discovery, self.pod.names)

    def upkeep(self) -> None:
        self.targets.forget_unused()

    def _engine_of(self, request: web.BaseRequest) -> str:
        return self.pod.names[self.pod.rank_here(AioIncoming(request))]

    def _ranks(self, engine: str) -> Collection[int] | None:
        known = self.core.capabilities.get(engine)
        worker = self.core.fleet.workers.get(engine)
        if worker is None or known is None or known.event_sources is None:
            return None
        return worker.loads.keys()


def main(args: Sequence[str]) -> int:
    return run(
        Sidecar,
        args,
        prog="warmroute sidecar",
        description="Stand before the engine of a decode pod; a prompt may be computed by a prefill worker.",
        aliases=SIDECAR_ALIASES,
    )
