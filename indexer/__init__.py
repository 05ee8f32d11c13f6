"""Which worker holds how much of a prompt: KV events, their order, block keys and the radix index. No I/O."""

from indexer.approximate import ApproximateIndex
from indexer.events import EventBatch, EventDecodeError, decode_batch
from indexer.held import HeldBlocks
from indexer.journal import Change, Journal
from indexer.keys import MediaSpan
from indexer.match import Holder, Match
from indexer.prefix import PrefixIndex
from indexer.prompt import Prompt
from indexer.references import Link, MediaReferences, Recalled
from indexer.replica import Replica
from indexer.saved_rank import SavedRank
from indexer.stream import Apply, Clear, FrameError, Join, Replay, Stream, parse_frames

__all__ = [
    "Apply",
    "ApproximateIndex",
    "Change",
    "Clear",
    "EventBatch",
    "EventDecodeError",
    "FrameError",
    "HeldBlocks",
    "Holder",
    "Join",
    "Journal",
    "Link",
    "Match",
    "MediaReferences",
    "MediaSpan",
    "PrefixIndex",
    "Prompt",
    "Recalled",
    "Replay",
    "Replica",
    "SavedRank",
    "Stream",
    "decode_batch",
    "parse_frames",
]
