"""Several gateways in this process in front of the same fake engines, which share through Redis or do not."""

from __future__ import annotations

from typing import Any

import aiohttp

from bench.engine.config import FakeVllmConfig
from bench.engine.server import FakeVllm
from gateway.config import Config
from gateway.config.schema import (
    GatewayConfig,
    HealthConfig,
    LoggingConfig,
    RedisConfig,
    ScorerConfig,
    TokensConfig,
    Worker,
)
from gateway.run import Gateway
from tests.support.gateway_world import until
from tests.support.redis_server import RedisServer
from tests.support.stacked import Stacked


def sharing(server: RedisServer, **keys: Any) -> RedisConfig:
    """Through that server; a busy test machine is no slow Redis."""
    return RedisConfig(**{"url": server.url, "op_timeout_ms": 3000.0, **keys})


class ReplicatedFleet(Stacked):
    """In a test: ``async with ReplicatedFleet(2, RedisConfig(url=...), a=engine(), b=engine()) as fleet:``."""

    def __init__(
        self,
        n: int,
        redis: RedisConfig | None = None,
        scorer: ScorerConfig | None = None,
        *,
        scrape_interval_s: float = 0.2,
        wait: bool = True,
        **engines: FakeVllmConfig,
    ) -> None:
        """`wait`: until every replica hears all others."""
        self._n = n
        self.redis = redis or RedisConfig()
        """For all that join without another one."""
        self._scorer = scorer or ScorerConfig()
        self._scrape_interval_s = scrape_interval_s
        self._wait = wait
        self._configs = engines
        self.engines: dict[str, FakeVllm] = {}
        self.gateways: list[Gateway] = []

    async def _start(self) -> None:
        for name, config in self._configs.items():
            self.engines[name] = await self._stack.enter_async_context(FakeVllm(config))
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession())
        for _ in range(self._n):
            await self.join()
        if self._wait and self.redis.url is not None:
            await self.until_all_hear()

    async def join(self, redis: RedisConfig | None = None) -> Gateway:
        """One more replica, ready."""
        config = Config(
            gateway=GatewayConfig(host="127.0.0.1", port=0, admin_port=0),
            workers=tuple(Worker(url=server.url, name=name) for name, server in self.engines.items()),
            scorer=self._scorer,
            redis=redis or self.redis,
            health=HealthConfig(scrape_interval_s=self._scrape_interval_s),
            tokens=TokensConfig(engine_budget_ms=2000),
            logging=LoggingConfig(level="error"),
        )
        gateway = await self._stack.enter_async_context(Gateway(config))
        core = gateway.core
        self.gateways.append(gateway)
        await until(lambda: set(core.capabilities) == set(self.engines))
        # Until then what is assumed goes where it is given up when events begin.
        await until(lambda: all(worker.publishes_events for worker in core.fleet.workers.values()))
        return gateway

    async def until_all_hear(self, others: int | None = None) -> None:
        others = len(self.gateways) - 1 if others is None else others
        await until(lambda: all(self.hears(gateway) >= others for gateway in self.gateways))

    @staticmethod
    def hears(gateway: Gateway) -> int:
        replicas = gateway.core.replicas
        assert replicas is not None
        return len(replicas.reader.elsewhere.writers) if replicas.is_shared else -1

    def others_at(self, i: int, worker: str) -> int:
        """Requests of others that gateway `i` believes there."""
        others = self.gateways[i].core.fleet.workers[worker].loads[0].others
        return others.prefills + others.streams

    def problems(self, i: int) -> list[str]:
        replicas = self.gateways[i].core.replicas
        assert replicas is not None
        return [detail for _, detail in replicas.degraded()]

    async def post(self, i: int, path: str, body: Any, **headers: str) -> tuple[int, Any, str | None]:
        """(status, answer, worker)"""
        url = f"http://127.0.0.1:{self.gateways[i].port}{path}"
        async with self.http.post(url, json=body, headers=headers) as response:
            answer = await response.json()
            return response.status, answer, response.headers.get("x-warmroute-worker")

    async def complete(self, i: int, prompt: Any, max_tokens: int = 2, **headers: str) -> str:
        """The worker of a completion by way of gateway `i`, which must succeed."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens}
        status, answer, worker = await self.post(i, "/v1/completions", body, **headers)
        assert status == 200, answer
        assert worker is not None
        return worker
