"""A chat completions body -> what goes into the chat template, and the text that comes out.

`template_kwargs` is also what ``/tokenize`` needs: that endpoint has no `documents` or `reasoning_effort` of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.tokens import conversation, estimate
from gateway.tokens.convert import system_first
from gateway.tokens.given import ChatPrompt
from gateway.tokens.settings import TokenSettings
from gateway.tokens.template import ChatTemplate
from gateway.tokens.types import CannotTokenize, Json, Reason

# Private-use characters: no template writes them, no sane prompt holds them.
_MEDIA_MARKS = ("\ue0f0", "\ue0f1")
# Arguments of transformers' `apply_chat_template`, which a request must not set through its template kwargs.
_NOT_FOR_TEMPLATES = frozenset({"chat_template", "tokenize", "conversation", "messages", "tools", "return_dict"})
_FIELDS = frozenset({"documents", "add_generation_prompt", "continue_final_message"})


@dataclass(frozen=True, slots=True)
class Rendered:
    """Prompt text; with media, only the text before the first media part (`prefix_only`)."""

    text: str
    prefix_only: bool


def template_kwargs(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Json:
    """The template kwargs of a request, by precedence: own fields, `chat_template_kwargs`, the server's defaults."""
    asked = body.get("chat_template_kwargs") or {}
    effort = body.get("reasoning_effort")
    fields: Json = {
        "add_generation_prompt": body.get("add_generation_prompt", True),
        "continue_final_message": body.get("continue_final_message", False),
        "documents": body.get("documents"),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in asked:
        fields["enable_thinking"] = effort != "none"
    merged = dict(defaults)
    for layer in (asked, fields):
        # vLLM reads null and "auto" as "not set".
        merged.update({name: value for name, value in layer.items() if value is not None and value != "auto"})
    return merged


def tools_of(body: Mapping[str, Any], settings: TokenSettings) -> list[Any] | None:
    """The tools the template gets to see."""
    tools = body.get("tools")
    if tools is None or (settings.exclude_tools_when_tool_choice_none and body.get("tool_choice") == "none"):
        return None
    if not isinstance(tools, list):
        raise CannotTokenize(Reason.MALFORMED)
    return tools


def render_chat(
    chat: ChatPrompt, template: ChatTemplate, settings: TokenSettings, special_tokens: Mapping[str, Any]
) -> Rendered:
    """Prompt text of `chat`. Raises CannotTokenize."""
    asked = chat.body.get("chat_template_kwargs")
    if asked is not None and (not isinstance(asked, dict) or not _NOT_FOR_TEMPLATES.isdisjoint(asked)):
        raise CannotTokenize(Reason.MALFORMED)
    kwargs = template_kwargs(chat.body, settings.default_chat_template_kwargs)
    tools = tools_of(chat.body, settings)
    schemas = None if tools is None else conversation.tool_schemas(tools)
    messages = chat.messages
    if chat.api == "messages" and template.system_first:
        messages = system_first(messages)
    content_format = template.content_format if settings.content_format == "auto" else settings.content_format

    def render(stand_in: str | None) -> str:
        built = conversation.Conversation(content_format, stand_in=stand_in, validated=chat.api != "responses").build(
            messages
        )
        if not template.knows_developer:
            built = conversation.developer_as_system(built)
        return template.render(
            built,
            tools=schemas,
            documents=kwargs.get("documents"),
            add_generation_prompt=bool(kwargs.get("add_generation_prompt", False)),
            continue_final_message=bool(kwargs.get("continue_final_message", False)),
            variables={**special_tokens, **{name: value for name, value in kwargs.items() if name not in _FIELDS}},
        )

    if not estimate.media_parts(messages):
        return Rendered(render(None), prefix_only=False)
    # What the template writes for a media part is its own business: two renderings agree exactly up to it. Only the
    # first one's text is used, so a template that treats chats with images differently is still followed.
    first = render(None if content_format == "openai" else _MEDIA_MARKS[0])
    return Rendered(_common_prefix(first, render(_MEDIA_MARKS[1])), prefix_only=True)


def _common_prefix(one: str, other: str) -> str:
    low, high = 0, min(len(one), len(other))
    while low < high:  # Slices compare at memory speed; a loop over characters would not.
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return one[:low]
