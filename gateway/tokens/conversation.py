"""Chat messages as clients send them -> the messages a chat template gets to see, by vLLM's rules.

Sources: vLLM 0.32 `renderers/chat_utils.py` (parts, roles, tool calls) and `renderers/hf.py` (developer role), and
transformers 5 `chat_template_utils.py` (None values, reasoning names).
"""

from __future__ import annotations

import json
from typing import Any

from gateway.tokens import estimate
from gateway.tokens.content_format import Format
from gateway.tokens.types import CannotTokenize, Json, Reason

_TEXT_KEY = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_MODALITY = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "image_embeds": "image",
    "image_pil": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "video_embeds": "video",
}
# Fields vLLM reads from a content part; any other field of a part reaches the template.
_PART_FIELDS = frozenset(
    {"audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio"}
    | {"name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url"}
)
# First words of a system line of Claude Code that changes with every request; vLLM drops the line.
_BILLING_HEADER = "x-anthropic-billing-header"


class Conversation:
    """Builds template messages.

    `stand_in`: text put in place of the first media part. `validated`: the messages went through vLLM's request model,
    which sorts the keys of tool calls; those of /v1/responses do not.
    """

    def __init__(self, content_format: Format, *, stand_in: str | None = None, validated: bool = True) -> None:
        self._openai = content_format == "openai"
        self._stand_in = stand_in
        self._call_order = ("arguments", "name") if validated else ("name", "arguments")

    def build(self, messages: list[Any]) -> list[Json]:
        """Template messages for `messages`, which stay unchanged. Raises CannotTokenize for what vLLM would refuse."""
        try:
            return [
                message if _is_plain(message) and not self._openai else self._message(message) for message in messages
            ]
        except (KeyError, TypeError, AttributeError, ValueError) as exc:
            raise CannotTokenize(Reason.MALFORMED) from exc

    def _message(self, message: Json) -> Json:
        role = message["role"]
        if not isinstance(role, str):
            raise CannotTokenize(Reason.MALFORMED)
        content = message.get("content")
        if isinstance(content, str) and role != "system":  # Nearly every message: not worth taking apart.
            out: Json = {"role": role, "content": [{"type": "text", "text": content}] if self._openai else content}
        else:
            parts: list[Any] = [] if content is None else [content] if isinstance(content, str) else content
            if not isinstance(parts, list):
                raise CannotTokenize(Reason.MALFORMED)
            if role == "system":
                parts = _without_billing_header(parts)
            out = {"role": role, "content": self._content(parts)}
        if role == "assistant":
            _add_assistant_fields(out, message, self._call_order)
        elif role == "tool":
            if message.get("tool_call_id") is not None:
                out["tool_call_id"] = message["tool_call_id"]
            out["content"] = _tool_text(out["content"])
        for name in ("name", "task"):
            if isinstance(message.get(name), str):
                out[name] = message[name]
        if role == "developer":
            out["tools"] = message.get("tools")
        return out

    def _content(self, parts: list[Any]) -> str | list[Json]:
        texts: list[str] = []
        dicts: list[Json] = []
        leading: list[str] = []
        for part in parts:
            if isinstance(part, str):
                text: str | None = part
            elif estimate.is_media(part):
                if self._stand_in is not None:
                    # Joined strings get the model's placeholders in front, whatever the place of the part.
                    leading.append(self._stand_in)
                    dicts.append({"type": "text", "text": self._stand_in})
                    self._stand_in = None
                else:
                    dicts.append({"type": _modality(part), **_extras(part)})
                continue
            elif part.get("type") == "tool_reference":
                text = part["name"]
                dicts.append({"type": "tool_reference", "name": text})
                texts.append(_string(text))
                continue
            else:
                text = part.get(_TEXT_KEY[part["type"]])
                if text is None and part["type"] in ("text", "refusal"):
                    continue
            texts.append(_string(text))
            dicts.append({"type": "text", "text": text, **(_extras(part) if isinstance(part, dict) else {})})
        return dicts if self._openai else "\n".join(leading + texts)


def _is_plain(message: Json) -> bool:
    """Whether a template that wants strings gets to see it as it is. (It cannot change it: see `template.py`.)"""
    return (
        len(message) == 2
        and message.get("role") in ("user", "assistant")
        and type(message.get("content")) is str
        and next(iter(message)) == "role"  # A template may print it whole.
    )


def _extras(part: Json) -> Json:
    return {key: value for key, value in part.items() if key not in _PART_FIELDS}


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise CannotTokenize(Reason.MALFORMED)
    return value


def _modality(part: Json) -> str:
    kind = part.get("type")
    if kind not in _MODALITY:
        kind = next((key for key in part if key in _MODALITY), None)
    if kind is None:
        raise CannotTokenize(Reason.UNSUPPORTED)
    return _MODALITY[kind]


def _without_billing_header(parts: list[Any]) -> list[Any]:
    kept = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if part.get("type") == "text" else None
        if isinstance(text, str) and text.startswith(_BILLING_HEADER):
            rest = text.partition("\n")[2]
            if not rest:
                continue
            part = rest if isinstance(part, str) else {**part, "text": rest}
        kept.append(part)
    return kept


def _add_assistant_fields(out: Json, message: Json, order: tuple[str, ...]) -> None:
    tool_calls = message.get("tool_calls")
    if tool_calls:
        out["tool_calls"] = [_tool_call(call, order) for call in tool_calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        out["reasoning"] = out["reasoning_content"] = reasoning  # Templates read it under either name.


def _tool_call(call: Json, order: tuple[str, ...]) -> Json:
    """A tool call with its arguments as a dict: templates print them, so a JSON string would be quoted twice.

    The order of the keys is vLLM's too, as some templates print the whole object.
    """
    function = call["function"]
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise CannotTokenize(Reason.UNSUPPORTED)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        arguments = {}
    return _ordered(call, ("id", "function", "type")) | {
        "function": _ordered({**function, "arguments": arguments}, order)
    }


def _ordered(value: Json, first: tuple[str, ...]) -> Json:
    return {key: value[key] for key in first if key in value} | value


def _tool_text(content: str | list[Json]) -> str | list[Json]:
    """Tool results are one string even for templates that walk over parts, unless there is more than text in them."""
    if isinstance(content, str) or any(part["type"] != "text" for part in content):
        return content
    return "\n".join(part["text"] for part in content)


def developer_as_system(messages: list[Json]) -> list[Json]:
    """For templates that do not know the developer role: such messages become system messages, all of them in front."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    messages = [
        {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    system = [message for message in messages if message["role"] == "system"]
    if len(system) == 1 and messages[0] is system[0]:
        return messages
    texts = [_joined(message.get("content", "")) for message in system]
    merged: Json = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _joined(content: str | list[Json]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


def tool_schemas(tools: list[Any]) -> list[Json]:
    """Tools as vLLM's request model writes them out again: known keys only, `description` even if null."""
    try:
        return [_tool_schema(tool) for tool in tools]
    except (KeyError, TypeError, AttributeError) as exc:
        raise CannotTokenize(Reason.MALFORMED) from exc


def _tool_schema(tool: Json) -> Json:
    function = tool["function"]
    schema: Json = {name: function.get(name) for name in ("name", "description", "parameters")}
    if not isinstance(schema["name"], str):
        raise CannotTokenize(Reason.MALFORMED)
    if function.get("strict") is not None:
        schema["strict"] = function["strict"]
    outer, inner = tool.get("defer_loading"), function.get("defer_loading")
    if inner is not None or outer is not None:
        schema["defer_loading"] = outer if inner is None else inner
    out: Json = {"type": "function", "function": schema}
    if outer is not None:
        out["defer_loading"] = outer
    return out
