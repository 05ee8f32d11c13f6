"""Blocks whose parent an index does not know yet, kept (bounded) until the parent arrives."""

from __future__ import annotations

from indexer.keys import Extra

Place = tuple[int, int, int]
"""(tier, KV-cache group, engine hash)."""


BLOCK_BYTES = 320
EXTRA_BYTES = 300
"""Accounted size of one waiting block besides its tokens, and of its extra keys."""


class Run:
    """Blocks of one event, in chain order, whose first one has the engine hash `parent` before it.

    While the run waits, `counts[i]` is how many copies of block i are resident (0: it was removed) and `live` how many
    blocks are.
    """

    __slots__ = (
        "block_size",
        "bytes",
        "counts",
        "extras",
        "group",
        "hashes",
        "live",
        "parent",
        "seen",
        "tier",
        "tokens",
    )

    def __init__(
        self,
        parent: int | None,
        hashes: list[int],
        tokens: bytes,
        block_size: int,
        extras: dict[int, Extra],
        tier: int,
        group: int,
    ) -> None:
        self.parent = parent
        self.hashes = hashes
        self.tokens = tokens
        self.block_size = block_size
        self.extras = extras
        self.tier = tier
        self.group = group
        self.bytes = len(tokens) + len(hashes) * BLOCK_BYTES + len(extras) * EXTRA_BYTES
        """Accounted size while it waits, however many of its blocks are still resident."""
        self.counts: list[int] = []
        self.live = 0
        self.seen: set[int] | None = set() if len(hashes) > 1 and len(set(hashes)) < len(hashes) else None
        """Set when the event lists a hash twice: the hashes already taken from it."""


class Orphans:
    """The waiting runs of one (worker, rank), at most `limit_blocks` resident blocks; the oldest run gives way."""

    __slots__ = ("blocks", "by_parent", "bytes", "dropped", "limit_blocks", "where")

    def __init__(self, limit_blocks: int) -> None:
        self.limit_blocks = limit_blocks
        self.by_parent: dict[int | None, dict[Run, None]] = {}
        self.where: dict[Place, tuple[Run, int]] = {}
        self.blocks = 0
        self.bytes = 0
        self.dropped = 0

    def add(self, run: Run, count_copies: bool) -> None:
        run.counts = [0] * len(run.hashes)
        for i, h in enumerate(run.hashes):
            place = (run.tier, run.group, h)
            known = self.where.get(place)
            if known is None:
                self.where[place] = (run, i)
                run.counts[i] = 1
                run.live += 1
            elif count_copies and known[0] is not run:
                known[0].counts[known[1]] += 1
        if not run.live:
            return
        self.blocks += run.live
        self.bytes += run.bytes
        self.by_parent.setdefault(run.parent, {})[run] = None
        while self.blocks > self.limit_blocks:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        for run in self.take(next(iter(self.by_parent))):
            self.dropped += run.live

    def take(self, parent: int | None) -> list[Run]:
        """The runs that wait for `parent`; they leave."""
        runs = list(self.by_parent.pop(parent, ()))
        for run in runs:
            self.blocks -= run.live
            self.bytes -= run.bytes
            for i, h in enumerate(run.hashes):
                place = (run.tier, run.group, h)
                known = self.where.get(place)
                if known is not None and known[0] is run and known[1] == i:
                    del self.where[place]
        return runs

    def remove(self, place: Place, remaining: int | None) -> bool:
        """Take one copy away, or all but `remaining`. False if nothing waits at `place`."""
        known = self.where.get(place)
        if known is None:
            return False
        run, i = known
        run.counts[i] = max(0, run.counts[i] - 1 if remaining is None else remaining)
        if run.counts[i] == 0:
            del self.where[place]
            run.live -= 1
            self.blocks -= 1
            if not run.live:
                runs = self.by_parent[run.parent]
                del runs[run]
                self.bytes -= run.bytes
                if not runs:
                    del self.by_parent[run.parent]
        return True

    def places(self, tier: int) -> list[Place]:
        return [place for place in self.where if place[0] == tier]
