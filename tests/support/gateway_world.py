"""A whole gateway in front of fake engines, in this process."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any, Literal

import aiohttp

from bench.engine.config import FakeVllmConfig
from bench.engine.server import FakeVllm
from bench.engine.timing import preset
from gateway.config import Config
from gateway.config.schema import (
    AuthConfig,
    GatewayConfig,
    HealthConfig,
    LoggingConfig,
    PdConfig,
    QueueConfig,
    ScorerConfig,
    TenancyConfig,
    TokensConfig,
    TracingConfig,
    Worker,
)
from gateway.run import Gateway
from tests.support.stacked import Stacked


def engine(**changes: Any) -> FakeVllmConfig:
    """A fast small engine that serves `tiny`."""
    config = FakeVllmConfig(**{"model": "tiny", **changes})
    return config.with_engine(timing=preset("instant"), max_model_len=16_384, num_gpu_blocks=4000)


def prefill(**changes: Any) -> FakeVllmConfig:
    """Such an engine that hands prompts over to others."""
    return engine(kv_connector=True, kv_role="kv_producer", **changes)


def decode(**changes: Any) -> FakeVllmConfig:
    """Such an engine that fetches prompts from others."""
    return engine(kv_connector=True, kv_role="kv_consumer", **changes)


_ROLES: dict[str, Literal["both", "prefill", "decode"]] = {"kv_producer": "prefill", "kv_consumer": "decode"}


class Fleet(Stacked):
    """In a test: ``async with Fleet(a=engine(), b=engine()) as fleet:``. Ready when entered. An engine's `kv_role`
    is its worker's role.
    """

    def __init__(
        self,
        pd: PdConfig | None = None,
        scorer: ScorerConfig | None = None,
        queue: QueueConfig | None = None,
        tenancy: TenancyConfig | None = None,
        auth: AuthConfig | None = None,
        unknown_models: Literal["refuse", "try"] = "refuse",
        scrape_interval_s: float = 0.1,
        tracing: TracingConfig | None = None,
        **engines: FakeVllmConfig,
    ) -> None:
        self._pd = pd or PdConfig()
        self._tracing = tracing or TracingConfig()
        self._unknown_models = unknown_models
        self._scrape_interval_s = scrape_interval_s
        self._scorer = scorer or ScorerConfig()
        self._queue = queue or QueueConfig()
        self._tenancy = tenancy or TenancyConfig()
        self._auth = auth or AuthConfig()
        self._configs = engines
        self.engines: dict[str, FakeVllm] = {}

    async def _start(self) -> None:
        for name, config in self._configs.items():
            self.engines[name] = await self._stack.enter_async_context(FakeVllm(config))
        gateway = GatewayConfig(
            host="127.0.0.1", port=0, admin_port=0, connect_timeout_s=20.0, unknown_models=self._unknown_models
        )
        config = Config(
            gateway=gateway,
            workers=tuple(
                Worker(url=server.url, name=name, role=_ROLES.get(server.config.kv_role, "both"))
                for name, server in self.engines.items()
            ),
            pd=self._pd,
            scorer=self._scorer,
            health=HealthConfig(scrape_interval_s=self._scrape_interval_s),
            queue=self._queue,
            tenancy=self._tenancy,
            auth=self._auth,
            tokens=TokensConfig(engine_budget_ms=2000),  # A busy test machine is no slow engine.
            logging=LoggingConfig(level="error"),
            tracing=self._tracing,
        )
        self.gateway = await self._stack.enter_async_context(Gateway(config))
        self.core = self.gateway.core
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession())
        await until(lambda: set(self.core.capabilities) == set(self.engines))
        await until(lambda: all(f.endpoint_state == "connected" for f in self.core.ingest.status().values()))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.gateway.admin_port}"

    async def get(self, url: str) -> tuple[int, Any]:
        async with self.http.get(url) as response:
            return response.status, _decoded(await response.text())

    async def post(self, url: str, body: Any = None) -> tuple[int, Any, Any]:
        """(status, body, headers)"""
        async with self.http.post(url, json=body) as response:
            return response.status, _decoded(await response.text()), response.headers

    async def complete(self, prompt: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
        """(worker, usage) of a completion that must succeed."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, **fields}
        status, answer, headers = await self.post(self.url + "/v1/completions", body)
        assert status == 200, answer
        return headers["x-warmroute-worker"], answer["usage"]

    async def all_serve(self, *workers: str) -> None:
        """Each of `workers` answers some new prompt, and nobody else does. Among idle ones chance decides which."""
        answered: set[str] = set()
        async with asyncio.timeout(60.0):
            for number in itertools.count():
                answered.add((await self.complete(f"whoever {number}"))[0])
                assert answered <= set(workers)
                if len(answered) == len(workers):
                    return


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.005)


def _decoded(text: str) -> Any:
    return json.loads(text) if text.startswith(("{", "[")) else text
