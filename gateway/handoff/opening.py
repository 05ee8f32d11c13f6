"""The start of a decode worker's stream: does content come, or an error instead?

An engine that cannot fetch the KV has already answered 200 and sent what comes before content. While nothing but that
has come, the request can still be served another way; so the proxy keeps the start back until this says GOOD.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import msgspec

MOST_BYTES = 64 << 10
"""A start longer than this is passed on, whatever it is."""

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BEFORE_CONTENT = frozenset(
    {
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_part.added",
        "message_start",
        "content_block_start",
        "ping",
    }
)
_ERRORS = frozenset({"error", "response.failed"})


class State(Enum):
    PENDING = "pending"
    GOOD = "good"
    FAILED = "failed"


class Opening:
    """Fed with the stream as it comes, cut anywhere. GOOD and FAILED are for good. `error` is the data of the event
    that told of the failure.
    """

    __slots__ = ("_data", "_event", "_n_bytes", "_rest", "error", "state")

    def __init__(self) -> None:
        self.state = State.PENDING
        self.error: bytes | None = None
        self._rest = b""
        self._event = b""
        self._data: list[bytes] = []
        self._n_bytes = 0
        """Of the lines so far."""

    def feed(self, piece: bytes) -> State:
        if self.state is State.PENDING:
            self.state = self._lines(self._rest + piece, max(0, len(self._rest) - 1))
        return self.state

    def end(self) -> State:
        """The stream is over. Still PENDING: there was no content in it."""
        if self.state is State.PENDING:
            self.state = self._lines(self._rest.removesuffix(b"\r") + b"\n\n", 0)
        return self.state

    def _lines(self, text: bytes, seen: int) -> State:
        """`seen`: so much of its beginning is known to have no line's end."""
        at = 0
        for end in _LINE_END.finditer(text, seen):
            if end.group() == b"\r" and end.end() == len(text):
                break  # Half of a CRLF perhaps.
            line = text[at : end.start()]
            self._n_bytes += end.end() - at
            at = end.end()
            if self._n_bytes > MOST_BYTES:
                return State.GOOD
            if line:
                self._field(line)
            elif self._data and (state := self._dispatched()) is not State.PENDING:
                return state
        self._rest = text[at:]
        return State.GOOD if self._n_bytes + len(self._rest) > MOST_BYTES else State.PENDING

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value.strip()

    def _dispatched(self) -> State:
        data, event = b"\n".join(self._data), self._event
        self._data, self._event = [], b""
        state = _judged(event.decode("utf-8", "replace"), data)
        if state is State.FAILED:
            self.error = data
        return state


def _judged(event: str, data: bytes) -> State:
    if event in _ERRORS:
        return State.FAILED
    try:
        told = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return State.GOOD  # `[DONE]`, or nothing that we know.
    if not isinstance(told, dict):
        return State.GOOD
    kind = told.get("type")
    if told.get("error") or told.get("object") == "error":
        return State.FAILED
    if isinstance(kind, str):
        return State.FAILED if kind in _ERRORS else State.PENDING if kind in _BEFORE_CONTENT else State.GOOD
    choices = told.get("choices")
    if not isinstance(choices, list) or not choices:
        return State.GOOD  # The usage at the end.
    states = {_choice(choice) for choice in choices}
    return next(state for state in (State.FAILED, State.GOOD, State.PENDING) if state in states)


def _choice(choice: Any) -> State:
    if not isinstance(choice, dict):
        return State.GOOD
    finish = choice.get("finish_reason")
    if finish is not None:
        return State.FAILED if finish == "error" else State.GOOD
    delta = choice.get("delta")
    parts = [choice.get("text"), choice.get("token_ids")]
    if isinstance(delta, dict):
        parts += [value for name, value in delta.items() if name != "role"]
    return State.GOOD if any(parts) else State.PENDING
