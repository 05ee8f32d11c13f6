"""Fake engines, indexers that follow them, and gateways that go by the indexers; in this process, or indexers in one of
their own that can be killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from typing import Any

import aiohttp
import grpc

from bench.engine.config import FakeVllmConfig
from bench.engine.server import FakeVllm
from gateway.config import Config
from gateway.config.schema import (
    GatewayConfig,
    HealthConfig,
    IndexConfig,
    IndexerConfig,
    IndexServiceConfig,
    LoggingConfig,
    TlsConfig,
    TokensConfig,
    Worker,
)
from gateway.indexservice.run import Indexer
from gateway.indexservice.server import SERVICE
from gateway.pb import indexer_pb2 as pb
from gateway.run import Gateway
from indexer import Holder, PrefixIndex
from tests.support.gateway_world import _decoded, until
from tests.support.stacked import Stacked

MESSAGES = {
    "Match": (pb.MatchRequest, pb.MatchResponse),
    "Stats": (pb.StatsRequest, pb.StatsResponse),
    "Forget": (pb.ForgetRequest, pb.ForgetResponse),
}


class Fleet(Stacked):
    """In a test: ``async with Fleet(a=engine(), b=engine()) as fleet:``, then `indexer` and `gateway` as needed."""

    def __init__(self, **engines: FakeVllmConfig) -> None:
        self._configs = engines
        self.engines: dict[str, FakeVllm] = {}

    async def _start(self) -> None:
        for name, config in self._configs.items():
            self.engines[name] = await self._stack.enter_async_context(FakeVllm(config))
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession())

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(Worker(url=server.url, name=name) for name, server in self.engines.items())

    def config(self, **changes: Any) -> Config:
        return Config(
            **{
                "gateway": GatewayConfig(host="127.0.0.1", port=0, admin_port=0),
                "workers": self.workers,
                "health": HealthConfig(scrape_interval_s=0.1),
                "tokens": TokensConfig(engine_budget_ms=2000),
                "logging": LoggingConfig(level="error"),
                **changes,
            }
        )

    async def indexer(self, *, tls: TlsConfig | None = None, within_s: float = 60.0, **changes: Any) -> Indexer:
        """Ready when it is returned."""
        settings = IndexerConfig(
            **{"host": "127.0.0.1", "port": 0, "metrics_port": 0, "admin_port": 0, "digest_interval_s": 1.0, **changes}
        )
        config = self.config(indexer=settings, tls=tls or TlsConfig())
        indexer = await self._stack.enter_async_context(Indexer(config))
        await until(indexer.server.is_serving, within_s)
        return indexer

    async def gateway(self, *addresses: str, **changes: Any) -> Gateway:
        """One that goes by the indexers there."""
        service = IndexServiceConfig(addresses=addresses, **changes)
        config = self.config(index=IndexConfig(source="service", service=service))
        return await self._stack.enter_async_context(Gateway(config))

    async def complete(self, gateway: Gateway, prompt: Any, **fields: Any) -> tuple[str, Any]:
        """(worker, answer) of a completion that must succeed."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, **fields}
        url = f"http://127.0.0.1:{gateway.port}/v1/completions"
        async with self.http.post(url, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return response.headers["x-warmroute-worker"], answer

    async def get(self, port: int, path: str) -> tuple[int, Any]:
        async with self.http.get(f"http://127.0.0.1:{port}{path}") as response:
            return response.status, _decoded(await response.text())


class IndexerProcess:
    """`warmroute indexer` in a process of its own, on a port that stays the same over restarts."""

    def __init__(self, workers: tuple[Worker, ...], *args: str) -> None:
        self.port = _free_port()
        self._args = [
            "--host", "127.0.0.1", "--port", str(self.port), "--metrics-port", "0", "--admin-port", "0",
            "--health-scrape-interval-s", "0.1", *args,
            "--worker", json.dumps([{"url": worker.url, "name": worker.name} for worker in workers]),
        ]  # fmt: skip
        self._process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "indexer", *self._args, stderr=asyncio.subprocess.DEVNULL
        )

    async def ready(self) -> None:
        async with asyncio.timeout(30):
            while True:
                try:
                    await ask(self.address, "Match", pb.MatchRequest(token_ids=b"1234"))
                    return
                except grpc.aio.AioRpcError as exc:
                    assert exc.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017 - what else is a fault
                    await asyncio.sleep(0.05)

    async def kill(self, number: int = signal.SIGKILL) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            await self._process.wait()

    async def __aenter__(self) -> IndexerProcess:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.kill()


def address(indexer: Indexer) -> str:
    return f"127.0.0.1:{indexer.server.port}"


async def ask(where: str, method: str, request: Any, credentials: grpc.ChannelCredentials | None = None) -> Any:
    """The answer of a unary method. Raises grpc.aio.AioRpcError."""
    _, answer = MESSAGES[method]
    async with channel(where, credentials) as it:
        serialize = (lambda raw: raw) if isinstance(request, bytes) else type(request).SerializeToString
        call = it.unary_unary(f"/{SERVICE}/{method}", serialize, answer.FromString)
        return await call(request, timeout=10)


def channel(where: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        return grpc.aio.insecure_channel(where, options)
    return grpc.aio.secure_channel(where, credentials, options)


def digests(index: PrefixIndex) -> dict[Holder, tuple[int, int]]:
    """What each rank's blocks come to; those of nothing are left out."""
    return {holder: digest for holder, digest in index.digests().items() if digest[0]}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
