"""Does a chat template walk over the parts of a message, or does it print `content` as one string?

vLLM gives a template that loops over ``message.content`` the parts as dicts ("openai") and any other the parts joined
to a string ("string"). It decides from the template's syntax tree; so do we, by the same rules, quirks included: the
rule is what the engine does, not what would be right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

Format = Literal["string", "openai"]


class _Unclear(Exception):
    """A loop or assignment whose target is no plain name: vLLM then falls back to "string"."""


def detect(template: nodes.Template) -> Format:
    """The content format of a parsed chat template."""
    try:
        return "openai" if any(_content_loops(template)) else "string"
    except _Unclear:
        return "string"


def _name_of(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unclear
    return target.name


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether `node` is the variable `name` (or its item or attribute `key`), perhaps filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if node is None:
        return False
    if key is None:
        return _is_name(node, name)
    if isinstance(node, nodes.Getitem):
        return _is_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and node.attr == key and _is_name(node.node, name)


def _message_lists(template: nodes.Template) -> list[str]:
    """`messages` and every variable that is assigned from it, directly or through another."""
    names = ["messages"]
    pending = ["messages"]
    while pending:
        name = pending.pop(0)
        for assign in template.find_all(nodes.Assign):
            if _reads(assign.node, name) and (alias := _name_of(assign.target)) not in names:
                names.append(alias)
                pending.append(alias)
    return names


def _messages(template: nodes.Template) -> list[str]:
    """Loop variables that stand for one message."""
    lists = _message_lists(template)
    return [
        _name_of(loop.target) for loop in template.find_all(nodes.For) if any(_reads(loop.iter, name) for name in lists)
    ]


def _content_parameters(template: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """Parameters of `macro` that some call gives a message's content."""
    parameters = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in template.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = list(zip(parameters, call.args, strict=False))
        given += [(kwarg.key, kwarg.value) for kwarg in call.kwargs if kwarg.key in parameters]
        found.update(name for name, value in given if any(_reads(value, message, "content") for message in messages))
    return found


def _content_loops(template: nodes.Template) -> Iterator[bool]:
    """True for each loop over the parts of a message's content, in source order."""
    messages = _messages(template)
    parameters_at: dict[int, set[str]] = {}
    for macro in template.find_all(nodes.Macro):
        parameters = _content_parameters(template, macro, messages)
        for loop in macro.find_all(nodes.For):
            parameters_at[id(loop)] = parameters or parameters_at.get(id(loop), set())
    for loop in template.find_all(nodes.For):
        # A bare `content` counts in the template's own scope; inside a macro only a parameter known to be content does.
        names = parameters_at.get(id(loop), {"content"})
        over_content = any(_reads(loop.iter, message, "content") for message in messages) or (
            isinstance(loop.iter, nodes.Name) and loop.iter.name in names
        )
        if over_content:
            _name_of(loop.target)
            yield True
