"""How deep a body is nested: parsers, templates and grammars behind us recurse, some in C without a bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.bad_request import BadRequest

MOST_LEVELS = 128
"""Of what people send the deepest are JSON schemas of tools, some 20 levels. The parser here ends at about 1000."""
_IDS = frozenset({"prompt", "token_ids", "input"})
"""May be long lists of numbers. What engines take there is two levels deep, and is checked by them."""


def check_depth(fields: Mapping[str, Any]) -> None:
    """Raises BadRequest."""
    level = [value for name, value in fields.items() if (type(value) is dict or type(value) is list)
             and not (name in _IDS and type(value) is list and value and type(value[0]) is int)]  # fmt: skip
    for _ in range(MOST_LEVELS):
        if not level:
            return
        level = [
            value
            for each in level
            for value in (each.values() if type(each) is dict else each)
            if type(value) is dict or type(value) is list
        ]
    raise BadRequest(f"The request body is nested deeper than {MOST_LEVELS} levels.", code="invalid_json")
