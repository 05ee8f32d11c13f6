"""KV-cache events of the model, and the bytes vLLM puts on the wire for them.

Three layouts of one event: ``map`` (vLLM 0.24 and later), ``array`` (0.22, 0.23) and ``array-0.11`` (0.11 to 0.19,
without group and spec kind). A batch is always the array ``[ts, events, data_parallel_rank]``.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

EventFormat = Literal["map", "array", "array-0.11"]
EVENT_FORMATS: Final[tuple[EventFormat, ...]] = ("map", "array", "array-0.11")

MEDIUM_GPU: Final = "GPU"
FULL_ATTENTION: Final = "full_attention"

ExtraKeys = list[list[Any] | None]


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Blocks that became full; `token_ids` are those of all blocks in a row. Field order is the wire's."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Physical copies that were evicted."""

    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The prefix cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(tuple[float, list[Event], int | None])


def encode_batch(ts: float, events: Sequence[Event], rank: int | None, layout: EventFormat = "map") -> bytes:
    """One message's payload. `ts` is seconds since the epoch, `rank` the data-parallel rank."""
    rows = events if layout == "map" else [_as_array(event, layout) for event in events]
    return _encoder.encode((ts, rows) if rank is None else (ts, rows, rank))


def decode_batch(payload: bytes) -> tuple[float, list[Event], int | None]:
    """A ``map`` payload back to typed events; msgspec.DecodeError on anything else."""
    return _decoder.decode(payload)


def _as_array(event: Event, layout: EventFormat) -> list[Any]:
    # vLLM's array structs drop defaulted fields from the end only.
    fields = list(msgspec.structs.astuple(event))
    if layout == "array-0.11":
        fields = fields[:6] if isinstance(event, BlockStored) else fields[:2]
    elif isinstance(event, BlockStored):
        fields = fields[:11]
        while len(fields) > 7 and fields[-1] is None:
            fields.pop()
    elif isinstance(event, BlockRemoved):
        fields = fields[:3] if event.group_idx is not None else fields[:2]
    return [type(event).__name__, *fields]
