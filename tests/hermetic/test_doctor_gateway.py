"""doctor on a running gateway: what it sees itself, by its admin port. And `explain` at the wrong port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from gateway.cli import main
from gateway.config.schema import PdConfig
from gateway.debug.remedies import REMEDIES
from gateway.doctor.examine import Options
from gateway.doctor.findings import Finding
from tests.support.doctor_world import diagnose, free_port, serving
from tests.support.gateway_world import Fleet, decode, engine, prefill, until


async def seen(admin: str) -> list[Finding]:
    return (await diagnose(options=Options(timeout_s=2.0, admin=admin))).findings


async def test_a_gateway_that_sees_nothing_wrong() -> None:
    async with Fleet(a=engine(), b=engine()) as fleet:
        found = await seen(fleet.admin)
        assert [finding.code for finding in found] == ["gateway"]
        assert "2 workers" in found[0].sentence


async def test_p6_broken_pairs_are_named() -> None:
    """P6, P9: a pair that refuses each other, seen by the gateway that would use it."""
    async with Fleet(pd=PdConfig(policy="always-remote"), p1=prefill(version="0.31.0"), d1=decode()) as fleet:
        await until(lambda: fleet.core.planner.pairs.pairs)
        # A machine that is busy has more to find.
        found = next(each for each in await seen(fleet.admin) if each.evidence.get("what") == "pair_broken")
        assert (found.code, found.evidence) == ("gateway-degraded", {"what": "pair_broken", "worker": "d1"})
        assert "different vLLM versions: 0.31.0 and 0.32.0" in found.sentence


async def test_a_gateway_without_workers_is_asked_all_the_same() -> None:
    async with Fleet(a=engine()) as fleet:
        await fleet.engines["a"].stop()
        await until(lambda: not fleet.core.is_well("a"))
        found = await seen(fleet.admin)
        assert {finding.code for finding in found} == {"gateway-degraded"}
        assert "worker_down" in {finding.evidence["what"] for finding in found}
        assert all(finding.fix == REMEDIES[finding.evidence["what"]] for finding in found)


async def test_a_gateway_with_a_token_says_so() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=401)

    async with serving({"/{path:.*}": refuse}) as url:
        (found,) = await seen(url)
        assert found.code == "gateway-unreachable"
        assert "WARMROUTE_ADMIN_TOKEN" in found.sentence


def answering(body: Any) -> Callable[[web.Request], Any]:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(body)

    return handler


async def test_e13_hits_that_do_not_come() -> None:
    """E13: a cache emptied around us shows in what engines report to have reused."""
    hits = {"compared": 100, "compared_predicted_tokens": 10_000, "over_tokens": 4_000, "requests": 120}
    workers = {"a": {"hits": hits}, "b": {"hits": {**hits, "over_tokens": 100}}, "c": {"hits": {**hits, "compared": 9}}}
    pages = {"/readyz": answering({"degraded": []}), "/debug/cache": answering({"workers": workers})}
    async with serving(pages) as url:
        (found,) = await seen(url)
        assert found.code == "gateway-hits-missed"
        assert found.evidence == {"worker": "a", "answers": 100, "predicted_tokens": 10_000, "missed_tokens": 4_000}
        assert "40%" in found.sentence


async def test_what_is_no_admin_port() -> None:
    async with Fleet(a=engine()) as fleet:
        (found,) = await seen(fleet.url)
        assert (found.code, "/debug/cache has status 404" in found.sentence) == ("gateway-unreachable", True)
        (found,) = await seen(fleet.engines["a"].url)
        assert found.code == "gateway-unreachable"
    async with serving({"/readyz": answering([]), "/debug/cache": answering({})}) as url:
        (found,) = await seen(url)
        assert "does not answer as a warmroute gateway" in found.sentence
    (found,) = await seen(f"http://127.0.0.1:{free_port()}")
    assert "refused" in found.sentence


async def test_command_with_an_admin_port_only(capsys: pytest.CaptureFixture[str]) -> None:
    async with Fleet(a=engine()) as fleet:
        assert await asyncio.to_thread(main, ["doctor", "--admin", fleet.admin, "--json"]) == 0
    assert [each["code"] for each in json.loads(capsys.readouterr().out)["fleet"]] == ["gateway"]


async def test_explain_at_the_wrong_port_says_which_is_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    async with Fleet(a=engine()) as fleet:
        for url in (fleet.url, fleet.engines["a"].url):
            args = ["explain", "--admin", url, "--model", "tiny", "--prompt", "hello"]
            assert await asyncio.to_thread(main, args) == 2
            assert "gateway.admin_port, 8001 by default" in capsys.readouterr().err
        args = ["explain", "--admin", fleet.admin, "--model", "no-such-model", "--prompt", "hello"]
        assert await asyncio.to_thread(main, args) == 1
        assert "admin_port" not in capsys.readouterr().err
