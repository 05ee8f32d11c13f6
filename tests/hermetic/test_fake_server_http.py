"""The fake server's HTTP surface against recorded answers of vLLM 0.32."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.engine import chat, tokenizer
from bench.engine.config import FakeVllmConfig
from bench.engine.server import FakeVllm
from bench.engine.timing import preset

DATA = Path(__file__).parents[1] / "data"
CALLS: dict[str, dict[str, Any]] = json.loads((DATA / "vllm_0.32_http.json").read_text())["calls"]
SERIES: dict[str, list[str]] = json.loads((DATA / "vllm_0.32_metrics.json").read_text())["series"]


def config(**changes: Any) -> FakeVllmConfig:
    base = FakeVllmConfig(model="tiny", lora_modules={"l1": "/adapters/l1"}, **changes)
    return base.with_engine(
        timing=preset("instant"), max_model_len=2048, block_size=32, num_gpu_blocks=200, max_num_batched_tokens=4096
    )


@pytest.fixture
async def engine() -> AsyncIterator[FakeVllm]:
    async with FakeVllm(config()) as server:
        yield server


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def post(http: aiohttp.ClientSession, engine: FakeVllm, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with http.post(engine.url + path, json=body, headers=headers) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith(("{", "[")) else text


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the engine signals nothing
            await asyncio.sleep(0.002)


def sse(text: str) -> list[Any]:
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(row.removeprefix("data: ")) for row in text.split("\n\n")[:-2]]


def shape(value: Any) -> Any:
    """Keys in order and value types; the contents are the model's business."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


@pytest.mark.parametrize(
    "label",
    ["tokenize_prompt", "completion_token_ids_prompt", "messages", "count_tokens", "kv_event_sources"],
)
async def test_answers_have_the_recorded_shape(engine: FakeVllm, http: aiohttp.ClientSession, label: str) -> None:
    call = CALLS[label]
    if call["request"] is None:
        async with http.get(engine.url + call["path"]) as response:
            status, body = response.status, await response.json()
    else:
        status, body = await post(http, engine, call["path"], call["request"])
    assert status == call["status"]
    assert shape(body) == shape(call["response"])
    assert list(body) == list(call["response"])


async def test_chat_answer_has_the_recorded_shape(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    call = CALLS["chat_return_token_ids"]
    status, body = await post(http, engine, call["path"], call["request"])
    assert status == 200
    assert shape(body) == shape(call["response"])
    assert body["prompt_token_ids"] == chat.render(call["request"]["messages"])


@pytest.mark.parametrize(
    "label", ["dp_rank_header_bad", "bad_model", "cache_salt_empty", "kv_params_bad_type", "prompt_too_long"]
)
async def test_errors_are_vllms_word_for_word(engine: FakeVllm, http: aiohttp.ClientSession, label: str) -> None:
    call = CALLS[label]
    body = call["request"]
    if label == "prompt_too_long":
        body = {**body, "prompt": [5] * 3000}
    status, answer = await post(http, engine, call["path"], body, **(call["headers"] or {}))
    assert (status, answer) == (call["status"], call["response"])


async def test_streamed_chunks_have_the_recorded_shape(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    call = CALLS["stream_usage"]
    async with http.post(engine.url + call["path"], json=call["request"]) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        chunks = sse(await response.text())
    recorded = sse(call["response"])
    assert [shape(chunk) for chunk in chunks] == [shape(chunk) for chunk in recorded]
    assert [chunk["usage"] for chunk in chunks] == [chunk["usage"] for chunk in recorded]


@pytest.mark.parametrize("raw", [b"{", b"[]", b'"x"', b"\xff\xfe", b""])
async def test_a_body_that_is_no_json_object_is_a_400(
    engine: FakeVllm, http: aiohttp.ClientSession, raw: bytes
) -> None:
    headers = {"Content-Type": "application/json"}
    async with http.post(engine.url + "/v1/completions", data=raw, headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "Bad Request"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1, "x"]}, "integers"),
        ({"prompt": [-1]}, "vocabulary"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "3"}, "integer"),
        ({"prompt": "x", "max_tokens": 4000}, "context length"),
        ({"prompt": "x", "n": 2, "temperature": 0}, "greedy"),
        ({"prompt": "x", "n": 1_000_000_000}, "at most 16384"),
        ({"prompt": "x", "stop": 3}, "stop"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream"),
    ],
)
async def test_a_bad_completion_is_a_400(
    engine: FakeVllm, http: aiohttp.ClientSession, body: dict[str, Any], word: str
) -> None:
    status, answer = await post(http, engine, "/v1/completions", {"model": "tiny", **body})
    assert status == 400
    assert word in answer["error"]["message"]


async def test_stream_and_whole_say_the_same(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, "temperature": 0}
    _, whole = await post(http, engine, "/v1/chat/completions", body)
    async with http.post(engine.url + "/v1/chat/completions", json={**body, "stream": True}) as response:
        chunks = sse(await response.text())
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (
        "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:])
        == (whole["choices"][0]["message"]["content"])
    )
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"


async def test_several_prompts_with_several_samples(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    body = {"model": "tiny", "prompt": ["ab", [400, 401]], "n": 2, "max_tokens": 3, "echo": True}
    _, whole = await post(http, engine, "/v1/completions", body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["choices"][0]["text"].startswith("ab")
    assert whole["choices"][0]["text"] != whole["choices"][1]["text"]
    assert whole["usage"]["completion_tokens"] == 12
    async with http.post(engine.url + "/v1/completions", json={**body, "stream": True}) as response:
        chunks = sse(await response.text())
    per_choice = {index: [c for c in chunks if c["choices"][0]["index"] == index] for index in range(4)}
    assert all(len(found) == 3 for found in per_choice.values())
    assert per_choice[0][0]["choices"][0]["text"].startswith("ab")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_text_before_it(
    engine: FakeVllm, http: aiohttp.ClientSession, stream: bool
) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 50, "temperature": 0}
    _, whole = await post(http, engine, "/v1/completions", body)
    text = whole["choices"][0]["text"]
    stop = text[18:23]  # straddles two tokens
    async with http.post(
        engine.url + "/v1/completions", json={**body, "stop": ["nowhere", stop], "stream": stream}
    ) as response:
        answer = await response.text()
    choices = [chunk["choices"][0] for chunk in (sse(answer) if stream else [json.loads(answer)])]
    assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", stop)
    assert engine.stats()[0].running == 0
    assert engine.drivers[0].finished == {"stop": 1, "length": 1, "abort": 0, "error": 0}


async def test_the_second_request_reports_its_hit(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    body = {"model": "tiny", "prompt": list(range(100, 300)), "max_tokens": 1}
    cached = []
    for _ in range(2):
        _, answer = await post(http, engine, "/v1/completions", body)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 192]
    async with http.post(engine.url + "/reset_prefix_cache") as response:
        assert response.status == 200
    _, answer = await post(http, engine, "/v1/completions", body)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_two_engines_answer_greedy_requests_alike(http: aiohttp.ClientSession) -> None:
    body = {"model": "tiny", "prompt": "the same", "max_tokens": 8, "temperature": 0}
    texts = []
    for seed in (1, 2):
        async with FakeVllm(config().with_engine(seed=seed)) as server:
            texts.append((await post(http, server, "/v1/completions", body))[1]["choices"][0]["text"])
    assert texts[0] == texts[1]


async def test_tokenize_equals_what_the_request_uses(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Grüße, 世界!"}]
    _, tokens = await post(http, engine, "/tokenize", {"model": "tiny", "messages": messages})
    body = {"model": "tiny", "messages": messages, "max_tokens": 1, "return_token_ids": True}
    _, answer = await post(http, engine, "/v1/chat/completions", body)
    assert tokens["tokens"] == answer["prompt_token_ids"]
    assert tokens["count"] == answer["usage"]["prompt_tokens"]
    ids = tokenizer.encode("Grüße, 世界!")
    _, text = await post(http, engine, "/detokenize", {"model": "tiny", "tokens": ids})
    assert text == {"prompt": "Grüße, 世界!"}


async def test_request_ids(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    """The header beats the body's id, and comes back as a header."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "request_id": "body-id"}
    _, answer = await post(http, engine, "/v1/completions", body)
    assert answer["id"] == "cmpl-body-id"
    async with http.post(engine.url + "/v1/completions", json=body, headers={"X-Request-Id": "hdr"}) as response:
        assert (await response.json())["id"] == "cmpl-hdr"
        assert response.headers["X-Request-Id"] == "hdr"


async def test_adapters_come_and_go(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    async def models() -> dict[str, Any]:
        async with http.get(engine.url + "/v1/models") as response:
            return {card["id"]: card for card in (await response.json())["data"]}

    cards = await models()
    assert cards["tiny"]["max_model_len"] == 2048
    assert (cards["l1"]["parent"], cards["l1"]["root"]) == ("tiny", "/adapters/l1")
    new = {"lora_name": "l2", "lora_path": "/adapters/l2"}
    assert (await post(http, engine, "/v1/load_lora_adapter", new))[0] == 200
    assert (await post(http, engine, "/v1/load_lora_adapter", new))[0] == 400
    assert "l2" in await models()
    assert (await post(http, engine, "/v1/completions", {"model": "l2", "prompt": "x"}))[0] == 200
    assert (await post(http, engine, "/v1/unload_lora_adapter", {"lora_name": "l2"}))[0] == 200
    assert (await post(http, engine, "/v1/unload_lora_adapter", {"lora_name": "l2"}))[0] == 404
    assert (await post(http, engine, "/v1/completions", {"model": "l2", "prompt": "x"}))[0] == 404


async def test_metrics_have_recorded_names_and_labels(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    await post(http, engine, "/v1/completions", {"model": "tiny", "prompt": list(range(100, 300)), "max_tokens": 4})
    async with http.get(engine.url + "/metrics") as response:
        text = await response.text()
    ours = {
        line.split("{")[0]: sorted(re.findall(r'(\w+)="', line.split("{", 1)[1]))
        for line in text.splitlines()
        if line.startswith("vllm:") and "_bucket" not in line and "_created" not in line
    }
    info = "vllm:cache_config_info"
    assert set(ours.pop(info)) <= set(SERIES[info])
    assert {name: SERIES[name] for name in ours} == ours
    values = dict(re.findall(r"^(\S+) (\S+)$", text, re.MULTILINE))
    label = '{engine="0",model_name="tiny"}'
    assert float(values[f"vllm:prefix_cache_queries_total{label}"]) == 200
    assert float(values[f"vllm:generation_tokens_total{label}"]) == 4
    assert float(values[f"vllm:time_to_first_token_seconds_count{label}"]) == 1
    assert float(values[f"vllm:inter_token_latency_seconds_count{label}"]) == 3
    assert float(values["process_start_time_seconds"]) > 1e9
    assert 'block_size="32"' in text
    assert 'num_gpu_blocks="200"' in text


async def test_small_endpoints(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    answers = {}
    for path in ("/health", "/ping", "/version", "/load", "/is_sleeping", "/nothing"):
        async with http.get(engine.url + path) as response:
            answers[path] = (response.status, await response.text())
    assert answers["/health"] == answers["/ping"] == (200, "")
    assert answers["/version"] == (200, '{"version":"0.32.0"}')
    assert answers["/load"] == (200, '{"server_load":0}')
    assert answers["/is_sleeping"] == (200, '{"is_sleeping":false}')
    assert answers["/nothing"][0] == 404


async def test_a_sleeping_server_answers_after_it_woke_and_has_forgotten_its_cache(
    engine: FakeVllm, http: aiohttp.ClientSession
) -> None:
    body = {"model": "tiny", "prompt": list(range(100, 300)), "max_tokens": 1}
    await post(http, engine, "/v1/completions", body)
    assert (await post(http, engine, "/sleep?level=1", None))[0] == 200
    waiting = asyncio.create_task(post(http, engine, "/v1/completions", body))
    await until(lambda: engine.stats()[0].incoming)
    assert not waiting.done()
    await post(http, engine, "/wake_up", None)
    _, answer = await waiting
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_client_gone_frees_the_request(http: aiohttp.ClientSession) -> None:
    slow = config().with_engine(timing=preset("h200-7b"))
    async with FakeVllm(slow) as engine:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1000, "stream": True}
        async with http.post(engine.url + "/v1/completions", json=body) as response:
            await response.content.readany()
            assert engine.stats()[0].running == 1
            response.close()
        await until(engine.drivers[0].engine.idle)
        assert engine.drivers[0].finished["abort"] == 1
        assert engine.drivers[0].engine.pool.num_used == 0


async def test_headers_leave_before_the_first_token(http: aiohttp.ClientSession) -> None:
    async with FakeVllm(config()) as engine:
        engine.drivers[0].pause(True)
        body = {"model": "tiny", "prompt": "x", "max_tokens": 2, "stream": True}
        async with asyncio.timeout(60), http.post(engine.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            engine.drivers[0].pause(False)
            assert len(sse(await response.text())) == 2


async def test_anthropic_and_responses(engine: FakeVllm, http: aiohttp.ClientSession) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "tiny", "messages": messages, "system": "be brief", "max_tokens": 4}
    status, answer = await post(http, engine, "/v1/messages", body)
    assert (status, answer["stop_reason"], answer["usage"]["output_tokens"]) == (200, "max_tokens", 4)
    body = {"model": "tiny", "input": "hi", "instructions": "be brief", "max_output_tokens": 4}
    status, answer = await post(http, engine, "/v1/responses", body)
    assert (status, answer["status"], answer["usage"]["output_tokens"]) == (200, "incomplete", 4)


async def test_command_line_prints_its_endpoints(http: aiohttp.ClientSession) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.engine.server", "--port", "0", "--model", "cli", "--timing", "instant"),
        *("--lora", "l1=/adapters/l1", "--data-parallel-size", "2"),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            started = json.loads(await process.stdout.readline())
        assert sorted(started["kv_event_sources"]) == ["0", "1"]
        async with http.get(started["url"] + "/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["cli", "l1"]
    finally:
        process.terminate()
        assert await process.wait() == 0
