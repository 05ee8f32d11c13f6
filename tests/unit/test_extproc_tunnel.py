"""WebSockets and CONNECT over external processing: requests that have no end before they are answered."""

import pytest

from gateway.pb import ext_proc_pb2 as pb
from tests.support.extproc import (
    POD,
    Talk,
    destinations,
    kinds,
    request_body,
    request_head,
    response_body,
    response_head,
)

UPGRADE = (("connection", "upgrade"), ("upgrade", "WebSocket"))
MODES = [pb.FULL_DUPLEX_STREAMED, pb.STREAMED, pb.NONE]
FD = (pb.FULL_DUPLEX_STREAMED, pb.FULL_DUPLEX_STREAMED)


def opened(mode: pb.BodySendMode = pb.FULL_DUPLEX_STREAMED, max_body_bytes: int = 1000) -> Talk:
    talk = Talk(max_body_bytes=max_body_bytes)
    assert talk.feed(request_head(*UPGRADE, modes=(mode, mode), method="GET", path="/v1/realtime")) == []
    return talk


@pytest.mark.parametrize("mode", MODES)
def test_a_websocket_is_decided_by_its_head_and_that_is_not_blind(mode: pb.BodySendMode) -> None:
    talk = opened(mode)
    assert (talk.ask.blind, talk.ask.body, talk.ask.headers["upgrade"]) == (False, b"", "WebSocket")
    (answer,) = talk.pick()
    assert destinations(answer) == (POD, POD)


@pytest.mark.parametrize("mode", [pb.BUFFERED, pb.BUFFERED_PARTIAL])
def test_a_proxy_that_would_wait_for_its_end_is_told_so(mode: pb.BodySendMode) -> None:
    talk = Talk()
    (answer,) = talk.feed(request_head(*UPGRADE, modes=(mode, mode), method="GET", path="/v1/realtime"))
    assert answer.immediate_response.status.code == 501
    assert b"request_body_mode" in answer.immediate_response.body


def test_connect_is_decided_by_its_head() -> None:
    talk = Talk()
    talk.feed(request_head(modes=FD, method="CONNECT", path=""))
    assert kinds(talk.pick()) == ["request_headers"]


def test_what_either_side_says_passes_at_once_and_without_a_limit() -> None:
    talk = opened(max_body_bytes=10)
    talk.pick()
    talk.feed(response_head(*UPGRADE, status=101))
    for i in range(10):
        for said in (talk.feed(request_body(b"ask%d" % i)), talk.feed(response_body(b"answer%d" % i))):
            assert len(said) == 1
    (end,) = talk.feed(request_body(ends=True))
    assert end.request_body.response.body_mutation.streamed_response.end_of_stream
    talk.feed(response_body(ends=True))
    assert talk.sent == b"".join(b"ask%d" % i for i in range(10))
    assert talk.returned == b"".join(b"answer%d" % i for i in range(10))
    assert talk.watch.lasts == ["ended"]


def test_who_speaks_before_it_is_decided_is_heard_after_it() -> None:
    talk = opened()
    assert talk.feed(request_body(b"a"), request_body(b"b")) == []
    assert kinds(talk.pick()) == ["request_headers", "request_body", "request_body"]
    assert talk.sent == b"ab"


def test_who_says_more_than_a_body_may_hold_before_it_is_decided_is_refused() -> None:
    talk = opened(max_body_bytes=10)
    (answer,) = talk.feed(request_body(b"a" * 11))
    assert answer.immediate_response.status.code == 413


@pytest.mark.parametrize(
    ("method", "headers"), [("POST", UPGRADE), ("POST", (("upgrade", "h2c"),)), ("GET", (("upgrade", "h2c"),))]
)
def test_other_upgrades_are_requests_like_all(method: str, headers: tuple[tuple[str, str], ...]) -> None:
    """Clients in Java offer h2c with every request."""
    talk = Talk()
    talk.feed(request_head(*headers, modes=FD, method=method), request_body(b"{}", ends=True))
    assert talk.ask.body == b"{}"
