"""The start of a decode stream: content, or an error before any."""

import json
from typing import Any

import pytest

from gateway.handoff.opening import MOST_BYTES, Opening, State

ERROR = {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}


def data(**told: Any) -> bytes:
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def event(kind: str, **told: Any) -> bytes:
    return b"event: " + kind.encode() + b"\n" + data(type=kind, **told)


def choice(**told: Any) -> bytes:
    return data(id="x", choices=[{"index": 0, "finish_reason": None, **told}])


ROLE = choice(delta={"role": "assistant", "content": ""})
BEGINNINGS = {
    "chat": ROLE,
    "completions": choice(text=""),
    "messages": event("message_start", message={"usage": {"input_tokens": 3}})
    + event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    + event("ping"),
    "responses": event("response.created", response={"error": None})
    + event("response.in_progress", response={})
    + event("response.output_item.added", item={})
    + event("response.content_part.added", part={}),
    "comment": b": keep-alive\n\nretry: 3\n\n",
    "nothing": b"",
}
CONTENTS = {
    "chat": choice(delta={"content": "Hi"}),
    "reasoning": choice(delta={"reasoning": "Hm"}),
    "tools": choice(delta={"tool_calls": [{"index": 0}]}),
    "empty answer": choice(delta={}, finish_reason="stop"),
    "completions": choice(text="Hi"),
    "generate": choice(token_ids=[3]),
    "usage": data(choices=[], usage={}),
    "done": b"data: [DONE]\n\n",
    "not json": b"data: not-json\n\n",
    "messages": event("content_block_delta", delta={"text": "Hi"}),
    "responses": event("response.output_text.delta", delta="Hi"),
    "completed": event("response.completed", response={}),
}
FAILURES = {
    "vllm": data(**ERROR),
    "older vllm": data(object="error", message="x", code=500),
    "messages": event("error", error={"type": "internal_error", "message": "x"}),
    "responses": event("response.failed", response={"error": {}}),
    "named by the event": b"event: error\ndata: oops\n\n",
    "p7": choice(delta={}, finish_reason="error"),
    "p7 completions": choice(text="", finish_reason="error"),
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("space", [b"data: ", b"data:"])
def test_h5_what_comes_after_the_beginning_decides(beginning: str, line_end: bytes, space: bytes) -> None:
    """H5: CRLF, and `data:` without a space."""

    def wire(text: bytes) -> bytes:
        return text.replace(b"data: ", space).replace(b"\n", line_end)

    start = wire(BEGINNINGS[beginning])
    for states, right in ((CONTENTS, State.GOOD), (FAILURES, State.FAILED)):
        for name, rest in states.items():
            opening = Opening()
            assert opening.feed(start) is State.PENDING
            opening.feed(wire(rest))
            assert opening.end() is right, name
            assert (opening.error is None) is (right is State.GOOD)


def test_p7_finish_reason_error_is_a_failure() -> None:
    """P7: a failed generation came as 200 with finish_reason "error" and no content."""
    opening = Opening()
    assert opening.feed(ROLE + FAILURES["p7"]) is State.FAILED


def test_the_failure_can_be_told_on() -> None:
    opening = Opening()
    opening.feed(ROLE)
    assert opening.feed(FAILURES["vllm"] + b"data: [DONE]\n\n") is State.FAILED
    assert json.loads(opening.error or b"") == ERROR


@pytest.mark.parametrize(
    "stream",
    [
        b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}\n\n'
        b"data: [DONE]\n\n",
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
        b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}\n\n'
        b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}\n\n',
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"chatcmpl-1","type":"message","role":'
        b'"assistant","content":[],"model":"m","usage":{"input_tokens":179,"output_tokens":0}}}\n\n'
        b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"2 validation errors"}}\n\n',
    ],
    ids=["completions", "chat", "messages"],
)
def test_a_failed_kv_load_as_vllm_0_32_streams_it(stream: bytes) -> None:
    assert Opening().feed(stream) is State.FAILED


def test_a_failed_kv_load_of_responses_is_a_cut_stream() -> None:
    """vLLM 0.32 breaks the connection after these two; the opening then is still PENDING."""
    opening = Opening()
    opening.feed(event("response.created", response={"status": "in_progress"}))
    assert opening.feed(event("response.in_progress", response={"status": "in_progress"})) is State.PENDING
    assert opening.end() is State.PENDING


def test_an_error_after_content_is_the_clients() -> None:
    opening = Opening()
    assert opening.feed(CONTENTS["chat"] + FAILURES["vllm"]) is State.GOOD
    assert opening.feed(FAILURES["vllm"]) is State.GOOD


def test_an_event_counts_when_it_is_whole() -> None:
    opening = Opening()
    for byte in FAILURES["vllm"][:-1]:
        assert opening.feed(bytes([byte])) is State.PENDING
    assert opening.feed(b"\n") is State.FAILED


def test_the_end_of_a_stream_ends_its_last_event() -> None:
    for cut in (b"", b"\n", b"\r"):
        opening = Opening()
        assert opening.feed(FAILURES["vllm"].rstrip(b"\n") + cut) is State.PENDING
        assert opening.end() is State.FAILED
    assert Opening().end() is State.PENDING


def test_a_long_beginning_passes() -> None:
    for piece in (b": " + b"x" * MOST_BYTES, data(choices=[], x="x" * MOST_BYTES), BEGINNINGS["responses"] * 1000):
        assert Opening().feed(piece) is State.GOOD


@pytest.mark.parametrize("told", [3, None, [], "x", {"type": []}, {"choices": [3]}, {"choices": {}}, {"choices": [{}]}])
def test_events_of_unknown_shape_harm_nobody(told: Any) -> None:
    opening = Opening()
    assert opening.feed(b"data: " + json.dumps(told).encode() + b"\n\n") is not State.FAILED
