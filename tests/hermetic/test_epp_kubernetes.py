"""`warmroute epp` that knows nothing but the Kubernetes API."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import grpc
import yaml
from multidict import CIMultiDict

from bench.engine.server import FakeVllm
from gateway.config import Config
from gateway.config.schema import EppConfig, HealthConfig, KubernetesConfig, LoggingConfig, QueueConfig, TokensConfig
from gateway.epp.run import Epp
from gateway.extproc.types import Pick, Refusal
from gateway.pb import health_pb2 as pb
from tests.support.epp_world import request
from tests.support.gateway_world import engine, until
from tests.support.kube_server import LEASES, OBJECTIVES, PODS, POOLS, REWRITES, KubeServer
from tests.support.pods import objective, pod, pool, rewrite
from tests.support.stacked import Stacked

_FREE = {"host": "127.0.0.1", "port": 0, "health_port": 0, "metrics_port": 0, "admin_port": 0}


class Cluster(Stacked):
    """One pod of one pool, with an objective and a rewrite; `replicas` pickers of which one leads."""

    def __init__(self, folder: Path, replicas: int = 1) -> None:
        self._folder = folder
        self._replicas = replicas
        self.pickers: list[Epp] = []

    async def _start(self) -> None:
        self.kube = await self._stack.enter_async_context(KubeServer())
        self.engine = await self._stack.enter_async_context(FakeVllm(engine()))
        self.kube.installed |= {OBJECTIVES, REWRITES}
        self.kube.put(POOLS, "pool", pool(int(self.engine.url.rpartition(":")[2])))
        self.kube.put(PODS, "a", pod("127.0.0.1"))
        self.kube.put(OBJECTIVES, "batch", objective(-1))
        self.kube.put(REWRITES, "nick", rewrite((["nick"], {"tiny": 1})))
        for _ in range(self._replicas):
            await self.add()

    async def add(self) -> Epp:
        kubeconfig = self._folder / "kubeconfig"
        context = {"name": "c", "context": {"cluster": "c"}}
        cluster = {"name": "c", "cluster": {"server": self.kube.url}}
        kubeconfig.write_text(yaml.safe_dump({"current-context": "c", "contexts": [context], "clusters": [cluster]}))
        config = Config(
            epp=EppConfig(**_FREE, tls="off"),  # type: ignore[arg-type]
            kubernetes=KubernetesConfig(pool="pool", kubeconfig=str(kubeconfig), leader_election=self._replicas > 1),
            queue=QueueConfig(waiting_per_worker=1),
            health=HealthConfig(scrape_interval_s=0.1),
            tokens=TokensConfig(engine_budget_ms=2000),
            logging=LoggingConfig(level="error"),
        )
        epp = await self._stack.enter_async_context(Epp(config))
        self.pickers.append(epp)
        await until(lambda: epp.core.capabilities)
        return epp


async def health(epp: Epp, service: str) -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{epp.server.health_port}") as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=pb.HealthCheckRequest.SerializeToString,
            response_deserializer=pb.HealthCheckResponse.FromString,
        )
        answer: pb.HealthCheckResponse = await check(pb.HealthCheckRequest(service=service))
        return answer.status


async def test_pods_priorities_and_rewrites_are_the_pools(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        (epp,) = cluster.pickers
        assert epp.core.metrics.registry.get_sample_value("warmroute_epp_leads") == 1
        await until(lambda: len(epp.objectives) and epp.rewrites)
        assert epp.objectives.priority("batch") == -1
        pick = await epp.picker.pick(request(model="nick").ask())
        assert isinstance(pick, Pick), pick
        assert pick.endpoints == (cluster.engine.url.removeprefix("http://"),)
        assert pick.rename == ("tiny", "nick")
        pick.watch.aborted()
        cluster.kube.delete(REWRITES, "nick")
        await until(lambda: not epp.rewrites)
        refused = await epp.picker.pick(request(model="nick").ask())
        assert isinstance(refused, Refusal)
        assert refused.status == 404
        cluster.kube.delete(PODS, "a")
        await until(lambda: not any(not w.draining for w in epp.core.fleet.workers.values()))
        refused = await epp.picker.pick(request(model="tiny").ask())
        assert isinstance(refused, Refusal)
        assert refused.status == 503


async def test_of_two_replicas_one_is_ready_and_the_other_takes_over(tmp_path: Path) -> None:
    async with Cluster(tmp_path, replicas=2) as cluster:
        first, second = cluster.pickers
        await until(lambda: first.elector is not None and first.elector.leads)
        assert [epp.core.metrics.registry.get_sample_value("warmroute_epp_leads") for epp in (first, second)] == [1, 0]
        assert [await health(epp, "readiness") for epp in (first, second)] == [1, 2]
        assert [await health(epp, "liveness") for epp in (first, second)] == [1, 1]
        await first.drain(0.0)
        await until(lambda: second.elector is not None and second.elector.leads, 30)
        assert [await health(epp, "inference-extension") for epp in (first, second)] == [2, 1]


async def test_a_follower_knows_what_is_cached_before_it_leads(tmp_path: Path) -> None:
    async with Cluster(tmp_path, replicas=2) as cluster:
        leader, follower = cluster.pickers
        await until(lambda: leader.elector is not None and leader.elector.leads)
        for epp in cluster.pickers:
            await until(lambda: all(f.endpoint_state == "connected" for f in epp.core.ingest.status().values()))  # noqa: B023
        async with aiohttp.ClientSession() as http:
            asked = {"model": "tiny", "prompt": "word " * 400, "max_tokens": 1}
            async with http.post(cluster.engine.url + "/v1/completions", json=asked) as response:
                assert response.status == 200
        await until(lambda: 0 < leader.core.index.stats()["entries"] == follower.core.index.stats()["entries"])
        assert follower.elector is not None
        assert not follower.elector.leads


async def test_a_leader_whose_lease_another_takes_is_asked_no_more_and_ends_what_runs(tmp_path: Path) -> None:
    async with Cluster(tmp_path, replicas=2) as cluster:
        first, _ = cluster.pickers
        await until(lambda: first.elector is not None and first.elector.leads)
        pick = await first.picker.pick(request(model="tiny").ask())
        assert isinstance(pick, Pick), pick
        (name,) = cluster.kube.all(LEASES)
        lease = cluster.kube.get(LEASES, name)
        assert lease is not None
        spec = {**lease["spec"], "holderIdentity": "somebody-else", "leaseTransitions": 7}
        cluster.kube.put(LEASES, name, {**lease, "spec": spec})
        await until(lambda: first.elector is not None and not first.elector.leads)
        assert [await health(first, service) for service in ("readiness", "liveness")] == [2, 1]
        assert first.core.metrics.registry.get_sample_value("warmroute_epp_leads") == 0
        late = await first.picker.pick(request(model="tiny").ask())  # A proxy needs a few checks to see it.
        assert isinstance(late, Pick), late
        for each in (pick, late):
            each.watch.responded(200, CIMultiDict({"content-type": "application/json"}), None)
            each.watch.ended()
        await until(lambda: not first.plane.in_flight)
