"""The two legs' bodies: what is set, what is left out, and that nothing else changes by a byte."""

import json
from array import array
from typing import Any

import msgspec
import pytest

from gateway.bad_request import BadRequest
from gateway.handoff.bodies import Body, clean
from gateway.handoff.connector import Legs, NixlPull

LEGS = Legs.new(
    request_id="r", prefill_worker="p", decode_worker="d", prefill_hosts=["p"], prefill_ports=None, block_size=16
)
ASK = NixlPull().prefill_params(LEGS)
OFFER = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "e", "extra": {"deep": [1]}}


def legs(kind: str, body: dict[str, Any], ids: list[int] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    cut = Body(json.dumps(body).encode(), kind)
    return json.loads(cut.prefill(ASK)), json.loads(cut.decode(OFFER, ids))


def test_40_prefill_is_one_token_not_streamed_and_decode_is_the_original() -> None:
    """llm-d D5 40."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 50,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    prefill, decode = legs("chat", body)
    assert prefill["stream"] is False
    assert "stream_options" not in prefill
    assert (prefill["max_tokens"], prefill["max_completion_tokens"]) == (1, 1)
    assert prefill["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert prefill["return_token_ids"] is True
    assert decode == {**body, "kv_transfer_params": OFFER}


def test_41_min_tokens_is_left_out_of_the_prefill_only() -> None:
    """llm-d D5 41: `min_tokens` above `max_tokens` is a 400."""
    prefill, decode = legs("completions", {"prompt": "x", "max_tokens": 100, "min_tokens": 5})
    assert prefill["max_tokens"] == 1
    assert "min_tokens" not in prefill
    assert (decode["max_tokens"], decode["min_tokens"]) == (100, 5)


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 50}, {"max_completion_tokens": 100}, {"max_tokens": None}])
def test_p13_a_limit_that_was_absent_is_absent_again(limits: dict[str, Any]) -> None:
    """P13 (and llm-d D5 43): a request without max_tokens got a limit of 0 on the decode leg."""
    prefill, decode = legs("chat", {"messages": [], **limits})
    assert (prefill["max_tokens"], prefill["max_completion_tokens"]) == (1, 1)
    assert decode == {"messages": [], **limits, "kv_transfer_params": OFFER}


@pytest.mark.parametrize("limits", [{}, {"max_output_tokens": 50}])
def test_44_responses(limits: dict[str, Any]) -> None:
    """llm-d D5 44. The prefill's answer is not the one to be stored."""
    body = {"input": "x", "stream": True, **limits}
    prefill, decode = legs("responses", body)
    assert (prefill["max_output_tokens"], prefill["stream"], prefill["store"]) == (1, False, False)
    assert "max_tokens" not in prefill
    assert decode == {**body, "kv_transfer_params": OFFER}


def test_46_messages_have_one_limit_and_no_way_to_return_ids() -> None:
    """llm-d D5 46."""
    prefill, decode = legs("messages", {"messages": [], "max_tokens": 9}, [1, 2])
    assert prefill == {"messages": [], "max_tokens": 1, "stream": False, "kv_transfer_params": ASK}
    assert decode["kv_transfer_params"] == {**OFFER, "prompt_token_ids": [1, 2]}


@pytest.mark.parametrize("sampling", [{"max_tokens": 9, "min_tokens": 3, "temperature": 0.10}, {}])
def test_generate_has_its_limits_in_sampling_params(sampling: dict[str, Any]) -> None:
    body = {"token_ids": [1, 2], "sampling_params": sampling, "stream": True}
    prefill, decode = legs("generate", body, [1, 2])
    rest = {name: value for name, value in sampling.items() if name == "temperature"}
    assert prefill["sampling_params"] == {**rest, "max_tokens": 1}
    assert "max_tokens" not in prefill
    assert decode == {**body, "kv_transfer_params": OFFER}


def test_ids_are_the_prompt_of_completions_and_in_the_params_elsewhere() -> None:
    _, completions = legs("completions", {"prompt": "hello", "max_tokens": 5}, [7, 8])
    assert completions["prompt"] == [7, 8]
    assert completions["kv_transfer_params"] == OFFER
    for kind in ("chat", "messages", "responses"):
        _, decode = legs(kind, {"messages": "hello"}, [7, 8])
        assert decode["messages"] == "hello"
        assert decode["kv_transfer_params"] == {**OFFER, "prompt_token_ids": [7, 8]}


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("completions", {"suffix": "}"}),
        ("completions", {"echo": True}),
        ("chat", {"return_prompt_text": True}),
        ("chat", {"echo": True}),
        ("responses", {"enable_response_messages": True}),
    ],
)
def test_ids_stay_away_where_the_answer_has_parts_made_of_the_text(kind: str, field: dict[str, Any]) -> None:
    _, decode = legs(kind, {"prompt": "hello", **field}, [7, 8])
    assert decode == {"prompt": "hello", **field, "kv_transfer_params": OFFER}
    _, decode = legs(kind, {"prompt": "hello", **dict.fromkeys(field)}, [7, 8])
    assert "[7, 8]" in json.dumps(decode)


def test_ids_may_come_as_uint32_and_without_params() -> None:
    cut = Body(b'{"messages":[]}', "chat")
    packed = array("I", [3, 4_000_000_000]).tobytes()
    assert json.loads(cut.decode(None, packed)) == {
        "messages": [],
        "kv_transfer_params": {"prompt_token_ids": [3, 4_000_000_000]},
    }


def test_ids_are_not_asked_for_where_the_prompt_is_ids_already() -> None:
    assert "return_token_ids" not in legs("completions", {"prompt": [1, 2]})[0]
    assert legs("completions", {"prompt": ["a"]})[0]["return_token_ids"] is True
    assert legs("responses", {"input": "a"})[0]["enable_response_messages"] is True
    assert "return_token_ids" not in json.loads(Body(b'{"prompt":"a"}', "completions").prefill(ASK, return_ids=False))


def test_a_request_id_goes_into_the_body_where_the_api_has_one() -> None:
    body = b'{"request_id":"theirs"}'
    assert json.loads(Body(body, "chat").prefill(ASK, request_id="ours"))["request_id"] == "ours"
    assert json.loads(Body(body, "chat").prefill(ASK))["request_id"] == "theirs"
    assert json.loads(Body(body, "messages").prefill(ASK, request_id="ours"))["request_id"] == "theirs"


def test_values_that_are_not_replaced_keep_their_spelling() -> None:
    kept = b'"a" : 1.50, "b":1E5 ,"c": 123456789012345678901234567890, "d":{"x" : [ 1,2 ], "y":"\\u00e9"}'
    cut = Body(b'{"max_tokens": 5, ' + kept + b"}", "completions")
    for body in (cut.prefill(ASK), cut.decode(OFFER)):
        for value in (b"1.50", b"1E5", b"123456789012345678901234567890", b'{"x" : [ 1,2 ], "y":"\\u00e9"}'):
            assert value in body


def test_params_go_on_as_they_came() -> None:
    raw = b'{"remote_blocks_expiry_time": 4546.10, "big":18446744073709551617, "deep" : {"a" :1}}'
    params = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    body = Body(b"{}", "chat").decode(params)
    assert b'"remote_blocks_expiry_time":4546.10,"big":18446744073709551617,"deep":{"a" :1}' in body


def test_of_duplicate_keys_the_last_counts() -> None:
    cut = Body(b'{"max_tokens":7,"prompt":"a","prompt":"b"}', "completions")
    assert json.loads(cut.decode(OFFER))["prompt"] == "b"


def test_nothing_to_strip_is_the_same_object() -> None:
    raw = b'{"messages" : [{"content":"kv_transfer_params remote_host"}], "vllm_xargs": {"a":1}}'
    cut = Body(raw, "chat")
    assert cut.clean is raw
    assert cut.decode() is raw
    assert clean(raw) is raw


@pytest.mark.parametrize(
    ("dirty", "rest"),
    [
        (b'{"a":1,"kv_transfer_params":{"do_remote_prefill":true}}', {"a": 1}),
        (b'{"kv\\u005ftransfer_params":{}, "ec_transfer_params":1}', {}),
        (b'{"\\u006bv_transfer_params":{},"kv_transfer_params":{}}', {}),
        (b'{"vllm_xargs":{"kv_transfer_params":1,"x":2}}', {"vllm_xargs": {"x": 2}}),
        (b'{"vllm_xargs":{"x":1},"vllm_xargs":{"do_remote_prefill":1}}', {"vllm_xargs": {}}),
        (b'{"vllm\\u005fxargs":{"remote_\\u0068ost":"h"}}', {"vllm_xargs": {}}),
        (
            b'{"sampling_params":{"n":1,"extra_args":{"kv_transfer_params":{},"do_remote_decode":true,"k":0}}}',
            {"sampling_params": {"n": 1, "extra_args": {"k": 0}}},
        ),
    ],
)
def test_what_steers_transfers_is_stripped(dirty: bytes, rest: dict[str, Any]) -> None:
    assert json.loads(clean(dirty)) == rest
    cut = Body(dirty, "generate")
    assert json.loads(cut.clean) == rest
    assert cut.decode() is cut.clean
    assert json.loads(cut.decode(OFFER)) == {**rest, "kv_transfer_params": OFFER}


def test_what_only_pythons_parser_reads_is_read() -> None:
    text = '{"a":NaN,"kv_transfer_params":1,"b":"\\ud800"}'
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"):
        assert clean(text.encode(encoding)) == b'{"a":NaN,"b":"\\ud800"}'
        harmless = text.replace("kv", "k").encode(encoding)
        assert clean(harmless) is harmless
    assert clean(b"\x00\x00\xfe\xff" + text.encode("utf-32-be")) == b'{"a":NaN,"b":"\\ud800"}'
    cut = Body(b'{"\\ud800" : -Infinity, "max_tokens": 1.0 }', "completions")
    assert cut.decode({}) == b'{"\\ud800":-Infinity,"max_tokens":1.0,"kv_transfer_params":{}}'


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"kv_transfer_params",
        b'["kv_transfer_params"]',
        b"\x00\x01{",
        b"--x\r\nkv_transfer_params",
        b'"{"',
        b"{",
    ],
)
def test_what_is_no_json_object_is_left_alone(raw: bytes) -> None:
    assert clean(raw) is raw


def test_what_an_engine_might_read_and_we_cannot_is_refused() -> None:
    deep = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"kv\\u005ftransfer_params":{}}'
    with pytest.raises(BadRequest):
        clean(deep)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b'{"a":1}x', b'{"a":1,}', b"{1:2}", b"NaN", b'{"a" 1}', b'{"a":NaN,}']
)
def test_bodies_that_are_no_objects_are_bad_requests(raw: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        Body(raw, "chat")
    assert caught.value.code == "invalid_json"
