"""A watch, told each thing at most once and in order, and never in the way of a request."""

from __future__ import annotations

import logging
from collections.abc import Callable

from multidict import CIMultiDict

from gateway.extproc.types import Watch
from gateway.proxy.errors import log_unexpected

_log = logging.getLogger(__name__)


class Told:
    """What raises is logged and hears no more but the end."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._deaf = False
        self.over = False

    def responded(self, status: int, headers: CIMultiDict[str], served: str | None) -> None:
        self._tell(lambda: self._watch.responded(status, headers, served))

    def chunk(self, data: bytes) -> None:
        if data:
            self._tell(lambda: self._watch.chunk(data))

    def ended(self) -> None:
        self._end(self._watch.ended)

    def aborted(self) -> None:
        self._end(self._watch.aborted)

    def unseen(self) -> None:
        self._end(self._watch.unseen)

    def recalled(self) -> None:
        self._end(self._watch.recalled)

    def _end(self, last: Callable[[], None]) -> None:
        if not self.over:
            self.over, self._deaf = True, False
            self._call(last)

    def _tell(self, what: Callable[[], None]) -> None:
        if not self.over and not self._deaf:
            self._call(what)

    def _call(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as exc:
            self._deaf = True
            log_unexpected(_log, "what becomes of a request is not heard", exc)
