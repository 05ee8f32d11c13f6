"""Why a request must be served by one engine, told by its body.

Two kinds of reason. The answer needs the whole prompt's forward pass or several sequences, which one set of transfer
params cannot bring over. Or a field that the prefill leg replaces has a value that the engine refuses: then the decode
engine itself is to say so, before a prefill is spent. Fields that both legs carry alike need no look here: the prefill
engine refuses them and its answer is the client's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scorer.types import PdReason

LIMITS: dict[str, tuple[str, ...]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "completions": ("max_tokens",),
    "messages": ("max_tokens",),
    "responses": ("max_output_tokens",),
    "generate": ("max_tokens",),
}
"""The fields that bound an answer's length, the one that counts first. In `generate` they are in `sampling_params`."""

_COMPLETIONS_LIMIT = 16
"""max_tokens of /v1/completions when absent (OpenAI's and vLLM's default)."""
_FLAGS = {
    "chat": ("stream", "return_token_ids"),
    "completions": ("stream", "return_token_ids"),
    "responses": ("stream", "store", "enable_response_messages"),
}
"""Flags that the prefill leg sets."""
_CLIENT_TOOLS = frozenset({"function", "custom"})


def why_local(
    kind: str | None, fields: Mapping[str, Any], n_prompts: int, *, context_tokens: int | None = None
) -> PdReason | None:
    """None: it may go remote. `kind` as in `Route.tokens`; `context_tokens` is the model's, where it is known."""
    if kind not in LIMITS:
        return PdReason.NOT_GENERATION
    sampling = fields.get("sampling_params") if kind == "generate" else fields
    if not isinstance(sampling, Mapping):
        return PdReason.WOULD_BE_REJECTED
    return (
        _several(kind, fields, sampling, n_prompts)
        or _whole_prompt(kind, fields, sampling)
        or (PdReason.WOULD_BE_REJECTED if _is_refused(kind, fields, sampling, context_tokens) else None)
    )


def _several(kind: str, fields: Mapping[str, Any], sampling: Mapping[str, Any], n_prompts: int) -> PdReason | None:
    if n_prompts > 1:
        return PdReason.SEVERAL_PROMPTS
    n = sampling.get("n", 1)
    if n is not None and n != 1:
        return PdReason.N_SEQUENCES if _is_number(n) and n > 1 else PdReason.WOULD_BE_REJECTED
    if sampling.get("best_of") not in (None, 0, 1):
        return PdReason.BEST_OF
    if fields.get("use_beam_search"):
        return PdReason.BEAM_SEARCH
    if kind == "responses":
        if fields.get("previous_response_id") is not None or fields.get("background"):
            # Kept in the memory of the one engine that answered, and answered to whoever asks that engine.
            return PdReason.STORED_RESPONSE
        if _runs_tools(fields.get("tools")):
            # The engine runs each turn as a sequence of its own, with the first one's transfer params.
            return PdReason.N_SEQUENCES
    return None


def _whole_prompt(kind: str, fields: Mapping[str, Any], sampling: Mapping[str, Any]) -> PdReason | None:
    if any(sampling.get(name) is not None for name in ("prompt_logprobs", "prompt_logprob_token_ids")):
        return PdReason.PROMPT_LOGPROBS
    if fields.get("echo"):
        return PdReason.ECHO
    if fields.get("prompt_embeds") is not None or _cuts_by_limit(kind, fields):
        return PdReason.NOT_READABLE
    return None


def _cuts_by_limit(kind: str, fields: Mapping[str, Any]) -> bool:
    """Whether how far the prompt is cut depends on the answer having a limit: the two legs would cut differently."""
    if any(fields.get(name) is not None for name in LIMITS[kind]):
        return False
    if kind == "responses":
        return bool(fields.get("truncation", "disabled") != "disabled")
    return kind == "chat" and bool(fields.get("truncate_prompt_tokens") == -1)


def _runs_tools(tools: object) -> bool:
    return isinstance(tools, list) and any(
        isinstance(tool, Mapping) and tool.get("type") not in _CLIENT_TOOLS for tool in tools
    )


def _is_refused(kind: str, fields: Mapping[str, Any], sampling: Mapping[str, Any], context_tokens: int | None) -> bool:
    limits = [sampling.get(name) for name in LIMITS[kind]]
    if not all(limit is None or (type(limit) is int and limit >= 1) for limit in limits):
        return True
    limit = next((limit for limit in limits if limit is not None), None)
    if limit is None and kind == "messages":
        return True
    if limit is None and kind == "completions":
        limit = _COMPLETIONS_LIMIT
    if limit is not None and context_tokens is not None and limit > context_tokens and kind != "generate":
        return True
    if kind in ("chat", "completions", "generate"):
        least = sampling.get("min_tokens", 0)
        if type(least) is not int or least < 0 or (limit is not None and least > limit):
            return True
    if not all(_is_flag(fields.get(name)) for name in _FLAGS.get(kind, ("stream",))):
        return True
    if kind == "responses" and fields.get("enable_response_messages", False) is None:
        return True
    return kind in ("chat", "completions", "generate") and _options_are_refused(kind, fields)


def _options_are_refused(kind: str, fields: Mapping[str, Any]) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, Mapping) or (options and not fields.get("stream") and kind != "generate"):
        return True
    return not all(_is_flag(options.get(name)) for name in ("include_usage", "continuous_usage_stats"))


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
