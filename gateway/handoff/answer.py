"""A prefill worker's answer: read, and its transfer params looked at before any engine acts on them.

Engines trust the params. Measured on vLLM 0.32: too few blocks or `do_remote_prefill` alone kill the engine, a missing
request id hangs the request and kills the engine when its client leaves, too many blocks are cut from the front and
give wrong text. So what is not exactly right is not passed on.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from gateway.handoff.fields import Fields, NotAnObject, split

_MOST_BLOCK_ID = (1 << 31) - 1
_MOST_PARALLEL = 65_536
_LONGEST_TEXT = 1024
_PULL = "pull"


class BadAnswer(ValueError):
    """What the prefill worker sent cannot be its answer."""


class BadParams(ValueError):
    """No engine may see these transfer params."""


class PrefillAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """None: the answer does not say.

    `raw_params` are the same params with undecoded values: what the decode worker gets. `reports_cached`: the worker's
    `usage` tells cached tokens, so the client's may (in `cached_tokens` they are else those told to the other engine).
    `stopped`: generation ended by itself at the first token.
    """

    params: dict[str, Any] | None = None
    raw_params: dict[str, msgspec.Raw] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    reports_cached: bool = False
    prompt_token_ids: list[int] | None = None
    stopped: bool = False


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None


class _Input(msgspec.Struct):
    tokens: list[int] | None = None


class _Answer(msgspec.Struct):
    """Of all five APIs. What only one of them has is optional in each."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: msgspec.Raw = msgspec.Raw(b"null")
    error: Any = None
    choices: list[_Choice] | None = None
    prompt_token_ids: list[int] | None = None
    stop_reason: str | None = None
    status: str | None = None
    input_messages: msgspec.Raw = msgspec.Raw(b"null")


_answers = msgspec.json.Decoder(_Answer)
_usages = msgspec.json.Decoder(_Usage | None)
_inputs = msgspec.json.Decoder(list[_Input] | None)


def read_answer(body: bytes, kind: str) -> PrefillAnswer:
    """`kind` is the API's, as in `Route.tokens`. Raises BadAnswer. A `usage` of the wrong shape is ignored."""
    try:
        answer = _answers.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        raise BadAnswer("the answer is not JSON of the right shape") from None
    choice = answer.choices[0] if answer.choices else _Choice()
    if answer.error is not None or choice.finish_reason == "error" or answer.status == "failed":
        raise BadAnswer("the answer tells of an error")
    raw_params = _raw_params(answer.kv_transfer_params)
    params = None if raw_params is None else {name: _decoded(value) for name, value in raw_params.items()}
    prompt_tokens, reported = _usage(answer.usage)
    ids = _ids(kind, answer, choice)
    if prompt_tokens is None and ids:
        prompt_tokens = len(ids)
    cached = reported
    if cached is None and params is not None:
        told = params.get("remote_prefill_cached_tokens")
        cached = told if type(told) is int else None
    if cached is not None:
        cached = max(0, cached if prompt_tokens is None else min(cached, prompt_tokens))
    return PrefillAnswer(
        params=params,
        raw_params=raw_params,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached,
        reports_cached=reported is not None,
        prompt_token_ids=ids if ids and len(ids) == prompt_tokens else None,
        stopped=_stopped(kind, answer, choice),
    )


def _raw_params(raw: msgspec.Raw) -> Fields | None:
    if bytes(raw) == b"null":
        return None
    try:
        return split(raw) or None
    except NotAnObject:
        raise BadAnswer("kv_transfer_params is not an object") from None


def _decoded(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        raise BadAnswer("a value in kv_transfer_params cannot be read") from None


def _usage(raw: msgspec.Raw) -> tuple[int | None, int | None]:
    """(prompt tokens, cached ones)"""
    try:
        usage = _usages.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None, None
    if usage is None:
        return None, None
    if usage.prompt_tokens is not None or usage.input_tokens is None:
        prompt, details, apart = usage.prompt_tokens, usage.prompt_tokens_details, 0
    else:
        # /v1/messages counts what was read from the cache, and what was new in it, apart from input_tokens.
        apart = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        prompt, details = usage.input_tokens, usage.input_tokens_details
    cached = usage.cache_read_input_tokens if details is None else details.cached_tokens
    return None if prompt is None or prompt < 0 else prompt + apart, cached


def _ids(kind: str, answer: _Answer, choice: _Choice) -> list[int] | None:
    if kind == "completions":
        ids = choice.prompt_token_ids
    elif kind == "responses":
        try:
            inputs = _inputs.decode(answer.input_messages)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            return None  # Models with a message format of their own put their messages there.
        ids = inputs[0].tokens if inputs is not None and len(inputs) == 1 else None
    else:
        ids = answer.prompt_token_ids
    if ids and min(ids) < 0:
        raise BadAnswer("a token id is negative")
    return ids


def _stopped(kind: str, answer: _Answer, choice: _Choice) -> bool:
    if kind == "messages":
        return answer.stop_reason not in (None, "max_tokens")
    if kind == "responses":
        return answer.status == "completed"
    return choice.finish_reason not in (None, "length")


def check_params(
    params: Mapping[str, Any],
    *,
    prompt_tokens: int,
    block_size: int,
    hosts: Collection[str],
    ports: Collection[int] | None,
    backoff_tokens: int = 0,
) -> None:
    """Raises BadParams unless a decode engine may pull with these. Keys that are not known here are not looked at.

    `block_size` is the prefill engine's in tokens. `hosts` and `ports` (None: any) are where its side channel may be.
    `backoff_tokens`: by so much engines of some models (Mamba, draft models that look ahead) end their prefill early.
    """
    if params.get("do_remote_prefill") is not True:
        raise BadParams("do_remote_prefill is not true")
    if params.get("do_remote_decode") not in (None, False):
        raise BadParams("do_remote_decode is not false")
    for name in ("remote_engine_id", "remote_request_id", "remote_host"):
        value = params.get(name)
        if not isinstance(value, str) or not value or len(value) > _LONGEST_TEXT:
            raise BadParams(f"{name} is not a text")
    if params.get("transfer_mode") not in (None, _PULL):
        raise BadParams("transfer_mode is not pull")
    if "prompt_token_ids" in params:
        raise BadParams("prompt_token_ids would replace the prompt")
    for name in ("tp_size", "dcp_size", "pp_size"):
        size = params.get(name)
        if size is not None and not (type(size) is int and 1 <= size <= _MOST_PARALLEL):
            raise BadParams(f"{name} is not a size")
    block = params.get("remote_block_size")
    if block is not None and not (type(block) is int and block >= 1):
        raise BadParams("remote_block_size is not a size")
    expiry = params.get("remote_blocks_expiry_time")
    if expiry is not None and not (type(expiry) in (int, float) and math.isfinite(expiry)):
        raise BadParams("remote_blocks_expiry_time is not a time")
    cached = params.get("remote_prefill_cached_tokens")
    if cached is not None and not (type(cached) is int and 0 <= cached <= prompt_tokens):
        raise BadParams("remote_prefill_cached_tokens is not within the prompt")
    _check_tokens(params, prompt_tokens, backoff_tokens)
    _check_blocks(params.get("remote_block_ids"), -(-(prompt_tokens - backoff_tokens) // block_size))
    _check_address(params, hosts, ports)


def _check_tokens(params: Mapping[str, Any], prompt_tokens: int, backoff_tokens: int) -> None:
    if prompt_tokens < 1:
        raise BadParams("the prompt is empty")
    n_tokens = params.get("remote_num_tokens")
    if n_tokens is None:
        return
    if type(n_tokens) is not int or not prompt_tokens - backoff_tokens <= n_tokens <= prompt_tokens:
        raise BadParams(f"remote_num_tokens differs from the prompt's {prompt_tokens}")


def _check_blocks(groups: object, n_needed: int) -> None:
    """Of several KV-cache groups those with a sliding window or a state hold fewer blocks than the prompt has; none
    holds more.
    """
    if not isinstance(groups, list) or not groups:
        raise BadParams("remote_block_ids is not a list of lists")
    for group in groups:
        if not isinstance(group, list) or not group:
            raise BadParams("a group of remote_block_ids is not a list of ids")
        if not all(type(block) is int and 0 <= block <= _MOST_BLOCK_ID for block in group):
            raise BadParams("a block id is not a number in range")
        if len(set(group)) != len(group):
            raise BadParams("a block id comes twice")
    n_blocks = max(map(len, groups))
    if n_blocks != n_needed:
        raise BadParams(f"{n_blocks} blocks where the prompt needs {n_needed}")


def _check_address(params: Mapping[str, Any], hosts: Collection[str], ports: Collection[int] | None) -> None:
    port = params.get("remote_port")
    if type(port) is not int or not 1 <= port <= 65_535:
        raise BadParams("remote_port is not a port")
    if same_host(params["remote_host"]) not in {same_host(host) for host in hosts}:
        raise BadParams(
            f"remote_host {params['remote_host'][:64]!r} is not the prefill worker's: set VLLM_NIXL_SIDE_CHANNEL_HOST "
            "there, or workers[].nixl here"
        )
    if ports is not None and port not in ports:
        raise BadParams(f"remote_port {port} is not the prefill worker's (workers[].nixl)")


def same_host(host: str) -> str:
    """One spelling of a name or address: case, brackets and the many forms of IPv6 (and IPv4 within it) aside."""
    host = host.strip().lower().removesuffix(".")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if host == "localhost":
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
