"""The gateway in front of three real vLLM servers, asked through the real OpenAI client."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from engines import BLOCK_TOKENS, VllmServer
from gateway_process import Gateway, poll, report

DEADLINE_S = 120.0
TOKEN_IDS = range(300, 2000)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def gateway(three_servers: list[VllmServer], engine_logs: Any) -> Iterator[Gateway]:
    model_root = three_servers[0].get("/v1/models").body["data"][0]["root"]
    gateway = Gateway(three_servers, engine_logs, "--tokens-tokenizer", model_root)
    gateway.start()
    yield gateway
    gateway.stop()


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


def ids(rng: random.Random, n: int) -> list[int]:
    return [rng.choice(TOKEN_IDS) for _ in range(n)]


def complete(gateway: Gateway, prompt: list[int], **extra: Any) -> tuple[str, int, int]:
    """(worker, predicted cached tokens, cached tokens the engine reports) of one request."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **extra}
    status, headers, answer = gateway.post("/v1/completions", body)
    assert status == 200, answer
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return headers["x-warmroute-worker"], int(headers["x-warmroute-cached-tokens"]), cached


def served_alone(server: VllmServer, prompt: list[int]) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return str(server.post("/v1/completions", body).body["choices"][0]["text"])


def test_models_are_listed_once(client: openai.OpenAI) -> None:
    assert sorted(model.id for model in client.models.list()) == ["l1", "tiny", "tiny-alias"]


def test_completions_equal_the_engines_own(client: openai.OpenAI, three_servers: list[VllmServer]) -> None:
    prompt = ids(random.Random(1), 100)
    expected = served_alone(three_servers[0], prompt)
    plain = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
    assert plain.choices[0].text == expected
    stream = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected
    several = client.completions.create(model="tiny", prompt=["one text", "another"], max_tokens=2, n=2)
    assert len(several.choices) == 4
    echoed = client.completions.create(model="tiny", prompt="echo this", max_tokens=1, echo=True)
    assert echoed.choices[0].text.startswith("echo this")


def test_chat_streams_and_does_not(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Say something."}]
    kwargs: Any = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
    plain = client.chat.completions.create(**kwargs)
    stream = client.chat.completions.create(**kwargs, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == plain.usage.prompt_tokens  # type: ignore[union-attr]


def test_chat_is_predicted_by_its_own_tokens(gateway: Gateway) -> None:
    """Template, tools and text are rendered and tokenised as the engine does: what is predicted is what it finds."""
    rng = random.Random(7)
    system = " ".join(rng.choices(["alpha", "beta", "gamma", "delta", "epsilon"], k=150))
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "What is the weather in Bern?"}]
    for extra in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        body = {"model": "tiny", "messages": messages, "max_tokens": 1, "temperature": 0, **extra}
        first = gateway.post("/v1/chat/completions", body)
        second = gateway.post("/v1/chat/completions", body)
        assert (first[0], second[0]) == (200, 200), (first, second)
        cached = second[2]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 100
        assert int(second[1]["x-warmroute-cached-tokens"]) == cached
        assert second[1]["x-warmroute-worker"] == first[1]["x-warmroute-worker"]


def test_adapter_and_salt_have_caches_of_their_own(gateway: Gateway) -> None:
    prompt = ids(random.Random(2), 200)
    complete(gateway, prompt)
    assert complete(gateway, prompt)[1:] == (192, 192)
    for extra in ({"model": "l1"}, {"cache_salt": "tenant-a"}, {"model": "l1", "cache_salt": "tenant-a"}):
        assert complete(gateway, prompt, **extra)[1:] == (0, 0), extra
        assert complete(gateway, prompt, **extra)[1:] == (192, 192), extra
    assert complete(gateway, prompt, model="tiny-alias")[1:] == (192, 192)


def test_openai_client_reaches_adapter_salt_tools_and_token_ids(client: openai.OpenAI, gateway: Gateway) -> None:
    prompt = ids(random.Random(12), 200)
    for model, extra in (("tiny", {}), ("l1", {}), ("tiny", {"cache_salt": "tenant-b"})):
        twice = [
            client.completions.create(model=model, prompt=prompt, max_tokens=1, temperature=0, extra_body=extra)
            for _ in range(2)
        ]
        cached = [answer.usage.prompt_tokens_details for answer in twice]  # type: ignore[union-attr]
        assert [(c.cached_tokens or 0) if c else 0 for c in cached] == [0, 192], (model, extra)
    messages: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
    tools: Any = [WEATHER]
    chat = client.chat.completions.create(
        model="l1", messages=messages, tools=tools, tool_choice="none", max_tokens=4, extra_body={"cache_salt": "t"}
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 4


def test_errors_keep_their_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="no-such-model", prompt="x")
    assert unknown.value.body["code"] in ("model_not_found", 404)  # type: ignore[index, call-overload]
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=[5] * 5000)


def traffic(rng: random.Random, n: int) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """`n` requests: every third a prefix never seen, else a repeat or a continuation of an earlier one."""
    known: list[tuple[list[int], dict[str, Any]]] = []
    for i in range(n):
        if i % 5 < 2 or not known:
            extra: dict[str, Any] = rng.choice(
                [{}, {}, {}, {"model": "l1"}, {"cache_salt": "t"}, {"model": "tiny-alias"}]
            )
            prompt = ids(rng, rng.randrange(70, 400))
        else:
            # recent ones, so that with so small a pool many are still there
            prompt, extra = rng.choice(known[-8:])
            if rng.random() < 0.5:
                prompt = prompt + ids(rng, rng.randrange(1, 80))
        known.append((prompt, extra))
        yield prompt, extra


def test_predictions_equal_what_the_engines_report(gateway: Gateway) -> None:
    """300 requests one after the other over more than 100 prefixes, with evictions: at least 99 % predicted exactly."""
    rng = random.Random(3)
    results = []
    prefixes = set()
    for prompt, extra in traffic(rng, 300):
        prefixes.add((tuple(prompt[:64]), str(extra)))
        results.append(complete(gateway, prompt, **extra))
    exact = sum(predicted == cached for _, predicted, cached in results)
    hits = sum(cached > 0 for _, _, cached in results)
    wrong = [r for r in results if r[1] != r[2]]
    evicted = gateway.removed_blocks()
    report(f"one at a time: exact {exact}/300, hits {hits}/300, prefixes {len(prefixes)}, wrong {wrong}")
    report(f"blocks evicted by each engine: {evicted}")
    assert all(evicted)
    assert len(prefixes) >= 100
    assert hits >= 120
    assert exact >= 297, wrong
    assert {worker for worker, _, _ in results} == {s.worker for s in gateway.servers}


def test_predictions_at_concurrency_four_are_reported(gateway: Gateway) -> None:
    """With four at a time a block may go between the decision and the engine's look; the share is reported, not
    fixed.
    """
    rng = random.Random(4)
    with ThreadPoolExecutor(4) as pool:
        requests = [pool.submit(complete, gateway, prompt, **extra) for prompt, extra in traffic(rng, 120)]
        results = [request.result(DEADLINE_S) for request in requests]
    exact = sum(predicted == cached for _, predicted, cached in results)
    report(f"four at a time: exact {exact}/120, hits {sum(cached > 0 for _, _, cached in results)}/120")
    assert exact >= 60


def test_reset_through_us_is_known_at_once(gateway: Gateway) -> None:
    prompt = ids(random.Random(5), 200)
    complete(gateway, prompt)
    assert complete(gateway, prompt)[1] == 192
    status, _, answer = gateway.post("/reset_prefix_cache", {}, admin=True)
    assert status == 200, answer
    assert complete(gateway, prompt)[1:] == (0, 0)


def test_reset_around_us_costs_one_wrong_prediction(gateway: Gateway) -> None:
    prompt = ids(random.Random(6), 200)
    worker, _, _ = complete(gateway, prompt)
    server = next(s for s in gateway.servers if s.worker == worker)
    assert complete(gateway, prompt)[1:] == (192, 192)
    server.post("/reset_prefix_cache", {})
    first = complete(gateway, prompt)
    assert first == (worker, 192, 0)
    # its events have come with that request; nothing is claimed that is not there
    body = {"model": "tiny", "prompt": prompt}
    poll(lambda: gateway.explain(body)[worker] == 192, DEADLINE_S, lambda: str(gateway.explain(body)))
    assert complete(gateway, prompt)[1:] == (192, 192)


def test_gateway_restarted_over_warm_engines_hits_at_once(gateway: Gateway) -> None:
    prompt = ids(random.Random(8), 300)
    worker, _, _ = complete(gateway, prompt)
    gateway.restart()
    assert complete(gateway, prompt) == (worker, 288, 288)


def test_frozen_engine_is_ejected_and_comes_back(gateway: Gateway) -> None:
    """SIGSTOP: connections stay open and nothing comes. The others take over within seconds; SIGCONT brings it back."""
    frozen = gateway.servers[1]
    stop = threading.Event()
    failures: list[str] = []

    def load() -> None:
        rng = random.Random(threading.get_ident())
        while not stop.is_set():
            status, _, answer = gateway.post(
                "/v1/completions", {"model": "tiny", "prompt": ids(rng, 40), "max_tokens": 2}
            )
            if status != 200:
                failures.append(f"{status} {answer}")

    threads = [threading.Thread(target=load, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        frozen.sigstop()
        stopped = time.monotonic()
        poll(lambda: not gateway.usable(frozen.worker), DEADLINE_S, lambda: str(gateway.workers()))
        report(f"ejected {time.monotonic() - stopped:.1f} s after SIGSTOP")
        rng = random.Random(9)
        assert all(complete(gateway, ids(rng, 50))[0] != frozen.worker for _ in range(10))
    finally:
        frozen.sigcont()
        poll(lambda: gateway.usable(frozen.worker), DEADLINE_S, lambda: str(gateway.workers()))
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    rng = random.Random(10)
    poll(lambda: complete(gateway, ids(rng, 50))[0] == frozen.worker, DEADLINE_S, lambda: "it gets no request again")


def test_engine_killed_and_restarted_in_place_leaves_no_stale_claim(gateway: Gateway) -> None:
    prompt = ids(random.Random(11), 200)
    worker, _, _ = complete(gateway, prompt)
    assert complete(gateway, prompt) == (worker, 192, 192)
    server = next(s for s in gateway.servers if s.worker == worker)
    server.kill()
    # the others serve meanwhile
    other, predicted, cached = complete(gateway, prompt)
    assert (other != worker, predicted) == (True, cached)
    server.restart_in_place()
    poll(lambda: gateway.usable(worker), DEADLINE_S, lambda: str(gateway.workers()))
    body = {"model": "tiny", "prompt": prompt}
    assert gateway.explain(body)[worker] == 0
    assert BLOCK_TOKENS == 32
    poll(lambda: gateway.ready(), DEADLINE_S, lambda: str(gateway.workers()))
