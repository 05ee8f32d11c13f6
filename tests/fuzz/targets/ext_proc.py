"""A stream of Envoy's external processing: any messages, in any order, with a decision in between."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from gateway.extproc.session import ProtocolError
from gateway.pb import ext_proc_pb2 as pb
from tests.fuzz.cut import packed, unpacked
from tests.support.extproc import (
    Recording,
    Talk,
    hinted,
    recordings,
    request_body,
    request_head,
    request_trailers,
    response_body,
    response_head,
    response_trailers,
)

_FULL = pb.FULL_DUPLEX_STREAMED


def _recorded(name: str) -> bytes:
    sent = [message for message in Recording(name).messages if isinstance(message, pb.ProcessingRequest)]
    return b"\x01" + packed(*(message.SerializeToString() for message in sent[:60]))


def _said(*messages: pb.ProcessingRequest, decide_after: int = 1) -> bytes:
    return bytes([decide_after]) + packed(*(message.SerializeToString() for message in messages))


SEEDS = [
    *map(_recorded, recordings()),
    _said(
        request_head(("content-length", "3"), modes=(_FULL, _FULL)),
        request_body(b"abc"),
        request_body(b"", ends=True),
        response_head(("content-type", "application/json")),
        response_body(b'{"model": "m", "a": 1}', ends=True),
        decide_after=2,
    ),
    _said(hinted(request_head(ends=True), ["10.0.0.1:8000", "10.0.0.2"]), response_head(status=503, ends=True)),
    _said(request_head(), request_body(b"a"), request_trailers(), response_head(), response_trailers()),
    _said(request_head(modes=(pb.BUFFERED, pb.BUFFERED)), request_body(b"{}", ends=True), response_head()),
    _said(request_head(modes=(pb.STREAMED, pb.NONE)), response_head()),
]
# fmt: off
WORDS = [
    b":status", b":path", b"content-length", b"content-type", b"x-gateway-destination-endpoint", b'"model": "m"',
    b"200", b"99999999999999999999", b"\xff\xff\xff\xff\x0f",
]
# fmt: on


def fuzz_one(data: bytes) -> None:
    decide_after = data[0] if data else 0
    talk = Talk(max_body_bytes=4096, sees_responses=not decide_after & 64)
    sent_on = b""
    try:
        for i, raw in enumerate(unpacked(data[1:])):
            try:
                message = pb.ProcessingRequest.FromString(raw)
            except DecodeError:
                continue
            talk.feed(message)
            if talk.session.ask is not None and i >= decide_after & 15:
                body = talk.ask.body
                if decide_after & 32:
                    talk.refuse()
                else:
                    talk.pick(rename=("m", "told") if decide_after & 16 else None)
                    sent_on = body
    except ProtocolError:
        pass
    talk.session.close()
    talk.session.close()
    for answer in talk.answers:
        pb.ProcessingResponse.FromString(answer.SerializeToString())
    picked = any(answer.dynamic_metadata.fields for answer in talk.answers)
    assert len(talk.watch.lasts) == picked
    assert talk.watch.told[-1:] == [(last,) for last in talk.watch.lasts]
    if picked:
        assert talk.sent in (sent_on, b""), "another body than the one that was decided on went on"
    assert len(sent_on) <= 4096
