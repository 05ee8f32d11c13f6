"""Where what engines hold comes from: their own events (`subscriber.py`), or an indexer (`gateway.indexservice`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from gateway.engine.feed import FeedStatus
from indexer import Holder
from scorer.types import RequestFacts

OnNews = Callable[[str, int], None]
"""Of a worker and rank something came."""
OnClear = Callable[[str, int, str], None]
"""What a worker and rank held is gone, and why."""


class Intake(Protocol):
    """Methods may be called from any thread; `add` and what follows it do as `EventIngest` says, where it is for this
    process to say who is followed.
    """

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def add(
        self,
        worker: str,
        rank: int,
        endpoint: str | None,
        replay_endpoint: str | None = None,
        *,
        topic: str | None = None,
    ) -> None: ...

    def remove(self, worker: str) -> None: ...

    def process_restarted(self, worker: str, reason: str, process_start_s: float | None = None) -> None: ...

    def forget(self, worker: str, reason: str) -> None: ...

    def status(self) -> dict[Holder, FeedStatus]: ...

    def counters(self) -> dict[str, int]: ...

    def replay_levels(self) -> dict[str, int]: ...

    def unmatched_topics(self) -> dict[str, int]: ...


class Link(Intake, Protocol):
    """One that goes by somebody else, who may be lost. The callbacks are called from threads of its own."""

    on_news: OnNews
    on_clear: OnClear
    is_live: bool
    """Whether an indexer is followed now."""

    @property
    def is_stale(self) -> bool:
        """Whether what is known is of before."""
        ...

    def note(self, facts: RequestFacts) -> str | None:
        """What the reason of a decision about `facts` is to say of it."""
        ...

    def degraded(self) -> Iterator[tuple[str, str]]:
        """(one of DEGRADATIONS, detail)"""
        ...
