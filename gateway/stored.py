"""Which worker holds which stored response of /v1/responses.

vLLM keeps responses in the memory of the process that made them: anybody else answers 404. The id is read off the
beginning of an answer that passes; ids are opaque and may be used twice, so the last worker that said one has it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import msgspec

LONGEST_ID = 256
_KEEP_S = 24 * 3600.0
_HEAD_BYTES = 4 << 10
_ID = re.compile(rb'(?:\A\s*\{|"response"\s*:\s*\{)\s*"id"\s*:\s*("(?:[^"\\]|\\.){1,1024}")')
"""A response's first field, at the start of a whole answer or inside a stream's first event. A quote within a JSON
string has a backslash before it, so no text looks like it.
"""
_NOT_STORED = re.compile(rb'"store"\s*:\s*false\b')


class Place(NamedTuple):
    """`rank`: whose KV cache has it; None: not known."""

    worker: str
    rank: int | None


class Gone(NamedTuple):
    """The worker has left or was restarted since, and with it its responses."""

    worker: str


class _Entry(NamedTuple):
    owner: str | None
    place: Place
    life: int
    since_s: float


class StoredResponses:
    """At most `most` ids, the least recently used forgotten first; each for a day. Times are monotonic seconds."""

    def __init__(self, most: int = 65_536) -> None:
        self._most = most
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lives: dict[str, int] = {}
        """Of workers that hold any."""
        self.tell: Callable[[str, Place, str | None], None] | None = None
        """For other replicas, where there are any."""
        self._n_lives = 0

    def __len__(self) -> int:
        return len(self._entries)

    def remember(self, response_id: str, place: Place, now_s: float, owner: str | None = None) -> None:
        """`owner`: whose it is. An id that another one has stays theirs: clients may choose ids."""
        if self.remember_elsewhere(response_id, place, now_s, owner) and self.tell is not None:
            self.tell(response_id, place, owner)

    def remember_elsewhere(self, response_id: str, place: Place, now_s: float, owner: str | None = None) -> bool:
        """Another replica has seen it made. False: it is not taken."""
        if not 0 < len(response_id) <= LONGEST_ID or not self._most:
            return False
        before = self._entries.get(response_id)
        if before is not None and before.owner != owner and self.find(response_id, now_s, before.owner) is not None:
            return False
        life = self._lives.get(place.worker)
        if life is None:
            self._n_lives += 1
            life = self._lives[place.worker] = self._n_lives
        self._entries[response_id] = _Entry(owner, place, life, now_s)
        self._entries.move_to_end(response_id)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)
        return True

    def find(self, response_id: str, now_s: float, owner: str | None = None) -> Place | Gone | None:
        """None: not known here, or another's."""
        entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner:
            return None
        if now_s >= entry.since_s + _KEEP_S:
            del self._entries[response_id]
            return None
        if self._lives.get(entry.place.worker) != entry.life:
            return Gone(entry.place.worker)
        self._entries.move_to_end(response_id)
        return entry.place

    def lost(self, worker: str) -> None:
        """Its process has ended."""
        self._lives.pop(worker, None)


class ResponseHead:
    """The beginning of one answer, however its bytes are cut; `found` is told its id, once."""

    __slots__ = ("_found", "_head")

    def __init__(self, found: Callable[[str], None]) -> None:
        self._found: Callable[[str], None] | None = found
        self._head = b""

    def feed(self, piece: bytes) -> None:
        if self._found is None:
            return
        self._head += piece[: _HEAD_BYTES - len(self._head)]
        response_id = id_of(self._head)
        if response_id is not None:
            self._found(response_id)
        if response_id is not None or len(self._head) >= _HEAD_BYTES:
            self._found, self._head = None, b""


def id_of(head: bytes) -> str | None:
    """The response's id, if the beginning of its answer says one."""
    match = _ID.search(head)
    if match is None:
        return None
    try:
        return msgspec.json.decode(match.group(1), type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def is_stored(body: bytes) -> bool:
    """Whether the request of that body asks for its response to be kept (the default). A `"store": false` that is not
    the body's own is taken for it; the response is then found by asking.
    """
    return b'"store"' not in body or _NOT_STORED.search(body) is None
