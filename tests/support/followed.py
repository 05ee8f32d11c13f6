"""Certificates that follow their files, in tests."""

from __future__ import annotations

from typing import Protocol


class Followed(Protocol):
    n_taken: int

    def refresh(self) -> bool: ...


def taken(followed: Followed) -> bool:
    """What was the same at two looks is."""
    before = followed.n_taken
    for _ in range(2):
        followed.refresh()
    return followed.n_taken > before
