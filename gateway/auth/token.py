"""One secret of a port, from a file or the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gateway.errors import UserError

_LEAST_CHARACTERS = 16


def checked(token: str, what: str) -> str:
    """Raises UserError."""
    if len(token) < _LEAST_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(f"{what} must have {_LEAST_CHARACTERS} characters or more, of ASCII, without spaces")
    return token


def read(file: str | None, variable: str, environment: Mapping[str, str], *, key: str, what: str) -> str | None:
    """Of `file` if it is given, which `key` names, else of the variable. None: there is none. Raises UserError."""
    if file is None:
        token = environment.get(variable, "").strip()
        return checked(token, what) if token else None
    try:
        return checked(Path(file).read_text(encoding="utf-8").strip(), what)
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "is not UTF-8 text"
        raise UserError(f"{key}: {file}: {reason}") from None
