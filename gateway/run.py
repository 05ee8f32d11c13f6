"""`warmroute gateway`: the face in front of a fleet."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.config import Config
from gateway.config.flags import GATEWAY_ALIASES
from gateway.core import Core
from gateway.discovery import Discovery
from gateway.proxy.holders import PREFIX as RESPONSES
from gateway.proxy.models import PATH as MODELS
from gateway.proxy.models import ModelList
from gateway.proxy.realtime import PATH as REALTIME
from gateway.proxy.stored_pages import StoredPages
from gateway.reload import Source
from gateway.service import Service, admin_token_of, configuration_of, known_workers, serve_config, with_policy
from gateway.siblings import Siblings
from gateway.sidecar.hints import HintReader
from gateway.sidecar.targets import Targets
from gateway.tls import scheme_of_workers

_HEADER = "header"
_POLICY = "cost"


class Gateway(Service):
    """One listener in front of all workers. Hint headers are obeyed only where the policy is `header`."""

    foreign_sections = ("sidecar", "epp", "indexer")
    changes_workers = True

    def __init__(self, config: Config, siblings: Siblings | None = None) -> None:
        """`siblings`: the other processes it is one gateway with. Raises UserError."""
        config = with_policy(config, config.pd.policy or _POLICY)
        settings = config.gateway
        admin_token = admin_token_of(config, settings.admin_host, "gateway.admin_host")
        core = Core(config, siblings=siblings)
        self._targets = Targets(core.fleet, core.apply, config.pd.allow, scheme=scheme_of_workers(config.tls))
        hints = None
        if config.pd.policy == _HEADER:
            hints = HintReader(self._targets, core.metrics.registry, core.rng)
        super().__init__(
            core,
            hints,
            admin_host=settings.admin_host,
            admin_port=settings.admin_port,
            admin_token=admin_token,
            controlled=lambda: sorted(core.fleet.workers),
            siblings=siblings,
        )
        models = ModelList(core.upstreams, lambda: list(core.fleet.workers), self.plane.parts.door)
        public = self.faces.public() if core.keys is None else self.faces.exposed(self.admin_token)
        self.plane.pages = {**public, MODELS: models.page, REALTIME: self.realtime.page}
        stored = StoredPages(self.plane, core.holders)
        self.plane.prefixes = {MODELS + "/": models.page, RESPONSES: stored.page}
        self.listen(settings.host, settings.port)

    def upkeep(self) -> None:
        self._targets.forget_unused()

    def discoveries(self) -> list[Discovery]:
        return known_workers(self.config)


def configuration(args: Sequence[str]) -> tuple[Config, Source]:
    """Raises UserError."""
    return configuration_of(
        args,
        prog="warmroute gateway",
        description="Serve the OpenAI API in front of vLLM workers; each request goes where it costs least.",
        aliases=GATEWAY_ALIASES,
    )


def main(args: Sequence[str]) -> int:
    config, source = configuration(args)
    if config.gateway.processes > 1:
        from gateway.processes.supervisor import supervise  # Only where there is something to supervise.

        return supervise(config, source, args)
    return serve_config(Gateway, config, source)
