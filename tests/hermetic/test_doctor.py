"""doctor against fake vLLM servers with real HTTP and ZeroMQ, each broken in one way."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from bench.engine.config import FakeVllmConfig, Faults
from bench.engine.generate import Run
from bench.engine.http import Api
from bench.engine.operations import Operations
from bench.engine.server import FakeVllm
from gateway.cli import main
from gateway.doctor import examine as examine_module
from gateway.doctor.examine import Options, examine
from gateway.doctor.fetch import Http
from gateway.doctor.findings import Finding, Report, Severity
from gateway.doctor.report import as_text
from gateway.doctor.tokenizer import check_tokenizer, tokenizer_path
from gateway.tokens.given import ChatPrompt, TextPrompt, prompts_of
from gateway.tokens.local import load
from gateway.tokens.settings import TokenSettings
from tests.support.token_models import make_model, tokenizer_json

PATIENT = Options(timeout_s=5.0)
QUICK = Options(timeout_s=1.0)
"""For what is expected not to come."""


async def diagnose(*urls: str, options: Options = PATIENT) -> Report:
    return await examine(urls, options, rng=random.Random(7))


async def look(engine: FakeVllm, options: Options = PATIENT) -> dict[str, Finding]:
    """Findings about one engine by code."""
    report = await diagnose(engine.url, options=options)
    return {finding.code: finding for finding in report.findings}


def problems(found: dict[str, Finding]) -> set[str]:
    return {code for code, finding in found.items() if finding.severity >= Severity.WARNING}


def rewrite(engine: FakeVllm, change: Callable[[dict[str, Any]], None], rank: int = 0) -> None:
    """Change every event of a rank before it is published."""
    publisher = engine.publishers[rank]
    publish = publisher.publish

    def changed(payload: bytes) -> None:
        ts, events, name = msgspec.msgpack.decode(payload)
        for event in events:
            change(event)
        publish(msgspec.msgpack.encode([ts, events, name]))

    publisher.publish = changed  # type: ignore[method-assign]


def silence(engine: FakeVllm, rank: int = 0) -> None:
    engine.publishers[rank].publish = lambda payload: None  # type: ignore[method-assign]


@asynccontextmanager
async def serving(routes: dict[str, Callable[[web.Request], Any]]) -> AsyncIterator[str]:
    """A small HTTP server of a test's own."""
    app = web.Application()
    for path, handler in routes.items():
        app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def babbling(text: bytes) -> AsyncIterator[int]:
    """A TCP server that sends `text` to everyone; its port."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(text)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


# ---- events ----------------------------------------------------------------------------------------------------------


async def test_d8_events_off() -> None:
    """D8: without events everything looks cold; the operator is told, and which flag to set."""
    async with FakeVllm(FakeVllmConfig(events_endpoint=None)) as engine:
        found = await look(engine)
        assert problems(found) == {"events-off"}
        assert "--kv-events-config" in found["events-off"].fix


async def test_events_not_announced_and_then_given_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    async def missing(*_: Any) -> web.Response:
        return web.Response(status=404)

    monkeypatch.setattr(Operations, "_event_sources", missing)
    async with FakeVllm(FakeVllmConfig(data_parallel_size=2)) as engine:
        assert problems(await look(engine)) == {"events-unannounced"}
    async with FakeVllm(FakeVllmConfig(data_parallel_size=2)) as engine:
        given = Options(events={engine.url: engine.events_endpoint}, replays={engine.url: engine.replay_endpoint})
        found = await look(engine, given)
        assert problems(found) == set()
        assert "events" in found


async def test_event_endpoint_unreachable_or_wrong() -> None:
    async with FakeVllm() as engine:
        away = f"tcp://127.0.0.1:{free_port()}"
        found = await look(engine, Options(timeout_s=1.0, events={engine.url: away}))
        assert "refused" in found["events-unreachable"].sentence
        assert "events-silent" not in found
        http_port = engine.url.replace("http:", "tcp:")
        for wrong in (http_port, engine.replay_endpoint):
            found = await look(engine, Options(timeout_s=1.0, events={engine.url: wrong}))
            assert "events-wrong-port" in found, wrong


async def test_events_of_another_server() -> None:
    async with FakeVllm() as engine, FakeVllm() as other, aiohttp.ClientSession() as session:
        given = Options(
            timeout_s=1.0, events={engine.url: other.events_endpoint}, replays={engine.url: other.replay_endpoint}
        )

        async def busy() -> None:
            while True:
                body = {"model": "fake-model", "prompt": [random.randrange(9, 99) for _ in range(64)], "max_tokens": 1}
                async with session.post(other.url + "/v1/completions", json=body) as response:
                    await response.read()
                await asyncio.sleep(0.01)

        load_on_other = asyncio.create_task(busy())
        try:
            found = await look(engine, given)
        finally:
            load_on_other.cancel()
        assert "events-unmatched" in found


async def test_e20_silent_engine() -> None:
    """E20: events are configured, but none come."""
    async with FakeVllm() as engine:
        silence(engine)
        found = await look(engine, QUICK)
        assert problems(found) == {"events-silent"}


async def test_published_but_not_delivered() -> None:
    async with FakeVllm(FakeVllmConfig(faults=Faults(drop_batches=10_000))) as engine:
        assert problems(await look(engine, QUICK)) == {"events-undelivered"}


async def test_e1_lost_batch() -> None:
    """E1: a batch that was lost on the way is noticed, and a replay brings it."""
    async with FakeVllm(FakeVllmConfig(faults=Faults(drop_batches=1))) as engine:
        found = await look(engine, QUICK)
        assert problems(found) == {"events-gap"}
        assert "events" in found


async def test_e1_lost_batch_without_replay() -> None:
    """E1: the same where the batch cannot be had again."""
    async with FakeVllm(FakeVllmConfig(replay_endpoint=None)) as engine:
        publisher = engine.publishers[0]
        publish = publisher.publish

        def skipping(payload: bytes) -> None:
            publish(payload)
            publisher.next_seq += 3

        publisher.publish = skipping  # type: ignore[method-assign]
        first = iter([True])

        def not_the_probe(event: dict[str, Any]) -> None:
            if next(first, False):  # so that there is a second one
                event["token_ids"] = [5] * len(event["token_ids"])

        rewrite(engine, not_the_probe)
        found = await look(engine, QUICK)
        assert problems(found) == {"events-gap", "replay-off"}
        assert "events" in found


@pytest.mark.parametrize("silent", [0, 1])
async def test_e22_e23_silent_rank(silent: int) -> None:
    """E22, E23: of two data-parallel ranks one publishes nothing."""
    async with FakeVllm(FakeVllmConfig(data_parallel_size=2)) as engine:
        silence(engine, silent)
        report = await diagnose(engine.url, options=QUICK)
        bad = [(f.code, f.rank) for f in report.findings if f.severity >= Severity.WARNING]
        assert bad == [("rank-silent", silent)]


async def test_ranks_that_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Api, "_rank", lambda *_: 0)
    async with FakeVllm(FakeVllmConfig(data_parallel_size=2)) as engine:
        found = await look(engine)
        assert found["rank-ignored"].rank == 1


async def test_ranks_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = FakeVllm.event_sources
    monkeypatch.setattr(FakeVllm, "event_sources", lambda self: {"0": everything(self)["0"]})
    async with FakeVllm(FakeVllmConfig(data_parallel_size=2)) as engine:
        assert problems(await look(engine)) == {"rank-unannounced"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"extra_keys": [["tenant-a"]] * 16}, "extra-keys"),
        ({"lora_name": "l1", "lora_id": 1}, "extra-keys"),
        ({"kv_cache_spec_kind": "sliding_window"}, "no-full-attention"),
        ({"medium": "CPU"}, "events-unmatched"),
        ({"token_ids": [7] * 256}, "events-unmatched"),
    ],
)
async def test_announced_but_not_found(change: dict[str, Any], code: str) -> None:
    async with FakeVllm() as engine:
        rewrite(engine, lambda event: event.update(change))
        found = await look(engine, QUICK)
        assert problems(found) == {code}
        assert "tenant-a" not in found[code].sentence


async def test_only_a_part_is_announced() -> None:
    def shorten(event: dict[str, Any]) -> None:
        event["block_hashes"], event["token_ids"] = event["block_hashes"][:4], event["token_ids"][:64]

    async with FakeVllm() as engine:
        rewrite(engine, shorten)
        assert problems(await look(engine, QUICK)) == {"events-incomplete", "cached-tokens-differ"}


async def test_e11_bad_events_are_named_and_cost_nothing_else() -> None:
    """E11: malformed and unknown events are counted, and the round trip still works."""
    async with FakeVllm() as engine:
        engine.inject(msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": "x"}], 0]))
        engine.inject(msgspec.msgpack.encode([2.0, [{"type": "BlockMoved"}], 0]))
        sliding = {
            "type": "BlockStored",
            "block_hashes": [1],
            "parent_block_hash": None,
            "token_ids": [3] * 16,
            "block_size": 16,
            "medium": "GPU",
            "group_idx": 1,
            "kv_cache_spec_kind": "sliding_window",
        }
        engine.inject(msgspec.msgpack.encode([3.0, [sliding], 0]))
        found = await look(engine)
        assert problems(found) == {"events-malformed"}
        assert "BlockMoved (1)" in found["events-unknown-type"].sentence
        assert "sliding_window" in found["groups-ignored"].sentence
        assert "events" in found


async def test_messages_that_are_no_batches() -> None:
    async with FakeVllm() as engine:
        engine.inject(b"nonsense")
        assert "events-malformed" in await look(engine, QUICK)


async def test_e10_removals_that_never_come() -> None:
    """E10: the index counts more blocks than the engine can hold."""
    async with FakeVllm(FakeVllmConfig().with_engine(num_gpu_blocks=64, max_model_len=512)) as engine:
        for number in range(80):
            stored = {
                "type": "BlockStored",
                "block_hashes": [1000 + number],
                "parent_block_hash": None,
                "token_ids": [number] * 16,
                "block_size": 16,
                "medium": "GPU",
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
            engine.inject(msgspec.msgpack.encode([float(number), [stored], 0]))
        assert problems(await look(engine)) == {"copies-stay"}


async def test_block_size_of_metrics_and_events_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.engine import metrics

    exposition = metrics.exposition
    told = lambda *args: exposition(*args).replace(b'block_size="16"', b'block_size="32"')  # noqa: E731
    monkeypatch.setattr(metrics, "exposition", told)
    async with FakeVllm() as engine:
        found = await look(engine)
        assert "block-size-differs" in found
        assert "events" in found


# ---- engines that connect --------------------------------------------------------------------------------------------


async def test_engines_that_connect_to_us() -> None:
    at = f"tcp://127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        topics = ("kv@one", "kv@two")
        engines = [
            await stack.enter_async_context(FakeVllm(FakeVllmConfig(events_endpoint=at, topic=topic)))
            for topic in topics
        ]
        report = await diagnose(*(engine.url for engine in engines))
        assert [f.code for f in report.findings if f.severity >= Severity.WARNING] == []
        assert sum(f.code == "events" for f in report.findings) == 2


async def test_two_engines_with_one_topic() -> None:
    at = f"tcp://127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(FakeVllm(FakeVllmConfig(events_endpoint=at, topic="kv"))) for _ in range(2)
        ]
        report = await diagnose(*(engine.url for engine in engines), options=QUICK)
        assert "topic-shared" in [finding.code for finding in report.fleet]


async def test_engine_that_should_connect_but_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"0": {"endpoint": f"tcp://127.0.0.1:{free_port()}", "publisher": "zmq"}}
    monkeypatch.setattr(FakeVllm, "event_sources", lambda self: told)
    async with FakeVllm() as engine:
        assert problems(await look(engine, QUICK)) == {"events-unreachable", "replay-off"}


async def test_cannot_listen_because_somebody_does() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        at = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        async with FakeVllm(FakeVllmConfig(events_endpoint=at)) as engine:
            assert "events-bind-failed" in await look(engine, QUICK)


# ---- replay ----------------------------------------------------------------------------------------------------------


async def test_replay_off() -> None:
    async with FakeVllm(FakeVllmConfig(replay_endpoint=None)) as engine:
        found = await look(engine)
        assert problems(found) == {"replay-off"}
        assert "events" in found


@pytest.mark.parametrize("history", [0, 3])
async def test_replay_unreachable(history: int) -> None:
    async with FakeVllm() as engine:
        for number in range(history):
            engine.inject(msgspec.msgpack.encode([float(number), [], 0]))
        away = f"tcp://127.0.0.1:{free_port()}"
        found = await look(engine, Options(timeout_s=1.0, replays={engine.url: away}))
        assert problems(found) == {"replay-unreachable"}
        assert "events" in found


@pytest.mark.parametrize("mode", ["off", "truncated"])
async def test_replay_that_breaks_off(mode: Any) -> None:
    async with FakeVllm(FakeVllmConfig(faults=Faults(replay=mode))) as engine:
        for number in range(6):
            engine.inject(msgspec.msgpack.encode([float(number), [], 0]))
        found = await look(engine, QUICK)
        assert problems(found) == {"replay-incomplete"}
        assert "events" in found


async def test_replay_of_another_engine() -> None:
    async with FakeVllm() as engine, FakeVllm() as other:
        for number in range(3):
            other.inject(msgspec.msgpack.encode([float(number), [], 0]))
        found = await look(engine, Options(timeout_s=1.0, replays={engine.url: other.replay_endpoint}))
        assert "replay-foreign" in found
        assert "events" in found


async def test_replay_of_another_rank() -> None:
    async with FakeVllm(FakeVllmConfig(data_parallel_size=2)) as engine:
        body = {"model": "fake-model", "prompt": list(range(100, 200)), "max_tokens": 1}
        async with aiohttp.ClientSession() as session:
            for rank in ("0", "1"):
                headers = {"X-data-parallel-rank": rank}
                async with session.post(engine.url + "/v1/completions", json=body, headers=headers) as response:
                    assert response.status == 200
        ports = [publisher.replay_endpoint for publisher in engine.publishers]
        for publisher, port in zip(engine.publishers, reversed(ports), strict=True):
            publisher.replay_endpoint = port
        assert "rank-mixed" in await look(engine, QUICK)


async def test_e2_short_history() -> None:
    """E2: what an engine no longer has is known to be missing."""
    async with FakeVllm(FakeVllmConfig(buffer_steps=4)) as engine:
        for number in range(10):
            engine.inject(msgspec.msgpack.encode([float(number), [], 0]))
        found = await look(engine)
        assert problems(found) == set()
        assert "batch 6 of 11" in found["replay-short"].sentence


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
