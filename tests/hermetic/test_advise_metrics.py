"""`warmroute advise --from-metrics` against servers that answer over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway import cli
from tests.support.model_configs import LLAMA_70B
from tests.support.vllm_metrics import metrics

GATEWAY = 'warmroute_build_info{version="1"} 1.0\n'


@asynccontextmanager
async def serving(texts: Iterator[str], health: dict[str, Any] | None = None) -> AsyncIterator[str]:
    """Yields the URL of a server whose `/metrics` is the next of `texts` each time."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=next(texts))

    async def tell(request: web.Request) -> web.Response:
        return web.json_response(health)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    app.router.add_get("/health", tell)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def advise(folder: Path, *more: str) -> int:
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    args = ["--model-config", str(folder), "--gpu", "h200", "--tensor-parallel", "4", "--servers", "2", "--json"]
    return await asyncio.to_thread(cli.main, ["advise", *args, "--requests", "60", *more])


async def test_traffic_is_made_from_what_several_servers_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(iter([metrics()] * 2)) as one, serving(iter([metrics()] * 2)) as other:
        assert await advise(tmp_path, "--rate", "1", "--from-metrics", f"{one}/metrics", other) == 0
    shown = capsys.readouterr().out
    told = json.loads(shown.splitlines()[-1])
    assert told["traffic"]["requests"] == 60
    assert told["traffic"]["reuse"] == 0.25
    assert told["traffic"]["requests_per_s"] == pytest.approx(1)
    assert told["traffic"]["mean_input_tokens"] == pytest.approx(1200, rel=0.25)
    assert told["server"]["kv_tokens"] == 16_000
    assert "16,000 tokens, as the servers say" in " ".join(shown.split())
    assert any("40 requests since the servers were started" in line for line in told["assumptions"])


async def test_two_readings_count_what_came_in_between(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(iter([metrics(), metrics(), metrics(times=2)])) as url:
        assert await advise(tmp_path, "--metrics-interval-s", "0.05", "--rate", "1", "--from-metrics", url) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert any("20 requests in the last 0 s" in line for line in told["assumptions"])


async def test_a_gateway_stands_for_the_workers_that_answer_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(iter([metrics()] * 2)) as one, serving(iter([metrics()] * 2)) as other:
        decoders = {url.removeprefix("http://"): {"role": role} for url, role in ((one, "both"), (other, "decode"))}
        health = {"workers": decoders | {"127.0.0.1:1": {"role": "prefill"}}}
        async with serving(iter([GATEWAY]), health) as gateway:
            assert await advise(tmp_path, "--rate", "1", "--from-metrics", gateway, one) == 0
    assumptions = json.loads(capsys.readouterr().out.splitlines()[-1])["assumptions"]
    assert any("40 requests since the servers were started" in line for line in assumptions)


@pytest.mark.parametrize(
    ("text", "health", "why"),
    [
        ("hello\n", {}, "is it a vLLM server?"),
        (GATEWAY, {"workers": {"my-gpu": {"role": "both"}}}, "no addresses in this gateway's /health (['my-gpu'])"),
        (GATEWAY, {"workers": {}}, "name its workers"),
        (GATEWAY, {"workers": 1}, "/health of this gateway cannot be read"),
    ],
)
async def test_a_server_of_another_kind_is_one_line(
    tmp_path: Path, text: str, health: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(iter([text] * 2), health) as url:
        assert await advise(tmp_path, "--from-metrics", url) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"warmroute: error: --from-metrics {url}: ")
    assert why in shown


async def test_a_server_without_metrics_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(iter([])) as url:
        assert await advise(tmp_path, "--from-metrics", f"{url}/v1") == 2
        assert "give the server's address without a path" in capsys.readouterr().err
    assert await advise(tmp_path, "--from-metrics", url) == 2
    assert "cannot connect to 127.0.0.1" in capsys.readouterr().err
