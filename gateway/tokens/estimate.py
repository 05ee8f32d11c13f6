"""How long a prompt is when nobody can tokenise it: bytes of text over bytes per token."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import msgspec

MEDIA_KEYS = frozenset(
    {
        "image_url",
        "input_image",
        "image_embeds",
        "image_pil",
        "audio_url",
        "input_audio",
        "audio_embeds",
        "video_url",
        "video_embeds",
        "prompt_embeds",
    }
)
"""Names of the media content parts of vLLM's chat API, as a part's ``type`` and as the key of its payload."""

# 24 x 24 patches, the count of LLaVA-1.5; other models take from 64 to several thousand.
IMAGE_TOKENS = 576
# Role markers and turn separators of common chat templates.
MESSAGE_TOKENS = 4


def text_bytes(value: object) -> int:
    """UTF-8 bytes of all text inside `value`, leaving out media payloads (a data URL is no text)."""
    total = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item) if item.isascii() else len(item.encode("utf-8", "surrogatepass"))
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(v for k, v in item.items() if k not in MEDIA_KEYS and k not in ("type", "source", "role"))
    return total


def media_parts(messages: object) -> int:
    """Image, audio and video parts in chat `messages`."""
    if not isinstance(messages, list):
        return 0
    count = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            count += sum(is_media(part) for part in content)
    return count


def is_media(part: object) -> bool:
    """Whether a content part brings anything but text."""
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    if isinstance(kind, str) and (kind in MEDIA_KEYS or kind == "image"):
        return True
    return (kind is None or part.get("uuid") is not None) and not MEDIA_KEYS.isdisjoint(part)


def body_bytes(kind: str, body: Mapping[str, Any]) -> int:
    """Text bytes of a whole request body that would become prompt, whatever its kind."""
    fields = {
        "completions": ("prompt",),
        "messages": ("system", "messages"),
        "responses": ("instructions", "input"),
    }.get(kind, ("messages", "prompt", "documents"))
    total = sum(text_bytes(body.get(name)) for name in fields)
    if tools := body.get("tools"):
        total += encoded_bytes(tools)
    return total


def encoded_bytes(value: object) -> int:
    """Bytes of `value` as JSON; 0 when it is no JSON."""
    try:
        return len(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        return 0


def tokens_of(n_bytes: int, bytes_per_token: float, *, messages: int = 0, media: int = 0) -> int:
    """Estimated tokens, at least 1."""
    return max(1, ceil(n_bytes / bytes_per_token) + MESSAGE_TOKENS * messages + IMAGE_TOKENS * media)
