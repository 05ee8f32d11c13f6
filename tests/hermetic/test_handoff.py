"""Prompts computed by prefill workers, over HTTP: what each leg is sent and what the client gets."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bench.engine.server import FakeVllm
from gateway.config.schema import PdConfig
from tests.support.gateway_world import Fleet, decode, engine, prefill, until
from tests.support.handoff_world import (
    BODIES,
    IDS,
    LONG,
    N_TOKENS,
    PREFILL_PARAMS,
    answers,
    ask,
    bodies,
    offered,
    offers,
    path_of,
    streams,
    usage_of,
    world,
)
from tests.support.proxy_world import Call, Stub

REMOTE = PdConfig(policy="always-remote")
COMPLETION = {"model": "m", "prompt": IDS}
CHAT = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
INPUT = {"model": "m", "input": LONG}
DONE = b"data: [DONE]\n\n"

# ---- llm-d's cases: what the legs are sent ---------------------------------------------------------------------------

LEGS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    # name: path, the client's body, what the prefill leg has instead, what it has not
    "40_chat_stream": (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}},
        {"max_tokens": 1, "stream": False},
        ("stream_options",),
    ),
    # llm-d sends min_tokens 1 even to those who never had it; ours leaves it out, as 0 and 1 are the same to an engine.
    "41_min_tokens": (
        "/v1/completions",
        {**COMPLETION, "max_tokens": 100, "min_tokens": 5},
        {"max_tokens": 1},
        ("min_tokens",),
    ),
    "43_max_completion_tokens": (
        "/v1/chat/completions",
        {**CHAT, "max_completion_tokens": 100},
        {"max_tokens": 1, "max_completion_tokens": 1},
        (),
    ),
    "43_max_tokens": (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 50},
        {"max_tokens": 1, "max_completion_tokens": 1},
        (),
    ),
    "43_no_limit": ("/v1/completions", COMPLETION, {"max_tokens": 1}, ("max_completion_tokens",)),
    "44_responses": ("/v1/responses", {**INPUT, "max_output_tokens": 50}, {"max_output_tokens": 1}, ("max_tokens",)),
    "44_responses_no_limit": ("/v1/responses", INPUT, {"max_output_tokens": 1}, ("max_tokens",)),
    "44_responses_stream": ("/v1/responses", {**INPUT, "stream": True}, {"stream": False}, ()),
}


@pytest.mark.parametrize("case", LEGS)
async def test_llm_d_case_what_the_legs_are_sent(case: str) -> None:
    path, body, prefilled, absent = LEGS[case]
    async with Stub(offers(cached=None)) as p1, Stub(answers()) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        told = await ask(it.http, it.url, path, body)
        assert (told.status, told.went) == (200, ("remote", "policy"))
        (first,), (second,) = bodies(p1), bodies(d1)
        assert first["kv_transfer_params"] == PREFILL_PARAMS
        assert {name: first[name] for name in prefilled} == prefilled
        assert not set(absent) & set(first)
        params = second.pop("kv_transfer_params")
        assert params == offered(remote_request_id=params["remote_request_id"])
        assert second == body
        assert [path_of(call) for call in (*p1.calls, *d1.calls)] == [path, path]


async def test_llm_d_case_46_without_a_hint_messages_pass() -> None:
    """The sidecar's policy: only a header sends a prompt elsewhere."""
    async with Stub(offers()) as p1, Stub(answers()) as d1, world(PdConfig(policy="header"), p1=p1, d1=d1) as it:
        body = {**CHAT, "max_tokens": 50}
        told = await ask(it.http, it.url, "/v1/messages", body)
        assert told.went[0] == "local"
        assert bodies(d1) == [body]
        assert p1.calls == []


@pytest.mark.parametrize("status", ["502 Bad Gateway", "503 Service Unavailable", "504 Gateway Timeout"])
async def test_llm_d_case_47_a_prefill_error_is_retried(status: str) -> None:
    """There on the same host after a while, here at once on the next one."""
    async with (
        Stub(answers(b"{}", status)) as p1,
        Stub(offers(remote_engine_id="e2")) as p2,
        Stub(answers()) as d1,
        world(REMOTE, p1=p1, p2=p2, d1=d1) as it,
    ):
        for _ in range(8):
            assert (await ask(it.http, it.url, body=COMPLETION)).went == ("remote", "policy")
            if p1.calls:
                break
        assert len(p1.calls) == 1
        assert len(p2.calls) == len(d1.calls)
        assert all(body["kv_transfer_params"]["remote_engine_id"] == "e2" for body in bodies(d1))


# ---- llm-d's cases: cached tokens ------------------------------------------------------------------------------------


def _usage(details: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": N_TOKENS, "completion_tokens": 3, "total_tokens": N_TOKENS + 3}
    return usage if details is ... else {**usage, "prompt_tokens_details": details}


@pytest.mark.parametrize(
    ("prefill_details", "decode_details", "cached"),
    [
        ({"cached_tokens": 7}, {"cached_tokens": 49}, 7),
        ({"cached_tokens": 7}, {}, 7),
        ({"cached_tokens": 7}, ..., 7),
        (..., {"cached_tokens": 49}, 0),
        ({"cached_tokens": 0}, {"cached_tokens": 49}, 0),
        ({"cached_tokens": 7}, {"cached_tokens": 7, "created_cache_tokens": None}, 7),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_llm_d_case_49_cached_tokens_are_the_prefill_workers(
    prefill_details: Any, decode_details: Any, cached: int, stream: bool
) -> None:
    usage = _usage(decode_details)
    text = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
    event = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    script = streams(text, event, DONE) if stream else answers({"choices": [{"text": "a"}], "usage": usage})
    async with (
        Stub(offers(usage=_usage(prefill_details))) as p1,
        Stub(script) as d1,
        world(REMOTE, p1=p1, d1=d1) as it,
    ):
        told = await ask(it.http, it.url, body={**COMPLETION, "stream": stream})
        assert told.prompt_and_cached == (N_TOKENS, cached)
        others = {} if decode_details is ... else decode_details
        assert told.usage["prompt_tokens_details"] == {**others, "cached_tokens": cached}
        assert told.text == "a"
        if not stream:
            assert told.headers["Content-Length"] == str(len(told.body))


_STREAM = b'data: {"choices":[{"index":0,"text":"\xc3\xa4"}]}\n\n'
_STREAM_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":64,"prompt_tokens_details":{"cached_tokens":49}}}'
_CUTS = {
    "50_in_the_field_name": [_STREAM[:2], _STREAM[2:], _STREAM_USAGE[:2], _STREAM_USAGE[2:] + b"\n\n" + DONE],
    "50_in_the_json": [_STREAM[:20], _STREAM[20:] + _STREAM_USAGE[:70], _STREAM_USAGE[70:], b"\n\n", DONE],
    "50_last_line_without_its_end": [_STREAM, _STREAM_USAGE],
    "50_not_json": [_STREAM, b"event: ping\ndata: not-json\n\n", _STREAM_USAGE + b"\n\n", DONE],
    "50_crlf": [_STREAM.replace(b"\n", b"\r\n"), _STREAM_USAGE + b"\r\n", b"\r\n" + DONE],
    "50_byte_by_byte": [bytes([byte]) for byte in _STREAM + _STREAM_USAGE + b"\n\n" + DONE],
}


@pytest.mark.parametrize("case", _CUTS)
async def test_llm_d_case_50_however_the_stream_is_cut(case: str) -> None:
    """Everything but the one number passes as the same bytes."""
    pieces = _CUTS[case]
    async with Stub(offers()) as p1, Stub(streams(*pieces)) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        status, body, _ = await it.post({**COMPLETION, "stream": True})
        assert status == 200
        assert body == b"".join(pieces).replace(b'"cached_tokens":49', b'"cached_tokens":7')


# ---- all four APIs, with engines -------------------------------------------------------------------------------------


@pytest.fixture
async def pair() -> AsyncIterator[Fleet]:
    async with Fleet(pd=REMOTE, p1=prefill(), d1=decode()) as started:
        yield started


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_the_answer_is_that_of_one_server(pair: Fleet, path: str, stream: bool) -> None:
    body = {**BODIES[path], "stream": stream}
    async with FakeVllm(engine()) as alone:
        expected = (await ask(pair.http, alone.url, path, body)).text
    told = await ask(pair.http, pair.url, path, body)
    assert told.text == expected != ""
    assert told.went == ("remote", "policy")
    assert told.outcome["prefiller"] == "p1"
    assert float(told.outcome["prefill_ms"]) >= 0
    assert told.headers["x-warmroute-worker"] == "d1"
    p1, d1 = pair.engines["p1"], pair.engines["d1"]
    assert [seen.leg for seen in (*p1.requests, *d1.requests)] == ["prefill", "decode"]
    assert sum(side.transfers.bytes.total for side in d1.nixl) > 0, "the KV really came from there"
    await until(lambda: p1.held_blocks == 0)
    assert pair.core.planner.in_flight() == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_cached_tokens_have_one_meaning(pair: Fleet, path: str, stream: bool) -> None:
    """What no engine had to compute: nothing at first, then what the prefill worker held. Never what was fetched."""
    body = {**BODIES[path], "stream": stream}
    if stream and "completions" in path:
        body["stream_options"] = {"include_usage": True}
    first = await ask(pair.http, pair.url, path, body)
    prompt, cached = first.prompt_and_cached
    assert prompt > 100
    assert cached == 0
    again = await ask(pair.http, pair.url, path, body)
    assert again.went == ("remote", "policy")
    assert again.prompt_and_cached == (prompt, (prompt - 1) // 16 * 16)
    hits = pair.core.hits.workers
    assert hits["p1"].actual_tokens == (prompt - 1) // 16 * 16


async def test_a_decode_worker_that_must_not_tokenise_again_gets_the_ids(pair: Fleet) -> None:
    for path in BODIES:
        await ask(pair.http, pair.url, path)
    completion, chat, responses, messages = (seen.body for seen in pair.engines["d1"].requests)
    n_tokens = completion["kv_transfer_params"]["remote_num_tokens"]
    assert len(completion["prompt"]) == n_tokens
    assert "prompt_token_ids" not in completion["kv_transfer_params"]
    for body in (chat, responses, messages):  # No prefill answer brings those of messages: they are our own.
        params = body["kv_transfer_params"]
        assert len(params["prompt_token_ids"]) == params["remote_num_tokens"]


async def test_llm_d_case_46_messages_are_handed_over_too(pair: Fleet) -> None:
    told = await ask(pair.http, pair.url, "/v1/messages", {**BODIES["/v1/messages"], "max_tokens": 50})
    assert told.went == ("remote", "policy")
    (first,), (second,) = ([seen.body for seen in pair.engines[name].requests] for name in ("p1", "d1"))
    assert (first["max_tokens"], second["max_tokens"]) == (1, 50)
    assert first["kv_transfer_params"] == PREFILL_PARAMS
    assert not {"max_completion_tokens", "return_token_ids"} & set(first)


# ---- headers ---------------------------------------------------------------------------------------------------------


async def test_both_legs_carry_the_clients_headers_and_one_request_id() -> None:
    control = {
        "x-prefiller-host-port": "evil:1",
        "x-data-parallel-rank": "3",
        "x-data-parallel-host-port": "evil:1",
        "x-kv-cache-source-host-port": "evil:1",
        "x-bypass-remote-prefill": "1",
        "x-warmroute-plan": "v1;choice=local",
        "x-warmroute-outcome": "id=1",
        "Expect": "100-continue",
        "Connection": "x-hop",
        "x-hop": "1",
    }
    async with Stub(offers()) as p1, Stub(answers()) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        headers = {"Authorization": "Bearer sk", "X-Request-Id": "mine", "traceparent": "00-a-b-01", **control}
        told = await ask(it.http, it.url, body=COMPLETION, **headers)
        assert told.went == ("remote", "policy")
        for call in (*p1.calls, *d1.calls):
            names = [name.lower() for name, _ in call.headers]
            assert call.header("Authorization") == "Bearer sk"
            assert call.header("traceparent") == "00-a-b-01"
            assert [value for name, value in call.headers if name.lower() == "x-request-id"] == ["mine"]
            assert not {name.lower() for name in control} - {"expect", "connection"} & set(names)
            assert len(call.body) == int(call.header("Content-Length") or 0)
        assert told.headers["X-Request-Id"] == "mine"
        assert told.outcome["id"] == "mine"


async def test_a_prefill_answer_is_not_compressed_for_the_client() -> None:
    async with Stub(offers()) as p1, Stub(answers()) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        await ask(it.http, it.url, body=COMPLETION, Accept_Encoding="gzip, br")
        assert p1.calls[0].header("Accept-Encoding") is None
        assert d1.calls[0].header("Accept-Encoding") == "gzip, br"


async def test_an_id_is_made_once_for_both_legs() -> None:
    async with Stub(offers()) as p1, Stub(answers()) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        for _ in range(2):
            await ask(it.http, it.url, body=COMPLETION)
        ids = [[call.header("X-Request-Id") for call in stub.calls] for stub in (p1, d1)]
        assert ids[0] == ids[1]
        assert len(set(ids[0])) == 2


async def test_a_worker_of_several_ranks_is_told_which() -> None:
    async with Stub(offers()) as p1, Stub(answers()) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        it.fleet.set_capabilities("p1", models=["m"], ranks=range(2))
        it.fleet.set_capabilities("d1", models=["m"], ranks=range(3))
        for start in range(6):
            body = {"model": "m", "prompt": [start] * N_TOKENS}
            assert (await ask(it.http, it.url, body=body)).status == 200
        assert {call.header("X-data-parallel-rank") for call in p1.calls} <= {"0", "1"}
        assert {call.header("X-data-parallel-rank") for call in d1.calls} <= {"0", "1", "2"}


# ---- nothing a client says steers a transfer -------------------------------------------------------------------------

KILLER = {"do_remote_prefill": True}


@pytest.mark.parametrize("policy", ["local", "always-remote"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_clients_transfer_params_reach_no_engine(path: str, policy: str) -> None:
    """{"do_remote_prefill": true} alone kills a decode engine."""
    sneaked = {
        "kv_transfer_params": KILLER,
        "ec_transfer_params": KILLER,
        "vllm_xargs": {"kv_transfer_params": json.dumps(KILLER), "do_remote_prefill": True, "fine": 1},
    }
    async with Fleet(pd=PdConfig(policy=policy), p1=prefill(), d1=decode()) as fleet:
        body = {**BODIES[path], **sneaked}
        escaped = json.dumps(body).replace('"kv_transfer_params"', '"kv\\u005ftransfer_params"').encode()
        for data in (body, escaped):
            told = await ask(fleet.http, fleet.url, path, data)
            assert told.text
        for seen in (*fleet.engines["p1"].requests, *fleet.engines["d1"].requests):
            assert "ec_transfer_params" not in seen.body
            assert seen.body["vllm_xargs"] == {"fine": 1}
            params = seen.body.get("kv_transfer_params")
            assert params != KILLER
            assert (params is None) is (seen.leg == "plain")
        assert not any(server.dead for server in fleet.engines.values())


async def test_a_broken_body_that_might_carry_them_is_refused_as_what_it_is() -> None:
    async with Stub(offers()) as p1, Stub(answers()) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        for body in (b'{"kv_transfer_params": ', b'{"vllm_xargs": {', b'{"model": "m", "a\\u0062": '):
            told = await ask(it.http, it.url, body=body)
            assert told.status == 400
            assert json.loads(told.body)["error"]["code"] == "invalid_json"
        assert p1.calls == d1.calls == []


# ---- what cannot go remote -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "n_sequences"),
        ({"prompt": [LONG, LONG]}, "several_prompts"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "beam_search"),
        ({"prompt": "short"}, "shorter_than_block"),
        ({"max_tokens": 0}, "would_be_rejected"),
        ({"max_tokens": 1_000_000}, "would_be_rejected"),
        ({"stream_options": {"include_usage": True}}, "would_be_rejected"),
    ],
)
async def test_what_one_engine_must_do_stays_there_and_says_why(
    pair: Fleet, fields: dict[str, Any], reason: str
) -> None:
    body = {"model": "tiny", "prompt": LONG, "max_tokens": 3, **fields}
    told = await ask(pair.http, pair.url, body=body)
    assert told.went == ("local", reason)
    assert "prefiller" not in told.outcome
    assert len(pair.engines["p1"].requests) == 0
    registry = pair.core.metrics.registry
    labels = {"choice": "local", "reason": reason}
    assert registry.get_sample_value("warmroute_pd_decisions_total", labels) == 1
    assert (told.status == 400) is (reason == "would_be_rejected")


async def test_what_has_no_prompt_of_its_own_is_never_split(pair: Fleet) -> None:
    told = await ask(pair.http, pair.url, "/v1/messages/count_tokens", BODIES["/v1/messages"])
    assert told.status == 200
    assert told.went == ("local", "not_generation")
    assert len(pair.engines["p1"].requests) == 0


# ---- what is counted -------------------------------------------------------------------------------------------------


async def test_a_handoff_shows_in_the_metrics(pair: Fleet) -> None:
    await ask(pair.http, pair.url)
    await until(lambda: pair.core.planner.in_flight() == 0)

    def value(name: str, **labels: str) -> float | None:
        return pair.core.metrics.registry.get_sample_value(f"warmroute_pd_{name}", labels)

    assert value("decisions_total", choice="remote", reason="policy") == 1
    assert value("handoffs_total", prefill="p1", decode="d1", outcome="ok") == 1
    for stage in ("prefill", "decode"):
        assert value("stage_outcomes_total", choice="remote", stage=stage, outcome="ok") == 1
    assert value("prefill_wait_seconds_count", prefill="p1") == 1
    assert value("prefill_compute_seconds_count", prefill="p1") == 1
    assert (value("transfer_tokens_total", prefill="p1", decode="d1") or 0) > 100
    assert value("decode_first_byte_seconds_count", prefill="p1", decode="d1") == 1
    status, text = await pair.get(pair.admin + "/metrics")
    assert status == 200
    assert 'warmroute_pd_stranded_tokens{prefill="p1"} 0.0' in text


async def test_the_outcome_header_can_be_switched_off(pair: Fleet) -> None:
    async with Stub(offers()) as p1, Stub(answers({"usage": usage_of("", 64, 1)})) as d1:
        it = world(REMOTE, p1=p1, d1=d1)
        it._limits = (*it._limits[:-1], False)
        async with it:
            told = await ask(it.http, it.url, body=COMPLETION)
            assert (told.status, told.outcome) == (200, {})


async def test_an_answer_of_any_length_comes_whole() -> None:
    """It is read to its end to set one number right."""

    async def script(call: Call) -> None:
        await call.ok(json.dumps({"text": "x" * (3 << 20), "usage": usage_of("", N_TOKENS, 49)}).encode())

    async with Stub(offers()) as p1, Stub(script) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        told = await ask(it.http, it.url, body=COMPLETION)
        assert len(json.loads(told.body)["text"]) == 3 << 20
        assert told.prompt_and_cached == (N_TOKENS, 7)
