"""Request bodies cut to the two legs of a handoff. Values that are not replaced stay the bytes they came in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.bad_request import BadRequest
from gateway.handoff.fields import Fields, NotAnObject, join, looks_like_object, piece, split
from gateway.handoff.local import LIMITS, why_local

__all__ = ["Body", "clean", "why_local"]

_ONE = msgspec.Raw(b"1")
_TRUE = msgspec.Raw(b"true")
_FALSE = msgspec.Raw(b"false")
_PARAMS = "kv_transfer_params"
_TRANSFER = frozenset({_PARAMS, "ec_transfer_params"})
_STEERING = (*_TRANSFER, "do_remote_", "remote_")
"""How keys begin that steer a connector where it reads them beside `_TRANSFER`: in what goes to the engine as
`extra_args`.
"""
_CARRIERS = frozenset({"vllm_xargs", "extra_args", "sampling_params"})
_DEPTH = 2
"""Carriers that the engine reads: `vllm_xargs`, and `extra_args` in the `sampling_params` of /inference/v1/generate."""
_MARKS = (b"_transfer_params", *(name.encode() for name in _CARRIERS), b"\\u00")
"""A body without any of these has no such key (`\\u00`: a key may be written in escapes)."""
_RETURN_IDS = {"chat": "return_token_ids", "completions": "return_token_ids", "responses": "enable_response_messages"}
"""The field that makes an answer bring the prompt's ids. In `generate` they are in the request; /v1/messages has none
(measured on vLLM 0.32).
"""
BRINGS_NO_IDS = frozenset({"messages"})
"""APIs whose answer cannot bring the ids."""
_NO_IDS = {
    "completions": ("suffix", "prompt_embeds", "echo"),
    "chat": ("echo", "return_prompt_text"),
    "responses": ("enable_response_messages",),
    "messages": (),
}
"""Where the decode worker takes ids, and what in a request speaks against them: its answer has parts made of the text.
"""
_BODY_IDS = frozenset({"chat", "completions", "responses", "generate"})
_ARRAY_OF_IDS = re.compile(rb"\[\s*\d")
_NOTHING = frozenset({b"null", b"false", b'""'})


class Body:
    """One request's JSON body, for an API of the given kind. `clean` is without anything by which a client could steer
    KV transfers; the very bytes that came if there was nothing of that.
    """

    __slots__ = ("_fields", "clean", "kind")

    def __init__(self, raw: bytes, kind: str) -> None:
        """Raises BadRequest."""
        try:
            fields = split(raw)
        except NotAnObject as exc:
            raise BadRequest(f"The request body is not a valid JSON object: {exc}.", code="invalid_json") from None
        kept = _without_steering(fields)
        self.kind = kind
        self.clean = raw if kept is fields else join(kept)
        self._fields = kept

    def prefill(self, params: Mapping[str, Any], *, request_id: str | None = None, return_ids: bool = True) -> bytes:
        """What the prefill worker gets: one token, whole. `request_id` goes into the body where the API has it;
        `return_ids` asks for the prompt's token ids where an answer can bring them and the request does not.
        """
        fields = dict(self._fields)
        fields.pop("stream_options", None)
        fields["stream"] = _FALSE
        if self.kind == "generate":
            fields["sampling_params"] = msgspec.Raw(join(self._one_token(self._sampling())))
        else:
            fields = self._one_token(fields)
        if self.kind == "responses":
            fields["store"] = _FALSE  # The answer to be kept is the other leg's.
        if return_ids and self.kind in _RETURN_IDS and not self._has_ids():
            fields[_RETURN_IDS[self.kind]] = _TRUE
        if request_id is not None and self.kind in _BODY_IDS:
            fields["request_id"] = piece(request_id)
        fields[_PARAMS] = _object(params)
        return join(fields)

    def decode(
        self, params: Mapping[str, Any] | None = None, prompt_token_ids: Sequence[int] | bytes | None = None
    ) -> bytes:
        """What the decode worker gets: the original, with `params`.

        `prompt_token_ids` (bytes: uint32) spare it tokenising again: as the `prompt` of /v1/completions, else inside
        the params. They are left out where the answer would not be the same with them; the engine itself leaves them
        out when there are images in the messages.
        """
        ids = None if prompt_token_ids is None or not self._takes_ids() else _ids(prompt_token_ids)
        if params is None and ids is None:
            return self.clean
        fields = dict(self._fields)
        if ids is not None and self.kind == "completions":
            fields["prompt"] = ids
        elif ids is not None:
            params = {**(params or {}), "prompt_token_ids": ids}
        if params is not None:
            fields[_PARAMS] = _object(params)
        return join(fields)

    def _one_token(self, fields: Fields) -> Fields:
        """Every limit is set, as an absent one means the model's context; `min_tokens` may not be above it."""
        fields.pop("min_tokens", None)
        for name in LIMITS[self.kind]:
            fields[name] = _ONE
        return fields

    def _sampling(self) -> Fields:
        try:
            return split(self._fields.get("sampling_params", b"{}"))
        except NotAnObject:
            return {}

    def _has_ids(self) -> bool:
        prompt = self._fields.get("prompt")
        return self.kind == "completions" and prompt is not None and _ARRAY_OF_IDS.match(prompt) is not None

    def _takes_ids(self) -> bool:
        return self.kind in _NO_IDS and not any(map(self._is_set, _NO_IDS[self.kind]))

    def _is_set(self, name: str) -> bool:
        value = self._fields.get(name)
        return value is not None and bytes(value) not in _NOTHING


class _Peek(msgspec.Struct):
    """Where a connector's keys can be: everything else in a body is skipped, not read."""

    kv_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    ec_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    vllm_xargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    extra_args: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    sampling_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_peek = msgspec.json.Decoder(_Peek)
_PEEKED = frozenset(_Peek.__struct_fields__)
MOST_MEMBERS = 100_000
"""Bodies with more are not taken apart: a million takes seconds. Counted by what may be one, in strings too."""


def is_takeable(raw: bytes) -> bool:
    """Whether it can be taken apart without holding up others."""
    return len(raw) < 8 * MOST_MEMBERS or min(raw.count(b":"), raw.count(b'"') // 2) <= MOST_MEMBERS


def clean(raw: bytes, members: Mapping[str, Any] | None = None) -> bytes:
    """The body of any route without what could steer KV transfers: the same object if there is nothing of that, or it
    is no JSON object. `members`: of the object it is, where they have been read.

    Raises BadRequest for what begins like an object, may hold such a key, and cannot be read here but perhaps by an
    engine (an object nested too deep for us, say).
    """
    if members is not None and _PEEKED.isdisjoint(members):
        return raw
    if not looks_like_object(raw):
        return raw
    try:
        peek = _peek.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        pass
    else:
        if all(getattr(peek, name) is msgspec.UNSET for name in peek.__struct_fields__):
            return raw
    if not is_takeable(raw):
        raise BadRequest("The request body has too many members.", code="invalid_json")
    try:
        fields = split(raw)
    except NotAnObject:
        if any(mark in raw for mark in _MARKS) or 0 in raw[:4]:
            raise BadRequest("The request body is not a valid JSON object.", code="invalid_json") from None
        return raw
    kept = _without_steering(fields)
    return raw if kept is fields else join(kept)


def _without_steering(fields: Fields, depth: int = 0) -> Fields:
    """`fields` itself if there is nothing to leave out."""
    changed: dict[str, msgspec.Raw | None] = {}
    for name in fields:
        if name in _TRANSFER or (depth > 0 and name.startswith(_STEERING)):
            changed[name] = None
        elif name in _CARRIERS and depth < _DEPTH:
            try:
                inner = split(fields[name])
            except NotAnObject:
                continue  # No engine takes it.
            kept = _without_steering(inner, depth + 1)
            if kept is not inner:
                changed[name] = msgspec.Raw(join(kept))
    if not changed:
        return fields
    merged = {name: changed.get(name, value) for name, value in fields.items()}
    return {name: value for name, value in merged.items() if value is not None}


def _object(params: Mapping[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(join({name: piece(value) for name, value in params.items()}))


def _ids(ids: Sequence[int] | bytes) -> msgspec.Raw:
    return piece(memoryview(ids).cast("I").tolist() if isinstance(ids, bytes) else list(ids))
