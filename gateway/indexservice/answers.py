"""Answers to Match as they go over the wire. Of each holder most is the same in every answer, so it is encoded once."""

from __future__ import annotations

from functools import lru_cache

from gateway.indexservice.publisher import Publisher, knowledge
from gateway.indexservice.wire import holding
from gateway.pb import indexer_pb2 as pb
from indexer import Holder, Match, PrefixIndex

_MOST_KEPT = 65_536
_HOLDINGS = bytes([pb.MatchResponse.HOLDINGS_FIELD_NUMBER << 3 | 2])
_RESIDENT_BLOCKS = bytes([pb.Holding.RESIDENT_BLOCKS_FIELD_NUMBER << 3])


class Answers:
    """Of one index, as `publisher` numbers it. In the event loop's thread."""

    def __init__(self, index: PrefixIndex, publisher: Publisher) -> None:
        self._index = index
        self._publisher = publisher
        self._feeds: object = None
        self._kept: dict[tuple[Holder, Match], bytes] = {}
        """Holdings without `resident_blocks`, which changes all the time; for `_feeds`."""

    def of(self, found: dict[Holder, Match]) -> bytes:
        """A MatchResponse."""
        publisher, kept, resident = self._publisher, self._kept, self._index.resident_blocks
        if publisher.feeds is not self._feeds or len(kept) > _MOST_KEPT:
            self._feeds = publisher.feeds
            kept.clear()
        head = pb.MatchResponse(instance=publisher.instance, sequence=publisher.history.sequence)
        parts = [head.SerializeToString()]
        for item in found.items():
            body = kept.get(item)
            if body is None:
                body = kept[item] = self._body(*item)
            blocks = _varint(resident(item[0]))
            parts += (_HOLDINGS, _varint(len(body) + len(blocks)), body, blocks)
        return b"".join(parts)

    def _body(self, holder: Holder, match: Match) -> bytes:
        feed = self._publisher.feeds.get(holder)
        one = holding(*holder, match)
        one.knowledge, one.epoch = knowledge(feed), 0 if feed is None else feed.epoch
        return one.SerializeToString() + _RESIDENT_BLOCKS


@lru_cache(_MOST_KEPT)
def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)
