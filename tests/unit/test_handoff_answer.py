"""A prefill worker's answer, and what in it no decode engine may see."""

import json
from typing import Any

import pytest

from gateway.handoff.answer import BadAnswer, BadParams, PrefillAnswer, check_params, read_answer, same_host
from gateway.handoff.connector import Legs, NixlPull

PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 1, 4]],
    "remote_engine_id": "7d93c206-8495-4583-a150-7355349969e7",
    "remote_request_id": "cmpl-req-1-0-9928301a",
    "remote_host": "127.0.0.1",
    "remote_port": 5610,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 40,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 16,
}
"""As vLLM 0.32 answers, block size 16."""
GONE = ...


def read(kind: str, **fields: Any) -> PrefillAnswer:
    return read_answer(json.dumps(fields).encode(), kind)


def test_answers_of_the_apis() -> None:
    choice = {"finish_reason": "length", "prompt_token_ids": [1, 2]}
    told = read(
        "completions",
        choices=[choice],
        usage={"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
        kv_transfer_params=PARAMS,
    )
    assert told.params == PARAMS
    assert (told.prompt_tokens, told.cached_tokens, told.prompt_token_ids) == (2, 1, [1, 2])
    assert (told.reports_cached, told.stopped) == (True, False)

    told = read("chat", choices=[{"finish_reason": "stop"}], prompt_token_ids=[1, 2], usage={"prompt_tokens": 2})
    assert (told.prompt_token_ids, told.stopped, told.params) == ([1, 2], True, None)

    told = read(
        "responses",
        status="incomplete",
        usage={"input_tokens": 3, "input_tokens_details": {"cached_tokens": 2, "cached_tokens_per_turn": []}},
        input_messages=[{"message": "hi", "tokens": [1, 2, 3], "type": "raw_message_tokens"}],
    )
    assert (told.prompt_tokens, told.cached_tokens, told.prompt_token_ids, told.stopped) == (3, 2, [1, 2, 3], False)
    assert read("responses", status="completed", input_messages=[{"author": {}}, {"content": []}]).stopped

    usage = {"input_tokens": 19, "output_tokens": 1, "cache_read_input_tokens": 32, "cache_creation_input_tokens": 128}
    told = read("messages", stop_reason="max_tokens", usage=usage)
    assert (told.prompt_tokens, told.cached_tokens, told.stopped) == (179, 32, False)

    told = read("generate", choices=[{"finish_reason": "length"}], usage={"prompt_tokens": 2}, prompt_token_ids=None)
    assert (told.prompt_tokens, told.cached_tokens, told.prompt_token_ids) == (2, None, None)


def test_params_tell_cached_tokens_where_the_usage_does_not() -> None:
    told = read("chat", usage={"prompt_tokens": 40, "prompt_tokens_details": None}, kv_transfer_params=PARAMS)
    assert (told.cached_tokens, told.reports_cached) == (16, False)


def test_p16_cached_tokens_are_within_the_prompt() -> None:
    """P16: more external than cached tokens made a negative counter."""
    for cached, right in ((50, 40), (-3, 0)):
        usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": cached}}
        assert read("chat", usage=usage).cached_tokens == right


def test_empty_params_are_none() -> None:
    assert read("chat", kv_transfer_params={}).params is None
    assert read("chat", kv_transfer_params=None).params is None
    assert read("chat").params is None


def test_x7_a_usage_of_the_wrong_shape_is_ignored() -> None:
    """X7."""
    for usage in ("oops", {"prompt_tokens": "1024"}, [], {"prompt_tokens": 5, "prompt_tokens_details": 3}, 7, None):
        told = read("chat", usage=usage, kv_transfer_params=PARAMS)
        assert told.prompt_tokens is None
        assert told.params == PARAMS


def test_ids_that_are_not_those_of_the_prompt_are_not_used() -> None:
    assert read("chat", prompt_token_ids=[1, 2], usage={"prompt_tokens": 3}).prompt_token_ids is None
    assert read("chat", prompt_token_ids=[1, 2]).prompt_tokens == 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"oops",
        b"[]",
        b'{"choices":[]',
        b'{"kv_transfer_params":[1]}',
        b'{"kv_transfer_params":"x"}',
        b'{"kv_transfer_params":{"a":1e400}}',
        b'{"prompt_token_ids":["x"]}',
        b'{"prompt_token_ids":[-1]}',
        b'{"choices":[3]}',
        b'{"error":{"message":"x"}}',
        b'{"status":"failed"}',
        b"[" * 100_000,
        b'{"kv_transfer_params":{"a":"\xff"}}',
    ],
)
def test_what_cannot_be_an_answer(body: bytes) -> None:
    with pytest.raises(BadAnswer):
        read_answer(body, "chat")


def test_p7_a_generation_that_failed_is_no_answer() -> None:
    """P7: status 200 with finish_reason "error"."""
    with pytest.raises(BadAnswer):
        read("completions", choices=[{"finish_reason": "error"}], kv_transfer_params=PARAMS)


def check(hosts: list[str] | None = None, ports: list[int] | None = None, **changes: Any) -> None:
    params = {name: value for name, value in {**PARAMS, **changes}.items() if value is not GONE}
    check_params(params, prompt_tokens=40, block_size=16, hosts=["127.0.0.1"] if hosts is None else hosts, ports=ports)


def test_good_params_pass() -> None:
    check()
    check(ports=[5610, 5611])
    check(unknown={"a": [1]}, do_remote_decode=GONE, tp_size=GONE, remote_num_tokens=GONE, transfer_mode=GONE)
    check(remote_block_ids=[[9], [1, 2, 3]])  # A sliding window's group, then one of full attention.
    check(remote_blocks_expiry_time=4546.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"do_remote_prefill": GONE},
        {"do_remote_prefill": False},
        {"do_remote_prefill": 1},
        {"do_remote_decode": True},
        {"remote_engine_id": GONE},
        {"remote_engine_id": ""},
        {"remote_engine_id": 7},
        {"remote_request_id": GONE},
        {"remote_request_id": None},
        {"remote_host": GONE},
        {"remote_host": ["127.0.0.1"]},
        {"remote_host": "10.0.0.9"},
        {"remote_port": GONE},
        {"remote_port": 0},
        {"remote_port": 65_536},
        {"remote_port": "5610"},
        {"remote_port": True},
        {"remote_port": 5610.0},
        {"remote_block_ids": GONE},
        {"remote_block_ids": []},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": [1, 2, 3]},
        {"remote_block_ids": [[1, 2]]},
        {"remote_block_ids": [[1, 2, 3, 4]]},
        {"remote_block_ids": [[1, 2, 3], []]},
        {"remote_block_ids": [[1, 2, 3], [1, 2, 3, 4]]},
        {"remote_block_ids": [[1, 2, 2]]},
        {"remote_block_ids": [[1, 2, -3]]},
        {"remote_block_ids": [[1, 2, "3"]]},
        {"remote_block_ids": [[1, 2, True]]},
        {"remote_block_ids": [[1, 2, 1 << 40]]},
        {"remote_num_tokens": 39},
        {"remote_num_tokens": 41},
        {"remote_num_tokens": "40"},
        {"tp_size": 0},
        {"tp_size": "1"},
        {"dcp_size": True},
        {"pp_size": -1},
        {"remote_blocks_expiry_time": "soon"},
        {"remote_prefill_cached_tokens": 41},
        {"transfer_mode": "push"},
        {"prompt_token_ids": [1]},
    ],
    ids=str,
)
def test_params_that_kill_hang_or_mislead_a_decode_engine(changes: dict[str, Any]) -> None:
    with pytest.raises(BadParams):
        check(**changes)


def test_foreign_addresses_are_refused() -> None:
    for hosts, ports in (([], None), (["127.0.0.2"], None), (["127.0.0.1"], []), (["127.0.0.1"], [5611])):
        with pytest.raises(BadParams):
            check(hosts, ports)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("::1", "0:0:0:0:0:0:0:1"),
        ("[FD00::A]", "fd00:0::a"),
        ("10.1.2.3", "::ffff:10.1.2.3"),
        ("Pod-7.ns.svc", "pod-7.NS.svc."),
        ("localhost", "127.0.0.1"),
    ],
)
def test_one_host_written_in_several_ways(ours: str, theirs: str) -> None:
    assert same_host(ours) == same_host(theirs)
    check([ours], remote_host=theirs)


def test_models_that_end_their_prefill_early() -> None:
    params = {**PARAMS, "remote_block_ids": [[1, 2]], "remote_num_tokens": 32}
    for backoff_tokens, fine in ((0, False), (7, False), (8, True)):
        try:
            check_params(
                params,
                prompt_tokens=40,
                block_size=16,
                hosts=["127.0.0.1"],
                ports=None,
                backoff_tokens=backoff_tokens,
            )
        except BadParams:
            assert not fine
        else:
            assert fine


def legs(prompt_tokens: int | None = None) -> Legs:
    return Legs.new(
        request_id="r",
        prefill_worker="p",
        decode_worker="d",
        prefill_hosts={"127.0.0.1"},
        prefill_ports=range(5610, 5612),
        block_size=16,
        prompt_tokens=prompt_tokens,
    )


def test_nixl_pull_passes_the_answers_params_on() -> None:
    raw = json.dumps({**PARAMS, "remote_blocks_expiry_time": 4546.25}).encode().replace(b"4546.25", b"4546.250")
    answer = read_answer(b'{"usage":{"prompt_tokens":40},"kv_transfer_params":' + raw + b"}", "chat")
    params = NixlPull().decode_params(legs(), answer)
    assert {name: json.loads(bytes(value)) for name, value in params.items()} == {
        **PARAMS,
        "remote_blocks_expiry_time": 4546.25,
    }
    assert bytes(params["remote_blocks_expiry_time"]) == b"4546.250"


def test_nixl_pull_needs_params_and_the_prompts_length() -> None:
    connector = NixlPull()
    without_length = read("chat", kv_transfer_params=PARAMS)
    connector.decode_params(legs(40), without_length)
    for leg, answer in (
        (legs(40), None),
        (legs(40), read("chat")),
        (legs(), without_length),
        (legs(41), without_length),
    ):
        with pytest.raises(BadParams):
            connector.decode_params(leg, answer)


def test_every_try_has_a_transfer_id_of_its_own() -> None:
    assert legs().transfer_id != legs().transfer_id
