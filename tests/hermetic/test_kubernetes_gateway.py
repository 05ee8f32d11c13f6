"""`warmroute gateway` in front of the pods of a cluster."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import aiohttp
import yaml

from bench.engine.server import FakeVllm
from bench.engine.timing import preset
from gateway.config import Config
from gateway.config.schema import GatewayConfig, HealthConfig, KubernetesConfig, LoggingConfig, TokensConfig
from gateway.run import Gateway
from tests.support.command import Command
from tests.support.gateway_world import engine, until
from tests.support.kube_server import PODS, POOLS, KubeServer
from tests.support.pods import pod, pool
from tests.support.stacked import Stacked

HOSTS = {"a": "127.0.0.2", "b": "127.0.0.3"}


def free_on_all() -> int:
    """A port that nobody has on any address."""
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))
        return int(sock.getsockname()[1])


class Cluster(Stacked):
    """Two pods, on loopback addresses of their own, of one pool; a gateway that knows nothing but the API."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_on_all()
        self.engines: dict[str, FakeVllm] = {}

    async def _start(self) -> None:
        self.kube = await self._stack.enter_async_context(KubeServer())
        self.kube.put(POOLS, "pool", pool(self.port))
        for name, host in HOSTS.items():
            config = engine(host=host, port=self.port).with_engine(timing=preset("cpu-fast"))
            self.engines[name] = await self._stack.enter_async_context(FakeVllm(config))
            self.kube.put(PODS, name, pod(host))
        kubeconfig = self._folder / "kubeconfig"
        kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "c"}}],
                    "clusters": [{"name": "c", "cluster": {"server": self.kube.url}}],
                }
            )
        )
        config = Config(
            gateway=GatewayConfig(host="127.0.0.1", port=0, admin_port=0),
            kubernetes=KubernetesConfig(pool="pool", kubeconfig=str(kubeconfig)),
            health=HealthConfig(scrape_interval_s=0.1),
            tokens=TokensConfig(engine_budget_ms=2000),
            logging=LoggingConfig(level="error"),
        )
        self.gateway = await self._stack.enter_async_context(Gateway(config))
        self.core = self.gateway.core
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession())
        await until(lambda: set(self.core.capabilities) == set(HOSTS))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}/v1/completions"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.gateway.admin_port}"


async def test_a_stream_of_a_pod_that_goes_is_whole_and_new_ones_go_elsewhere(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        kube, core = cluster.kube, cluster.core
        await until(lambda: all(feed.endpoint_state == "connected" for feed in core.ingest.status().values()))
        body = {"model": "tiny", "prompt": [1] * 40, "max_tokens": 150, "stream": True, "ignore_eos": True}
        async with cluster.http.post(cluster.url, json=body) as stream:
            gone = stream.headers["x-warmroute-worker"]
            (other,) = set(HOSTS) - {gone}
            await stream.content.readline()
            kube.put(PODS, gone, pod(HOSTS[gone], terminating=True))
            await until(lambda: core.fleet.workers[gone].draining)
            kube.delete(PODS, gone)
            await until(lambda: gone not in core.fleet.workers)
            assert not stream.content.is_eof()
            async with cluster.http.post(cluster.url, json={**body, "stream": False, "max_tokens": 2}) as answer:
                assert answer.headers["x-warmroute-worker"] == other
            text = (await stream.read()).decode()
        assert text.count("data: ") >= 149
        assert text.rstrip().endswith("data: [DONE]")
        kube.put(PODS, gone, pod(HOSTS[gone]))
        await until(lambda: gone in core.capabilities)


async def test_an_api_that_is_away_is_a_degradation_and_the_gateway_serves_on(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        cluster.kube.down = True
        cluster.kube.cut()
        ready, metrics = "", ""
        async with asyncio.timeout(60):
            while "the Kubernetes API cannot be asked" not in ready:
                async with cluster.http.get(cluster.admin + "/readyz?verbose") as answer:
                    ready = await answer.text()
                await asyncio.sleep(0.02)
        async with cluster.http.get(cluster.admin + "/metrics") as answer:
            metrics = await answer.text()
        assert 'warmroute_degraded{what="discovery"} ' in metrics.replace("1.0", " ")
        assert "what is known stays" in ready
        body = {"model": "tiny", "prompt": [1] * 40, "max_tokens": 2}
        async with cluster.http.post(cluster.url, json=body) as answer:
            assert answer.status == 200
        async with cluster.http.get(cluster.admin + "/admin/workers") as answer:
            sources = {it["source"] for it in (await answer.json())["workers"]}
        assert sources == {"kubernetes"}
        async with cluster.http.delete(cluster.admin + "/admin/workers/a") as answer:
            assert answer.status == 409
            assert "is in Kubernetes" in await answer.text()


async def test_the_command_follows_a_selector(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        flags = ["--kubernetes-kubeconfig", str(tmp_path / "kubeconfig"), "--kubernetes-selector", "app=vllm"]
        async with Command("gateway", *flags, "--kubernetes-ports", str(cluster.port)) as gateway:
            async with gateway.http.get(gateway.admin + "/admin/workers") as answer:
                found = {it["name"]: it["url"] for it in (await answer.json())["workers"]}
            assert found == {name: f"http://{host}:{cluster.port}" for name, host in HOSTS.items()}
            await gateway.terminate()
