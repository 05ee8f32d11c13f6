"""The toy's chat template: `<bos>` then `<role> content <end>` for each message, then `<assistant>` to be continued."""

import json
from typing import Any, Final

from bench.engine import tokenizer

_ROLES: Final = {
    "system": tokenizer.SYSTEM,
    "developer": tokenizer.SYSTEM,
    "user": tokenizer.USER,
    "assistant": tokenizer.ASSISTANT,
    "tool": tokenizer.TOOL,
}


def render(messages: list[Any], tools: list[Any] | None = None, add_generation_prompt: bool = True) -> list[int]:
    """Token ids of a conversation; ValueError names what is wrong with it."""
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
        ids += tokenizer.encode(content_text(message.get("content"), number))
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
