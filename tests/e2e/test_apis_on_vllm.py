"""Stored responses, adapters loaded at run time and the realtime path, with three real vLLM servers."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from engines import MODELS, VllmServer
from gateway_process import Gateway, poll

DEADLINE_S = 120.0


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


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    return client.responses.create(model="tiny", input=text, max_output_tokens=8, **fields)


def test_stored_responses_are_followed_up_read_and_cancelled_where_they_are(client: openai.OpenAI) -> None:
    for i in range(4):
        first = ask(client, f"story {i}")
        second = ask(client, "go on", previous_response_id=first.id)
        third = ask(client, "and on", previous_response_id=second.id)
        assert third.previous_response_id == second.id
        assert third.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens
        assert client.responses.retrieve(second.id).output_text == second.output_text
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            client.responses.cancel(first.id)


def test_a_streamed_response_is_remembered(client: openai.OpenAI) -> None:
    events = list(ask(client, "a streamed story", stream=True))
    response_id = events[0].response.id
    assert client.responses.retrieve(response_id).id == response_id
    assert ask(client, "go on", previous_response_id=response_id).previous_response_id == response_id


def test_one_in_the_background_is_read_until_it_is_done(client: openai.OpenAI) -> None:
    queued = ask(client, "a long story", background=True)
    assert queued.status == "queued"
    deadline_s = time.monotonic() + DEADLINE_S
    while client.responses.retrieve(queued.id).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_what_nobody_holds_is_not_found(client: openai.OpenAI, gateway: Gateway) -> None:
    with pytest.raises(openai.NotFoundError, match="Response with id 'resp_none' not found") as failure:
        client.responses.retrieve("resp_none")
    assert failure.value.code == "response_not_found"
    made = ask(client, "before the restart")
    gateway.restart()
    assert client.responses.retrieve(made.id).id == made.id
    assert ask(client, "after it", previous_response_id=made.id).previous_response_id == made.id


def test_an_adapter_loaded_behind_our_back_serves_at_once_and_ends_soon(
    client: openai.OpenAI, three_servers: list[VllmServer]
) -> None:
    loaded = three_servers[1].post("/v1/load_lora_adapter", {"lora_name": "late", "lora_path": str(MODELS / "l1")})
    assert loaded.status == 200, loaded.body
    for i in range(3):
        answer = client.completions.with_raw_response.create(model="late", prompt=f"{i}", max_tokens=1)
        assert answer.headers["x-warmroute-worker"] == three_servers[1].worker
    assert three_servers[1].post("/v1/unload_lora_adapter", {"lora_name": "late"}).status == 200

    def is_unknown() -> bool:
        try:
            client.completions.create(model="late", prompt="x", max_tokens=1)
        except openai.NotFoundError as exc:
            return exc.code == "model_not_found"
        return False

    poll(is_unknown, 10.0, lambda: "the adapter is still listed")


def test_realtime_of_a_model_without_it_is_refused_by_the_engine(gateway: Gateway) -> None:
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=DEADLINE_S)
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    headers["Sec-WebSocket-Key"] = "a2tra2tra2tra2tra2traw=="
    connection.request("GET", "/v1/realtime?model=tiny", headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    assert (400 <= response.status < 500, b"upstream_refused" in body) == (True, True), (response.status, body)
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=DEADLINE_S)
    connection.request("GET", "/v1/realtime?model=tiny")
    assert connection.getresponse().status == 426
    connection.close()
