"""External processing in tests: messages as a proxy sends them, recordings of real ones, watches that remember."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from google.protobuf import text_format
from multidict import CIMultiDict

from gateway.extproc.session import Session
from gateway.extproc.types import Ask, Pick, Recall, Refusal
from gateway.pb import ext_proc_pb2 as pb

RECORDINGS = Path(__file__).resolve().parents[1] / "data" / "extproc"
DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
POD = "10.0.0.1:8000"
MOST_BYTES = 8 << 20
_BODY = "response_body"


class Watched:
    """What a watch was told, in order: ("responded", 200, served), ("chunk", b"..."), ("ended",) ..."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.headers: CIMultiDict[str] = CIMultiDict()

    def responded(self, status: int, headers: CIMultiDict[str], served: str | None) -> None:
        self.headers = headers
        self.told.append(("responded", status, served))

    def chunk(self, data: bytes) -> None:
        self.told.append(("chunk", data))

    def ended(self) -> None:
        self.told.append(("ended",))

    def aborted(self) -> None:
        self.told.append(("aborted",))

    def unseen(self) -> None:
        self.told.append(("unseen",))

    def recalled(self) -> None:
        self.told.append(("recalled",))

    @property
    def body(self) -> bytes:
        return b"".join(said[1] for said in self.told if said[0] == "chunk" and isinstance(said[1], bytes))

    @property
    def lasts(self) -> list[object]:
        return [said[0] for said in self.told if said[0] in ("ended", "aborted", "unseen", "recalled")]


def header_map(pairs: Iterable[tuple[str, str]]) -> pb.HeaderMap:
    return pb.HeaderMap(headers=[pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in pairs])


def request_head(
    *headers: tuple[str, str],
    ends: bool = False,
    modes: tuple[pb.BodySendMode, pb.BodySendMode] | None = None,
    method: str = "POST",
    path: str = "/v1/completions",
) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    pairs = [(":method", method), (":path", path), (":authority", "gw"), *headers]
    message.request_headers.headers.CopyFrom(header_map(pairs))
    message.request_headers.end_of_stream = ends
    if modes is not None:
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
    return message


def request_body(data: bytes = b"", ends: bool = False) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=ends))


def request_trailers() -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_trailers=pb.HttpTrailers(trailers=header_map([("x-t", "1")])))


def response_head(*headers: tuple[str, str], status: int = 200, ends: bool = False) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.response_headers.headers.CopyFrom(header_map([(":status", str(status)), *headers]))
    message.response_headers.end_of_stream = ends
    return message


def response_body(data: bytes = b"", ends: bool = False) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=ends))


def response_trailers() -> pb.ProcessingRequest:
    return pb.ProcessingRequest(response_trailers=pb.HttpTrailers(trailers=header_map([("x-t", "1")])))


def hinted(message: pb.ProcessingRequest, subset: str | Sequence[str]) -> pb.ProcessingRequest:
    """`message` with a hint at the endpoints that may be picked."""
    value = message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields[SUBSET]
    if isinstance(subset, str):
        value.string_value = subset
    else:
        value.list_value.SetInParent()
        value.list_value.extend(subset)
    return message


class Talk:
    """A session and all that went over it."""

    def __init__(self, *, max_body_bytes: int = MOST_BYTES, sees_responses: bool = True) -> None:
        self.session = Session(max_body_bytes=max_body_bytes, sees_responses=sees_responses)
        self.answers: list[pb.ProcessingResponse] = []
        self.watch = Watched()

    def feed(self, *messages: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        """The answers to these messages."""
        answers = [answer for message in messages for answer in self.session.feed(message)]
        self.answers += answers
        return answers

    @property
    def ask(self) -> Ask:
        assert self.session.ask is not None, "nothing is asked"
        return self.session.ask

    def pick(
        self,
        *endpoints: str,
        set_headers: dict[str, str] | None = None,
        body: bytes | None = None,
        rename: tuple[str, str] | None = None,
        recall: Recall | None = None,
    ) -> list[pb.ProcessingResponse]:
        """The answers to the decision for these endpoints."""
        pick = Pick(
            endpoints=endpoints or (POD,),
            watch=self.watch,
            set_headers=set_headers or {},
            body=body,
            rename=rename,
            recall=recall,
        )
        answers = self.session.decide(pick)
        self.answers += answers
        return answers

    def refuse(self, status: int = 503, body: bytes = b"{}") -> list[pb.ProcessingResponse]:
        answers = self.session.decide(Refusal(status=status, body=body, headers={}, details="why not"))
        self.answers += answers
        return answers

    @property
    def sent(self) -> bytes:
        """What went on of the request's body."""
        return sent(self.answers)

    @property
    def returned(self) -> bytes:
        """What went back of the response's body, in full duplex."""
        streamed = [
            a.response_body.response.body_mutation.streamed_response for a in self.answers if kind(a)[-1] == "y"
        ]
        return b"".join(part.body for part in streamed)


def kind(message: pb.ProcessingRequest | pb.ProcessingResponse) -> str:
    if isinstance(message, pb.ProcessingRequest):
        return message.WhichOneof("request") or ""
    return message.WhichOneof("response") or ""


def kinds(messages: Iterable[pb.ProcessingRequest | pb.ProcessingResponse]) -> list[str]:
    return [kind(message) for message in messages]


def sent(answers: Iterable[pb.ProcessingResponse]) -> bytes:
    """What goes on of a request's body in full duplex, or takes its place otherwise."""
    out = b""
    for answer in answers:
        if kind(answer) == "request_body":
            mutation = answer.request_body.response.body_mutation
            out += mutation.streamed_response.body or mutation.body
    return out


def headers_set(common: pb.CommonResponse) -> dict[str, str]:
    return {option.header.key: option.header.raw_value.decode() for option in common.header_mutation.set_headers}


def destinations(answer: pb.ProcessingResponse) -> tuple[str | None, str | None]:
    """(by header, by metadata)"""
    part = answer.request_headers if kind(answer) == "request_headers" else answer.request_body
    spaces = answer.dynamic_metadata.fields
    told = spaces["envoy.lb"].struct_value.fields[DESTINATION].string_value if "envoy.lb" in spaces else None
    return headers_set(part.response).get(DESTINATION), told


class Recording:
    """One recorded stream. `messages` are both sides' in their order."""

    def __init__(self, name: str) -> None:
        text = (RECORDINGS / f"{name}.txt").read_text(encoding="utf-8")
        found = re.findall(
            r"^# \+[\d.]+ ms  (ENVOY -> EPP|EPP -> ENVOY)\nprocessing_\w+ \{\n(.*?)^\}\n(?=# )", text, re.M | re.S
        )
        self.messages: list[pb.ProcessingRequest | pb.ProcessingResponse] = [
            text_format.Parse(body, pb.ProcessingRequest(), allow_unknown_field=True)
            if side == "ENVOY -> EPP"
            else text_format.Parse(body, pb.ProcessingResponse(), allow_unknown_field=True)
            for side, body in found
        ]
        assert self.messages
        assert text.count("ms  ENVOY -> EPP") + text.count("ms  EPP -> ENVOY") == len(self.messages)


def recordings() -> list[str]:
    return sorted(path.stem for path in RECORDINGS.glob("*.txt"))
