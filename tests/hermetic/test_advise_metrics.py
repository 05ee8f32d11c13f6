"""`warmroute advise --from-metrics` against servers that answer over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from gateway import cli
from tests.support.model_configs import LLAMA_70B
from tests.support.vllm_metrics import metrics


@asynccontextmanager
async def serving(texts: Iterator[str]) -> AsyncIterator[str]:
    """Yields the URL of a server whose `/metrics` is the next of `texts` each time."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=next(texts))

    app = web.Application()
    app.router.add_get("/metrics", answer)
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
    async with serving(iter([metrics()])) as one, serving(iter([metrics()])) as other:
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
    async with serving(iter([metrics(), metrics(times=2)])) as url:
        assert await advise(tmp_path, "--metrics-interval-s", "0.05", "--rate", "1", "--from-metrics", url) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert any("20 requests in the last 0 s" in line for line in told["assumptions"])


@pytest.mark.parametrize(
    ("text", "why"),
    [("hello\n", "is it a vLLM server?"), ("warmroute_build_info 1\n", "name its vLLM servers instead")],
)
async def test_a_server_of_another_kind_is_one_line(
    tmp_path: Path, text: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(iter([text])) as url:
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
