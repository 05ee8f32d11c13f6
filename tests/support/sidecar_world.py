"""A whole sidecar in front of fake engines or scripted ones, in this process."""

from __future__ import annotations

import json
import socket
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec

from bench.engine.config import FakeVllmConfig
from bench.engine.server import FakeVllm
from gateway.config import Config
from gateway.config.schema import (
    GatewayConfig,
    HealthConfig,
    LoggingConfig,
    PdConfig,
    SidecarConfig,
    TlsConfig,
    TokensConfig,
    Worker,
)
from gateway.sidecar.run import Sidecar
from tests.support.gateway_world import engine, until
from tests.support.stacked import Stacked


def sidecar_config(
    engine_url: str, *, pd: PdConfig | None = None, tls: TlsConfig | None = None, **sidecar: Any
) -> Config:
    """On free ports of the loopback."""
    return Config(
        gateway=GatewayConfig(drain_timeout_s=10),
        sidecar=SidecarConfig(engine=engine_url, host="127.0.0.1", port=0, admin_port=0, **sidecar),
        pd=pd or PdConfig(),
        tls=tls or TlsConfig(),
        health=HealthConfig(scrape_interval_s=0.1),
        tokens=TokensConfig(engine_budget_ms=2000),
        logging=LoggingConfig(level="error"),
    )


class Pod(Stacked):
    """In a test: ``async with Pod() as pod:``: one fake engine for each rank, ready, and the sidecar before them.

    `engine_url` stands for engines of the test's own, which may be anything.
    """

    def __init__(
        self,
        config: FakeVllmConfig | None = None,
        *,
        ranks: int = 1,
        engine_url: str | None = None,
        workers: tuple[Worker, ...] = (),
        **settings: Any,
    ) -> None:
        self._config = config or engine()
        self._ranks = ranks
        self._engine_url = engine_url
        self._workers = workers
        self._settings = settings
        self.engines: list[FakeVllm] = []

    async def _start(self) -> None:
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession())
        url = self._engine_url
        if url is None:
            self.engines = await self._neighbours()
            url = self.engines[0].url
        config = sidecar_config(url, data_parallel_size=self._ranks, **self._settings)
        config = msgspec.structs.replace(config, workers=self._workers)
        self.sidecar = await self._stack.enter_async_context(Sidecar(config))
        self.core = self.sidecar.core
        if self._engine_url is None:
            await until(lambda: set(self.core.capabilities) >= set(self.sidecar.pod.names))

    async def _neighbours(self) -> list[FakeVllm]:
        """Engines on ports one after the other."""
        for _ in range(50):
            first = free_port()
            async with AsyncExitStack() as stack:
                try:
                    engines = [
                        await stack.enter_async_context(FakeVllm(replace(self._config, port=first + rank)))
                        for rank in range(self._ranks)
                    ]
                except OSError:
                    continue
                self._stack.push_async_exit(stack.pop_all())
                return engines
        raise RuntimeError("no ports one after the other are free")

    def url(self, rank: int = 0) -> str:
        return f"http://127.0.0.1:{self.sidecar.ports[rank]}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.sidecar.admin_port}"

    async def ask(self, method: str, path: str, *, rank: int = 0, **kwargs: Any) -> tuple[int, Any, Any]:
        """(status, JSON or text, headers)"""
        async with self.http.request(method, self.url(rank) + path, **kwargs) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith(("{", "[")) else text, response.headers

    async def complete(self, *headers: tuple[str, str], rank: int = 0, **fields: Any) -> tuple[int, Any, Any]:
        body = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 2, **fields}
        return await self.ask("POST", "/v1/completions", rank=rank, json=body, headers=list(headers))

    def value(self, name: str, **labels: str) -> float:
        return self.core.metrics.registry.get_sample_value(name, labels) or 0.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
