"""A workers file of plain lines: one URL each, perhaps with `key=value`s after it, and # comments.

http://10.0.0.1:8000
http://10.0.0.2:8000 role=decode events=tcp://10.0.0.2:5557
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gateway.config.schema import Worker
from gateway.errors import UserError

_KEYS = tuple(field for field in Worker.__struct_fields__ if field not in ("url", "labels"))


class LinesError(UserError):
    """Something in the file cannot be used; one line per problem."""


def is_lines(text: str) -> bool:
    """Whether the first line with something on it is a URL (YAML and JSON lists begin otherwise)."""
    return next((line for _, line in _meant(text)), "").lower().startswith(("http://", "https://"))


def read_lines(text: str, file: str) -> tuple[Worker, ...]:
    """Raises LinesError with all problems."""
    workers: list[Worker] = []
    problems: list[str] = []
    for number, line in _meant(text):
        url, *pairs = line.split()
        values: dict[str, str] = {"url": url}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals or key not in _KEYS:
                problems.append(f"{file}:{number}: expected one of {', '.join(_KEYS)} with =value, got {pair!r}")
            values[key] = value
        try:
            workers.append(
                msgspec.convert({k: v for k, v in values.items() if k in ("url", *_KEYS)}, Worker, strict=False)
            )
        except msgspec.ValidationError as error:
            problems.append(f"{file}:{number}: {error}")
    if problems:
        raise LinesError("\n".join(problems))
    return tuple(workers)


def _meant(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        meant = line.partition(" #")[0].strip() if not line.lstrip().startswith("#") else ""
        if meant:
            yield number, meant
