"""Which feed a batch belongs to.

A feed is declared as (worker, rank) together with a connection. Batches name their rank themselves, and where the two
differ the batch is right: an engine that serves one rank of many says so, whatever it was declared as. Two exceptions:
a rank that another connection of the same worker was declared for is that connection's, and a number that cannot be a
rank is no rank. Several ranks on one connection get a feed each; those that were not declared cannot be asked for
replays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gateway.engine.feed import Feed, IngestSettings
from gateway.engine.source import Source
from indexer import EventBatch, Holder

MAX_RANKS = 1024


class Feeds:
    """All feeds, by the holder their batches go to and by what they were declared as."""

    def __init__(self, settings: IngestSettings) -> None:
        self.counters: Counter[str] = Counter()
        self._settings = settings
        self._by_holder: dict[Holder, Feed] = {}
        self._declared: dict[Holder, Feed] = {}

    def __iter__(self) -> Iterator[Feed]:
        """A copy, safe while the ingest thread goes on."""
        return iter(list(self._by_holder.values()))

    def of_source(self, source: Source) -> list[Feed]:
        return [feed for feed in self if feed.source is source]

    def of_worker(self, worker: str) -> list[Feed]:
        return [feed for feed in self if feed.worker == worker]

    def declare(self, source: Source, worker: str, rank: int, replay_endpoint: str | None) -> tuple[Feed, Feed | None]:
        """The new feed, and the one that had its holder without being declared for it, if any: that one must go."""
        feed = Feed(source, worker, rank, self._settings, replay_endpoint=replay_endpoint, declared_rank=rank)
        squatter = self._by_holder.pop((worker, rank), None)
        if squatter is not None and squatter.declared_rank is not None:
            self._declared.pop((worker, squatter.declared_rank), None)
        self._by_holder[worker, rank] = self._declared[worker, rank] = feed
        return feed, squatter

    def drop(self, feed: Feed) -> None:
        for table, rank in ((self._by_holder, feed.rank), (self._declared, feed.declared_rank)):
            if rank is not None and table.get((feed.worker, rank)) is feed:
                del table[feed.worker, rank]

    def declared(self, worker: str, rank: int) -> Feed | None:
        return self._declared.get((worker, rank))

    def of_batch(self, source: Source, worker: str, declared_rank: int, batch: EventBatch) -> Feed | None:
        """The feed of a batch that came over `source`, None when its rank is another connection's.

        Takes away the batch's own rank where it is not to be believed.
        """
        declared = self._declared.get((worker, declared_rank))
        rank = batch.data_parallel_rank
        if rank is not None and not 0 <= rank < MAX_RANKS:
            self.counters["impossible_ranks"] += 1
            rank = batch.data_parallel_rank = None
        if rank is None and declared is not None:
            return declared
        rank = declared_rank if rank is None else rank
        known = self._by_holder.get((worker, rank))
        if known is not None and known.source is source:
            return known
        if known is not None:
            self.counters["rank_conflicts"] += 1
            batch.data_parallel_rank = None
            return declared
        if declared is not None and declared.is_untouched:
            del self._by_holder[worker, declared.rank]
            declared.rank = rank
            self._by_holder[worker, rank] = declared
            return declared
        feed = self._by_holder[worker, rank] = Feed(source, worker, rank, self._settings)
        return feed
