"""What is written to Redis: one byte for the version, then msgpack. Fields are added at the ends of structs only, which
readers of the same version skip; anything else is another version, which is told and left alone.

What comes out of Redis is believed as little as anything from a network: sizes, signs and kinds are checked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from indexer import Holder
from indexer.held import packed
from scorer.journal import Arrival, SessionAt
from scorer.ledger import InFlight

VERSION = 1
LONGEST_BYTES = 4 << 20
MOST_BLOCKS = 8_192
"""In one message; what is more goes into the next."""
_MOST_S = 86_400.0
_T = TypeVar("_T")
_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_Name = Annotated[str, Meta(max_length=512)]
_Rank = Annotated[int, Meta(ge=0, le=65_535)]
_Seconds = Annotated[float, Meta(ge=0, le=_MOST_S)]


class Bad(ValueError):
    """Nothing that this version has written."""


class OtherVersion(Bad):
    """Another version's."""


class _Load(msgspec.Struct, frozen=True, array_like=True, gc=False):
    worker: _Name
    rank: _Rank
    prefills: _Count
    comp_s: _Seconds
    head_s: _Seconds
    streams: _Count
    kv_tokens: _Count
    booked_age_s: _Seconds
    left_age_s: _Seconds


class _Arrival(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`keys`: uint64, little-endian."""

    number: _Count
    worker: _Name
    rank: _Rank
    keys: Annotated[bytes, Meta(max_length=8 * MOST_BLOCKS)]


class _Session(msgspec.Struct, frozen=True, array_like=True, gc=False):
    key: Annotated[bytes, Meta(max_length=32)]
    worker: _Name | None
    rank: _Rank
    tokens: _Count


class _Response(msgspec.Struct, frozen=True, array_like=True, gc=False):
    response_id: _Name
    worker: _Name
    rank: _Rank | None
    owner: _Name | None = None


class _Whole(msgspec.Struct, frozen=True, array_like=True):
    number: _Count
    loads: list[_Load]


class _News(msgspec.Struct, frozen=True, array_like=True):
    number: _Count
    loads: list[_Load] = []
    arrivals: list[_Arrival] = []
    over: dict[_Count, bool] = {}
    sessions: list[_Session] = []
    responses: list[_Response] = []
    bye: bool = False
    after: _Count = 0


Loads = Mapping[Holder, InFlight]


class News(msgspec.Struct, frozen=True, kw_only=True):
    """One message, as its reader uses it. `responses`: (id, worker, rank, owner). `bye`: the writer is going down.
    `after`: the number of its news before.
    """

    number: int
    after: int = 0
    loads: Loads = {}
    arrivals: list[Arrival] = []
    over: Mapping[int, bool] = {}
    sessions: list[SessionAt] = []
    responses: list[tuple[str, str, int | None, str | None]] = []
    bye: bool = False


_encode = msgspec.msgpack.Encoder().encode
_news = msgspec.msgpack.Decoder(_News)
_whole = msgspec.msgpack.Decoder(_Whole)
_sessions = msgspec.msgpack.Decoder(list[_Session])
_state = msgspec.msgpack.Decoder(dict[str, Any])
_HEAD = bytes([VERSION])


def news(it: News) -> bytes:
    return _HEAD + _encode(
        _News(
            it.number,
            _loads(it.loads),
            [_Arrival(each.number, *each.holder, packed(each.keys)) for each in it.arrivals],
            dict(it.over),
            _of_sessions(it.sessions),
            [_Response(*each) for each in it.responses],
            it.bye,
            it.after,
        )
    )


def read_news(data: bytes) -> News:
    """Raises Bad."""
    it = _decode(_news, data)
    return News(
        number=it.number,
        loads=_holders(it.loads),
        arrivals=[Arrival(each.number, (each.worker, each.rank), _keys(each.keys)) for each in it.arrivals],
        over=it.over,
        sessions=_to_sessions(it.sessions),
        responses=[(each.response_id, each.worker, each.rank, each.owner) for each in it.responses],
        bye=it.bye,
        after=it.after,
    )


def whole(number: int, loads: Loads) -> bytes:
    return _HEAD + _encode(_Whole(number, _loads(loads)))


def read_whole(data: bytes) -> tuple[int, Loads]:
    """Raises Bad."""
    it = _decode(_whole, data)
    return it.number, _holders(it.loads)


def sessions(them: Iterable[SessionAt]) -> bytes:
    return _HEAD + _encode(_of_sessions(them))


def read_sessions(data: bytes) -> list[SessionAt]:
    """Raises Bad."""
    them: list[_Session] = _decode(_sessions, data)
    return _to_sessions(them)


def learned(state: Mapping[str, Any]) -> bytes:
    """`state` is that of a Calibration."""
    return _HEAD + _encode(state)


def read_learned(data: bytes) -> dict[str, Any]:
    """Raises Bad. What is in it is for Calibration to check."""
    return _decode(_state, data)


def parted(arrivals: Iterable[Arrival]) -> list[list[Arrival]]:
    """In messages that are not too large; a prompt too long for one is told as far as it fits."""
    parts: list[list[Arrival]] = [[]]
    n_blocks = 0
    for each in arrivals:
        if len(each.keys) > MOST_BLOCKS:
            each = Arrival(each.number, each.holder, each.keys[:MOST_BLOCKS])
        if n_blocks + len(each.keys) > MOST_BLOCKS and parts[-1]:
            parts.append([])
            n_blocks = 0
        parts[-1].append(each)
        n_blocks += len(each.keys)
    return parts


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    if not data or len(data) > LONGEST_BYTES:
        raise Bad("empty or too long")
    if data[0] != VERSION:
        raise OtherVersion(f"version {data[0]}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, RecursionError) as exc:
        raise Bad(str(exc)) from None


def _loads(loads: Loads) -> list[_Load]:
    out = []
    for (worker, rank), it in loads.items():
        comp_s, head_s, booked_age_s, left_age_s = (
            min(_MOST_S, each) for each in (it.comp_s, it.head_s, it.booked_age_s, it.left_age_s)
        )
        out.append(_Load(worker, rank, it.prefills, comp_s, head_s, it.streams, it.kv_tokens, booked_age_s, left_age_s))
    return out


def _holders(loads: Iterable[_Load]) -> Loads:
    return {
        (it.worker, it.rank): InFlight(
            it.prefills,
            it.comp_s,
            min(it.head_s, it.comp_s),
            it.streams,
            it.kv_tokens,
            it.booked_age_s,
            it.left_age_s,
        )
        for it in loads
    }


def _keys(data: bytes) -> list[int]:
    if len(data) % 8:
        raise Bad("no whole number of keys")
    return list(memoryview(data).cast("Q"))


def _of_sessions(them: Iterable[SessionAt]) -> list[_Session]:
    return [
        _Session(it.key, None, 0, 0) if it.holder is None else _Session(it.key, it.holder[0], it.holder[1], it.tokens)
        for it in them
    ]


def _to_sessions(them: Iterable[_Session]) -> list[SessionAt]:
    return [SessionAt(it.key, None if it.worker is None else (it.worker, it.rank), it.tokens) for it in them]
