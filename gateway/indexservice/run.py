"""`warmroute indexer`: one subscriber to the engines' KV events for many gateways."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

import msgspec

from gateway.auth.admin import is_loopback
from gateway.auth.token import read
from gateway.config import Config
from gateway.config.flags import INDEXER_ALIASES
from gateway.config.schema import RedisConfig
from gateway.core import Core
from gateway.debug.faces import AdminPort
from gateway.discovery import Discovery
from gateway.discovery.kubernetes import KubernetesDiscovery
from gateway.errors import UserError
from gateway.extproc.tls import Given
from gateway.indexservice.metrics import IndexerMetrics
from gateway.indexservice.publisher import Publisher
from gateway.indexservice.server import IndexServer, Settings
from gateway.proxy.server import HttpServer
from gateway.publishing import EVENTS_UP
from gateway.service import Service, admin_token_of, known_workers, run, with_policy, without_keys
from gateway.tls import serving_certificate

_log = logging.getLogger(__name__)
_NOTICED_S = 2.0
"""So long after watchers were sent away, gateways may still ask."""
_SETTLED_S = 1.5
"""A subscription is looked at again so long after it is up, for what was lost meanwhile."""


class Indexer(Service):
    """gRPC, /metrics beside it, and /debug on the admin port. No request is decided here."""

    foreign_sections = ("sidecar", "epp", "queue", "tenancy", "pd", "scorer", "tokens", "auth", "redis")
    hears_clients = False

    def __init__(self, config: Config) -> None:
        """Raises UserError."""
        settings = config.indexer
        if config.index.source != "local":
            raise UserError("index.source: an indexer subscribes to the engines itself, so that it must be local")
        config = msgspec.structs.replace(config, redis=RedisConfig())  # It decides nothing that others should hear.
        config = _with_client_ca(without_keys(config, "indexer"))
        token = read(
            settings.token_file, settings.token_env, os.environ, key="indexer.token_file", what="the indexer's token"
        )
        if (
            token is None
            and settings.client_ca is None
            and settings.port is not None
            and not is_loopback(settings.host)
        ):
            _log.warning(
                "whoever reaches port %d can read the index and have workers forgotten: set a token (the environment "
                "variable %s, or indexer.token_file) or indexer.client_ca, or let only gateways reach it",
                settings.port, settings.token_env,
            )  # fmt: skip
        admin_token = admin_token_of(config, settings.admin_host, "indexer.admin_host")
        core = Core(with_policy(config, "local"), tokenizes=False)
        super().__init__(
            core,
            None,
            admin_host=settings.admin_host,
            admin_port=settings.admin_port,
            admin_token=admin_token,
            controlled=lambda: sorted(core.fleet.workers),
        )
        self._warm_up_s = settings.warm_up_s
        self._known: list[Discovery] = []
        self._began_s = time.monotonic()
        self._was_ready = False
        self.publisher = Publisher(
            core.index,
            core.ingest.status,
            history_bytes=settings.history_bytes,
            digest_interval_s=settings.digest_interval_s,
        )
        self.server = IndexServer(
            core.index,
            self.publisher,
            Settings(
                host=settings.host,
                port=settings.port,
                socket=settings.socket,
                credentials=None if self.certificate is None else Given(self.certificate).credentials(),
                token=token,
                write_timeout_s=settings.write_timeout_s,
            ),
            ready=self._is_ready,
            forget=self._forget,
        )
        core.metrics.registry.register(IndexerMetrics(self.server, self.publisher))
        self.listeners.append(
            HttpServer(AdminPort(self.faces.public(), settings.host).handle, settings.host, settings.metrics_port)
        )

    async def start(self) -> None:
        await super().start()
        self.publisher.start()
        await self.server.start()

    async def drain(self, timeout_s: float) -> int:
        """Watchers go to another indexer, or on with what they have."""
        self.plane.draining = True
        left = await self.server.drain(_NOTICED_S, timeout_s)
        self.core.recorder.end("the indexer is going down")
        return left

    async def close(self) -> None:
        await self.server.close()
        await self.publisher.close()
        await super().close()

    def discoveries(self) -> list[Discovery]:
        self._known = known_workers(self.config)
        return self._known

    def _forget(self, worker: str) -> bool:
        if worker not in self.core.fleet.workers:
            return False
        self.core.cache_cleared(worker)
        return True

    def _is_ready(self) -> bool:
        """Once it has caught up with every engine that answers; what is known elsewhere is better until then."""
        if not self._was_ready:
            age_s = time.monotonic() - self._began_s
            self._was_ready = age_s > self._warm_up_s or (age_s > _SETTLED_S and self._has_caught_up())
        return self._was_ready

    def _has_caught_up(self) -> bool:
        core = self.core
        if not core.fleet.workers or not all(
            each.synced for each in self._known if isinstance(each, KubernetesDiscovery)
        ):
            return False
        for name in core.fleet.workers:
            if name not in core.capabilities and core.scraper.reachable(name) is not False:
                return False
        feeds = core.ingest.status().values()
        return all(feed.phase == "live" for feed in feeds if feed.endpoint_state in EVENTS_UP and feed.replay_endpoint)


def _with_client_ca(config: Config) -> Config:
    """Whom its port knows its clients by is followed like the certificate it shows them. Raises UserError."""
    client_ca = config.indexer.client_ca
    if client_ca is None:
        return config
    if config.tls.cert is None:
        raise UserError("indexer.client_ca: clients can show certificates in TLS only; set tls.cert and tls.key")
    tls = msgspec.structs.replace(config.tls, client_ca=client_ca)
    serving_certificate(tls)  # What can be wrong comes before what has to be closed.
    return msgspec.structs.replace(config, tls=tls)


def main(args: Sequence[str]) -> int:
    return run(
        Indexer,
        args,
        prog="warmroute indexer",
        description="Follow the KV events of all workers once, and let gateways copy or ask the index.",
        aliases=INDEXER_ALIASES,
    )
