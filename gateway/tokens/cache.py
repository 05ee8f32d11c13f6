"""Token ids of texts seen lately: the pieces of chats, whole prompts that are not cut, what engines answered."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock

import xxhash

# Dict entry, key and bytes object, beside the ids themselves.
_ENTRY_BYTES = 200

_SEED_BITS = 62


def new_seed() -> int:
    """Tells keys of one maker of ids from those of all others. Nobody can know it: who did could make a text whose ids
    are then taken for those of another one.
    """
    return secrets.randbits(_SEED_BITS)


def part_of(salt: str) -> int:
    """What keys of prompts with that cache salt are made different by, as their KV blocks are: how soon the ids of a
    text are there does not tell that another tenant has sent it.
    """
    return xxhash.xxh3_64_intdigest(salt.encode("utf-8", "surrogatepass"))


class IdCache:
    """Least recently used ids within a byte budget. Keys are 128-bit hashes: the text itself is not kept.

    Thread-safe: worker threads read and write it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[int, bytes] = OrderedDict()
        self._lock = Lock()
        self.n_bytes = 0
        self.hits = 0
        self.misses = 0
        self.hit_bytes = 0
        self.miss_bytes = 0
        """Of text."""

    @staticmethod
    def key(text: bytes, seed: int) -> int:
        """Key of a text in UTF-8; `seed` is that of whoever makes its ids."""
        return xxhash.xxh3_128_intdigest(text, seed)

    def get(self, key: int, n_bytes: int) -> bytes | None:
        """Ids of the text of `n_bytes` with that key."""
        return self.get_all([key], [n_bytes])[0]

    def get_all(self, keys: Sequence[int], n_bytes: Iterable[int]) -> list[bytes | None]:
        """Ids by key, None for those that are unknown; `n_bytes` are their texts' lengths."""
        entries, sizes = self._entries, list(n_bytes)
        with self._lock:
            found = list(map(entries.get, keys))
            missed = missed_bytes = 0
            for key, ids, size in zip(keys, found, sizes, strict=True):
                if ids is None:
                    missed += 1
                    missed_bytes += size
                else:
                    entries.move_to_end(key)
            self.misses += missed
            self.miss_bytes += missed_bytes
            self.hits += len(found) - missed
            self.hit_bytes += sum(sizes) - missed_bytes
        return found

    def put(self, key: int, ids: bytes) -> None:
        self.put_all([(key, ids)])

    def put_all(self, made: Iterable[tuple[int, bytes]]) -> None:
        """Ids of one prompt or of its pieces, in order; what one prompt may not fill is left out."""
        left = self._max_bytes // 4  # One huge prompt must not push out all others.
        with self._lock:
            for key, ids in made:
                cost = len(ids) + _ENTRY_BYTES
                if key in self._entries or cost > left:
                    continue
                left -= cost
                self._entries[key] = ids
                self.n_bytes += cost
            while self.n_bytes > self._max_bytes:
                _, old = self._entries.popitem(last=False)
                self.n_bytes -= len(old) + _ENTRY_BYTES
