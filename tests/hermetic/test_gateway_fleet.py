"""The gateway in front of fake engines, as an OpenAI client sees it."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from gateway.engine.health import State
from gateway.right_of_way import RightOfWay
from tests.support.command import Command
from tests.support.gateway_world import Fleet, engine, until

# Long enough for its prefill to cost more than a step with nothing but its last token in it.
LONG = "the quick brown fox jumps over the lazy dog " * 400


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(a=engine(lora_modules={"l1": "/adapters/l1"}), b=engine()) as started:
        yield started


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=fleet.url + "/v1", api_key="sk-any", max_retries=0) as openai_client:
        yield openai_client


async def test_chat_and_completions(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": LONG}]
    whole = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, temperature=0)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 5
    stream = await client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=5,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert (chunks[-1].usage.prompt_tokens_details.cached_tokens or 0) > 0
    for prompt in ("text", ["two", "texts"], [1, 2, 3], [[1, 2], [3]]):
        answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=2, n=2, echo=True)
        assert len(answer.choices) == 2 * (2 if isinstance(prompt[0], list) or prompt == ["two", "texts"] else 1)


async def test_models_are_the_union_of_the_raw_cards(fleet: Fleet, client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert sorted(model.id for model in models) == ["l1", "tiny"]
    card = next(model for model in models if model.id == "tiny")
    assert card.max_model_len == 16_384  # type: ignore[attr-defined]
    assert card.permission[0]["object"] == "model_permission"  # type: ignore[attr-defined]
    assert (await client.models.retrieve("l1")).id == "l1"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("nope")
    assert caught.value.code == "model_not_found"


async def test_errors_are_what_the_openai_client_expects(fleet: Fleet, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        await client.completions.create(model="nope", prompt="x")
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    assert "`nope` does not exist" in not_found.value.message
    with pytest.raises(openai.BadRequestError) as engines_own:
        await client.completions.create(model="tiny", prompt=[5] * 20_000)
    assert "maximum context length" in engines_own.value.message
    fleet.core.asleep.update(fleet.engines)
    with pytest.raises(openai.InternalServerError) as unavailable:
        await client.completions.create(model="tiny", prompt="x")
    assert (unavailable.value.status_code, unavailable.value.code) == (503, "no_worker")
    assert unavailable.value.response.headers["Retry-After"] == "1"


async def test_a_prompt_returns_to_where_it_is_cached(fleet: Fleet) -> None:
    first, cold = await fleet.complete(LONG)
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    await until(lambda: fleet.core.fleet.workers[first].publishes_events)
    for _ in range(5):
        worker, usage = await fleet.complete(LONG)
        assert worker == first
        assert usage["prompt_tokens_details"]["cached_tokens"] > 3000
    status, page = await fleet.get(fleet.admin + "/debug/cache")
    hits = page["workers"][first]["hits"]
    assert status == 200
    assert hits["compared_predicted_tokens"] == hits["actual_tokens"] > 15_000
    assert (hits["over_tokens"], hits["under_tokens"]) == (0, 0)
    assert page["workers"][first]["ranks"]["0"]["held"]["blocks"]["gpu"] > 200
    assert page["top_prefixes"][0]["saved_tokens"] > 3000
    assert "fox" not in str(page)


async def test_who_takes_in_events_gives_way_to_who_reads_and_places_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[RightOfWay] = []
    given: list[RightOfWay] = []
    monkeypatch.setattr(RightOfWay, "take", lambda way: taken.append(way))
    monkeypatch.setattr(RightOfWay, "give", lambda way: given.append(way))
    async with Fleet(a=engine()) as fleet:
        await fleet.complete("somewhere")
        await until(lambda: given != [])
        assert taken == [fleet.core.right_of_way] * 2
        assert set(given) == {fleet.core.right_of_way}


async def test_an_adapter_goes_to_a_worker_that_has_it(fleet: Fleet) -> None:
    assert {(await fleet.complete(f"{i}", model="l1"))[0] for i in range(4)} == {"a"}


async def test_without_a_model_the_only_one_serves(fleet: Fleet) -> None:
    status, answer, _ = await fleet.post(fleet.url + "/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert (status, answer["model"]) == (200, "tiny")


async def test_two_models_are_kept_apart() -> None:
    async with Fleet(a=engine(), b=engine(model="other")) as fleet:
        for model, worker in (("tiny", "a"), ("other", "b")):
            assert {(await fleet.complete(f"{i}", model=model))[0] for i in range(3)} == {worker}
        status, answer, _ = await fleet.post(fleet.url + "/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["param"]) == (400, "model")


async def test_ranks_are_addressed() -> None:
    async with Fleet(a=engine(data_parallel_size=2)) as fleet:
        assert sorted(fleet.core.fleet.workers["a"].loads) == [0, 1]
        await asyncio.gather(*(fleet.complete(f"{i} {LONG}") for i in range(6)))
        held = (await fleet.get(fleet.admin + "/debug/cache"))[1]["workers"]["a"]["ranks"]
        assert set(held) == {"0", "1"}
        await until(lambda: set(fleet.core.index.stats()["workers"].get("a", ())) == {"0", "1"})


async def test_a_worker_that_dies_is_left_out_and_taken_back(fleet: Fleet) -> None:
    dead = fleet.engines["a"]
    await dead.stop()
    for i in range(6):
        assert (await fleet.complete(f"{i}"))[0] == "b"
    await until(lambda: fleet.core.health.state("a").state is not State.HEALTHY, within_s=15)
    await until(lambda: fleet.core.scraper.status()["a"].reachable is False)
    status, page = await fleet.get(fleet.url + "/readyz?verbose")
    assert status == 200
    assert {"worker_down", "worker_ejected"} <= {row["what"] for row in page["degraded"] if row.get("worker") == "a"}
    await dead.start()
    await until(lambda: fleet.core.health.state("a").state is State.HEALTHY, within_s=20)


async def test_a_restarted_worker_starts_empty(fleet: Fleet) -> None:
    worker, _ = await fleet.complete(LONG)
    await until(lambda: fleet.core.index.stats()["workers"].get(worker, {}).get("0", {}).get("stored_blocks"))
    await fleet.engines[worker].restart()
    await until(
        lambda: (
            not fleet.core.index.stats()["workers"].get(worker, {}).get("0", {"blocks": {"gpu": 0}})["blocks"]["gpu"]
        )
    )
    _, page, _ = await fleet.post(fleet.admin + "/debug/explain", {"model": "tiny", "prompt": LONG})
    assert {row["cached_tokens"] for row in page["considered"] if row["decode"][0] == worker} <= {0}


async def test_health_and_readiness(fleet: Fleet) -> None:
    status, page = await fleet.get(fleet.url + "/health")
    assert (status, page["status"], page["usable"], page["roles"]["both"]) == (200, "ok", 2, 2)
    assert page["workers"]["a"]["adapters"] == ["l1"]
    status, page = await fleet.get(fleet.url + "/readyz")
    assert (status, page) == (200, {"ready": True, "draining": False, "usable_workers": 2})
    fleet.core.asleep.add("a")
    _, page = await fleet.get(fleet.url + "/readyz?verbose")
    assert ("worker_asleep", "a") in {(row["what"], row.get("worker")) for row in page["degraded"]}
    fleet.core.asleep.add("b")
    assert (await fleet.get(fleet.url + "/health"))[0] == 503
    assert (await fleet.get(fleet.url + "/readyz"))[0] == 503
    fleet.core.asleep.clear()
    fleet.gateway.plane.draining = True
    status, page = await fleet.get(fleet.url + "/readyz")
    assert (status, page["draining"]) == (503, True)


async def test_each_degradation_is_named() -> None:
    async with Fleet(a=engine(events_endpoint=None), b=engine(replay_endpoint=None)) as fleet:
        for i in range(4):
            await fleet.complete(f"{i} {LONG}")
        _, page = await fleet.get(fleet.url + "/readyz?verbose")
        found = {(row["what"], row.get("worker") or row.get("model")) for row in page["degraded"]}
        assert {("events_missing", "a"), ("replay_missing", "b"), ("tokens_by_engine", "tiny")} <= found
        await fleet.engines["a"].stop()
        await until(lambda: fleet.core.scraper.status()["a"].reachable is False)
        _, page = await fleet.get(fleet.url + "/readyz?verbose")
        assert ("worker_down", "a") in {(row["what"], row.get("worker")) for row in page["degraded"]}


async def test_a_gateway_without_workers_is_alive_and_not_ready() -> None:
    async with Fleet() as fleet:
        assert (await fleet.get(fleet.url + "/livez"))[0] == 200
        assert (await fleet.get(fleet.url + "/health"))[0] == 503
        _, page = await fleet.get(fleet.url + "/readyz?verbose")
        assert [row["what"] for row in page["degraded"]] == ["no_workers"]
        assert (await fleet.get(fleet.url + "/metrics"))[0] == 200
        assert (await fleet.get(fleet.url + "/v1/models"))[0] == 503


METRICS = {
    "access_log_lines_dropped",
    "actual_cached_tokens",
    "answers_cut",
    "build_info",
    "config_reloads",
    "decisions",
    "degraded",
    "ejections",
    "engine_kv_usage_ratio",
    "engine_running",
    "engine_stats_age_seconds",
    "engine_waiting",
    "event_batches",
    "event_gaps",
    "event_ingest",
    "event_missing_batches",
    "event_replays",
    "events",
    "events_arriving",
    "events_partial",
    "events_rank_age_seconds",
    "events_rank_arriving",
    "events_refused",
    "index_blocks",
    "index_budget_bytes",
    "index_bytes",
    "index_entries",
    "index_evicted_blocks",
    "index_lookups",
    "index_orphan_blocks",
    "learned_factor",
    "learned_pull_scale",
    "media_references",
    "overhead_seconds",
    "pd_decisions",
    "pd_decode_first_byte_seconds",
    "pd_handoffs",
    "pd_leases_expired",
    "pd_pair_broken",
    "pd_prefill_compute_seconds",
    "pd_prefill_wait_seconds",
    "pd_releases",
    "pd_retries",
    "pd_stage_outcomes",
    "pd_stranded_tokens",
    "pd_transfer_bytes",
    "pd_transfer_seconds",
    "pd_transfer_tokens",
    "pd_transfers_failed",
    "predicted_cached_tokens",
    "prompt_tokens",
    "queue_evictable",
    "queue_oldest_seconds",
    "queue_requests",
    "queue_shedding_armed",
    "queue_tenants",
    "queue_tokens",
    "queue_ttft_error",
    "queue_ttft_samples",
    "queue_wait_seconds",
    "realtime_sessions",
    "reported_predicted_cached_tokens",
    "reported_prompt_tokens",
    "request_cached_tokens",
    "request_duration_seconds",
    "request_input_tokens",
    "request_output_tokens",
    "requests",
    "requests_in_flight",
    "requests_rejected",
    "retries",
    "session_decisions",
    "sessions",
    "stored_response_lookups",
    "stored_responses",
    "time_to_first_token_seconds",
    "token_source",
    "tokenizer_cache",
    "tokenizer_cache_bytes",
    "tokenizer_encoder",
    "tokenizer_jobs",
    "tokenizer_jobs_shed",
    "tokenizer_pieces",
    "tokenizer_text_bytes",
    "worker_available",
    "worker_booked_kv_tokens",
    "worker_booked_prefills",
    "worker_booked_streams",
    "worker_chosen",
    "worker_draining",
    "worker_predicted_wait_seconds",
    "workers",
}


async def test_every_metric_is_there_from_the_start(fleet: Fleet) -> None:
    status, text = await fleet.get(fleet.url + "/metrics")
    assert status == 200
    named = set(re.findall(r"^# TYPE warmroute_(\w+?)(?:_total)? \w+$", text, re.MULTILINE))
    assert named == METRICS
    for name in ("worker_available", "engine_running", "events_arriving", "event_gaps_total", "worker_chosen_total"):
        for worker in ("a", "b"):
            assert f'warmroute_{name}{{worker="{worker}"}}' in text
    assert 'warmroute_queue_requests{model="tiny"} 0.0' in text
    assert (await fleet.get(fleet.admin + "/metrics"))[0] == 200


async def test_metrics_follow_requests(fleet: Fleet) -> None:
    worker, usage = await fleet.complete(LONG)
    text = (await fleet.get(fleet.url + "/metrics"))[1]
    assert f'warmroute_requests_total{{status="200",worker="{worker}"}} 1.0' in text
    assert f'warmroute_reported_prompt_tokens_total{{worker="{worker}"}} {usage["prompt_tokens"]}.0' in text
    assert 'warmroute_decisions_total{policy="warmroute",prefill="local",tokens="engine"} 1.0' in text
    assert "warmroute_overhead_seconds_count 1.0" in text
    assert "warmroute_requests_in_flight 0.0" in text


async def test_the_command_serves_and_drains_on_sigterm(fleet: Fleet) -> None:
    async with Command("gateway", "--workers", ",".join(server.url for server in fleet.engines.values())) as gateway:
        for server in fleet.engines.values():
            server.faults.headers_delay_s = 0.5
        body = {"model": "tiny", "prompt": "x", "max_tokens": 3}
        running = asyncio.create_task(fleet.post(gateway.url + "/v1/completions", body))
        await until(lambda: any(server.drivers[0].engine for server in fleet.engines.values()))
        await asyncio.sleep(0.2)
        gateway.process.send_signal(signal.SIGTERM)
        status, _, _ = await asyncio.wait_for(running, 60)
        assert status == 200
        assert " POST /v1/completions 200 " in await gateway.stopped()


async def test_a_head_that_is_half_there_on_sigterm_is_waited_for(fleet: Fleet) -> None:
    (server, *_) = fleet.engines.values()
    async with Command("gateway", "--workers", server.url) as gateway:
        server.faults.paths = ("/v1/completions",)
        server.faults.headers_delay_s = 2.0
        body = b'{"model": "tiny", "prompt": "x", "max_tokens": 3}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        running = asyncio.create_task(fleet.post(gateway.url + "/v1/completions", json.loads(body)))
        async with asyncio.timeout(60):
            while "\nwarmroute_requests_in_flight 1.0" not in (await fleet.get(gateway.url + "/metrics"))[1]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head[:30])
        gateway.process.send_signal(signal.SIGTERM)
        assert (await asyncio.wait_for(running, 60))[0] == 200
        writer.write(head[30:] + body)
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer.lower()
        await gateway.stopped()


@pytest.mark.parametrize("scheme", ["http", "HTTP"])
async def test_lists_of_models_are_asked_for_by_a_whole_url_too(scheme: str) -> None:
    async with Fleet(a=engine()) as fleet:
        for path, said in (("/v1/models", b'"object":"list"'), ("/v1/models/tiny", b'"id":"tiny"')):
            reader, writer = await asyncio.open_connection("127.0.0.1", fleet.gateway.port)
            writer.write(f"GET {scheme}://x.example{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            answer = await asyncio.wait_for(reader.read(), 60)
            writer.close()
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert said in answer.replace(b": ", b":")
