"""What goes between an indexer and those who ask or copy it (`gateway/indexservice`): bytes a peer may send.

A question is answered or refused in words; what an indexer says is taken in or refused, and then the copy can still be
summed up, cleared and asked.
"""

from __future__ import annotations

import random
from array import array
from contextlib import suppress
from typing import cast

from google.protobuf.message import DecodeError

from gateway.config.schema import IndexServiceConfig
from gateway.indexservice.addresses import Addresses
from gateway.indexservice.answers import Answers
from gateway.indexservice.link import ReplicaLink, _Broken
from gateway.indexservice.publisher import Publisher
from gateway.indexservice.questions import BadQuestion, prompt_of
from gateway.indexservice.wire import WireError, packed
from gateway.pb import indexer_pb2 as pb
from indexer import Replica
from indexer.journal import CHILD

_KEYS = packed(range(100, 108))
_BLOCKS = pb.Blocks(block_size=16, keys=_KEYS, runs=[4 << 2, 4 << 2 | CHILD], parents=packed([103]))
_CHANGES = [
    pb.Change(worker="a", stored=_BLOCKS),
    pb.Change(worker="a", removed=packed([107]), digest=pb.Digest(blocks=7, keys_sum=sum(range(100, 107)))),
    pb.Change(worker="a", cleared=True, stored=pb.Blocks(tier=pb.CPU, block_size=16, keys=_KEYS)),
    pb.Change(worker="b", rank=1, gone=True, adapter="lora"),
    pb.Change(worker="a", feed=pb.Feed(endpoint_state="connected", phase="live", batches=1)),
]
_BEGIN = pb.Begin(instance="run", sequence=7)
_SECTION = pb.Section(worker="a", first=True, last=True, blocks=[_BLOCKS], adapters=["lora"])

SEEDS = [
    pb.Update(begin=_BEGIN, sections=[_SECTION], end=pb.End(sequence=7)).SerializeToString(),
    pb.Update(begin=_BEGIN, deltas=[pb.Delta(sequence=8, changes=_CHANGES)]).SerializeToString(),
    pb.Update(deltas=[pb.Delta(sequence=1, changes=[change]) for change in _CHANGES]).SerializeToString(),
    pb.MatchRequest(token_ids=array("I", range(64)).tobytes(), cache_salt="s", lora="lora").SerializeToString(),
    pb.MatchRequest(block_keys=_KEYS, block_size=16).SerializeToString(),
]
WORDS = [b"\x08\x10", b"\xff\xff\xff\xff\x0f", b"run", b"a", packed([2**64 - 1]), b"\x12\x00"]


class _Telling:
    instance = "run"
    feeds: dict[tuple[str, int], pb.Feed] = {}  # noqa: RUF012 - nobody has any

    class history:
        sequence = 7


def fuzz_one(data: bytes) -> None:
    copy = Replica()
    follower = ReplicaLink(Addresses(IndexServiceConfig(addresses=("127.0.0.1:1",)), random.Random(1)), copy)
    with suppress(DecodeError):
        update = pb.Update.FromString(data)
        with suppress(WireError, ValueError, _Broken):
            follower._take(update)
        list(follower.degraded())
        follower.status()
    with suppress(DecodeError):
        request = pb.MatchRequest.FromString(data)
        with suppress(BadQuestion, ValueError):
            found = copy.match(prompt_of(request), model=request.model or None, lora=request.lora or None)
            answer = Answers(copy, cast(Publisher, _Telling())).of(found)
            assert len(pb.MatchResponse.FromString(answer).holdings) == len(found)
    for worker, rank in list(copy.held_tokens()):
        copy.digest((worker, rank))
        copy.drop(worker, rank)
    copy.sweep(1 << 20)
    assert copy.stats()["entries"] == 0
