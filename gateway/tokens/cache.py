"""Token ids of whole prompts seen lately: retries, n clients with one prompt, the same prompt asked of two APIs."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

import xxhash

# Dict entry, key and bytes object, beside the ids themselves.
_ENTRY_BYTES = 200


class PromptCache:
    """Least recently used ids within a byte budget. Keys are 128-bit hashes: the prompt itself is not kept.

    Thread-safe: worker threads read and write it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[int, bytes] = OrderedDict()
        self._lock = Lock()
        self.n_bytes = 0
        self.hits = 0
        self.misses = 0

    @staticmethod
    def key(text: str | bytes, salt: str) -> int:
        """Key of a prompt; `salt` tells apart tokenizers and their flags."""
        digest = xxhash.xxh3_128(salt.encode("utf-8", "surrogatepass") + b"\0")
        digest.update(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        return digest.intdigest()

    def get(self, key: int) -> bytes | None:
        with self._lock:
            ids = self._entries.get(key)
            if ids is None:
                self.misses += 1
                return None
            self._entries.move_to_end(key)
            self.hits += 1
            return ids

    def put(self, key: int, ids: bytes) -> None:
        cost = len(ids) + _ENTRY_BYTES
        if cost > self._max_bytes // 4:  # One huge prompt must not push out all others.
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = ids
            self.n_bytes += cost
            while self.n_bytes > self._max_bytes:
                _, old = self._entries.popitem(last=False)
                self.n_bytes -= len(old) + _ENTRY_BYTES
