"""Headers as they are sent."""

from __future__ import annotations

from multidict import CIMultiDict


def rows(headers: CIMultiDict[str]) -> str:
    """Each with its line end. Raises ValueError where one would become two."""
    text = "\r\n".join(map(": ".join, headers.items()))
    if not text:
        return ""
    n_ends = len(headers) - 1
    if text.count("\n") != n_ends or text.count("\r") != n_ends:
        raise ValueError("a line end in a header")
    return text + "\r\n"
