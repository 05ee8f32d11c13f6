"""Words of Envoy's external processing: reading what a proxy says, and building what it is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from google.protobuf.struct_pb2 import Value
from multidict import CIMultiDict

from gateway.extproc.types import Pick, Refusal
from gateway.pb import ext_proc_pb2 as pb
from gateway.proxy.headers import STEERING

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
SCORES = DESTINATION + "-scores"
DROPPED = "x-llm-d-request-dropped-reason"
_LB = "envoy.lb"
_SUBSET_HINT = "envoy.lb.subset_hint"
_UPSTREAM_ADDRESS = "upstream.address"
_CONTENT_LENGTH = "content-length"
_CONTENT_TYPE = "content-type"

CHUNK_BYTES = 62_000
"""Some proxies take no more than 64 KB in one message of a streamed body."""

OWNED = (
    *sorted(name.decode() for name in STEERING),
    DESTINATION,
    SERVED,
    SUBSET,
    DESTINATION + "-fallback",
    SCORES,
    DROPPED,
)
"""Request headers that only we, or the proxy, may write: a client's go no further, nor do they reach the picker."""
_OWNED = frozenset(OWNED)
_FOREIGN = tuple(name for name in OWNED if name != DESTINATION)

_UNSENDABLE = frozenset("\r\n\0")


class Head(msgspec.Struct, frozen=True):
    """Headers of one message; `pseudo` are those whose names begin with a colon."""

    headers: CIMultiDict[str]
    pseudo: dict[str, str]

    @property
    def content_length(self) -> int | None:
        value = self.headers.get(_CONTENT_LENGTH, "")
        return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None


def head_of(headers: pb.HeaderMap) -> Head:
    """Envoy writes `raw_value`, agentgateway writes pseudo-headers to `value`."""
    pairs, pseudo = [], {}
    for header in headers.headers:
        name = header.key
        value = header.raw_value.decode("utf-8", "surrogateescape") or header.value
        if name.startswith(":"):
            pseudo[name] = value
        else:
            pairs.append((name, value))
    return Head(CIMultiDict(pairs), pseudo)


def without_owned(headers: CIMultiDict[str]) -> CIMultiDict[str]:
    return CIMultiDict([pair for pair in headers.items() if pair[0].lower() not in _OWNED])


def subset_of(message: pb.ProcessingRequest) -> tuple[str, ...] | None:
    """The endpoints a proxy allows: a list, a string with commas, or a list of such strings. An address without a port
    means all of its ports. None: it says nothing. What it says and we cannot read allows none.
    """
    spaces = message.metadata_context.filter_metadata
    if _SUBSET_HINT not in spaces or SUBSET not in spaces[_SUBSET_HINT].fields:
        return None
    value = spaces[_SUBSET_HINT].fields[SUBSET]
    texts: Iterable[Value] = value.list_value.values if value.WhichOneof("kind") == "list_value" else (value,)
    return tuple(part for text in texts for part in map(str.strip, text.string_value.split(",")) if part)


def served_of(message: pb.ProcessingRequest) -> str | None:
    """The endpoint a response comes from, as the proxy's metadata or its attributes tell."""
    spaces = message.metadata_context.filter_metadata
    if _LB in spaces and SERVED in spaces[_LB].fields and (served := spaces[_LB].fields[SERVED].string_value):
        return served
    for attributes in message.attributes.values():
        if _UPSTREAM_ADDRESS in attributes.fields:
            return attributes.fields[_UPSTREAM_ADDRESS].string_value or None
    return None


def served_or_why(message: pb.ProcessingRequest) -> str:
    """What GAIE's conformance suite wants to read: the endpoint by metadata alone, or what is missing there."""
    spaces = message.metadata_context.filter_metadata
    if _LB not in spaces:
        return "fail: missing envoy lb metadata"
    value = spaces[_LB].fields.get(SERVED)
    if value is None or value.WhichOneof("kind") != "string_value":
        return "fail: missing destination endpoint served metadata"
    return value.string_value


def set_header(mutation: pb.HeaderMutation, name: str, value: str) -> None:
    """Overwrites. With `value` in place of `raw_value` Envoy drops the header; appended, a client's own would win.
    Raises ValueError for what no header can hold.
    """
    if not _UNSENDABLE.isdisjoint(value):
        raise ValueError(f"a line break in the header {name}")
    option = mutation.set_headers.add()
    option.header.key = name.lower()
    option.header.raw_value = value.encode("utf-8", "surrogateescape")
    option.append_action = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def route(message: pb.ProcessingResponse, common: pb.CommonResponse, pick: Pick, length: int | None) -> None:
    """Send a request where `pick` says; `common` is the part of `message` that may change its headers. length: of a
    body that takes the place of one whose length was told.
    """
    if not pick.endpoints:
        raise ValueError("a pick without an endpoint")
    destination = ",".join(pick.endpoints)
    mutation = common.header_mutation
    set_header(mutation, DESTINATION, destination)
    for name, value in pick.set_headers.items():
        set_header(mutation, name, value)
    if length is not None:
        set_header(mutation, _CONTENT_LENGTH, str(length))
    removed = _FOREIGN + pick.remove_headers
    ours = {name.lower() for name in pick.set_headers}
    if not ours.isdisjoint(removed):  # A proxy may remove after it has set.
        removed = tuple(name for name in removed if name not in ours)
    mutation.remove_headers.extend(removed)
    common.clear_route_cache = True
    told = message.dynamic_metadata.fields[_LB].struct_value
    told.fields[DESTINATION].string_value = destination
    if pick.scores:
        told.fields[SCORES].struct_value.update(pick.scores)


def immediate(refusal: Refusal) -> pb.ProcessingResponse:
    """Envoy calls a body without a content type plain text."""
    message = pb.ProcessingResponse()
    answer = message.immediate_response
    answer.status.code = refusal.status
    answer.body = refusal.body
    answer.details = "_".join(refusal.details.split())
    if not any(name.lower() == _CONTENT_TYPE for name in refusal.headers):
        set_header(answer.headers, _CONTENT_TYPE, "application/json")
    for name, value in refusal.headers.items():
        set_header(answer.headers, name, value)
    return message


def chunks(body: bytes) -> Iterator[bytes]:
    """At least one."""
    for start in range(0, len(body) or 1, CHUNK_BYTES):
        yield body[start : start + CHUNK_BYTES]


def streamed_request(body: bytes, ends: bool) -> pb.ProcessingResponse:
    message = pb.ProcessingResponse()
    _stream(message.request_body, body, ends)
    return message


def streamed_response(body: bytes, ends: bool) -> pb.ProcessingResponse:
    message = pb.ProcessingResponse()
    _stream(message.response_body, body, ends)
    return message


def _stream(answer: pb.BodyResponse, body: bytes, ends: bool) -> None:
    streamed = answer.response.body_mutation.streamed_response
    streamed.body = body
    streamed.end_of_stream = ends


def unchanged(kind: str) -> pb.ProcessingResponse:
    """The answer to a message of `kind` of which nothing changes."""
    message = pb.ProcessingResponse()
    getattr(message, kind).SetInParent()
    return message


def replaced_body(body: bytes, tells_length: bool) -> pb.ProcessingResponse:
    """Of a response. A chunk of which nothing is to go out is cleared. tells_length: the response has a Content-Length,
    which must fit.
    """
    message = pb.ProcessingResponse()
    common = message.response_body.response
    if body:
        common.body_mutation.body = body
    else:
        common.body_mutation.clear_body = True
    if tells_length:
        set_header(common.header_mutation, _CONTENT_LENGTH, str(len(body)))
    return message


def change_response(message: pb.ProcessingResponse, hidden: Iterable[str], added: Mapping[str, str]) -> None:
    """A response's headers, without those of `hidden` and with those of `added`."""
    mutation = message.response_headers.response.header_mutation
    mutation.remove_headers.extend(hidden)
    for name, value in added.items():
        set_header(mutation, name, value)


def without_content_length(message: pb.ProcessingResponse) -> None:
    message.response_headers.response.header_mutation.remove_headers.append(_CONTENT_LENGTH)
