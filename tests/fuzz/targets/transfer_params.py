"""A prefill worker's answer, and its transfer params: refused, or exactly what a decode engine may be given."""

from __future__ import annotations

import json

import msgspec

from gateway.handoff.answer import BadAnswer, BadParams, check_params, read_answer, same_host
from gateway.handoff.fields import NotAnObject, join, split, with_member
from tests.support.recorded import load

_KINDS = ("chat", "completions", "messages", "responses", "generate")
_PD = load("pd")
_OF_FIVE = _PD["prefill_of_5_tokens"]

SEEDS = [
    *(bytes([_KINDS.index(kind)]) + json.dumps(answer).encode() for kind, answer in _PD["prefill"].items()),
    b"\1" + "{}".encode("utf-16-be"),
    *(
        bytes([i]) + json.dumps({"kv_transfer_params": _OF_FIVE, "usage": {"prompt_tokens": 40}}).encode()
        for i in range(len(_KINDS))
    ),
]
# fmt: off
WORDS = [
    b'"kv_transfer_params": ', b'"remote_block_ids": [[', b'"remote_port": ', b'"remote_host": ',
    b'"remote_num_tokens": ', b'"do_remote_prefill": true', b'"transfer_mode": "push"', b'"usage": ', b"null",
    b"true", b"1e400", b"NaN", b"-1", b"[", b"]", b"{", b"}", b"4294967296", b"99999999999999999999999",
    b'"\\ud800"', b'"::ffff:127.0.0.1"',
]
# fmt: on


def fuzz_one(data: bytes) -> None:
    raw = data[1:]
    _one_member(raw)
    same_host(raw[:64].decode("utf-8", "replace"))
    try:
        answer = read_answer(raw, _KINDS[(data[0] if data else 0) % len(_KINDS)])
    except BadAnswer:
        return
    assert answer.cached_tokens is None or answer.cached_tokens >= 0
    if answer.prompt_tokens is not None and answer.cached_tokens is not None:
        assert answer.cached_tokens <= answer.prompt_tokens
    if answer.params is None or answer.raw_params is None:
        return
    tokens = answer.prompt_tokens or 0
    try:
        check_params(answer.params, prompt_tokens=tokens, block_size=16, hosts={"127.0.0.1"}, ports=None)
    except BadParams:
        return
    read = json.loads(join(answer.raw_params))
    assert read["do_remote_prefill"] is True
    assert len(max(read["remote_block_ids"], key=len)) == -(-tokens // 16)
    assert 1 <= read["remote_port"] <= 65535
    assert "prompt_token_ids" not in read


def _one_member(raw: bytes) -> None:
    """Objects taken apart and put together are what they were."""
    try:
        fields = split(raw)
    except NotAnObject:
        return
    assert {name: bytes(value) for name, value in split(join(fields)).items()} == {
        name: bytes(value) for name, value in fields.items()
    }
    changed = with_member(raw, "kv_transfer_params", b"7")
    assert bytes(split(changed)["kv_transfer_params"]) == b"7"
    assert split(changed).keys() == fields.keys() | {"kv_transfer_params"}
    assert all(isinstance(value, msgspec.Raw) for value in fields.values())
