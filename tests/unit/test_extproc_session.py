"""One request over external processing: every way its body may come, every way it may end."""

from typing import Any

import pytest

from gateway.extproc.session import ProtocolError, Session
from gateway.extproc.types import Pick, Recall, Refusal
from gateway.extproc.wire import CHUNK_BYTES, OWNED
from gateway.pb import ext_proc_pb2 as pb
from tests.support.extproc import (
    DESTINATION,
    POD,
    Recording,
    Talk,
    Watched,
    destinations,
    headers_set,
    hinted,
    kind,
    kinds,
    recordings,
    request_body,
    request_head,
    request_trailers,
    response_body,
    response_head,
    response_trailers,
    sent,
)

FD = (pb.FULL_DUPLEX_STREAMED, pb.FULL_DUPLEX_STREAMED)
BUFFERED = (pb.BUFFERED, pb.BUFFERED)
STREAMED = (pb.STREAMED, pb.STREAMED)
NONE = (pb.NONE, pb.NONE)
JSON = ("content-type", "application/json")

# What becomes of the recorded request: the watch's last word, None where nothing was picked.
LASTS = {
    "fd_client_disconnect_mid_request": None,
    "fd_client_disconnect_mid_sse": "aborted",
    "fd_post_response_headers_only": "unseen",
}


@pytest.mark.parametrize("name", recordings())
def test_recorded_streams_of_envoy(name: str) -> None:
    """The same kinds of answers at the same places as Envoy was content with, the same destination, and every byte."""
    recording = Recording(name)
    talk, answers, theirs = Talk(), list[str](), list[str]()
    bodies: dict[str, list[bytes]] = {"request_body": [], "response_body": []}
    for message in recording.messages:
        if isinstance(message, pb.ProcessingResponse):
            if talk.session.ask is not None:
                answers += kinds(talk.pick())
            theirs.append(kind(message))
            continue
        assert answers == theirs
        answers += kinds(talk.feed(message))
        if kind(message) in bodies:
            bodies[kind(message)].append(getattr(message, kind(message)).body)
    assert answers == theirs
    routed = [a for a in talk.answers if a.dynamic_metadata.fields]
    streams = name.startswith(("fd_", "override_"))
    if routed:
        assert destinations(routed[0]) == (POD, POD)
        assert talk.sent == (b"".join(bodies["request_body"]) if streams else b"")
    if streams and name != "fd_post_response_headers_only":
        assert talk.returned == b"".join(bodies["response_body"])
    assert talk.watch.body == b"".join(bodies["response_body"])
    talk.session.close()
    last = LASTS.get(name, "ended")
    assert talk.watch.lasts == ([] if last is None else [last])


@pytest.mark.parametrize(
    ("name", "status", "served"),
    [
        ("override_host_list_retry_served", 200, "127.0.0.1:18201"),
        ("fd_attributes", 200, "127.0.0.1:18201"),
        ("fd_dead", 503, None),
        ("fd_post", 200, None),
    ],
)
def test_who_served_is_read_from_metadata_else_from_attributes(name: str, status: int, served: str | None) -> None:
    talk = Talk()
    for message in Recording(name).messages:
        if isinstance(message, pb.ProcessingRequest):
            talk.feed(message)
            if talk.session.ask is not None:
                talk.pick()
    assert talk.watch.told[0] == ("responded", status, served)


def test_a_recorded_subset_is_asked_for() -> None:
    talk = Talk()
    for message in Recording("fd_subset_hint").messages[:3]:
        assert isinstance(message, pb.ProcessingRequest)
        talk.feed(message)
    assert talk.ask.subset == ("127.0.0.1:18202",)


def test_nothing_is_answered_before_a_full_duplex_body_is_whole() -> None:
    talk = Talk()
    assert talk.feed(request_head(modes=FD), request_body(b'{"mod'), request_body(b'el":"m"}')) == []
    assert talk.session.ask is None
    assert talk.feed(request_body(ends=True)) == []
    assert talk.ask.body == b'{"model":"m"}'
    assert (talk.ask.method, talk.ask.path, talk.ask.blind) == ("POST", "/v1/completions", False)
    head, body = talk.pick()
    assert destinations(head) == (POD, POD)
    assert head.request_headers.response.clear_route_cache
    streamed = body.request_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b'{"model":"m"}', True)


def test_without_a_protocol_config_bodies_are_taken_for_full_duplex() -> None:
    talk = Talk()
    assert talk.feed(request_head()) == []
    talk.feed(request_body(b"x", ends=True))
    assert kinds(talk.pick()) == ["request_headers", "request_body"]
    talk.feed(response_head())
    (answer,) = talk.feed(response_body(b"y"))
    assert answer.response_body.response.body_mutation.streamed_response.body == b"y"


@pytest.mark.parametrize("modes", [FD, BUFFERED, STREAMED, NONE])
def test_a_request_without_a_body_is_decided_at_once(modes: tuple[pb.BodySendMode, pb.BodySendMode]) -> None:
    talk = Talk()
    assert talk.feed(request_head(ends=True, modes=modes, method="GET", path="/v1/models")) == []
    assert (talk.ask.body, talk.ask.blind, talk.ask.path) == (b"", False, "/v1/models")
    (answer,) = talk.pick()
    assert destinations(answer) == (POD, POD)


def test_a_body_as_long_as_its_content_length_is_not_waited_for() -> None:
    talk = Talk()
    talk.feed(request_head(("content-length", "4"), modes=FD), request_body(b"ab"), request_body(b"cd"))
    assert talk.ask.body == b"abcd"
    _, body = talk.pick()
    assert not body.request_body.response.body_mutation.streamed_response.end_of_stream
    (end,) = talk.feed(request_body(ends=True))
    streamed = end.request_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"", True)


def test_its_end_may_come_while_it_is_decided() -> None:
    talk = Talk()
    talk.feed(request_head(("content-length", "4"), modes=FD), request_body(b"abcd"), request_body(ends=True))
    (_, body) = talk.pick()
    assert body.request_body.response.body_mutation.streamed_response.end_of_stream


@pytest.mark.parametrize("decided", [False, True])
@pytest.mark.parametrize("length", [[], [("content-length", "4")]])
def test_envoy_46237_the_last_part_of_a_body_may_come_twice(decided: bool, length: list[tuple[str, str]]) -> None:
    talk = Talk()
    talk.feed(request_head(*length, modes=FD), request_body(b"ab"), request_body(b"cd", ends=not length))
    assert talk.ask.body == b"abcd"
    if decided:
        talk.pick()
    talk.feed(request_body(b"cd", ends=True))
    if not decided:
        talk.pick()
    assert talk.feed(request_body(b"cd", ends=True)) == []
    assert talk.sent == b"abcd"
    ends = [a.request_body.response.body_mutation.streamed_response.end_of_stream for a in talk.answers[1:]]
    assert ends.count(True) == 1
    assert ends[-1]


def test_trailers_end_a_request() -> None:
    talk = Talk()
    talk.feed(request_head(modes=FD), request_body(b"hello"), request_trailers())
    answers = talk.pick()
    assert kinds(answers) == ["request_headers", "request_body", "request_trailers"]
    assert not answers[1].request_body.response.body_mutation.streamed_response.end_of_stream


def test_trailers_may_come_after_a_decision() -> None:
    talk = Talk()
    talk.feed(request_head(("content-length", "5"), modes=FD), request_body(b"hello"))
    talk.pick()
    assert kinds(talk.feed(request_trailers())) == ["request_trailers"]


@pytest.mark.parametrize(
    ("size", "messages"), [(0, 1), (1, 1), (61_000, 1), (62_000, 1), (62_001, 2), (63_000, 2), (125_000, 3)]
)
def test_no_chunk_is_over_62000_bytes(size: int, messages: int) -> None:
    body = bytes(i % 251 for i in range(size))
    talk = Talk()
    talk.feed(request_head(modes=FD), request_body(body), request_body(ends=True))
    _, *parts = talk.pick()
    streamed = [part.request_body.response.body_mutation.streamed_response for part in parts]
    assert [part.end_of_stream for part in streamed] == [False] * (messages - 1) + [True]
    assert max(len(part.body) for part in streamed) <= CHUNK_BYTES
    assert sent(parts) == body


def test_buffered_the_body_is_in_one_message_and_its_answer_sets_the_headers() -> None:
    talk = Talk()
    (at_once,) = talk.feed(request_head(("content-length", "2"), modes=BUFFERED))
    assert kind(at_once) == "request_headers"
    assert not at_once.request_headers.response.header_mutation.set_headers
    talk.feed(request_body(b"{}", ends=True))
    (answer,) = talk.pick()
    assert destinations(answer) == (POD, POD)
    assert not answer.request_body.response.HasField("body_mutation")
    assert "content-length" not in headers_set(answer.request_body.response)


def test_buffered_a_changed_body_has_its_content_length() -> None:
    """Envoy answers 500 otherwise."""
    talk = Talk()
    talk.feed(request_head(("content-length", "2"), modes=BUFFERED), request_body(b"{}", ends=True))
    (answer,) = talk.pick(body=b'{"model":"other"}')
    assert answer.request_body.response.body_mutation.body == b'{"model":"other"}'
    assert headers_set(answer.request_body.response)["content-length"] == "17"


def test_a_changed_body_of_unknown_length_gets_none() -> None:
    talk = Talk()
    talk.feed(request_head(modes=BUFFERED), request_body(b"{}", ends=True))
    (answer,) = talk.pick(body=b"{ }")
    assert "content-length" not in headers_set(answer.request_body.response)


def test_full_duplex_a_changed_body_takes_the_old_ones_place() -> None:
    talk = Talk()
    talk.feed(request_head(("content-length", "2"), modes=FD), request_body(b"{}"), request_body(ends=True))
    head, *_ = talk.pick(body=b"{  }")
    assert talk.sent == b"{  }"
    assert headers_set(head.request_headers.response)["content-length"] == "4"


def test_a_body_that_came_in_part_is_not_shown() -> None:
    talk = Talk()
    talk.feed(request_head(modes=(pb.BUFFERED_PARTIAL, pb.NONE)), request_body(b'{"mod'))
    assert (talk.ask.body, talk.ask.blind) == (b"", True)
    with pytest.raises(ValueError, match="body"):
        talk.pick(body=b"{}")
    assert kinds(talk.pick()) == ["request_body"]


@pytest.mark.parametrize("modes", [STREAMED, NONE])
def test_what_cannot_be_seen_is_decided_blindly(modes: tuple[pb.BodySendMode, pb.BodySendMode]) -> None:
    talk = Talk()
    talk.feed(request_head(modes=modes))
    assert (talk.ask.body, talk.ask.blind) == (b"", True)
    talk.feed(request_body(b"early"))  # send_body_without_waiting_for_header_response
    assert kinds(talk.pick()) == ["request_headers", "request_body"]
    (answer,) = talk.feed(request_body(b"late", ends=True))
    assert not answer.request_body.response.HasField("body_mutation")


@pytest.mark.parametrize("modes", [(pb.GRPC, pb.NONE), (pb.NONE, pb.GRPC), (17, 17)])
def test_modes_that_are_not_known_are_an_error(modes: tuple[pb.BodySendMode, pb.BodySendMode]) -> None:
    with pytest.raises(ProtocolError, match="modes"):
        Talk().feed(request_head(modes=modes))


def test_headers_are_written_raw_and_overwrite() -> None:
    talk = Talk()
    talk.feed(request_head(ends=True))
    (answer,) = talk.pick(set_headers={"X-Prefiller-Host-Port": "10.0.0.9:8000"})
    options = answer.request_headers.response.header_mutation.set_headers
    assert [option.header.key for option in options] == [DESTINATION, "x-prefiller-host-port"]
    assert {option.append_action for option in options} == {pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD}
    assert all(option.header.raw_value and not option.header.value for option in options)


def test_headers_are_read_raw_or_not() -> None:
    """agentgateway writes pseudo-headers to `value`."""
    message = pb.ProcessingRequest()
    message.request_headers.end_of_stream = True
    for name, value in ((":method", "GET"), (":path", "/v1/models"), ("x-a", "b")):
        message.request_headers.headers.headers.add(key=name, value=value)
    talk = Talk()
    talk.feed(message)
    assert (talk.ask.method, talk.ask.path, talk.ask.headers["X-A"]) == ("GET", "/v1/models", "b")


def test_control_headers_of_clients_go_nowhere() -> None:
    talk = Talk()
    talk.feed(request_head(*((name, "10.66.6.6:1") for name in OWNED), ("x-mine", "kept"), ends=True))
    assert list(talk.ask.headers) == ["x-mine"]
    (answer,) = talk.pick(set_headers={"X-Prefiller-Host-Port": "10.0.0.9:8000"})
    mutation = answer.request_headers.response.header_mutation
    assert {DESTINATION, *mutation.remove_headers} | {"x-prefiller-host-port"} == set(OWNED)
    assert "x-prefiller-host-port" not in mutation.remove_headers  # A proxy may remove after it has set.
    assert {"x-data-parallel-rank", "x-kv-cache-source-host-port", "x-warmroute-plan"} <= set(OWNED)


@pytest.mark.parametrize(
    ("hint", "subset"),
    [
        (["10.0.0.1:8080"], ("10.0.0.1:8080",)),
        ("10.0.0.2:8080,10.0.0.3:8080", ("10.0.0.2:8080", "10.0.0.3:8080")),
        ("  10.0.0.2:8080 ,  ,  10.0.0.3:8080  ", ("10.0.0.2:8080", "10.0.0.3:8080")),
        (["10.0.0.2:8080, 10.0.0.3:8080"], ("10.0.0.2:8080", "10.0.0.3:8080")),
        (["10.0.0.1", "[fd00::1]:8000"], ("10.0.0.1", "[fd00::1]:8000")),
    ],
)
def test_a_subset_is_a_list_or_a_string(hint: str | list[str], subset: tuple[str, ...]) -> None:
    talk = Talk()
    talk.feed(hinted(request_head(modes=FD), hint), hinted(request_body(b"x", ends=True), hint))
    assert talk.ask.subset == subset


@pytest.mark.parametrize("hint", [[], "", " , ", [""]])
def test_a_subset_of_none_is_503(hint: str | list[str]) -> None:
    talk = Talk()
    (answer,) = talk.feed(hinted(request_head(ends=True), hint))
    assert answer.immediate_response.status.code == 503
    assert b"no_endpoints" in answer.immediate_response.body
    assert talk.session.decided


def test_a_subset_may_come_with_the_body_only() -> None:
    talk = Talk()
    talk.feed(request_head(modes=FD), hinted(request_body(b"x", ends=True), ["10.0.0.1:1"]))
    assert talk.ask.subset == ("10.0.0.1:1",)


def test_a_subset_that_cannot_be_read_allows_none() -> None:
    message = request_head(ends=True)
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields[DESTINATION + "-subset"].number_value = 8000
    (answer,) = Talk().feed(message)
    assert answer.immediate_response.status.code == 503


def test_a_list_of_endpoints_is_joined_and_the_same_everywhere() -> None:
    talk = Talk()
    talk.feed(request_head(ends=True))
    (answer,) = talk.pick("10.0.0.1:8000", "[fd00::1]:8000")
    assert destinations(answer) == ("10.0.0.1:8000,[fd00::1]:8000",) * 2


def test_a_refusal_is_an_immediate_response() -> None:
    talk = Talk()
    talk.feed(request_head(modes=FD), request_body(b"x", ends=True))
    (answer,) = talk.refuse(429, b'{"error":{}}')
    immediate = answer.immediate_response
    assert (immediate.status.code, immediate.body, immediate.details) == (429, b'{"error":{}}', "why_not")
    assert immediate.headers.set_headers[0].header.raw_value == b"application/json"
    assert talk.session.decided
    assert talk.feed(response_head(status=429), response_body(b"x", ends=True)) == []


def test_a_body_over_the_limit_is_refused_when_the_client_will_hear_it() -> None:
    """That is, when it has sent it all; only one that is far too long is cut off."""
    over = Talk(max_body_bytes=10)
    assert over.feed(request_head(modes=FD), request_body(b"123456"), request_body(b"12345")) == []
    (answer,) = over.feed(request_body(ends=True))
    assert answer.immediate_response.status.code == 413
    told = Talk(max_body_bytes=10)
    (answer,) = told.feed(request_head(("content-length", "11"), modes=FD), request_body(b"12345678901"))
    assert answer.immediate_response.status.code == 413
    far = Talk(max_body_bytes=10)
    (answer,) = far.feed(request_head(modes=FD), request_body(b"1" * 21))
    assert answer.immediate_response.status.code == 413
    assert far.feed(request_body(b"more", ends=True)) == []


def test_a_pick_that_cannot_be_carried_out_may_be_replaced() -> None:
    for bad in ({"set_headers": {"x-a": "b\r\nc: d"}}, {"body": b"{}"}):
        talk = Talk()
        talk.feed(request_head(ends=True))
        with pytest.raises(ValueError, match=r"line break|body"):
            talk.pick(**bad)  # type: ignore[arg-type]
        assert talk.watch.told == [("aborted",)]
        (answer,) = talk.refuse()
        assert answer.immediate_response.status.code == 503
    talk = Talk()
    talk.feed(request_head(ends=True))
    with pytest.raises(ValueError, match="endpoint"):
        talk.session.decide(Pick(endpoints=(), watch=talk.watch))


def test_an_answer_of_the_proxys_own_overtakes_a_decision() -> None:
    talk = Talk()
    talk.feed(request_head(modes=FD), request_body(b"x", ends=True))
    assert kinds(talk.feed(response_head(status=504), response_body(b"timeout", ends=True))) == [
        "response_headers",
        "response_body",
    ]
    assert talk.session.ask is None
    assert talk.pick() == []
    assert talk.watch.told == [("aborted",)]


def test_a_stream_may_begin_with_a_response() -> None:
    """Of a filter that answers before ours has seen the request."""
    talk = Talk()
    message = response_head(status=401)
    message.protocol_config.response_body_mode = pb.FULL_DUPLEX_STREAMED
    assert kinds(talk.feed(message, response_body(b"no", ends=True))) == ["response_headers", "response_body"]


def test_an_upstream_may_answer_before_its_request_is_whole() -> None:
    talk = Talk()
    talk.feed(request_head(("content-length", "1"), modes=FD), request_body(b"x"))
    talk.pick()
    talk.feed(response_head(status=400))
    assert kinds(talk.feed(request_body(ends=True), response_body(b"bad", ends=True))) == [
        "request_body",
        "response_body",
    ]
    assert talk.watch.told == [("responded", 400, None), ("chunk", b"bad"), ("ended",)]


def picked(modes: tuple[pb.BodySendMode, pb.BodySendMode], rename: tuple[str, str] | None = None) -> Talk:
    talk = Talk()
    talk.feed(request_head(ends=True, modes=modes))
    talk.pick(rename=rename)
    return talk


@pytest.mark.parametrize(("modes", "answer"), [(FD, b"one"), ((pb.BUFFERED, pb.STREAMED), b"")])
def test_bodies_whose_head_is_not_shown_pass_unchanged_and_unseen(
    modes: tuple[pb.BodySendMode, pb.BodySendMode], answer: bytes
) -> None:
    """response_header_mode: SKIP, with bodies."""
    talk = picked(modes, rename=("one", "two"))
    answers = talk.feed(response_body(b"one"), response_body(b"", ends=True), response_trailers())
    assert kinds(answers) == ["response_body", "response_body", "response_trailers"]
    assert answers[0].response_body.response.body_mutation.streamed_response.body == answer
    assert talk.watch.told == [("unseen",)]


def test_a_response_that_is_a_head_alone_is_whole() -> None:
    talk = picked(FD)
    talk.feed(response_head(status=204, ends=True))
    talk.session.close()
    assert talk.watch.told == [("responded", 204, None), ("ended",)]


def test_every_byte_of_a_response_goes_back_at_once() -> None:
    talk = picked(FD)
    talk.feed(response_head(("content-type", "text/event-stream")))
    for data in (b"data: 1\n\n", b"data: 2\n\n", b""):
        (answer,) = talk.feed(response_body(data, ends=not data))
        streamed = answer.response_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (data, not data)
    told = [("responded", 200, None), ("chunk", b"data: 1\n\n"), ("chunk", b"data: 2\n\n"), ("ended",)]
    assert talk.watch.told == told
    talk.session.close()
    assert talk.watch.told == told


@pytest.mark.parametrize("modes", [BUFFERED, STREAMED])
def test_other_modes_answer_bodies_with_nothing(modes: tuple[pb.BodySendMode, pb.BodySendMode]) -> None:
    talk = picked(modes)
    talk.feed(response_head())
    (answer,) = talk.feed(response_body(b"{}", ends=True))
    assert not answer.response_body.response.HasField("body_mutation")
    assert talk.watch.lasts == ["ended"]


def test_trailers_end_a_response() -> None:
    talk = picked(FD)
    talk.feed(response_head(), response_body(b"{}"))
    assert talk.watch.lasts == []
    assert kinds(talk.feed(response_trailers())) == ["response_trailers"]
    assert talk.watch.lasts == ["ended"]


def test_a_buffered_body_is_the_end_whether_or_not_trailers_come() -> None:
    talk = picked(BUFFERED)
    talk.feed(response_head(), response_body(b"{}"))
    assert talk.watch.lasts == ["ended"]
    assert kinds(talk.feed(response_trailers())) == ["response_trailers"]


def test_a_stream_that_ends_without_an_end_is_aborted() -> None:
    talk = picked(FD)
    talk.feed(response_head(), response_body(b"data"))
    talk.session.close()
    talk.session.close()
    assert talk.watch.lasts == ["aborted"]


def test_a_response_that_has_not_begun_is_aborted_where_it_would_be_seen() -> None:
    talk = picked(FD)
    talk.session.close()
    assert talk.watch.told == [("aborted",)]
    talk = picked(NONE)
    talk.session.close()
    assert talk.watch.told == [("unseen",)]


def test_a_head_is_all_that_is_seen_without_bodies() -> None:
    talk = picked((pb.FULL_DUPLEX_STREAMED, pb.NONE))
    assert kinds(talk.feed(response_head(status=429))) == ["response_headers"]
    talk.session.close()
    assert talk.watch.told == [("responded", 429, None), ("unseen",)]


def test_responses_that_are_not_shown_are_unseen_at_once() -> None:
    talk = Talk(sees_responses=False)
    talk.feed(request_head(ends=True))
    assert kinds(talk.pick()) == ["request_headers"]
    assert talk.watch.told == [("unseen",)]
    assert kinds(talk.feed(response_head())) == ["response_headers"]  # It is answered if it comes all the same.
    talk.session.close()
    assert talk.watch.told == [("unseen",)]


# ---- taken back ------------------------------------------------------------------------------------------------------

STREAM = ("content-type", "text/event-stream")
GONE = Refusal(status=429, body=b"gone", headers={}, details="gone")


def recallable(modes: tuple[pb.BodySendMode, pb.BodySendMode] = FD) -> Talk:
    talk = Talk()
    talk.feed(request_head(modes=modes, ends=True))
    talk.pick(recall=Recall())
    return talk


@pytest.mark.parametrize("modes", [FD, BUFFERED, STREAMED])
def test_case_22_what_was_sent_on_can_be_taken_back_until_its_response_begins(
    modes: tuple[pb.BodySendMode, pb.BodySendMode],
) -> None:
    talk = recallable(modes)
    (answer,) = talk.session.take_back(GONE)
    assert answer.immediate_response.status.code == 429
    assert [option.header.key for option in answer.immediate_response.headers.set_headers] == ["content-type"]
    assert talk.session.take_back(GONE) == []
    talk.session.close()
    assert talk.watch.told == [("recalled",)]
    talk = recallable(modes)
    talk.feed(response_head(JSON))
    assert talk.session.take_back(GONE) == []
    assert talk.watch.lasts == []


def test_what_comes_of_it_all_the_same_is_ignored() -> None:
    talk = recallable()
    talk.session.take_back(GONE)
    assert talk.feed(response_head(), response_body(b"{}", ends=True), response_trailers()) == []


def test_the_head_of_a_stream_is_held_until_its_first_chunk() -> None:
    talk = recallable()
    assert talk.feed(response_head(STREAM)) == []
    assert talk.watch.told == []
    assert kinds(talk.feed(response_body(b"data: 1\n\n"))) == ["response_headers", "response_body"]
    assert talk.watch.told == [("responded", 200, None), ("chunk", b"data: 1\n\n")]
    assert talk.session.take_back(GONE) == []
    assert kinds(talk.feed(response_body(b"", ends=True))) == ["response_body"]
    assert talk.watch.lasts == ["ended"]


def test_a_held_head_is_not_the_beginning() -> None:
    talk = recallable()
    talk.feed(response_head(STREAM))
    assert kinds(talk.session.take_back(GONE)) == ["immediate_response"]
    assert talk.watch.told == [("recalled",)]


@pytest.mark.parametrize("last", ["body", "trailers"])
def test_a_stream_of_nothing_ends_though_its_head_was_held(last: str) -> None:
    talk = recallable()
    talk.feed(response_head(STREAM))
    end = response_body(b"", ends=True) if last == "body" else response_trailers()
    assert kinds(talk.feed(end)) == ["response_headers", f"response_{last}"]
    assert talk.watch.lasts == ["ended"]


def test_a_client_that_leaves_a_held_head_has_got_nothing() -> None:
    talk = recallable()
    talk.feed(response_head(STREAM))
    talk.session.close()
    assert talk.watch.told == [("aborted",)]
    assert talk.session.take_back(GONE) == []


@pytest.mark.parametrize(
    "head",
    [
        response_head(JSON),
        response_head(STREAM, status=503),
        response_head(STREAM, ends=True),
    ],
)
def test_other_heads_are_not_held(head: pb.ProcessingRequest) -> None:
    assert kinds(recallable().feed(head)) == ["response_headers"]


def test_what_is_not_to_be_taken_back_is_not_held() -> None:
    assert kinds(picked(FD).feed(response_head(STREAM))) == ["response_headers"]


@pytest.mark.parametrize("modes", [BUFFERED, STREAMED])
def test_where_chunks_wait_for_the_heads_answer_it_is_not_held(modes: tuple[pb.BodySendMode, pb.BodySendMode]) -> None:
    assert kinds(recallable(modes).feed(response_head(STREAM))) == ["response_headers"]


def test_a_watch_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Watched):
        def responded(self, *_: object) -> None:
            raise KeyError(prompt)

    prompt = "secret" + "prompt"
    session, watch = Session(max_body_bytes=1), Broken()
    session.feed(request_head(ends=True))
    session.decide(Pick(endpoints=(POD,), watch=watch))
    assert kinds(session.feed(response_head())) == ["response_headers"]
    assert kinds(session.feed(response_body(b"x", ends=True))) == ["response_body"]
    assert watch.told == [("ended",)]
    assert "KeyError" in caplog.text
    assert "secretprompt" not in caplog.text


@pytest.mark.parametrize(
    "messages",
    [
        [pb.ProcessingRequest()],
        [request_body(b"x")],
        [request_trailers()],
        [response_body(b"x")],
        [response_trailers()],
        [request_head(), request_head()],
        [request_head(), response_head(), response_head()],
        [request_head(), response_head(ends=True), response_body(b"x")],
        [pb.ProcessingRequest(response_headers=pb.HttpHeaders())],
        [request_head(modes=BUFFERED), request_trailers()],
        [request_head(("content-length", "1")), request_body(b"x"), request_body(b"y")],
    ],
)
def test_what_does_not_fit_is_an_error(messages: list[pb.ProcessingRequest]) -> None:
    with pytest.raises(ProtocolError):
        Talk().feed(*messages)


def test_a_model_is_renamed_across_chunks() -> None:
    talk = picked(FD, rename=("served-name", "gpt-4"))
    (head,) = talk.feed(response_head(JSON, ("content-length", "44")))
    assert head.response_headers.response.header_mutation.remove_headers == ["content-length"]
    body = b'{"id":"cmpl-123","model":"served-name","x":1}'
    for i in range(len(body)):
        talk.feed(response_body(body[i : i + 1]))
    talk.feed(response_body(ends=True))
    assert talk.returned == b'{"id":"cmpl-123","model":"gpt-4","x":1}'
    assert talk.watch.body == body


def test_buffered_a_renamed_response_has_its_content_length() -> None:
    talk = picked(BUFFERED, rename=("served-name", "m"))
    (head,) = talk.feed(response_head(JSON, ("content-length", "23")))
    assert not head.response_headers.response.HasField("header_mutation")
    (answer,) = talk.feed(response_body(b'{"model":"served-name"}', ends=True))
    assert answer.response_body.response.body_mutation.body == b'{"model":"m"}'
    assert headers_set(answer.response_body.response) == {"content-length": "13"}


def test_streamed_a_held_chunk_is_cleared() -> None:
    talk = picked(STREAMED, rename=("served-name", "m"))
    talk.feed(response_head(JSON))
    (first,) = talk.feed(response_body(b'"model":"served'))
    assert first.response_body.response.body_mutation.clear_body
    (second,) = talk.feed(response_body(b'-name"', ends=True))
    assert second.response_body.response.body_mutation.body == b'"model":"m"'


def test_held_bytes_go_out_before_trailers() -> None:
    talk = picked(FD, rename=("served-name", "m"))
    talk.feed(response_head(JSON), response_body(b'"model":"serv'))
    assert kinds(talk.feed(response_trailers())) == ["response_body", "response_trailers"]
    assert talk.returned == b'"model":"serv'


@pytest.mark.parametrize("header", [("content-encoding", "gzip"), ("content-type", "audio/wav")])
def test_what_is_not_text_is_not_renamed(header: tuple[str, str]) -> None:
    talk = picked(FD, rename=("a", "b"))
    talk.feed(response_head(*([JSON] if header[0] != "content-type" else []), header))
    talk.feed(response_body(b'"model":"a"', ends=True))
    assert talk.returned == b'"model":"a"'


def test_headers_of_a_response_can_be_hidden_and_name_who_served() -> None:
    talk = Talk()
    talk.feed(request_head(ends=True))
    pick = Pick(endpoints=(POD,), watch=talk.watch, hide_headers=("x-warmroute-outcome",), served_header="x-served")
    talk.session.decide(pick)
    message = response_head()
    message.metadata_context.filter_metadata["envoy.lb"].fields[f"{DESTINATION}-served"].string_value = POD
    (answer,) = talk.feed(message)
    common = answer.response_headers.response
    assert list(common.header_mutation.remove_headers) == ["x-warmroute-outcome"]
    assert headers_set(common) == {"x-served": POD}


def _served(space: dict[str, Any] | None) -> str | None:
    """What is told of a response with this metadata of envoy.lb, and the attribute that learning goes by."""
    talk = Talk()
    talk.feed(request_head(ends=True))
    pick = Pick(endpoints=(POD,), watch=talk.watch, served_header="x-served", add_headers={"x-picked": POD})
    talk.session.decide(pick)
    message = response_head(("x-custom", "1"))
    message.attributes["envoy.filters.http.ext_proc"].fields["upstream.address"].string_value = POD
    if space is not None:
        message.metadata_context.filter_metadata["envoy.lb"].update(space)
    (answer,) = talk.feed(message)
    mutation = answer.response_headers.response.header_mutation
    assert not mutation.remove_headers  # x-custom passes.
    told = headers_set(answer.response_headers.response)
    assert (told.pop("x-picked"), set(told)) == (POD, {"x-served"})
    return told["x-served"]


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (None, "fail: missing envoy lb metadata"),
        ({}, "fail: missing destination endpoint served metadata"),
        ({"other": 1}, "fail: missing destination endpoint served metadata"),
        ({f"{DESTINATION}-served": 3}, "fail: missing destination endpoint served metadata"),
        ({f"{DESTINATION}-served": "10.0.0.2:3000"}, "10.0.0.2:3000"),
    ],
)
def test_case_35_who_served_is_what_the_metadata_says_or_what_is_missing(space: Any, told: str) -> None:
    assert _served(space) == told


def test_elsewhere_nobody_is_named() -> None:
    assert headers_set(picked(FD).feed(response_head())[0].response_headers.response) == {}


@pytest.mark.parametrize("scores", [{}, {POD: 0.5, "[fd00::1]:8000": 1.0}])
def test_case_20_scores_are_metadata_beside_the_destination(scores: dict[str, float]) -> None:
    talk = Talk()
    talk.feed(request_head(ends=True, modes=FD))
    (answer,) = talk.session.decide(Pick(endpoints=(POD,), watch=talk.watch, scores=scores))
    told = answer.dynamic_metadata.fields["envoy.lb"].struct_value
    assert told.fields[DESTINATION].string_value == POD
    assert (DESTINATION + "-scores" in told.fields) == bool(scores)
    assert {
        name: each.number_value for name, each in told.fields[DESTINATION + "-scores"].struct_value.fields.items()
    } == scores
