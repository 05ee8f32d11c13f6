"""A body with images, audio or video -> links by which its prompt is known without its content (`indexer.references`).

Nothing is fetched or decoded: a reference is what the client wrote (a URL, a data: URI, base64), or its `uuid`, which
vLLM takes for the item's identity whatever else is given. Only hashes leave this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import xxhash

from gateway.tokens import estimate
from indexer.references import Link

_MOST_LINKS = 64
"""The last ones: the next turn of a conversation needs no more."""
_AROUND = ("model", "cache_salt", "tools", "tool_choice", "system", "instructions", "chat_template_kwargs", "documents",
           "chat_template", "reasoning", "reasoning_effort", "mm_processor_kwargs", "media_io_kwargs")  # fmt: skip
"""Fields that change a prompt as a whole, or what is computed of its media."""
_MESSAGES = {"chat": "messages", "messages": "messages", "responses": "input"}
_BYTES_PER_TOKEN = 4.0


def media_links(kind: str, body: Mapping[str, Any]) -> tuple[Link, ...]:
    """The links of the prompt from its first media item on; none if it has no such item, or cannot be read."""
    messages = body.get(_MESSAGES.get(kind, ""))
    if not isinstance(messages, list):
        return ()
    try:
        return tuple(_links(body, messages))[-_MOST_LINKS:]
    except (TypeError, ValueError, RecursionError, OverflowError, msgspec.MsgspecError):
        return ()  # Lone surrogates among others: Python reads them, and nobody writes them.


def _links(body: Mapping[str, Any], messages: list[Any]) -> Iterator[Link]:
    if not any(_parts_with_media(message) for message in messages):
        return
    around = [body.get(name) for name in _AROUND]
    key = _hash(around, 0)
    n_bytes, media = sum(estimate.text_bytes(value) for value in around), 0
    for message in messages:
        parts = _parts_with_media(message)
        head = message if parts is None else {k: v for k, v in message.items() if k not in ("content", "output")}
        key = _hash(head, key)
        n_bytes += estimate.text_bytes(head)
        for part in parts or ():
            key = _hash(_identity(part), key)
            n_bytes += estimate.text_bytes(part)
            if _is_media(part):
                media += 1
                yield key, estimate.tokens_of(n_bytes, _BYTES_PER_TOKEN, media=media)
        key = _hash(None, key)
        if media:
            yield key, estimate.tokens_of(n_bytes, _BYTES_PER_TOKEN, media=media)


def _parts_with_media(message: Any) -> list[Any] | None:
    """The parts of a message if some of them bring more than text."""
    if not isinstance(message, dict):
        return None
    for name in ("content", "output"):
        parts = message.get(name)
        if isinstance(parts, list) and any(map(_is_media, parts)):
            return parts
    return None


def _is_media(part: Any) -> bool:
    """Also a tool's result with an image in it."""
    inner = part.get("content") if isinstance(part, dict) else None
    return estimate.is_media(part) or (isinstance(inner, list) and any(map(estimate.is_media, inner)))


def _identity(part: Any) -> Any:
    uuid = part.get("uuid") if isinstance(part, dict) else None
    return ["uuid", part.get("type"), uuid] if isinstance(uuid, str) and estimate.is_media(part) else part


def _hash(value: Any, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(value), seed)
