"""Prefill/decode hand-off of fake servers, against what vLLM 0.32 with NIXL 1.5.1 was recorded to do."""

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from bench.engine import chat
from bench.engine.server import FakeVllm
from tests.support.engine_pair import (
    APIS,
    GREEDY,
    OFFER,
    PROMPT,
    RECORDED,
    Pair,
    a_pair,
    config,
    events,
    kinds,
    metric,
    request_of,
    shape,
    streamed_text,
    text_of,
    until,
)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with a_pair() as found:
        yield found


# --- both legs on every API -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", APIS)
async def test_a_prefill_answers_as_recorded(api: str) -> None:
    async with a_pair(prompt_tokens_details=False) as pair:
        recorded = RECORDED["prefill"][api]
        status, answer = await pair.post(pair.prefill, request_of(api, kv_transfer_params=OFFER), APIS[api])
        assert status == 200
        assert shape(answer) == shape(recorded)
        assert list(answer) == list(recorded)
        params = answer["kv_transfer_params"]
        assert list(params) == list(recorded["kv_transfer_params"])
        form = re.sub(r"[0-9a-f]{16}", "X", re.sub(r"-[0-9a-f]{8}$", "-S", params["remote_request_id"]))
        told = recorded["kv_transfer_params"]["remote_request_id"]
        assert form == re.sub(r"[0-9a-f]{16}", "X", re.sub(r"-[0-9a-f]{8}$", "-S", told))
        assert params["remote_port"] != pair.prefill.port  # the side channel's, not that of HTTP
        assert pair.prefill.stats()[0].held == 1
        assert pair.prefill.held_blocks == len(params["remote_block_ids"][0])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
async def test_a_remote_answer_is_that_of_one_server(pair: Pair, api: str, stream: bool) -> None:
    _, prefill = await pair.post(pair.prefill, request_of(api, kv_transfer_params=OFFER), APIS[api])
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    body = request_of(api, **{limit: 9, "stream": stream, "kv_transfer_params": prefill["kv_transfer_params"]})
    async with pair.http.post(pair.decode.url + APIS[api], json=body) as response:
        text = await response.text()
    remote = streamed_text(api, text) if stream else text_of(api, json.loads(text))
    del body["kv_transfer_params"], body["stream"]
    _, local = await pair.post(pair.prefill, body, APIS[api])
    assert remote == text_of(api, local)
    assert pair.decode.stats()[0].pulled_tokens > 0
    assert pair.prefill.held_blocks == 0


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("api", APIS)
async def test_streams_have_the_recorded_events(pair: Pair, api: str, failed: bool) -> None:
    _, prefill = await pair.post(pair.prefill, request_of(api, kv_transfer_params=OFFER), APIS[api])
    params = prefill["kv_transfer_params"]
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    body = request_of(api, **{limit: 5, "stream": True, "kv_transfer_params": params})
    if failed:
        params["remote_engine_id"] = "no-such-engine"
    received = b""
    async with pair.http.post(pair.decode.url + APIS[api], json=body) as response:
        assert response.status == 200
        cut = pytest.raises(aiohttp.ClientPayloadError) if failed and api == "responses" else contextlib.nullcontext()
        with cut:
            async for part in response.content.iter_any():
                received += part
    ours = events(received.decode())
    recorded = RECORDED["failed_streams" if failed else "decode_streams"][api]
    # A stream's length depends on the tokens; what follows what, and the fields of each, do not.
    assert kinds(ours) == kinds(recorded)
    assert received.endswith(b"data: [DONE]\n\n") == (api in ("completions", "chat"))
    if failed:
        assert [row for row in ours if "error" in row[1]] == [tuple(row) for row in recorded if "error" in row[1]]


async def test_responses_stream_is_vllms(pair: Pair) -> None:
    body = request_of("responses", stream=True, max_output_tokens=3)
    async with pair.http.post(pair.decode.url + "/v1/responses", json=body) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        text = await response.text()
    assert "[DONE]" not in text
    rows = events(text)
    assert [name for name, _ in rows] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [data["sequence_number"] for _, data in rows] == list(range(len(rows)))
    assert all(data["type"] == name for name, data in rows)
    last = rows[-1][1]["response"]
    assert (last["status"], last["usage"]["output_tokens"]) == ("incomplete", 3)
    assert last["id"] == rows[0][1]["response"]["id"]
    assert rows[0][1]["response"]["usage"] is None


async def test_messages_stream_is_vllms(pair: Pair) -> None:
    body = request_of("messages", stream=True, max_tokens=3)
    async with pair.http.post(pair.decode.url + "/v1/messages", json=body) as response:
        text = await response.text()
    assert text.startswith('event: message_start\ndata: {"type":"message_start","message":{"id":"chatcmpl-')
    rows = events(text)
    names = ["message_start", "content_block_start", *["content_block_delta"] * 3, "content_block_stop"]
    assert [name for name, _ in rows] == [*names, "message_delta", "message_stop"]
    prompt = rows[0][1]["message"]["usage"]["input_tokens"]
    delta = rows[-2][1]
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    usage = delta["usage"]
    assert prompt == usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.parametrize("api", APIS)
async def test_a_streamed_prefill_offers_nothing_and_pins(pair: Pair, api: str) -> None:
    """Except for responses, whose last event is a whole response."""
    body = request_of(api, stream=True, kv_transfer_params=OFFER)
    async with pair.http.post(pair.prefill.url + APIS[api], json=body) as response:
        offers = '"kv_transfer_params":{' in await response.text()
    assert offers == (api == "responses")
    assert pair.prefill.held_blocks > 0


@pytest.mark.parametrize(("kind", "fields"), [("n=2", {"n": 2, "temperature": 1}), ("two prompts", {})])
async def test_several_sequences_offer_one(pair: Pair, kind: str, fields: dict[str, Any]) -> None:
    more = {"prompt": [PROMPT, PROMPT[::-1]]} if kind == "two prompts" else {}
    params = await pair.offer(**fields, **more)
    form = re.sub(r"[0-9a-f]{8,}", "X", params["remote_request_id"])
    assert form == re.sub(r"[0-9a-f]{8,}", "X", RECORDED["remote_request_ids"][kind])
    assert pair.prefill.stats()[0].held == 2


async def test_more_than_one_token_says_nothing_of_the_cache(pair: Pair) -> None:
    params = await pair.offer(max_tokens=5)
    assert list(params) == list(RECORDED["prefill_of_5_tokens"])
    assert params["remote_num_tokens"] == RECORDED["prefill_of_5_tokens"]["remote_num_tokens"] == 504


async def test_a_prompt_below_one_block_is_offered_too(pair: Pair) -> None:
    """As recorded; other versions and connectors may answer null."""
    params = await pair.offer(prompt=PROMPT[:20])
    assert (len(params["remote_block_ids"][0]), params["remote_num_tokens"]) == (1, 20)


async def test_a_prefill_cut_off_by_a_stop_string_offers_nothing(pair: Pair) -> None:
    whole = await pair.text(server=pair.prefill)
    _, answer = await pair.post(
        pair.prefill, {**GREEDY, "max_tokens": 20, "stop": whole[4:8], "kv_transfer_params": OFFER}
    )
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["kv_transfer_params"] is None
    assert pair.prefill.held_blocks == 0


@pytest.mark.parametrize("params", [OFFER, {"do_remote_prefill": True}])
async def test_a_server_without_connector_ignores_transfer_params(params: dict[str, Any]) -> None:
    async with a_pair(kv_connector=False) as pair:
        status, answer = await pair.decoded(params, pair.prefill)
        assert (status, answer["kv_transfer_params"]) == (200, None)
        assert pair.prefill.held_blocks == 0


# --- token ids --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_forwarded_ids_win_over_messages(pair: Pair, api: str) -> None:
    ids = chat.render([{"role": "user", "content": "another prompt"}])
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    body = request_of(api, kv_transfer_params={"prompt_token_ids": ids}, **{limit: 6})
    _, given = await pair.post(pair.decode, body, APIS[api])
    plain = {"model": "tiny", "temperature": 0, "prompt": ids, "max_tokens": 6}
    _, wanted = await pair.post(pair.decode, plain)
    assert text_of(api, given) == text_of("completions", wanted)


@pytest.mark.parametrize("ids", [[], [-1], [True], "x", [10**9]])
async def test_bad_forwarded_ids_are_refused(pair: Pair, ids: Any) -> None:
    body = request_of("chat", kv_transfer_params={"prompt_token_ids": ids})
    status, answer = await pair.post(pair.decode, body, APIS["chat"])
    assert (status, answer["error"]["code"]) == (400, 400)


async def test_prompt_ids_are_told_by_two_apis(pair: Pair) -> None:
    found = {}
    for api, path in APIS.items():
        body = request_of(api, return_token_ids=True, kv_transfer_params=OFFER)
        found[api] = "prompt_token_ids" in json.dumps((await pair.post(pair.prefill, body, path))[1])
    assert found == {"completions": True, "chat": True, "responses": False, "messages": False}


# --- what is told -----------------------------------------------------------------------------------------------------


async def test_cached_tokens_are_those_of_the_prefill_server(pair: Pair) -> None:
    await pair.offer()
    params = await pair.offer()
    assert params["remote_prefill_cached_tokens"] == 480
    _, answer = await pair.decoded(params)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 480
    pair.decode.reset_prefix_cache()
    params = await pair.offer()
    del params["remote_prefill_cached_tokens"]
    _, answer = await pair.decoded(params)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 500  # what was pulled counts as cached


async def test_a_decode_pulls_only_what_it_lacks(pair: Pair) -> None:
    await pair.post(pair.decode, {**GREEDY, "prompt": PROMPT[:256], "max_tokens": 1})
    await pair.text(await pair.offer())
    assert await metric(pair, pair.decode, "nixl_bytes_transferred_sum") == 262_144  # as recorded
    assert await metric(pair, pair.decode, "nixl_num_descriptors_sum") == 2  # neighbours, in 2 layers
    for name in ("xfer_time_seconds", "post_time_seconds", "bytes_transferred", "num_descriptors"):
        assert await metric(pair, pair.decode, f"nixl_{name}_count") == 1
    sources = {"local_compute": 256, "local_cache_hit": 256, "external_kv_transfer": 244}
    for source, tokens in sources.items():
        assert await metric(pair, pair.decode, f'prompt_tokens_by_source_total{{source="{source}"}}') == tokens
    assert await metric(pair, pair.decode, 'prompt_tokens_cached_by_source_total{source="p2p"}') == 244
    assert await metric(pair, pair.decode, 'prompt_tokens_cached_by_source_total{source="device"}') == 256
    assert await metric(pair, pair.decode, "external_prefix_cache_queries_total") == 256 + 244
    assert await metric(pair, pair.decode, "external_prefix_cache_hits_total") == 244


async def test_pinned_blocks_count_as_used(pair: Pair) -> None:
    await pair.offer()
    assert await metric(pair, pair.prefill, "kv_cache_usage_perc") == pytest.approx(16 / 99)


async def test_server_info_tells_what_makes_a_pair(pair: Pair) -> None:
    async with pair.http.get(pair.decode.url + "/server_info") as response:
        told = await response.json()
    fields = dict(re.findall(r"(\w+)=('[^']*'|[^,]*)", told["vllm_config"]))
    assert (fields["model"], fields["dtype"], fields["kv_cache_dtype"]) == ("'tiny'", "torch.bfloat16", "auto")
    assert told["vllm_env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] == pair.decode.nixl_ports[0]
    async with pair.http.get(pair.decode.url + "/server_info?config_format=json") as response:
        connector = (await response.json())["vllm_config"]["kv_transfer_config"]
    assert (connector["kv_connector"], connector["kv_load_failure_policy"]) == ("NixlConnector", "fail")
    assert connector["engine_id"] == pair.decode.nixl[0].engine_id
    async with FakeVllm(config(dev_mode=False)) as plain, pair.http.get(plain.url + "/server_info") as response:
        assert response.status == 404


async def test_ranks_have_addresses_and_engine_ids_of_their_own() -> None:
    async with a_pair(data_parallel_size=2) as pair:
        found = []
        for rank in range(2):
            body = {**GREEDY, "max_tokens": 1, "kv_transfer_params": OFFER}
            headers = {"X-data-parallel-rank": str(rank)}
            async with pair.http.post(pair.prefill.url + "/v1/completions", json=body, headers=headers) as response:
                found.append((await response.json())["kv_transfer_params"])
        assert found[1]["remote_port"] == found[0]["remote_port"] + 1
        assert [it["remote_engine_id"][-4:] for it in found] == ["_dp0", "_dp1"]
        texts = []
        for params in found:
            texts.append(await pair.text(params))
            pair.decode.reset_prefix_cache()
        assert texts[0] == texts[1]


# --- faults and witnesses ---------------------------------------------------------------------------------------------


async def test_legs_fail_apart(pair: Pair) -> None:
    pair.prefill.faults.update({"leg": "prefill", "fail_first": 2, "error_status": 503})
    body = {**GREEDY, "max_tokens": 1}
    asked = [{**body, "kv_transfer_params": params} for params in (OFFER, None, OFFER, OFFER)]
    assert [(await pair.post(pair.prefill, it))[0] for it in asked] == [503, 200, 503, 200]
    pair.decode.faults.update({"leg": "decode", "fail_first": 1})
    params = await pair.offer()
    assert [(await pair.decoded(it))[0] for it in (None, params, params)] == [200, 500, 200]


async def test_tampered_offers(pair: Pair) -> None:
    faults = pair.prefill.faults
    faults.offer = {"remote_host": "10.0.0.1"}
    assert (await pair.offer())["remote_host"] == "10.0.0.1"
    faults.offer_without = ("remote_request_id",)
    assert "remote_request_id" not in await pair.offer()
    faults.offer = lambda offer: None
    _, answer = await pair.post(pair.prefill, {**GREEDY, "max_tokens": 1, "kv_transfer_params": OFFER})
    assert answer["kv_transfer_params"] is None
    faults.offer = lambda offer: {**offer, "remote_block_ids": [offer["remote_block_ids"][0][:2]]}
    assert len((await pair.offer())["remote_block_ids"][0]) == 2


async def test_answers_that_are_no_json(pair: Pair) -> None:
    pair.prefill.faults.answer = "<html>"
    body = {**GREEDY, "max_tokens": 1, "kv_transfer_params": OFFER}
    async with pair.http.post(pair.prefill.url + "/v1/completions", json=body) as response:
        assert (response.status, await response.text()) == (200, "<html>")
    assert pair.prefill.held_blocks == 16  # the work was done


async def test_a_slow_prefill(pair: Pair) -> None:
    pair.prefill.faults.prefill_delay_s = 0.1
    asking = asyncio.create_task(pair.offer())
    await until(lambda: pair.prefill.requests)
    await pair.decoded(None, pair.prefill)  # others are served
    assert not asking.done()
    assert await asking


async def test_requests_are_remembered(pair: Pair) -> None:
    params = await pair.offer()
    async with pair.http.post(
        pair.decode.url + "/v1/completions",
        json={**GREEDY, "kv_transfer_params": params},
        headers={"X-Request-Id": "one"},
    ) as response:
        await response.read()
    (first,), (second,) = pair.prefill.requests, pair.decode.requests
    assert (first.leg, first.path, first.body["max_tokens"]) == ("prefill", "/v1/completions", 1)
    assert (second.leg, second.headers["x-request-id"]) == ("decode", "one")
    assert second.body["kv_transfer_params"] == params
    async with a_pair(record_requests=2) as other:
        for _ in range(3):
            await other.decoded(None, other.prefill)
        assert len(other.prefill.requests) == 2


async def test_nixl_series_have_vllms_names() -> None:
    names = {"xfer_time_seconds", "post_time_seconds", "bytes_transferred", "num_descriptors"}
    histograms = {f"vllm:nixl_{name}_{end}" for name, end in itertools.product(names, ("bucket", "count", "sum"))}
    counted = ("failed_transfers", "failed_notifications", "kv_expired_reqs", "notifications_after_expiry")
    counters = {f"vllm:nixl_num_{name}_total" for name in counted}
    async with a_pair(kv_role="kv_producer") as pair, pair.http.get(pair.prefill.url + "/metrics") as response:
        text = await response.text()
        found = set(re.findall(r"^(vllm:nixl_\w+)\{", text, re.MULTILINE))
        assert {name for name in found if not name.endswith("_created")} == histograms | counters
        assert "kv_fetch_by_stage" not in text  # a consumer's
        assert await metric(pair, pair.decode, 'num_requests_kv_fetch_by_stage{stage="in_progress"}') == 0
