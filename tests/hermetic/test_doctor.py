"""doctor against fake vLLM servers with real HTTP and ZeroMQ, each broken in one way."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bench.engine.config import FakeVllmConfig, Faults
from bench.engine.generate import Run
from bench.engine.server import FakeVllm
from gateway.cli import main
from gateway.doctor import examine as examine_module
from gateway.doctor.examine import Options
from gateway.doctor.fetch import Http
from gateway.doctor.findings import Finding, Severity
from gateway.doctor.report import as_text
from gateway.doctor.tokenizer import check_tokenizer, tokenizer_path
from gateway.tokens.given import ChatPrompt, TextPrompt, prompts_of
from gateway.tokens.local import load
from gateway.tokens.settings import TokenSettings
from tests.support.doctor_world import QUICK, babbling, diagnose, free_port, look, problems, serving
from tests.support.token_models import make_model, tokenizer_json

# ---- well ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        FakeVllmConfig(),
        FakeVllmConfig(event_format="array", replay_with_topic=False, version="0.23.0"),
        FakeVllmConfig(event_format="array-0.11", replay_with_topic=False, version="0.11.2"),
        FakeVllmConfig(data_parallel_size=2),
        FakeVllmConfig(topic="kv@127.0.0.1@m").with_engine(block_size=256),
    ],
    ids=["0.32", "0.23", "0.11", "two ranks", "large blocks"],
)
async def test_a_server_that_is_well(config: FakeVllmConfig) -> None:
    async with FakeVllm(config) as engine:
        report = await diagnose(engine.url)
        found = {finding.code for finding in report.findings}
        assert {"reachable", "models", "metrics", "replay", "events"} <= found
        assert report.worst == Severity.NOTE  # no tokenizer is at hand
        assert sum(f.code == "events" for f in report.findings) == config.data_parallel_size


async def test_e8_what_was_stored_before_is_read_from_the_history() -> None:
    """E8: events from before the subscription are not lost."""
    async with FakeVllm() as engine, aiohttp.ClientSession() as session:
        body = {"model": "fake-model", "prompt": list(range(100, 500)), "max_tokens": 1}
        async with session.post(engine.url + "/v1/completions", json=body) as response:
            assert response.status == 200
        found = await look(engine)
        assert "2 batches so far" in found["replay"].sentence
        assert problems(found) == set()


async def test_i1_hash_seeds_do_not_matter() -> None:
    """I1: two engines with other hash seeds both round-trip, as no engine hash is ever recomputed."""
    async with FakeVllm(FakeVllmConfig().with_engine(seed=1)) as a, FakeVllm(FakeVllmConfig().with_engine(seed=2)) as b:
        report = await diagnose(a.url, b.url)
        assert [f.code for f in report.findings if f.severity >= Severity.WARNING] == []
        assert sum(f.code == "events" for f in report.findings) == 2


async def test_no_prompt_is_sent_without_leave() -> None:
    async with FakeVllm() as engine:
        found = await look(engine, Options(probe=False))
        assert "probe-skipped" in found
        assert problems(found) == set()
        assert engine.stats()[0].prompt_tokens == 0


async def test_nothing_secret_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    async with FakeVllm() as engine:
        code = await asyncio.to_thread(main, ["doctor", engine.url, "--json"])
    shown = capsys.readouterr()
    assert code == 0
    document = json.loads(shown.out)
    assert document["worst"] == "note"
    assert "hunter2" not in shown.out + shown.err


async def test_command_prints_lines_and_the_exit_code_follows(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeVllm(FakeVllmConfig(replay_endpoint=None)) as engine:
        assert await asyncio.to_thread(main, ["doctor", engine.url, engine.url]) == 1
    shown = capsys.readouterr().out
    assert "replay-off" in shown
    assert "url-twice" in shown
    assert shown.endswith("1 worker: 0 errors, 2 warnings\n")


# ---- reaching it -----------------------------------------------------------------------------------------------------


async def welcome(_: web.Request) -> web.Response:
    return web.Response(text="welcome")


async def test_o2_bad_workers_do_not_hide_a_good_one() -> None:
    """O2: one unreachable worker among several stalls nothing."""
    async with AsyncExitStack() as stack:
        good = await stack.enter_async_context(FakeVllm())
        stalled = await stack.enter_async_context(FakeVllm(FakeVllmConfig(faults=Faults(paths=("/",), stall=True))))
        plain = await stack.enter_async_context(serving({"/{any:.*}": welcome}))
        garbage = await stack.enter_async_context(babbling(b"SSH-2.0-OpenSSH_9\r\n"))
        urls = {
            "reachable": good.url,
            "timeout": stalled.url,
            "not-vllm": plain,
            "not-http": f"http://127.0.0.1:{garbage}",
            "tls-failed": good.url.replace("http:", "https:"),
            "unreachable": f"http://127.0.0.1:{free_port()}",
        }
        report = await diagnose(*urls.values(), options=Options(timeout_s=2.0))
        for code, url in urls.items():
            codes = [finding.code for finding in report.workers[url]]
            assert code in codes
            assert len(codes) == 1 or code == "reachable"
        assert "events" in [finding.code for finding in report.workers[good.url]]


async def test_the_event_port_given_as_url() -> None:
    async with FakeVllm() as engine:
        url = engine.events_endpoint.replace("tcp:", "http:")
        report = await diagnose(url, options=QUICK)
        assert {finding.code for finding in report.findings} <= {"not-http", "timeout"}


async def test_dead_and_sleeping_engines_are_not_probed() -> None:
    async with FakeVllm() as dead, FakeVllm() as asleep:
        dead.kill_engine()
        asleep.sleep(1)
        report = await diagnose(dead.url, asleep.url)
        assert "unhealthy" in [finding.code for finding in report.workers[dead.url]]
        assert "asleep" in [finding.code for finding in report.workers[asleep.url]]
        assert "probe-failed" not in {finding.code for finding in report.findings}


async def test_deadline_keeps_what_was_found() -> None:
    async with FakeVllm(FakeVllmConfig(faults=Faults(paths=("/v1/completions",), stall=True))) as engine:
        report = await diagnose(engine.url, options=Options(timeout_s=30.0, deadline_s=2.0))
        codes = [finding.code for finding in report.workers[engine.url]]
        assert "check-incomplete" in codes
        assert "reachable" in codes


async def test_a_fault_of_ours_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> list[Finding]:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(examine_module, "check_tokenizer", broken)
    async with FakeVllm() as engine:
        found = await look(engine)
        assert "secret" not in found["check-failed"].sentence
        assert "events" in found


# ---- the probe -------------------------------------------------------------------------------------------------------


async def test_prompt_token_details_off() -> None:
    async with FakeVllm(FakeVllmConfig(prompt_tokens_details=False)) as engine:
        found = await look(engine, QUICK)
        assert problems(found) == {"cached-tokens-missing"}
        assert "--enable-prompt-tokens-details" in found["cached-tokens-missing"].fix


async def test_prefix_caching_off() -> None:
    async with FakeVllm(FakeVllmConfig().with_engine(enable_prefix_caching=False)) as engine:
        assert problems(await look(engine)) == {"prefix-caching-off"}


@pytest.mark.parametrize(("share", "code"), [(0.0, "cache-not-reused"), (0.5, "cached-tokens-differ")])
async def test_reuse_other_than_predicted(share: float, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Run.cached_tokens
    monkeypatch.setattr(Run, "cached_tokens", lambda self: int(real(self) * share))
    async with FakeVllm() as engine:
        assert problems(await look(engine, QUICK)) == {code}


async def test_probe_that_fails() -> None:
    faults = Faults(paths=("/v1/completions",), error_rate=1.0, error_status=500)
    async with FakeVllm(FakeVllmConfig(faults=faults)) as engine:
        found = await look(engine, QUICK)
        assert problems(found) == {"probe-failed"}
        assert "500 (injected fault)" in found["probe-failed"].sentence


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


async def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "chatml")
    async with FakeVllm(FakeVllmConfig(root=str(folder))) as engine:
        found = await look(engine)
        assert problems(found) == {"tokenizer-mismatch"}
        assert str(folder) in found["tokenizer-mismatch"].sentence


async def test_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    async with FakeVllm() as engine:
        assert problems(await look(engine, Options(tokenizer=str(tmp_path)))) == {"tokenizer-unusable"}


async def test_tokenizer_that_agrees_and_an_engine_that_does_not_answer(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "chatml", tokenizer=tokenizer_json())
    theirs = load(str(folder), TokenSettings())

    async def tokenize(request: web.Request) -> web.Response:
        body = await request.json()
        (prompt,) = prompts_of("completions" if "prompt" in body else "chat", body)
        assert isinstance(prompt, TextPrompt | ChatPrompt)
        ids = theirs.encode(theirs.text_of(prompt).text, add_special_tokens=prompt.add_special_tokens)
        return web.json_response({"tokens": list(memoryview(ids).cast("I"))})

    async with serving({"/tokenize": tokenize}) as url, serving({}) as without, aiohttp.ClientSession() as session:
        (found,) = await check_tokenizer(Http(session, url, 5.0), "m", str(folder))
        assert found.code == "tokenizer"
        (found,) = await check_tokenizer(Http(session, without, 5.0), "m", str(folder))
        assert found.code == "tokenize-unavailable"
        (found,) = await check_tokenizer(Http(session, without, 5.0), "m", tokenizer_path(None, "org/model"))
        assert found.code == "tokenizer-unchecked"


# ---- a fleet ---------------------------------------------------------------------------------------------------------


async def test_mixed_fleet() -> None:
    base = FakeVllmConfig()
    configs = [base, replace(base, version="0.31.0").with_engine(block_size=32, max_model_len=16384)]
    async with AsyncExitStack() as stack:
        urls = [(await stack.enter_async_context(FakeVllm(config))).url for config in configs]
        report = await diagnose(*urls)
        codes = {finding.code for finding in report.fleet}
        assert codes == {"versions-differ", "block-sizes-differ", "max-model-len-differs"}
        assert sum(f.code == "events" for f in report.findings) == 2
        assert "all workers" in as_text(report, colour=False)


async def test_localhost_twice() -> None:
    async with FakeVllm() as engine:
        report = await diagnose(engine.url, engine.url.replace("127.0.0.1", "localhost"))
        assert [finding.code for finding in report.fleet] == ["same-server"]
