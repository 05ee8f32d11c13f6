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
from gateway.service import Service, known_workers, run, with_policy
from gateway.sidecar.hints import HintReader
from gateway.sidecar.targets import Targets
from gateway.tls import scheme_of_workers

_HEADER = "header"
_POLICY = "cost"


class Gateway(Service):
    """One listener in front of all workers. Hint headers are obeyed only where the policy is `header`."""

    foreign_sections = ("sidecar", "epp", "indexer")
    changes_workers = True

    def __init__(self, config: Config) -> None:
        config = with_policy(config, config.pd.policy or _POLICY)
        settings = config.gateway
        core = Core(config)
        self._targets = Targets(core.fleet, core.apply, config.pd.allow, scheme=scheme_of_workers(config.tls))
        hints = None
        if config.pd.policy == _HEADER:
            hints = HintReader(self._targets, core.metrics.registry, core.rng)
        super().__init__(
            core,
            hints,
            admin_host=settings.admin_host,
            admin_port=settings.admin_port,
            controlled=lambda: sorted(core.fleet.workers),
        )
        models = ModelList(core.upstreams, lambda: list(core.fleet.workers))
        self.plane.pages = {**self.faces.public(), MODELS: models.page, REALTIME: self.realtime.page}
        stored = StoredPages(self.plane, core.holders)
        self.plane.prefixes = {MODELS + "/": models.page, RESPONSES: stored.page}
        self.listen(settings.host, settings.port)

    def upkeep(self) -> None:
        self._targets.forget_unused()

    def discoveries(self) -> list[Discovery]:
        return known_workers(self.config)


def main(args: Sequence[str]) -> int:
    return run(
        Gateway,
        args,
        prog="warmroute gateway",
        description="Serve the OpenAI API in front of vLLM workers; each request goes where it costs least.",
        aliases=GATEWAY_ALIASES,
    )
