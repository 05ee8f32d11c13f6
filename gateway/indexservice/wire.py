"""Changes of an index as messages of `proto/indexer.proto`, and back."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from gateway.engine.feed import FeedStatus
from gateway.pb import indexer_pb2 as pb
from indexer import Change, Holder, Match
from indexer.journal import CHILD

KEY_BYTES = 8
_TIERS = len(pb.Tier.keys())
_LITTLE = sys.byteorder == "little"


class WireError(ValueError):
    """A message that says what cannot be."""


def packed(keys: Iterable[int]) -> bytes:
    words = array("Q", keys)
    if not _LITTLE:
        words.byteswap()
    return words.tobytes()


def unpacked(data: bytes) -> list[int]:
    """Raises WireError."""
    if len(data) % KEY_BYTES:
        raise WireError(f"block keys are {KEY_BYTES} bytes each, not {len(data)} in all")
    words = array("Q", data)
    if not _LITTLE:
        words.byteswap()
    return words.tolist()


def little_endian(tokens: bytes) -> bytes:
    """uint32 of this machine's order as they are sent, or the other way round. Raises WireError."""
    if len(tokens) % 4:
        raise WireError("token_ids are little-endian uint32, four bytes each")
    if _LITTLE:
        return tokens
    words = array("I", tokens)
    words.byteswap()
    return words.tobytes()


def of_changes(sequence: int, changes: Sequence[Change]) -> pb.Delta:
    delta = pb.Delta(sequence=sequence)
    for change in changes:
        out = delta.changes.add(
            worker=change.worker, rank=change.rank, gone=change.gone, cleared=change.cleared, tier=_tier(change.tier)
        )
        if change.removed:
            out.removed = packed(change.removed)
        if change.stored:
            out.stored.CopyFrom(_blocks(change))
        if change.digest is not None:
            out.digest.blocks, out.digest.keys_sum = change.digest
        if change.adapter is not None:
            out.adapter = change.adapter
    return delta


def change_of(message: pb.Change) -> Change:
    """Raises WireError."""
    change = Change(
        worker=message.worker,
        rank=message.rank,
        gone=message.gone,
        cleared=message.cleared,
        tier=_known_tier(message.tier),
        removed=unpacked(message.removed) if message.removed else [],
        adapter=message.adapter or None,
    )
    if message.HasField("stored"):
        stored = message.stored
        change.block_size, change.stored = stored.block_size, unpacked(stored.keys)
        change.runs, change.parents = list(stored.runs), unpacked(stored.parents)
    if message.HasField("digest"):
        change.digest = message.digest.blocks, message.digest.keys_sum
    return change


def sections(
    worker: str,
    rank: int,
    changes: Sequence[Change],
    *,
    most_blocks: int,
    feed: pb.Feed | None = None,
    adapters: Sequence[str] = (),
) -> Iterator[pb.Section]:
    """What one holder holds, in messages of at most so many blocks."""
    section = pb.Section(worker=worker, rank=rank, first=True, adapters=adapters)
    if feed is not None:
        section.feed.CopyFrom(feed)
    room = most_blocks
    for change in changes:
        for part in _parts(change, most_blocks):
            if section.blocks and len(part.stored) > room:
                yield section
                section, room = pb.Section(worker=worker, rank=rank), most_blocks
            section.blocks.append(_blocks(part))
            room -= len(part.stored)
    section.last = True
    yield section


def section_changes(section: pb.Section) -> list[Change]:
    """Raises WireError."""
    return [
        Change(
            worker=section.worker,
            rank=section.rank,
            tier=_known_tier(blocks.tier),
            block_size=blocks.block_size,
            stored=unpacked(blocks.keys),
            runs=list(blocks.runs),
            parents=unpacked(blocks.parents),
        )
        for blocks in section.blocks
    ]


def feed_of(status: FeedStatus) -> pb.Feed:
    return pb.Feed(
        endpoint=status.endpoint,
        endpoint_state=status.endpoint_state,
        replay_endpoint=status.replay_endpoint or "",
        phase=status.phase,
        partial=status.partial,
        epoch=status.epoch,
        gaps=status.gaps,
        missing_batches=status.missing_batches,
        batches=status.batches,
        events=status.events,
    )


def status_of(holder: Holder, feed: pb.Feed, *, stale: bool, heard_s_ago: float | None) -> FeedStatus:
    """As it was told by an indexer; `stale`: which is not there now."""
    return FeedStatus(
        worker=holder[0],
        rank=holder[1],
        endpoint=feed.endpoint,
        endpoint_state="stale" if stale else feed.endpoint_state,
        endpoint_error=None,
        replay_endpoint=feed.replay_endpoint or None,
        phase=feed.phase,
        partial=feed.partial,
        epoch=feed.epoch,
        next_seq=0,
        gaps=feed.gaps,
        missing_batches=feed.missing_batches,
        batches=feed.batches,
        events=feed.events,
        events_per_s=0.0,
        last_batch_age_s=heard_s_ago if feed.batches else None,
        counters={},
    )


def holding(worker: str, rank: int, match: Match) -> pb.Holding:
    return pb.Holding(
        worker=worker,
        rank=rank,
        gpu_tokens=match.gpu_tokens,
        cpu_tokens=match.cpu_tokens,
        disk_tokens=match.disk_tokens,
        reach_tokens=match.reach_tokens,
    )


def match_of(message: pb.Holding) -> Match:
    return Match(message.gpu_tokens, message.cpu_tokens, message.disk_tokens, message.reach_tokens)


def _parts(change: Change, most_blocks: int) -> Iterator[Change]:
    """`change` cut into changes of at most so many blocks. A run that is cut goes on as a child of its last block."""
    keys = change.stored
    if len(keys) <= most_blocks:
        yield change
        return
    if not change.runs:
        for start in range(0, len(keys), most_blocks):
            part = _like(change)
            part.stored = keys[start : start + most_blocks]
            yield part
        return
    parents = iter(change.parents)
    part = _like(change)
    start = 0
    for run in change.runs:
        kind, stop = run & 3, start + (run >> 2)
        parent = next(parents) if kind == CHILD else None
        while start < stop:
            n = min(stop - start, most_blocks - len(part.stored))
            part.runs.append(n << 2 | kind)
            if parent is not None:
                part.parents.append(parent)
            part.stored += keys[start : start + n]
            start += n
            kind, parent = CHILD, keys[start - 1]
            if len(part.stored) == most_blocks:
                yield part
                part = _like(change)
    if part.stored:
        yield part


def _like(change: Change) -> Change:
    return Change(
        worker=change.worker,
        rank=change.rank,
        tier=change.tier,
        block_size=change.block_size,
        stored=[],
        runs=[],
        parents=[],
    )


def _blocks(change: Change) -> pb.Blocks:
    return pb.Blocks(
        tier=_tier(change.tier),
        block_size=change.block_size,
        keys=packed(change.stored),
        runs=change.runs,
        parents=packed(change.parents),
    )


def _tier(tier: int) -> pb.Tier:
    return cast("pb.Tier", tier)


def _known_tier(tier: int) -> int:
    if not 0 <= tier < _TIERS:
        raise WireError(f"there is no tier {tier}")
    return tier
