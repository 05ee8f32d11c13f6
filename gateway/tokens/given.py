"""Request body -> the prompts in it: ids the client gave, text, a chat, or something only the engine understands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from gateway.tokens import convert, estimate
from gateway.tokens.cache import part_of
from gateway.tokens.types import CannotTokenize, Json, Reason, pack_ids


@dataclass(frozen=True, slots=True)
class Truncation:
    """``truncate_prompt_tokens`` (tokens to keep; negative: the model's length) and ``truncation_side``."""

    keep: int | None = None
    side: str | None = None

    def apply(self, ids: bytes, default_side: str, *, prefix_only: bool = False) -> bytes:
        """What is left of `ids`. Raises CannotTokenize when that depends on tokens or a length we do not know."""
        if self.keep is None:
            return ids
        left = (self.side or default_side) == "left"
        if left and (self.keep < 0 or prefix_only):
            raise CannotTokenize(Reason.TRUNCATED)
        if self.keep < 0 or self.keep * 4 >= len(ids):  # Cut from the right, a prefix stays a prefix.
            return ids
        return ids[len(ids) - self.keep * 4 :] if left else ids[: self.keep * 4]


WHOLE = Truncation()

MAX_PROMPTS = 64
"""So many prompts of one completions request are tokenised."""


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """Token ids from the request, uint32 little-endian."""

    ids: bytes


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text, as completions take it."""

    text: str
    add_special_tokens: bool
    truncation: Truncation = WHOLE
    part: int = 0
    """Of the cache of ids (see `part_of`)."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat in the shape of a chat completions body, and the API it came through."""

    body: Json
    add_special_tokens: bool = False
    api: Literal["chat", "messages", "responses"] = "chat"
    truncation: Truncation = WHOLE
    part: int = 0

    @property
    def messages(self) -> list[Any]:
        return self.body["messages"]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class OpaquePrompt:
    """No source but the estimate can serve this one."""

    reason: Reason
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of text, messages and media parts of a prompt."""

    n_bytes: int
    messages: int = 0
    media: int = 0

    def estimated_tokens(self, bytes_per_token: float) -> int:
        return estimate.tokens_of(self.n_bytes, bytes_per_token, messages=self.messages, media=self.media)


def size_of(prompt: TextPrompt | ChatPrompt) -> Size:
    if isinstance(prompt, TextPrompt):
        return Size(estimate.text_bytes(prompt.text))
    messages = prompt.messages
    return Size(estimate.body_bytes("chat", prompt.body), len(messages), estimate.media_parts(messages))


Prompt = GivenPrompt | TextPrompt | ChatPrompt | OpaquePrompt


def prompts_of(kind: str, body: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of one request, in order; at least one. Never raises."""
    try:
        return _apart(_PARSERS[kind](body), body.get("cache_salt"))
    except CannotTokenize as exc:
        reason = exc.reason
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError, RecursionError):
        reason = Reason.MALFORMED if kind in _PARSERS else Reason.UNKNOWN_KIND
    return [OpaquePrompt(reason, estimate.body_bytes(kind, body))]


def _apart(prompts: list[Prompt], salt: object) -> list[Prompt]:
    if not isinstance(salt, str):
        return prompts
    part = part_of(salt)
    return [replace(each, part=part) if isinstance(each, TextPrompt | ChatPrompt) else each for each in prompts]


def _completions(body: Mapping[str, Any]) -> list[Prompt]:
    if body.get("prompt_embeds") is not None:
        raise CannotTokenize(Reason.UNSUPPORTED)
    prompt = body["prompt"]
    add_special_tokens = _flag(body, "add_special_tokens", default=True)
    truncation = _truncation(body)
    if isinstance(prompt, str):
        return [TextPrompt(prompt, add_special_tokens, truncation)]
    if not prompt or not isinstance(prompt, list):
        raise CannotTokenize(Reason.MALFORMED)
    if isinstance(prompt[0], int):
        return [_given(prompt, truncation)]
    prompts: list[Prompt] = [
        TextPrompt(item, add_special_tokens, truncation) if isinstance(item, str) else _given(item, truncation)
        for item in prompt[:MAX_PROMPTS]
    ]
    if len(prompt) > MAX_PROMPTS:
        # the request is placed by its first prompts; the rest count by their size, without a look at each
        rest = prompt[MAX_PROMPTS:]
        sizes = [len(item) for item in rest if isinstance(item, (str, list))]
        given = isinstance(rest[0], list)
        prompts.append(OpaquePrompt(Reason.TOO_MANY_PROMPTS, sum(sizes) * (4 if given else 1)))
    return prompts


def _chat(body: Mapping[str, Any]) -> list[Prompt]:
    messages = body["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise CannotTokenize(Reason.MALFORMED)
    # vLLM takes forwarded prompt ids instead of rendering, unless it needs the messages themselves.
    forwarded = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
    if forwarded and not body.get("echo") and not estimate.media_parts(messages):
        return [GivenPrompt(pack_ids(forwarded))]
    add_special_tokens = _flag(body, "add_special_tokens", default=False)
    return [ChatPrompt(dict(body), add_special_tokens, truncation=_truncation(body))]


def _messages(body: Mapping[str, Any]) -> list[Prompt]:
    return [
        replace(prompt, api="messages") if isinstance(prompt, ChatPrompt) else prompt
        for prompt in _chat(convert.chat_from_messages(body))
    ]


def _responses(body: Mapping[str, Any]) -> list[Prompt]:
    # vLLM tokenises rendered responses with special tokens on (ResponsesRequest.build_tok_params), unlike chats.
    return [
        replace(prompt, add_special_tokens=True, api="responses") if isinstance(prompt, ChatPrompt) else prompt
        for prompt in _chat(convert.chat_from_responses(body))
    ]


def _generate(body: Mapping[str, Any]) -> list[Prompt]:
    return [GivenPrompt(pack_ids(body["token_ids"]))]


_PARSERS = {
    "completions": _completions,
    "chat": _chat,
    "messages": _messages,
    "responses": _responses,
    "generate": _generate,
}


def _given(ids: list[int], truncation: Truncation) -> GivenPrompt:
    return GivenPrompt(truncation.apply(pack_ids(ids), "right"))


def _truncation(body: Mapping[str, Any]) -> Truncation:
    keep, side = body.get("truncate_prompt_tokens"), body.get("truncation_side")
    if keep is None:
        return WHOLE
    if not isinstance(keep, int) or side not in (None, "left", "right"):
        raise CannotTokenize(Reason.MALFORMED)
    return Truncation(keep, side)


def _flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name)
    return default if value is None else bool(value)
