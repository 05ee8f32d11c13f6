"""One chat template, compiled once: messages in, prompt text out, as transformers' `apply_chat_template` would.

Rules read in transformers 5 `chat_template_utils.py` and vLLM 0.32 `renderers/hf.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.tokens.content_format import Format, detect
from gateway.tokens.types import CannotTokenize, Json, Reason

# Marks the end of the message to continue; what the template writes after it is cut off. The blank tells whether the
# template keeps trailing space.
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


class _GenerationBlocks(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here it only prints them."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML and sorts keys.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


_ATTRIBUTES_OF_DICTS = frozenset(dir(dict))


class _Environment(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """``message.role``: as the sandbox, which raises and catches an error for each member of a dict."""
        if type(obj) is dict and attribute not in _ATTRIBUTES_OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def _environment() -> ImmutableSandboxedEnvironment:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class ChatTemplate:
    """A compiled chat template. Thread-safe. Raises ValueError when `source` is no Jinja template."""

    def __init__(self, source: str) -> None:
        env = _environment()
        try:
            tree = env.parse(source)
            self._template = env.from_string(source)
            self._template.globals = dict(self._template.globals)  # Else layers, gone through for each rendering.
        except jinja2.TemplateError as exc:
            raise ValueError(f"chat template does not compile: {exc}") from exc
        self._source = source
        self._variables = jinja2.meta.find_undeclared_variables(tree) - _RESERVED
        self.content_format: Format = detect(tree)
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.system_first = self._wants_system_first()

    def render(
        self,
        messages: list[Json],
        *,
        tools: list[Json] | None = None,
        documents: list[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Prompt text. `variables` (special tokens, template kwargs) reach the template only if it asks for them.

        Raises CannotTokenize: TEMPLATE_REJECTED when the template refused the conversation, TEMPLATE_FAILED otherwise.
        """
        if not messages or (continue_final_message and add_generation_prompt):
            raise CannotTokenize(Reason.TEMPLATE_REJECTED)
        final_text = None
        if continue_final_message:
            messages, final_text = self._mark_final(messages)
        known = {name: value for name, value in (variables or {}).items() if name in self._variables}
        try:
            text = self._template.render(
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **known,
            )
        except jinja2.TemplateError as exc:
            raise CannotTokenize(Reason.TEMPLATE_REJECTED) from exc
        except Exception as exc:  # A template is a program: it can fail in every way a program can.
            raise CannotTokenize(Reason.TEMPLATE_FAILED) from exc
        return text if final_text is None else _cut_at_mark(text, final_text)

    def _mark_final(self, messages: list[Json]) -> tuple[list[Json], str]:
        final = dict(messages[-1])
        content = final.get("content")
        if "content" not in self._source:
            raise CannotTokenize(Reason.TEMPLATE_REJECTED)
        if isinstance(content, str):
            text = content
            final["content"] = content + _CONTINUE_MARK
        else:
            parts = [dict(part) for part in content or []]
            last = next((part for part in reversed(parts) if "text" in part), None)
            if last is None:
                raise CannotTokenize(Reason.TEMPLATE_REJECTED)
            text = last["text"]
            last["text"] = text + _CONTINUE_MARK
            final["content"] = parts
        return [*messages[:-1], final], text

    def _wants_system_first(self) -> bool:
        """Whether the template refuses a system message after a user's (vLLM's probe for /v1/messages)."""
        turns = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        try:
            self.render(turns, add_generation_prompt=False)
        except CannotTokenize as exc:
            return exc.reason is Reason.TEMPLATE_REJECTED
        return False


def _cut_at_mark(text: str, final_text: str) -> str:
    mark = _CONTINUE_MARK.strip()
    at = text.rfind(mark)
    if at < 0 or final_text.strip() not in text:
        raise CannotTokenize(Reason.TEMPLATE_REJECTED)
    if text.startswith(_CONTINUE_MARK, at):
        return text[:at]
    return text[:at].rstrip()  # The template strips messages, and so the blank of the mark.
