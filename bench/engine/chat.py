"""The toy's chat template: `<bos>` then `<role> content <end>` for each message, then `<assistant>` to be continued."""

import json
from typing import Any, Final

import xxhash

from bench.engine import tokenizer
from bench.engine.request import mix64

_ROLES: Final = {
    "system": tokenizer.SYSTEM,
    "developer": tokenizer.SYSTEM,
    "user": tokenizer.USER,
    "assistant": tokenizer.ASSISTANT,
    "tool": tokenizer.TOOL,
}


def render(
    messages: list[Any], tools: list[Any] | None = None, add_generation_prompt: bool = True, image_tokens: int = 0
) -> list[int]:
    """Token ids of a conversation; ValueError names what is wrong with it. An image takes `image_tokens` (0: the model
    takes none).
    """
    ids = [tokenizer.BOS]
    if tools:
        ids += [tokenizer.SYSTEM, *tokenizer.encode(json.dumps(tools, sort_keys=True)), tokenizer.END]
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{number}] must be an object")
        role = _ROLES.get(str(message.get("role")))
        if role is None:
            raise ValueError(f"messages[{number}] has unknown role {message.get('role')!r}")
        ids.append(role)
        ids += content_ids(message.get("content"), number, image_tokens)
        if message.get("tool_calls"):
            ids += tokenizer.encode(json.dumps(message["tool_calls"], sort_keys=True))
        ids.append(tokenizer.END)
    if add_generation_prompt:
        ids.append(tokenizer.ASSISTANT)
    return ids


def is_text(messages: Any) -> bool:
    """No message has a part that is not text, so token ids can stand for all of it."""
    contents = [message.get("content") for message in messages or () if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(
        isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("text"), str)) for part in parts
    )


def content_ids(content: Any, number: int, image_tokens: int) -> list[int]:
    if not image_tokens or not isinstance(content, list):
        return tokenizer.encode(content_text(content, number))
    ids: list[int] = []
    for part in content:
        image = part.get("image_url") if isinstance(part, dict) else None
        if image is None:
            ids += tokenizer.encode(content_text([part], number))
            continue
        # Other images, other KV: what vLLM does by extra keys of blocks does a hash of ids here.
        key = xxhash.xxh3_64_intdigest(str(part.get("uuid") or image).encode())
        first, end = tokenizer.GENERATED_IDS
        ids += [first + mix64(key + i) % (end - first) for i in range(image_tokens)]
    return ids


def content_text(content: Any, number: int) -> str:
    """A message's text: a string, null, or text parts in a row. ValueError for anything a text model does not take."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"messages[{number}].content must be a string or a list of parts")
    parts: list[str] = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"messages[{number}]: At most 0 {kind}(s) may be provided in one prompt.")
    return "\n".join(parts)
