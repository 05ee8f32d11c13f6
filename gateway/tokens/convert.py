"""/v1/messages and /v1/responses bodies -> the chat completions body vLLM itself turns them into.

Sources: vLLM 0.32 `entrypoints/anthropic/serving.py` and `entrypoints/openai/responses/utils.py`. What needs state the
engine keeps (a previous response) or special renderers is refused with CannotTokenize, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.tokens.types import CannotTokenize, Json, Reason

_BILLING_HEADER = "x-anthropic-billing-header"
_UNFINISHED = ("in_progress", "incomplete")


def chat_from_messages(body: Mapping[str, Any]) -> Json:
    """The chat body for /v1/messages; system messages stay where they stand (see `system_first`)."""
    messages: list[Json] = []
    if system := _system_text(body.get("system")):
        messages.append({"role": "system", "content": system})
    for message in body["messages"]:
        content = message.get("content")
        if message["role"] == "system":
            if text := _system_text(content):
                messages.append({"role": "system", "content": text})
        elif isinstance(content, str):
            messages.append({"role": message["role"], "content": content})
        else:
            _add_blocks(messages, message["role"], content)
    chat: Json = {
        "model": body.get("model"),
        "messages": messages,
        "chat_template_kwargs": body.get("chat_template_kwargs"),
        "kv_transfer_params": body.get("kv_transfer_params"),
    }
    if (effort := (body.get("output_config") or {}).get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if (body.get("thinking") or {}).get("type") == "disabled":
        chat["reasoning_effort"] = "none"
    if (tools := body.get("tools")) is not None:
        chat["tools"] = [_tool_from_messages(tool) for tool in tools]
        chat["tool_choice"] = "none" if (body.get("tool_choice") or {}).get("type") == "none" else "auto"
    return chat


def system_first(messages: list[Any]) -> list[Any]:
    """All system messages of a converted /v1/messages chat as one in front, for templates that want that."""
    if not any(message["role"] == "system" for message in messages[1:]):
        return messages
    system = "".join(message["content"] for message in messages if message["role"] == "system")
    return [{"role": "system", "content": system}, *(m for m in messages if m["role"] != "system")]


def _system_text(system: object) -> str:
    if system is None:
        return ""
    if isinstance(system, str):
        return system
    if not isinstance(system, list):
        raise CannotTokenize(Reason.MALFORMED)
    texts = [block.get("text") or "" for block in system if block["type"] == "text"]
    return "".join(text for text in texts if not text.startswith(_BILLING_HEADER))


def _add_blocks(messages: list[Json], role: str, blocks: Iterable[Json]) -> None:
    parts: list[Json] = []
    calls: list[Json] = []
    reasoning: list[str] = []
    for block in blocks:
        match block["type"]:
            case "text":
                if block.get("text"):
                    parts.append({"type": "text", "text": block["text"]})
            case "image":
                parts.append({"type": "image_url", "image_url": {"url": ""}})
            case "thinking":
                if block.get("thinking") is not None:
                    reasoning.append(block["thinking"])
            case "tool_use":
                arguments = json.dumps(block.get("input") or {})
                calls.append(_call(block.get("id") or "", block.get("name") or "", arguments))
            case "tool_result" if role == "user":
                messages.extend(_tool_results(block))
            case "redacted_thinking" | "tool_reference":
                pass
            case _:
                raise CannotTokenize(Reason.UNSUPPORTED)
    message: Json = {"role": role}
    if reasoning:
        message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    if len(parts) == 1 and parts[0]["type"] == "text":
        message["content"] = parts[0]["text"]
    elif parts:
        message["content"] = parts
    if role != "user" or "content" in message:
        messages.append(message)


def _tool_results(block: Json) -> list[Json]:
    call_id = block.get("tool_use_id") or ""
    content = block.get("content")
    if not isinstance(content, list):
        return [{"role": "tool", "tool_call_id": call_id, "content": content or ""}]
    texts = [item.get("text", "") for item in content if item.get("type") == "text"]
    images = [item for item in content if item.get("type") == "image"]
    names = [item.get("tool_name") or item.get("name") for item in content if item.get("type") == "tool_reference"]
    out: list[Json] = [{"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}]
    if images:
        out.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}} for _ in images]})
    if references := [{"type": "tool_reference", "name": name} for name in names if name]:
        out.append({"role": "tool", "tool_call_id": call_id, "content": references})
    return out


def _tool_from_messages(tool: Json) -> Json:
    schema = dict(tool["input_schema"])
    schema.setdefault("type", "object")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": schema}
    for name in ("strict", "defer_loading"):
        function[name] = tool.get(name)
    return {"type": "function", "function": function}


def chat_from_responses(body: Mapping[str, Any]) -> Json:
    """The chat body for /v1/responses."""
    if body.get("previous_response_id") is not None or body.get("prompt") is not None:
        raise CannotTokenize(Reason.UNSUPPORTED)
    given = body["input"]
    messages: list[Json] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for item in given:
            _add_item(messages, item)
    unfinished = (
        not isinstance(given, str)
        and bool(given)
        and given[-1].get("type", "message") in ("message", "reasoning")
        and given[-1].get("status") in _UNFINISHED
    )
    chat: Json = {
        "model": body.get("model"),
        "messages": messages,
        "chat_template_kwargs": body.get("chat_template_kwargs"),
        "kv_transfer_params": body.get("kv_transfer_params"),
        "add_generation_prompt": not unfinished,
        "continue_final_message": unfinished,
        "reasoning_effort": (body.get("reasoning") or {}).get("effort"),
    }
    # vLLM shows the model its function tools only, and drops the built-in ones.
    if tools := body.get("tools"):
        chat["tools"] = [_tool_from_responses(tool) for tool in tools if tool["type"] not in _BUILT_IN]
        chat["tool_choice"] = body.get("tool_choice")
    if body.get("truncation", "disabled") != "disabled":
        chat["truncate_prompt_tokens"] = -1
    return chat


_BUILT_IN = frozenset(
    {"web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp", "local_shell"}
)


def _tool_from_responses(tool: Json) -> Json:
    if tool["type"] != "function":
        raise CannotTokenize(Reason.UNSUPPORTED)
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _add_item(messages: list[Json], item: Json) -> None:
    """Adds one input item as a message, or to the assistant message before it, as vLLM merges them."""
    previous = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match item.get("type", "message"):
        case "function_call":
            if item.get("namespace"):
                raise CannotTokenize(Reason.UNSUPPORTED)
            call = _call(item["call_id"], item["name"], item["arguments"])
            if previous is not None:
                previous.setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "tool_calls": [call]})
        case "function_call_output":
            messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        case "reasoning":
            _fill(messages, previous, "reasoning", _reasoning_text(item))
        case "message" if item["role"] == "assistant" and (text := _first_text(item.get("content"))) is not None:
            _fill(messages, previous, "content", text)
        case "message":
            messages.append(item)
        case _:
            raise CannotTokenize(Reason.UNSUPPORTED)


def _fill(messages: list[Json], previous: Json | None, name: str, text: str) -> None:
    if previous is not None and previous.get(name) is None:
        previous[name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _first_text(content: object) -> str | None:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        text = content[0].get("text")
        return text if isinstance(text, str) else None
    return None


def _reasoning_text(item: Json) -> str:
    if item.get("encrypted_content"):
        raise CannotTokenize(Reason.UNSUPPORTED)
    for name in ("content", "summary"):
        if entries := item.get(name):
            return str(entries[0]["text"])
    return ""


def _call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
