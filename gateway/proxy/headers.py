"""Which headers pass. End-to-end headers keep their order, number and (first) spelling; hop-by-hop ones (RFC 9110,
7.6.1) and those by which a client could steer what is behind us do not pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from multidict import CIMultiDict, MultiMapping

RawHeaders = Iterable[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
RANK_HEADER = "X-data-parallel-rank"
RANK_ENDPOINT_HEADER = "x-data-parallel-host-port"
PREFILLER_HEADER = "x-prefiller-host-port"
KV_SOURCE_HEADER = "x-kv-cache-source-host-port"
PLAN_HEADER = "x-warmroute-plan"
OUTCOME_HEADER = "x-warmroute-outcome"
"""In our answers: what became of the request's prompt."""
LEG_HEADER = "x-warmroute-leg"
"""On prefill legs. A face of ours that gets one computes the prompt where it is: none can go round in circles."""
# Engines and sidecars behind us would obey these: a client could make them connect anywhere, or pick a rank past the
# planner (llm-d's, Dynamo's and our own hand-off headers). Who may be obeyed is read before (gateway.sidecar.hints).
STEERING = frozenset(
    name.lower().encode()
    for name in (
        RANK_HEADER,
        RANK_ENDPOINT_HEADER,
        PREFILLER_HEADER,
        KV_SOURCE_HEADER,
        PLAN_HEADER,
        OUTCOME_HEADER,
        LEG_HEADER,
        "x-bypass-remote-prefill",
        "x-encoder-hosts-ports",
        "x-prefiller-url",
    )
)
_REQUEST = _HOP_BY_HOP | STEERING | {b"host", b"content-length", b"expect"}


_LEG = LEG_HEADER.encode()
_REQUEST_ID = "X-Request-Id"
_MOST_NAMES = 1024
_LONGEST_KEPT_BYTES = 64


_Name = tuple[str, bytes, bool, bool]
"""(as text, in lower case, whether it passes to a worker, whether it passes to a client)"""

_names: dict[bytes, _Name] = {}
"""Names seen so far: the same few come with every message."""


def _name(raw: bytes) -> _Name:
    lower = raw.lower()
    name = _text(raw), lower, lower not in _REQUEST, lower not in _HOP_BY_HOP
    if len(_names) < _MOST_NAMES and len(raw) <= _LONGEST_KEPT_BYTES:
        _names[raw] = name
    return name


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def _passing(raw: RawHeaders, up: bool) -> CIMultiDict[str]:
    pairs: list[tuple[str, str]] = []
    spelled: dict[bytes, str] = {}  # aiohttp keeps repeated headers only if they are spelled alike.
    named: list[bytes] = []
    for raw_name, value in raw:
        text, lower, passes_up, passes_down = _names.get(raw_name) or _name(raw_name)
        if passes_up if up else passes_down:
            pairs.append((spelled.setdefault(lower, text), value.decode("utf-8", "surrogateescape")))
        elif lower == b"connection":
            named += value.split(b",")
    out = CIMultiDict(pairs)
    for token in named:
        out.popall(_text(token.strip()), None)
    return out


def request_headers(raw: RawHeaders) -> CIMultiDict[str]:
    """What goes on to a worker. Host and Content-Length are the connection's own business; of several request ids the
    first goes on.
    """
    headers = _passing(raw, up=True)
    ids = headers.getall(_REQUEST_ID, ())
    if len(ids) > 1:
        headers[_REQUEST_ID] = next(filter(None, ids), "")
    return headers


def is_encoded(headers: Mapping[str, str]) -> bool:
    """Whether their body is compressed, or whatever else a Content-Encoding can say."""
    rows = headers.getall("content-encoding", ()) if isinstance(headers, MultiMapping) else ()
    said = rows or (headers.get("content-encoding", ""),)
    return any(coding.strip().lower() not in ("", "identity") for row in said for coding in row.split(","))


def is_unread(headers: Mapping[str, str]) -> bool:
    """Whether their body is no JSON that we look into."""
    return is_encoded(headers) or headers.get("content-type", "")[:10].lower() == "multipart/"


def is_leg(raw: RawHeaders) -> bool:
    """Whether a face of ours sent these."""
    return any(len(name) == len(_LEG) and name.lower() == _LEG for name, _ in raw)


def response_headers(raw: RawHeaders) -> CIMultiDict[str]:
    """What goes back to the client."""
    return _passing(raw, up=False)
