"""What the token room hands out, and the few words it uses to say why."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

Source = Literal["given", "local", "engine", "estimate"]
"""Who made the ids: the client, our tokenizer, the engine's ``/tokenize``, or nobody (the count is a guess)."""

Json = dict[str, Any]
"""A decoded JSON object."""

EngineTokenize = Callable[[bytes], Awaitable[tuple[int, bytes]]]
"""POSTs a JSON body to an engine's ``/tokenize``: (HTTP status, response body). Raises when there is no answer."""


class Reason(StrEnum):
    """Why the best source was not used. A closed set without any prompt text, so it can be a metric label."""

    MODE = "mode"
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_KIND = "unknown_kind"
    MALFORMED = "malformed_body"
    UNSUPPORTED = "unsupported_content"
    TOO_LARGE = "prompt_too_large"
    TOO_MANY_PROMPTS = "too_many_prompts"
    INTERNAL = "internal_error"
    MEDIA = "media_after_prefix"
    TRUNCATED = "truncated_to_model_length"
    HARMONY = "harmony_rendered_by_engine"
    NO_TOKENIZER = "no_local_tokenizer"
    LOADING = "local_loading"
    LOAD_FAILED = "local_load_failed"
    MISMATCH = "local_mismatch"
    NO_TEMPLATE = "no_chat_template"
    UNTRUSTED_TEMPLATE = "untrusted_request_template"
    TEMPLATE_REJECTED = "template_rejected"
    TEMPLATE_FAILED = "template_failed"
    QUEUE_FULL = "local_queue_full"
    LOCAL_TIMEOUT = "local_timeout"
    NO_ENGINE = "no_engine"
    BREAKER_OPEN = "engine_breaker_open"
    ENGINE_BUSY = "engine_busy"
    ENGINE_TIMEOUT = "engine_timeout"
    ENGINE_OVER_BUDGET = "engine_over_budget"
    ENGINE_ERROR = "engine_error"
    ENGINE_REJECTED = "engine_rejected"


class CannotTokenize(Exception):
    """A source gave no ids; carries only a `Reason`, never text of the prompt."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Tokens:
    """One prompt as token ids.

    `ids`: uint32 little-endian, four bytes per token, or None when nobody could say (`source` is then "estimate").
    `n_tokens`: tokens of the whole prompt; an estimate when `ids` is None or `prefix_only` is set.
    `prefix_only`: `ids` covers only the text before the first image, video or audio part.
    `reason`: `Reason` values, joined by "; ", of the better sources that were passed over.
    `media_parts`: image, video and audio parts in the prompt.
    """

    ids: bytes | None
    n_tokens: int
    source: Source
    prefix_only: bool = False
    reason: str | None = None
    media_parts: int = 0

    def as_array(self) -> array[int]:
        """The ids as ``array('I')``, e.g. to send them on; empty when there are none."""
        out = array("I", self.ids or b"")
        if sys.byteorder == "big":
            out.byteswap()
        return out


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as uint32 little-endian bytes. Raises TypeError or OverflowError when one is not a uint32."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def join_reasons(*reasons: Reason | None) -> str | None:
    """Reasons in order, without repeats."""
    return "; ".join(dict.fromkeys(str(r) for r in reasons if r is not None)) or None
