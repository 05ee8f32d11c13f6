"""Prompts computed on one real engine and decoded on another: through the gateway, on all four APIs."""

from __future__ import annotations

import json
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
from api_client import APIS, Answer, ask, request_body, words
from gateway_process import Gateway, report
from pd_fleet import LEASE_FLAGS, PdFleet, text_of

SEEDS = random.Random(41)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "one",
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
VALID: list[tuple[str, dict[str, Any]]] = [
    *((api, {"model": "l1"}) for api in APIS),
    ("completions", {"cache_salt": "tenant"}),
    ("chat", {"cache_salt": "tenant"}),
    ("chat", {"tools": [WEATHER], "tool_choice": "none"}),
    ("chat", {"response_format": SCHEMA, "max_tokens": 24}),
    ("completions", {"structured_outputs": {"choice": ["yes", "no"]}}),
    ("completions", {"logprobs": 2}),
    ("chat", {"logprobs": True, "top_logprobs": 2}),
    ("completions", {"temperature": 0.8, "seed": 5}),
    ("chat", {"temperature": 0.8, "seed": 5}),
    ("completions", {"repetition_penalty": 1.3, "frequency_penalty": 0.4}),
    ("completions", {"min_tokens": 4}),
    ("completions", {"stop": ["e"]}),
    ("chat", {"max_tokens": None, "max_completion_tokens": 5}),
    ("chat", {"max_tokens": 50, "max_completion_tokens": 5}),
    ("completions", {"prompt": [400 + i for i in range(33)]}),
]
LOCAL: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"n": 2, "temperature": 0.7, "seed": 3}, "n_sequences"),
    ("chat", {"n": 2, "temperature": 0.7, "seed": 3}, "n_sequences"),
    ("completions", {"prompt": [words(1, 40), words(2, 40)]}, "several_prompts"),
    ("completions", {"prompt_logprobs": 1}, "prompt_logprobs"),
    ("chat", {"prompt_logprobs": 1}, "prompt_logprobs"),
    ("completions", {"echo": True}, "echo"),
    ("chat", {"echo": True}, "echo"),
    ("completions", {"best_of": 2, "temperature": 0.7, "seed": 3}, "best_of"),
    ("completions", {"use_beam_search": True, "n": 2}, "n_sequences"),
    ("chat", {"use_beam_search": True}, "beam_search"),
]


def _name(value: Any) -> str:
    """Of a test's parameter."""
    return value if isinstance(value, str) else json.dumps(value)[:40]


@pytest.fixture(scope="module")
def gateway(pd_servers: PdFleet, engine_logs: pathlib.Path) -> Iterator[Gateway]:
    """Everything that can go remote does."""
    prefill, decode = ([server.url for server in role] for role in (pd_servers.prefill, pd_servers.decode))
    gateway = Gateway([], engine_logs, "--pd-policy", "always-remote", *LEASE_FLAGS, prefill=prefill, decode=decode)
    gateway.start()
    yield gateway
    gateway.stop()


def texts(answer: Answer) -> list[str]:
    """Of all choices of a completion or chat answer."""
    assert (answer.status, answer.error) == (200, None), answer
    choices = json.loads(answer.raw)["choices"]
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_remote_text_equals_a_single_servers(api: str, stream: bool, gateway: Gateway, fleet: PdFleet) -> None:
    """Three cold prompts and each once more: the KV came from the prefill server, and the text is the same."""
    for _ in range(3):
        body = request_body(api, SEEDS.randrange(10**9))
        right = fleet.expected(api, body)
        for again in (False, True):
            bytes_before, tokens_before = fleet.moved()
            answer = ask(gateway.url, api, body, stream=stream)
            assert text_of(answer) == right
            assert answer.choice == ("remote", "policy")
            assert answer.prompt_tokens is not None
            assert answer.cached_tokens is not None
            assert 0 <= answer.cached_tokens <= answer.prompt_tokens
            bytes_after, tokens_after = fleet.moved()
            assert bytes_after > bytes_before
            assert tokens_after > tokens_before
            if not again:
                assert tokens_after - tokens_before == answer.prompt_tokens
                assert answer.cached_tokens == 0
    fleet.wait_until_nothing_is_held()


@pytest.mark.parametrize(("api", "extra"), VALID, ids=_name)
def test_remote_serves_what_a_single_server_does(
    api: str, extra: dict[str, Any], gateway: Gateway, fleet: PdFleet
) -> None:
    body = {k: v for k, v in request_body(api, SEEDS.randrange(10**9), **extra).items() if v is not None}
    right = fleet.expected(api, body)
    answer = ask(gateway.url, api, body)
    assert text_of(answer) == right
    assert answer.choice == ("remote", "policy")
    assert text_of(ask(gateway.url, api, body, stream=True)) == right


@pytest.mark.parametrize("api", APIS)
def test_more_output_asked_for_than_the_context_has_left(api: str, gateway: Gateway, fleet: PdFleet) -> None:
    """Newer engines cut it short, older ones refuse; wherever it goes, the answer is the single server's."""
    field = "max_output_tokens" if api == "responses" else "max_tokens"
    body = request_body(api, SEEDS.randrange(10**9), n_words=600, **{field: 2000})
    assert text_of(ask(gateway.url, api, body)) == fleet.expected(api, body)
    fleet.wait_until_nothing_is_held()


def test_request_without_output_limit(gateway: Gateway, fleet: PdFleet) -> None:
    """P13: the prefill leg's one token is not left in the decode leg of a request that said nothing."""
    stops: dict[str, dict[str, Any]] = {
        "completions": {"stop": ["e", "a"]},
        "chat": {"stop": ["e", "a"]},
        "responses": {"stop_token_ids": [*range(3, 1500)]},
    }
    for api, stop in stops.items():
        body = request_body(api, SEEDS.randrange(10**9), n_words=20, **stop)
        del body["max_output_tokens" if api == "responses" else "max_tokens"]
        answer = ask(gateway.url, api, body)
        assert text_of(answer) == fleet.expected(api, body), api
        assert answer.choice[0] == "remote"


@pytest.mark.parametrize(("api", "extra", "reason"), LOCAL, ids=_name)
def test_what_cannot_be_split_stays_local(
    api: str, extra: dict[str, Any], reason: str, gateway: Gateway, fleet: PdFleet
) -> None:
    """P10, P15: several sequences, and answers made of the prompt itself."""
    body = request_body(api, SEEDS.randrange(10**9), **extra)
    answer = ask(gateway.url, api, body)
    assert texts(answer) == texts(ask(fleet.plain.url, api, body))
    assert answer.choice == ("local", reason)
    assert gateway.metric("warmroute_pd_decisions_total", 'choice="local"', f'reason="{reason}"') >= 1
    fleet.wait_until_nothing_is_held()


@pytest.mark.parametrize("api", APIS)
def test_what_the_engine_refuses_is_its_answer(api: str, gateway: Gateway, fleet: PdFleet) -> None:
    """P1: a request that no engine takes gets the engine's own words, and leaves nothing behind."""
    for extra in ({"temperature": -1}, {"model": "no-such-model"}, {"top_p": "x"}):
        body = request_body(api, SEEDS.randrange(10**9), **extra)
        plain, answer = ask(fleet.plain.url, api, body), ask(gateway.url, api, body)
        assert (answer.status, plain.status >= 400) == (plain.status, True), (answer, plain)
    body = request_body(api, 3, n_words=2000)
    plain, answer = ask(fleet.plain.url, api, body), ask(gateway.url, api, body)
    assert (answer.status, answer.raw) == (plain.status, plain.raw)
    fleet.wait_until_nothing_is_held()


@pytest.mark.parametrize(
    ("policy", "reason", "choices"),
    [
        ((), "cost", {60: ["local"], 500: ["local", "remote"]}),
        (("--pd-policy", "threshold:1024"), "threshold", {60: ["local"], 500: ["remote"]}),
    ],
    ids=["default", "threshold"],
)
def test_short_cold_prompts_stay(
    policy: tuple[str, ...],
    reason: str,
    choices: dict[int, list[str]],
    fleet: PdFleet,
    engine_logs: pathlib.Path,
) -> None:
    """D2: a short cold prompt is cheaper computed where it is decoded: by cost, and by a rule."""
    prefill, decode = ([server.url for server in role] for role in (fleet.prefill, fleet.decode))
    root = fleet.plain.get("/v1/models").body["data"][0]["root"]
    gateway = Gateway(
        [], engine_logs, "--tokens-tokenizer", root, *policy, *LEASE_FLAGS, prefill=prefill, decode=decode
    )
    gateway.start()
    try:
        for n_words, expected in choices.items():
            body = request_body("chat", SEEDS.randrange(10**9), n_words=n_words)
            answer = ask(gateway.url, "chat", body)
            assert text_of(answer) == fleet.expected("chat", body)
            assert answer.choice in [(choice, reason) for choice in expected]
    finally:
        gateway.stop()


def test_handoffs_are_counted(gateway: Gateway, fleet: PdFleet) -> None:
    """By pair, and nothing stays booked."""
    for seed in range(8):
        ask(gateway.url, "completions", request_body("completions", 7000 + seed))
    pairs = [
        gateway.metric("warmroute_pd_handoffs_total", f'"{p.worker}"', f'"{d.worker}"', 'outcome="ok"')
        for p in fleet.prefill
        for d in fleet.decode
    ]
    report(f"handoffs by pair: {pairs}")
    assert sum(pairs) == gateway.metric("warmroute_pd_handoffs_total", 'outcome="ok"')
    assert sum(pairs) >= 8
    assert gateway.metric("warmroute_pd_transfer_tokens_total") > 0
    gateway.wait_until_nothing_is_booked()
