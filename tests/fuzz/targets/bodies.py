"""Bodies of every API as clients send them, forms too: facts or a 400, and nothing that steers transfers goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from gateway import form
from gateway.bad_request import BadRequest
from gateway.handoff.bodies import Body, clean
from gateway.handoff.local import why_local
from gateway.large import decode_large
from gateway.request import RequestReader, decode_body, members_of
from gateway.stored import is_stored
from gateway.tokens import TokenService
from scorer.fleet import Fleet
from scorer.types import ChangeKind, WorkerChange
from tests.support.recorded import load

_KINDS = ("chat", "completions", "messages", "responses", "generate", None)
_TYPES = ("application/json", "multipart/form-data; boundary=b", 'multipart/form-data; boundary="b b"')
_STEERING = ("kv_transfer_params", "ec_transfer_params")
_FORM = (
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n\x00\x01\r\n'
    b"--b\r\nContent-Disposition: form-data; name=stream\r\n\r\ntrue\r\n--b--\r\n"
)
_CHAT: dict[str, Any] = {
    "model": "m", "stream": True, "max_tokens": 5, "kv_transfer_params": {"do_remote_prefill": True}, "n": 1,
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "vllm_xargs": {"remote_host": "x", "kept": 1}, "cache_salt": "s",
}  # fmt: skip
_RESPONSES: dict[str, Any] = {
    "model": "m", "instructions": "i", "store": False, "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "t"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "o"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
    ],
}  # fmt: skip
_MESSAGES: dict[str, Any] = {
    "model": "m", "max_tokens": 3, "system": [{"type": "text", "text": "s"}], "messages": [
        {"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "tool_result", "tool_use_id": "1"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
    ],
}  # fmt: skip
_GENERATE = {"model": "m", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2, "extra_args": {"remote_": 1}}}
_WHOLE = (_CHAT, {"model": "m", "prompt": ["a", "b"], "n": 2}, _MESSAGES, _RESPONSES, _GENERATE)

SEEDS = [
    *(bytes([i]) + json.dumps(body).encode() for i, body in enumerate(_WHOLE)),
    *(b"\x01" + json.dumps(call["request"]).encode() for call in load("http")["calls"].values() if call["request"]),
    bytes([len(_KINDS)]) + _FORM,
    b"\x00" + json.dumps(_CHAT).encode("utf-16"),
    b"\x01" + b"\xef\xbb\xbf" + b'{"prompt": [1, 2], "a": NaN, "b": "\\ud800"}',
]
# fmt: off
WORDS = [
    b'"kv_transfer_params": ', b'"\\u006bv_transfer_params": 1,', b'"messages": ', b'"prompt": ', b'"input": ', b"[",
    b"]", b"{", b"}", b"NaN", b"1e400", b"-1", b"\\ud800", b'"', b":", b",", b"null", b"true", b"\xef\xbb\xbf",
    b"\xff\xfe", b"99999999999999999999", b"\r\n--b\r\n", b"Content-Disposition: form-data; name=model", b"\r\n\r\n",
    b"--b--", b'"content": ', b'"type": "text"', b"\0",
]
# fmt: on

_loop = asyncio.new_event_loop()
_fleet = Fleet()
_fleet.apply(WorkerChange(kind=ChangeKind.ADDED, worker="w", url="http://x"))
_fleet.set_capabilities("w", models=["m"], adapters={"lora"})


def fuzz_one(data: bytes) -> None:
    first, raw = (data[0] if data else 0), data[1:]
    kind = _KINDS[first % len(_KINDS)]
    content_type = _TYPES[first // len(_KINDS) % len(_TYPES)]
    is_stored(raw)
    form.fields(content_type, raw, frozenset({"model", "stream"}))
    try:
        facts = _loop.run_until_complete(_read(kind, raw, content_type))
    except BadRequest:
        pass
    else:
        assert facts.prompt_tokens >= 0
        assert facts.tokens is None or len(facts.tokens) % 4 == 0
    decode_large(raw, kind)
    try:
        cleaned = clean(raw)
    except BadRequest:
        return
    assert clean(raw, members_of(raw)) == cleaned
    read = _as_an_engine_reads(cleaned)
    if read is not None:
        assert not any(name in read for name in _STEERING)
    if kind is None:
        return
    try:
        body = Body(raw, kind)
        why_local(kind, decode_body(raw), 1)
    except BadRequest:
        return
    for leg in (body.prefill({"do_remote_decode": True}), body.decode({"do_remote_prefill": True}, [1, 2])):
        read = _as_an_engine_reads(leg)
        assert read is None or isinstance(read["kv_transfer_params"], dict)


async def _read(kind: str | None, raw: bytes, content_type: str) -> Any:
    service = TokenService()
    try:
        return await RequestReader(_fleet, service).read("r", kind, raw, {"content-type": content_type})
    finally:
        await service.close()


def _as_an_engine_reads(raw: bytes) -> dict[str, Any] | None:
    try:
        read = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None
