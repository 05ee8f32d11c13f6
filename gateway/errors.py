"""The one exception the command line shows as a plain line instead of a traceback."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can put right; its text is the whole message (one problem per line)."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None when nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return close[0] if close else None
