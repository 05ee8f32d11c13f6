"""Bodies cut anywhere, messages in any order, bytes of any kind: the same request goes on, or an error."""

from __future__ import annotations

import json

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from gateway.extproc.session import ProtocolError
from gateway.extproc.types import Recall, Refusal
from gateway.extproc.wire import CHUNK_BYTES
from gateway.pb import ext_proc_pb2 as pb
from tests.support.extproc import (
    Talk,
    destinations,
    kind,
    kinds,
    request_body,
    request_head,
    request_trailers,
    response_body,
    response_head,
    response_trailers,
)

FD = pb.FULL_DUPLEX_STREAMED
SHOWN = (FD, pb.BUFFERED)
RESPONSES = (FD, pb.BUFFERED, pb.STREAMED, pb.NONE)
REQUESTS = (FD, pb.BUFFERED, pb.BUFFERED_PARTIAL, pb.STREAMED, pb.NONE)

parts = st.lists(st.binary(max_size=200), max_size=6)
bodies = st.one_of(st.binary(max_size=300), st.integers(CHUNK_BYTES - 2, 3 * CHUNK_BYTES + 2).map(lambda n: b"ab" * n))


@st.composite
def cut(draw: st.DrawFn, body: bytes) -> list[bytes]:
    """`body` in pieces, empty ones among them."""
    places = sorted(draw(st.lists(st.integers(0, len(body)), max_size=5)))
    return [body[a:b] for a, b in zip([0, *places], [*places, len(body)], strict=True)]


@given(data=st.data(), body=bodies, told=st.booleans(), end=st.sampled_from(["in the last", "alone", "trailers"]))
def test_any_cut_of_a_body_asks_the_same_and_sends_the_same(
    data: st.DataObject, body: bytes, told: bool, end: str
) -> None:
    talk = Talk()
    pieces = data.draw(cut(body))
    head = request_head(*([("content-length", str(len(body)))] if told else []), modes=(FD, FD))
    messages = [head, *(request_body(piece) for piece in pieces)]
    if end == "in the last":
        messages[-1] = request_body(pieces[-1], ends=True)
    else:
        messages.append(request_body(ends=True) if end == "alone" else request_trailers())
    decide_after = data.draw(st.integers(0, len(messages)))
    asks = []
    for i, message in enumerate(messages):
        talk.feed(message)
        if talk.session.ask is not None and i >= decide_after:
            asks.append(talk.ask)
            talk.pick()
    if talk.session.ask is not None:
        asks.append(talk.ask)
        talk.pick()
    (ask,) = asks
    assert ask.body == body
    assert talk.sent == body
    assert kind(talk.answers[0]) == "request_headers"
    streamed = [
        a.request_body.response.body_mutation.streamed_response for a in talk.answers if kind(a) == "request_body"
    ]
    assert all(len(part.body) <= CHUNK_BYTES for part in streamed)
    ends = [part.end_of_stream for part in streamed]
    assert (ends[-1:] == [True] and ends.count(True) == 1) or (end == "trailers" and not any(ends))
    assert (kinds(talk.answers)[-1] == "request_trailers") == (end == "trailers")


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[list[pb.ProcessingRequest], int]:
    """What Envoy may send for one request, requests' and responses' messages in their orders and merged anyhow; and
    after which message the decision is made. A response may come first, early, or not at all.
    """
    modes = draw(st.sampled_from(REQUESTS)), draw(st.sampled_from(RESPONSES))
    request = [request_head(ends=draw(st.booleans()), modes=modes)]
    if not request[0].request_headers.end_of_stream:
        pieces = draw(parts)
        shape = draw(st.sampled_from(["ends", "trailers", "stops"]))
        if modes[0] in (pb.BUFFERED, pb.BUFFERED_PARTIAL):
            request.append(request_body(b"".join(pieces), ends=modes[0] == pb.BUFFERED or draw(st.booleans())))
        elif modes[0] != pb.NONE:
            request += [request_body(piece) for piece in pieces]
            if shape == "ends":
                request.append(request_body(ends=True))
        if shape == "trailers" and modes[0] != pb.NONE:
            request.append(request_trailers())
    kind_of_response = draw(st.sampled_from(["application/json", "text/event-stream; charset=utf-8"]))
    head = "content-type", kind_of_response
    response = [response_head(head, status=draw(st.integers(200, 599)), ends=draw(st.booleans()))]
    if not response[0].response_headers.end_of_stream and modes[1] != pb.NONE:
        pieces = draw(parts)
        if modes[1] == pb.BUFFERED:
            response.append(response_body(b"".join(pieces), ends=True))
        else:
            response += [response_body(piece) for piece in pieces]
            response.append(draw(st.sampled_from([response_body(ends=True), response_trailers()])))
    response = response[: draw(st.integers(0, len(response)))]
    merged = []
    while request or response:
        side = request if not response or (request and draw(st.booleans())) else response
        merged.append(side.pop(0))
    merged[0].protocol_config.request_body_mode, merged[0].protocol_config.response_body_mode = modes
    return merged, draw(st.integers(0, len(merged)))


@given(exchange=exchanges(), recallable=st.booleans())
def test_any_order_is_answered_and_each_message_once(
    exchange: tuple[list[pb.ProcessingRequest], int], recallable: bool
) -> None:
    messages, decide_after = exchange
    talk = Talk()
    recall = Recall() if recallable else None
    for i, message in enumerate(messages):
        talk.feed(message)
        if talk.session.ask is not None and i >= decide_after:
            talk.pick(recall=recall)
    if talk.session.ask is not None:
        talk.pick(recall=recall)
    is_held = talk.session._held is not None
    talk.session.close()
    answered, came = kinds(talk.answers), kinds(messages)
    if is_held:  # It waits for a chunk that did not come.
        assert recallable
        came = [name for name in came if not name.startswith("response")]
    for name in ("response_headers", "response_trailers"):
        assert answered.count(name) == came.count(name)
    assert answered.count("response_body") == came.count("response_body")
    overtaken = "response_headers" in came and not any(a.dynamic_metadata.fields for a in talk.answers)
    if not overtaken and talk.session.decided and talk.watch.told:
        routed = [answer for answer in talk.answers if answer.dynamic_metadata.fields]
        assert len(routed) == 1
        assert destinations(routed[0])[0] == destinations(routed[0])[1]
        assert answered.count("request_headers") == 1
        assert answered.count("request_trailers") == came.count("request_trailers")
    assert len(talk.watch.lasts) <= 1
    assert talk.watch.told[-1:] == [(last,) for last in talk.watch.lasts]
    assert talk.watch.body in b"".join(m.response_body.body for m in messages)


@given(exchange=exchanges(), at=st.integers(0, 12))
def test_what_is_taken_back_is_refused_once_and_only_before_its_response_begins(
    exchange: tuple[list[pb.ProcessingRequest], int], at: int
) -> None:
    messages, decide_after = exchange
    talk, gone = Talk(), Refusal(status=429, body=b"gone", headers={})
    taken: list[pb.ProcessingResponse] = []
    for i, message in enumerate(messages):
        answers = talk.feed(message)
        assert not (taken and answers)
        if talk.session.ask is not None and i >= decide_after:
            talk.pick(recall=Recall())
        if i >= at and not taken:
            begun = "response_headers" in kinds(talk.answers)
            taken = talk.session.take_back(gone)
            if taken:
                assert not begun
                assert kinds(taken) == ["immediate_response"]
                assert talk.watch.told == [("recalled",)]
    if taken:
        assert talk.session.take_back(gone) == []
    talk.session.close()
    assert talk.session.take_back(gone) == []
    assert talk.watch.lasts == ["recalled"] if taken else "recalled" not in talk.watch.lasts


anything = st.one_of(
    st.builds(request_head, ends=st.booleans(), modes=st.tuples(st.sampled_from(REQUESTS), st.sampled_from(RESPONSES))),
    st.builds(request_body, st.binary(max_size=9), st.booleans()),
    st.builds(response_head, status=st.integers(0, 999), ends=st.booleans()),
    st.builds(response_body, st.binary(max_size=9), st.booleans()),
    st.builds(request_trailers),
    st.builds(response_trailers),
    st.just(pb.ProcessingRequest()),
)


@given(messages=st.lists(anything, max_size=12), picks=st.sets(st.integers(0, 11)), refuse=st.booleans())
def test_nonsense_is_an_error_or_answered_and_the_watch_hears_one_end(
    messages: list[pb.ProcessingRequest], picks: set[int], refuse: bool
) -> None:
    talk = Talk()
    try:
        for i, message in enumerate(messages):
            talk.feed(message)
            if i in picks and talk.session.ask is not None:
                _ = talk.refuse() if refuse else talk.pick()
    except ProtocolError:
        pass
    talk.session.close()
    routed = any(answer.dynamic_metadata.fields for answer in talk.answers)
    assert len(talk.watch.lasts) == routed


@given(raw=st.lists(st.binary(max_size=60), max_size=5))
def test_bytes_of_any_kind_do_no_harm(raw: list[bytes]) -> None:
    talk = Talk()
    for data in raw:
        try:
            message = pb.ProcessingRequest.FromString(data)
        except DecodeError:
            continue
        try:
            talk.feed(message)
        except ProtocolError:
            return
    assert talk.session.decided == bool(talk.answers) or not talk.session.decided


@given(
    body=st.lists(
        st.sampled_from([b'"model"', b'"', b"model", b":", b" ", b'"abc"', b"abc", b"\\", b'"mo', b"x", b"{"])
    ),
    data=st.data(),
)
def test_a_rename_does_not_depend_on_the_cut(body: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(body)
    outs = []
    for pieces in ([whole], data.draw(cut(whole))):
        talk = Talk()
        talk.feed(request_head(ends=True))
        talk.pick(rename=("abc", "other"))
        talk.feed(response_head(("content-type", "application/json")))
        for piece in pieces:
            talk.feed(response_body(piece))
        talk.feed(response_body(ends=True))
        outs.append(talk.returned)
        assert talk.watch.body == whole
    assert outs[0] == outs[1]
    assert outs[0].replace(b'"other"', b'"abc"') == whole


@pytest.mark.parametrize("name", ["m", "meta-llama/Llama-3.1-8B", 'a"b\\c', "modèle", "模型"])
@given(data=st.data())
def test_any_name_is_renamed(name: str, data: st.DataObject) -> None:
    ascii_only = data.draw(st.booleans())
    separators = data.draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", "  :\n ")]))
    answer = {"id": name, "model": name, "choices": [{"text": f'"model":"{name}"', "model": name + "x"}]}
    text = json.dumps(answer, ensure_ascii=ascii_only, separators=separators).encode()
    talk = Talk()
    talk.feed(request_head(ends=True))
    talk.pick(rename=(name, "told"))
    talk.feed(response_head(("content-type", "text/event-stream")))
    for piece in data.draw(cut(text)):
        talk.feed(response_body(piece))
    talk.feed(response_body(ends=True))
    assert json.loads(talk.returned) == answer | {"model": "told"}
