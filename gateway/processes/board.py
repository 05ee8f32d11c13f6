"""The few of Redis's data types and commands that replicas tell each other by, in memory (`gateway/replicas`).

Whoever speaks to it sees what a Redis would answer (tests/property/test_board.py holds it to a real one), so that
processes of one machine and replicas of a fleet share by the same code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

Entry = tuple[bytes, dict[bytes, bytes]]
MOST_KEYS: Final = 65_536
MOST_STREAM_BYTES: Final = 32 << 20


class BoardError(ValueError):
    """No command of the board, or not as it takes it."""


class _Stream:
    __slots__ = ("entries", "last", "n_bytes")

    def __init__(self) -> None:
        self.entries: deque[tuple[tuple[int, int], dict[bytes, bytes]]] = deque()
        self.last = (0, 0)
        self.n_bytes = 0

    def add(self, fields: dict[bytes, bytes], most: int) -> None:
        """With its number in `last`; the oldest go."""
        self.entries.append((self.last, fields))
        self.n_bytes += _size(fields)
        while len(self.entries) > most or (self.n_bytes > MOST_STREAM_BYTES and len(self.entries) > 1):
            self.n_bytes -= _size(self.entries.popleft()[1])


class Board:
    """Times are given: `now_s` for expiry (monotonic), `now_ms` for the numbers of stream entries."""

    def __init__(self) -> None:
        self._strings: dict[str, bytes] = {}
        self._sets: dict[str, set[bytes]] = {}
        self._streams: dict[str, _Stream] = {}
        self._until_s: dict[str, float] = {}

    def run(self, command: Sequence[Any], now_s: float, now_ms: int) -> Any:
        """What Redis answers to `[name, argument ...]`. Raises BoardError."""
        name, *args = command
        try:
            match name:
                case "xadd":
                    return self.xadd(*args, now_s=now_s, now_ms=now_ms)
                case "expire":
                    return self.expire(*args, now_s=now_s)
                case "set":
                    return self.put(*args, now_s=now_s)
                case "delete":
                    return self.delete(*args, now_s=now_s)
                case "sadd":
                    return self.sadd(*args, now_s=now_s)
                case "srem":
                    return self.srem(*args, now_s=now_s)
                case "smembers":
                    return list(self.smembers(*args, now_s=now_s))
                case "mget":
                    return self.mget(*args, now_s=now_s)
                case "xrevrange":
                    return self.xrevrange(*args, now_s=now_s)
                case "xread":
                    return self.xread(*args, now_s=now_s)
        except (TypeError, ValueError, AttributeError) as exc:
            raise BoardError(f"{name}: {exc}") from None
        raise BoardError(f"{name} is no command")

    # ---- strings and sets --------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes, ttl_s: float | None = None, *, now_s: float) -> bool:
        self._forget(key)
        self._make_room(now_s)
        self._strings[key] = value
        if ttl_s is not None:
            self._until_s[key] = now_s + ttl_s
        return True

    def mget(self, keys: Sequence[str], *, now_s: float) -> list[bytes | None]:
        return [self._strings.get(key) if self._is_there(key, now_s) else None for key in keys]

    def sadd(self, key: str, *members: bytes, now_s: float) -> int:
        self._is_there(key, now_s)
        there = self._sets.setdefault(key, set())
        before = len(there)
        there.update(members)
        return len(there) - before

    def srem(self, key: str, *members: bytes, now_s: float) -> int:
        there = self._sets.get(key, set()) if self._is_there(key, now_s) else set()
        n_gone = len(there.intersection(members))
        there.difference_update(members)
        if n_gone and not there:
            self._forget(key)
        return n_gone

    def smembers(self, key: str, *, now_s: float) -> set[bytes]:
        return self._sets.get(key, set()) if self._is_there(key, now_s) else set()

    def delete(self, *keys: str, now_s: float) -> int:
        n_gone = 0
        for key in keys:
            n_gone += self._is_there(key, now_s)
            self._forget(key)
        return n_gone

    def expire(self, key: str, ttl_s: float, *, now_s: float) -> bool:
        if not self._is_there(key, now_s):
            return False
        self._until_s[key] = now_s + ttl_s
        return True

    # ---- streams -----------------------------------------------------------------------------------------------------

    def xadd(self, key: str, fields: Mapping[bytes, bytes], most: int, *, now_s: float, now_ms: int) -> bytes:
        self._is_there(key, now_s)
        stream = self._streams.setdefault(key, _Stream())
        at_ms, nth = stream.last
        stream.last = (now_ms, 0) if now_ms > at_ms else (at_ms, nth + 1)
        stream.add(dict(fields), most)
        return _name(stream.last)

    def xrevrange(self, key: str, count: int, *, now_s: float) -> list[Entry]:
        """The last `count` of them, the last first."""
        stream = self._streams.get(key) if self._is_there(key, now_s) else None
        return [] if stream is None else [(_name(number), at) for number, at in islice(reversed(stream.entries), count)]

    def xread(self, key: str, after: bytes, count: int, *, now_s: float) -> list[Entry]:
        """At most `count` of those that came after `after`, in their order."""
        stream = self._streams.get(key) if self._is_there(key, now_s) else None
        from_ = _number(after)
        if stream is None or stream.last <= from_:
            return []
        newer: list[Entry] = []
        for number, fields in reversed(stream.entries):
            if number <= from_:
                break
            newer.append((_name(number), fields))
        return newer[::-1][:count]

    # ---- keys --------------------------------------------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """Forget what has expired and nobody asks for."""
        for key in [key for key, until_s in self._until_s.items() if until_s <= now_s]:
            self._forget(key)

    def _is_there(self, key: str, now_s: float) -> bool:
        if self._until_s.get(key, now_s + 1) <= now_s:
            self._forget(key)
        return key in self._strings or key in self._sets or key in self._streams

    def _forget(self, key: str) -> None:
        for kind in (self._strings, self._sets, self._streams, self._until_s):
            kind.pop(key, None)

    def _make_room(self, now_s: float) -> None:
        if len(self._strings) >= MOST_KEYS:
            self.sweep(now_s)
        if len(self._strings) >= MOST_KEYS:
            raise BoardError("too many keys")


def _size(fields: Mapping[bytes, bytes]) -> int:
    return sum(len(value) for value in fields.values())


def _name(number: tuple[int, int]) -> bytes:
    return b"%d-%d" % number


def _number(name: bytes) -> tuple[int, int]:
    at_ms, _, nth = name.partition(b"-")
    return int(at_ms), int(nth or 0)
