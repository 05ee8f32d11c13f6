"""What operators have changed through the admin port, for processes that start later: each begins with the same."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

import msgspec

from gateway.logs import PATH as LOG_LEVEL
from gateway.proxy.routes import WORKERS

_MOST: Final = 4096


class Change(msgspec.Struct, frozen=True):
    """A request that was answered well."""

    method: str
    target: str
    body: bytes


class Changes:
    """In their order; what a later one makes void goes."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], Change] = {}
        """By whom they are about, and what kind they are."""

    def all(self) -> list[Change]:
        return list(self._of.values())

    def note(self, change: Change, answer: bytes) -> None:
        path = change.target.partition("?")[0]
        if path == LOG_LEVEL:
            self._put((LOG_LEVEL, ""), change)
        elif path == WORKERS:
            name = _name_in(answer)
            self._of.pop((name, "gone"), None)
            self._put((name, "added"), change)
            if (drained := self._of.get((name, "drained"))) is not None:
                self._put((name, "drained"), drained)  # It still is, and was there before it was.
        elif path.startswith(WORKERS + "/"):
            rest = path.removeprefix(WORKERS + "/")
            if change.method == "DELETE":
                name = _name_in(answer) or unquote(rest)
                was_added = self._of.pop((name, "added"), None) is not None
                self._of.pop((name, "drained"), None)
                if not was_added:  # Else nobody will hear of it.
                    self._put((name, "gone"), Change("DELETE", f"{path}?force=true", b""))
            else:
                name = _name_in(answer) or unquote(rest.rpartition("/")[0])
                self._put((name, "drained"), change)

    def forget(self, change: Change) -> None:
        """It no longer holds."""
        self._of = {about: each for about, each in self._of.items() if each is not change}

    def _put(self, about: tuple[str, str], change: Change) -> None:
        self._of.pop(about, None)
        self._of[about] = change
        if len(self._of) > _MOST:
            del self._of[next(iter(self._of))]


def is_for_all(method: str, path: str) -> bool:
    """Whether every process is to do it."""
    is_change = method not in ("GET", "HEAD")
    return is_change and (path in (LOG_LEVEL, WORKERS) or path.startswith(WORKERS + "/"))


def _name_in(answer: bytes) -> str:
    try:
        name = msgspec.json.decode(answer).get("name", "")
    except (msgspec.MsgspecError, AttributeError):
        return ""
    return name if isinstance(name, str) else ""
