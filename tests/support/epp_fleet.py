"""A whole picker behind a real Envoy, before fake engines or behind sidecars of ours; and the table of cases there."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import aiohttp

from bench.engine.config import FakeVllmConfig
from bench.engine.server import FakeVllm
from gateway.config import Config
from gateway.config.schema import (
    EppConfig,
    GatewayConfig,
    HealthConfig,
    LoggingConfig,
    PdConfig,
    QueueConfig,
    SidecarConfig,
    TokensConfig,
    TracingConfig,
    Worker,
)
from gateway.epp.run import Epp
from gateway.sidecar.run import Sidecar
from tests.support.envoy import Change, Envoy, fit, shipped
from tests.support.gateway_world import until
from tests.support.stacked import Stacked

_ROLES: dict[str, Literal["both", "prefill", "decode"]] = {"kv_producer": "prefill", "kv_consumer": "decode"}


class EppFleet(Stacked):
    """In a test: ``async with EppFleet(tmp_path, a=engine(), b=engine()) as fleet:``. Ready when entered. An engine's
    `kv_role` is its worker's role; `sidecars` puts one of ours before each that decodes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        envoy: str = "standalone",
        change: Change | None = None,
        epp: dict[str, Any] | None = None,
        pd: PdConfig | None = None,
        queue: QueueConfig | None = None,
        gateway: dict[str, Any] | None = None,
        sidecars: bool = False,
        tracing: TracingConfig | None = None,
        **engines: FakeVllmConfig,
    ) -> None:
        self._folder = folder
        self._tracing = tracing or TracingConfig()
        self._envoy = envoy
        self._change = change
        self._epp = EppConfig(
            **{
                "host": "127.0.0.1", "port": 0, "health_port": 0, "metrics_port": 0, "admin_port": 0,
                "tls": "self_signed" if envoy == "override-host" else "off",
                "responses": "unseen" if envoy == "no-response" else "seen",
                **(epp or {}),
            }
        )  # fmt: skip
        self._pd = pd or PdConfig()
        self._queue = queue or QueueConfig()
        self._gateway = GatewayConfig(**{"drain_timeout_s": 1.0, **(gateway or {})})
        self._sidecars = sidecars
        self._configs = engines
        self.engines: dict[str, FakeVllm] = {}
        self.sidecars: dict[str, Sidecar] = {}

    async def _start(self) -> None:
        for name, config in self._configs.items():
            self.engines[name] = await self._stack.enter_async_context(FakeVllm(config))
        workers = [await self._worker(name) for name in self.engines]
        config = Config(
            gateway=self._gateway,
            epp=self._epp,
            workers=tuple(workers),
            pd=self._pd,
            queue=self._queue,
            health=HealthConfig(scrape_interval_s=0.1),
            tokens=TokensConfig(engine_budget_ms=2000),  # A busy test machine is no slow engine.
            logging=LoggingConfig(level="error"),
            tracing=self._tracing,
        )
        self.epp = await self._stack.enter_async_context(Epp(config))
        self.core = self.epp.core
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession())
        await until(lambda: set(self.core.capabilities) == set(self.engines))
        await until(lambda: all(f.endpoint_state == "connected" for f in self.core.ingest.status().values()))
        await self._start_envoy()

    async def _worker(self, name: str) -> Worker:
        engine = self.engines[name]
        role = _ROLES.get(engine.config.kv_role, "both")
        if not self._sidecars or role == "prefill":
            return Worker(url=engine.url, name=name, role=role)
        config = Config(
            sidecar=SidecarConfig(engine=engine.url, host="127.0.0.1", port=0, admin_port=0),
            pd=PdConfig(allow=("*",)),
            health=HealthConfig(scrape_interval_s=0.1),
            logging=LoggingConfig(level="error"),
            tracing=self._tracing,
        )
        sidecar = self.sidecars[name] = await self._stack.enter_async_context(Sidecar(config))
        await until(lambda: sidecar.core.capabilities)
        return Worker(url=f"http://127.0.0.1:{sidecar.port}", name=name, role=role, events=engine.events_endpoint)

    async def _start_envoy(self) -> None:
        config = shipped(self._envoy)
        ports = tuple(int(worker.url.rpartition(":")[2]) for worker in self.epp.config.workers)
        fit(config, picker=self.epp.server.port, pods=ports)
        if self._change is not None:
            self._change(config)
        self.envoy = Envoy(config, self._folder)
        await asyncio.to_thread(self.envoy.__enter__)
        self._stack.callback(self.envoy.stop)
        async with asyncio.timeout(20):
            while not await asyncio.to_thread(self._sees_picker):  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.02)

    def _sees_picker(self) -> bool:
        stat = "cluster.picker.membership_healthy"
        return self.envoy.stats(f"^{stat}$") == {stat: 1}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.envoy.port}"

    async def ask(self, method: str, path: str, **kwargs: Any) -> tuple[int, Any, Any]:
        """(status, JSON or text, headers) through Envoy."""
        async with self.http.request(method, self.url + path, **kwargs) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith(("{", "[")) else text, response.headers

    async def complete(self, prompt: Any, *, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, **fields}
        status, answer, _ = await self.ask("POST", "/v1/completions", json=body, headers=headers)
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    async def page(self, path: str) -> tuple[int, Any]:
        """Of the picker's own, on the metrics port."""
        async with self.http.get(f"http://127.0.0.1:{self.epp.port}{path}") as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text

    def is_idle(self) -> bool:
        """Nothing is booked or running any more."""
        workers = self.core.fleet.workers.values()
        booked = sum(load.requests for worker in workers for load in worker.loads.values())
        return not booked and not self.epp.plane.in_flight and not self.core.planner.in_flight()

    def value(self, name: str, **labels: str) -> float:
        return self.core.metrics.registry.get_sample_value(name, labels) or 0.0

    def served(self) -> dict[str, float]:
        """Good answers by worker."""
        return {name: self.value("warmroute_requests_total", worker=name, status="200") for name in self.engines}
