"""The keys, all in one slot of a cluster, as Redis hashes `{prefix:fleet}` of them. docs/replicas.md has the table."""

from __future__ import annotations

from typing import Final

from indexer import Holder

NEWS_ENTRIES: Final = 512
"""Kept in the stream at least: a second of eight busy replicas. Who missed more reads the wholes."""
NEWS_TTL_S: Final = 60
WRITERS_TTL_S: Final = 86_400
KEPT_TTL_S: Final = 3_600
"""What outlives its writer for those who start later: factors and sessions."""
SNAPSHOT_TTL_S: Final = 600
LEASE_TTL_S: Final = 30
FIELD_WRITER: Final = b"w"
FIELD_NEWS: Final = b"n"


class Keys:
    """The names of one fleet's keys."""

    def __init__(self, prefix: str, fleet: str) -> None:
        tag = f"{{{prefix}:{fleet}}}"
        self.news = f"{tag}:news"
        """Stream: what has changed, in the order of arrival."""
        self.writers = f"{tag}:writers"
        """Set of the writers' names."""
        self.lease = f"{tag}:lease"
        """String: who writes snapshots."""
        self._of = f"{tag}:"

    def load(self, writer: str) -> str:
        """String: all that the writer has in flight. Gone as soon as the writer is not heard of."""
        return f"{self._of}load:{writer}"

    def snapshot(self, holder: Holder) -> str:
        """String: the head of a rank's snapshot."""
        return f"{self._of}index:{holder[0]}:{holder[1]}"

    def piece(self, holder: Holder, i: int) -> str:
        """String: a part of it."""
        return f"{self.snapshot(holder)}:{i}"

    def learned(self, writer: str) -> str:
        """String: the factors it has learned."""
        return f"{self._of}learned:{writer}"

    def sessions(self, writer: str) -> str:
        """String: which rank served which session last."""
        return f"{self._of}sessions:{writer}"
