"""`warmroute epp`: the endpoint picker behind Envoy, for Gateway API Inference Extension and llm-d."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec
from multidict import CIMultiDict

from gateway.config import Config
from gateway.config.flags import EPP_ALIASES
from gateway.core import Core
from gateway.debug.faces import AdminPort
from gateway.debug.health import is_usable
from gateway.discovery import Discovery
from gateway.discovery.kubernetes import KubernetesDiscovery, elector_of
from gateway.epp.addressed import Addressed
from gateway.epp.control import read_control
from gateway.epp.metrics import EppMetrics, StreamCounts
from gateway.epp.objectives import Objectives, read_objectives
from gateway.epp.parts import EppParts
from gateway.epp.picker import PlannedPicker
from gateway.epp.places import Places
from gateway.epp.rewrites import Rewrites, read_rewrites
from gateway.epp.unseen import Unseen
from gateway.errors import UserError
from gateway.extproc.server import PickerServer, PickerSettings
from gateway.extproc.tls import Given, Identity, SelfSigned
from gateway.proxy.server import HttpServer
from gateway.reload import KeyPath
from gateway.service import Service, admin_token_of, known_workers, run, with_policy, without_keys
from gateway.tls import ServingCertificate

_POLICY = "cost"
_NO_SIDECAR = "local"
_NOTICED_S = 5.0
"""So long after NOT_SERVING is said, proxies may still send requests."""
_RECENT_S = 60.0
_WARM_UP_S = 10.0
"""A pool may have no pods at all; so long it is waited for the first."""
_TOLD = {
    "bodies_unseen": "the proxy does not show request bodies (request_body_mode): their requests are placed by load",
    "outcomes_missing": "prompts were to be computed elsewhere, and no sidecar of ours said what became of it: set "
    "epp.sidecar to what stands before the engines (or gateway.response_headers is off there)",
}


class Epp(Service):
    """ext_proc and gRPC health, /metrics beside them, and /debug on the admin port. Bodies go past, but nothing is
    sent to workers but what the gateway asks of engines itself.
    """

    foreign_sections = ("sidecar", "auth", "indexer")
    hears_clients = False

    def __init__(self, config: Config) -> None:
        """Raises UserError."""
        settings = config.epp
        if config.tls.client_ca is not None and settings.tls != "files":
            raise UserError("tls.client_ca needs epp.tls: files in the picker, whose clients then need certificates")
        if config.tenancy.certificate:
            raise UserError("tenancy.certificate is not for the picker, who sees no client: use tenancy.header")
        config = without_keys(_with_sidecar(config), "picker")
        if settings.tls != "files":  # tls.cert may be there for another face.
            config = msgspec.structs.replace(config, tls=msgspec.structs.replace(config.tls, cert=None, key=None))
        elif config.tls.cert is None:
            raise UserError("epp.tls: files needs tls.cert and tls.key")
        # What can be wrong comes before what has to be closed.
        self.objectives = Objectives(read_objectives(settings.objectives))
        self.rewrites = Rewrites(read_rewrites(settings.rewrites))
        self.elector = elector_of(config.kubernetes, changed=lambda leads: self._metrics.leads.set(leads))
        admin_token = admin_token_of(config, settings.admin_host, "epp.admin_host")
        core = Core(config, retries=False)
        super().__init__(
            core,
            None,
            admin_host=settings.admin_host,
            admin_port=settings.admin_port,
            admin_token=admin_token,
            controlled=lambda: sorted(core.fleet.workers),
        )
        metrics = self._metrics = EppMetrics(core.metrics.registry)
        metrics.leads.set(self.elector is None)
        self.unseen = Unseen(core.fleet.workers, metrics, config.gateway.request_timeout_s)
        self.picker = PlannedPicker(
            EppParts(
                parts=self.plane.parts,
                places=Places(core.fleet.workers),
                metrics=metrics,
                unseen=self.unseen,
                began=self._began,
                over=self._over,
            ),
            settings,
            objectives=self.objectives,
            rewrites=self.rewrites,
            find_holder=core.holders.find,
        )
        self.faces.rewritten = self._rewritten
        self.server = PickerServer(
            self.picker,
            PickerSettings(
                host=settings.host,
                port=settings.port,
                health_port=settings.health_port,
                identity=_identity(settings.tls, self.certificate),
                max_body_bytes=config.gateway.max_body_bytes,
                decision_timeout_s=_decision_timeout_s(config),
                sees_responses=settings.responses == "seen",
                hears_context=self.tracing is not None,
                grpc=settings.grpc,
            ),
            self._is_ready,
        )
        core.metrics.registry.register(StreamCounts(self.server.counts))
        core.others_degraded.append(self._degraded)
        self.listeners.append(
            HttpServer(AdminPort(self.faces.public(), settings.host).handle, settings.host, settings.metrics_port)
        )
        self._known: list[Discovery] = []
        self._began_s = time.monotonic()
        self._was_usable = False
        self._counted: dict[str, int] = {}
        self._told_until_s: dict[str, float] = {}

    async def start(self) -> None:
        await super().start()
        await self.server.start()
        if self.elector is not None:
            self.elector.start()

    async def drain(self, timeout_s: float) -> int:
        """Health says NOT_SERVING while everything goes on; returns how many streams are left."""
        self.plane.draining = True
        if self.elector is not None:
            await self.elector.close()  # Another replica may lead at once.
        left = await self.server.drain(min(_NOTICED_S, timeout_s), timeout_s)
        self.core.recorder.end("the picker is going down")
        return left

    async def close(self) -> None:
        self.core.queue.close()  # Who still waits is answered instead of cut.
        if self.elector is not None:
            await self.elector.close()
        await self.server.close()
        self.unseen.close()
        await super().close()

    def discoveries(self) -> list[Discovery]:
        self._known = known_workers(self.config, objectives=self.objectives.replace, rewrites=self.rewrites.replace)
        return [self.as_seen(each) for each in self._known]

    def _take_config(self, given: Config, changed: frozenset[KeyPath]) -> None:
        settings = given.epp
        objectives, rewrites = read_objectives(settings.objectives), read_rewrites(settings.rewrites)
        super()._take_config(given, changed)
        self.objectives.configure(objectives)
        self.rewrites.configure(rewrites)
        self.server.decision_timeout_s = _decision_timeout_s(self.config)

    def as_seen(self, discovery: Discovery) -> Discovery:
        return Addressed(discovery)

    def upkeep(self) -> None:
        """What has been counted since the last time is told for a while."""
        until_s = time.monotonic() + _RECENT_S
        counts = {"bodies_unseen": self.server.counts.blind}
        if self.config.epp.sidecar == "warmroute":  # Others say nothing anyway.
            counts["outcomes_missing"] = self._metrics.missing
        for what, count in counts.items():
            if count > self._counted.get(what, 0):
                self._counted[what], self._told_until_s[what] = count, until_s

    def _rewritten(self, body: bytes, headers: CIMultiDict[str]) -> bytes:
        return self.picker.renamed(body, read_control(headers), headers)[0]

    def _began(self) -> None:
        self.plane.in_flight += 1

    def _over(self) -> None:
        self.plane.in_flight -= 1

    def _is_ready(self) -> bool:
        """Who does not lead is not asked. Of a leader, once it knows the pool and a worker was usable; that none is now
        is told by 503s, which say why.
        """
        if self.elector is not None and not self.elector.leads:
            return False
        if not self._was_usable:
            core = self.core
            self._was_usable = any(is_usable(core, worker) for worker in core.fleet.workers.values())
        synced = all(each.synced for each in self._known if isinstance(each, KubernetesDiscovery))
        return self._was_usable or (synced and time.monotonic() - self._began_s > _WARM_UP_S)

    def _degraded(self) -> Iterator[tuple[str, str]]:
        if (problem := self.unseen.problem) is not None:
            yield "responses_unseen", problem
        now_s = time.monotonic()
        for what, until_s in self._told_until_s.items():
            if now_s < until_s:
                yield what, _TOLD[what]
        if self.elector is not None and self.elector.problem is not None:
            yield "leader_unknown", self.elector.problem


def _with_sidecar(config: Config) -> Config:
    """The configuration with what the sidecar can carry out."""
    match config.epp.sidecar:
        case "none":
            if config.pd.policy not in (None, _NO_SIDECAR):
                raise UserError(f"epp.sidecar: none leaves nobody who could carry out pd.policy {config.pd.policy}")
            peers, policy = False, _NO_SIDECAR
        case "llm-d":
            peers, policy = False, config.pd.policy or _POLICY
        case _:
            peers, policy = config.pd.peers, config.pd.policy or _POLICY
    config = with_policy(config, policy)
    return msgspec.structs.replace(config, pd=msgspec.structs.replace(config.pd, peers=peers))


def _decision_timeout_s(config: Config) -> float:
    """The picker has a deadline of its own, and waiting for room is none of it: this is for what holds up both."""
    return config.epp.decision_deadline_s + config.queue.max_wait_s + 1


def _identity(kind: str, certificate: ServingCertificate | None) -> Identity | None:
    if kind == "off":
        return None
    if kind == "self_signed":
        return SelfSigned()
    if certificate is None:
        raise ValueError("files without a certificate")
    return Given(certificate)


def main(args: Sequence[str]) -> int:
    return run(
        Epp,
        args,
        prog="warmroute epp",
        description="Pick endpoints for Envoy (ext_proc, Gateway API Inference Extension); each request goes where it "
        "costs least.",
        aliases=EPP_ALIASES,
    )
