"""Faults of endpoint pickers behind Envoy that others met in production, by their rows in docs/field-cases.md."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from gateway.extproc.refusals import refusal
from gateway.extproc.server import METHOD, SERVICE, PickerServer, PickerSettings
from gateway.extproc.types import Ask, Refusal
from gateway.pb import ext_proc_pb2 as pb
from gateway.proxy.errors import ApiError
from tests.support.extproc import (
    POD,
    Talk,
    destinations,
    hinted,
    kind,
    request_body,
    request_head,
)

FD = (pb.FULL_DUPLEX_STREAMED, pb.FULL_DUPLEX_STREAMED)


def test_x1_a_body_is_whole_at_its_content_length_though_no_end_is_said() -> None:
    talk = Talk()
    talk.feed(request_head(("content-length", "13"), modes=FD), request_body(b'{"model":"m"}'))
    assert talk.ask.body == b'{"model":"m"}'
    assert [kind(answer) for answer in talk.pick()] == ["request_headers", "request_body"]


def test_x2_a_body_of_a_megabyte_goes_on_in_chunks_and_not_a_byte_is_different() -> None:
    body = b'{"model":"m","prompt":"%s"}' % (b"x" * 1_014_480)
    talk = Talk()
    talk.feed(request_head(("content-length", str(len(body))), modes=FD))
    for start in range(0, len(body), 32_768):
        talk.feed(request_body(body[start : start + 32_768]))
    talk.feed(request_body(ends=True))
    talk.pick()
    assert talk.sent == body
    assert len(talk.answers) == 1 + -(-len(body) // 62_000)


@pytest.mark.parametrize("mode", [pb.FULL_DUPLEX_STREAMED, pb.BUFFERED])
def test_x4_a_body_over_our_limit_is_413_and_hangs_nowhere(mode: pb.BodySendMode) -> None:
    talk = Talk(max_body_bytes=1000)
    talk.feed(request_head(("content-length", "1001"), modes=(mode, mode)))
    (answer,) = talk.feed(request_body(b"x" * 1001, ends=True))
    assert answer.immediate_response.status.code == 413
    assert b"1000 bytes" in answer.immediate_response.body


@pytest.mark.parametrize("header", ["test-epp-endpoint-selection", "x-gateway-destination-endpoint-subset"])
def test_x5_a_subset_is_the_proxys_and_no_header_of_a_client(header: str) -> None:
    talk = Talk()
    talk.feed(hinted(request_head((header, "10.9.9.9:1"), ends=True), [POD, "10.0.0.2:8000"]))
    assert talk.ask.subset == (POD, "10.0.0.2:8000")
    talk = Talk()
    talk.feed(request_head((header, "10.9.9.9:1"), ends=True))
    assert talk.ask.subset is None
    talk = Talk()
    (answer,) = talk.feed(hinted(request_head((header, "10.9.9.9:1"), ends=True), []))
    assert answer.immediate_response.status.code == 503


async def test_x8_a_decision_that_fails_is_answered_at_once_whatever_the_proxy_sends() -> None:
    failed = asyncio.Event()

    class Failing:
        async def pick(self, _: Ask) -> Refusal:
            await failed.wait()
            return refusal(ApiError(502, "the prefill failed", code="prefill_failed"))

    server = PickerServer(Failing(), PickerSettings(host="127.0.0.1", port=0, health_port=None))
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.stream_stream(
            f"/{SERVICE}/{METHOD}",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )(timeout=20)
        await call.write(request_head(modes=FD))
        await call.write(request_body(b"x", ends=True))
        failed.set()  # Nothing more is sent.
        answer = await call.read()
        assert answer.immediate_response.status.code == 502
        assert destinations(answer) == (None, None)
    await server.close()
