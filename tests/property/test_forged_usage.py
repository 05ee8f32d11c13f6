"""What engines repeat of a client's request is not taken for what the answer took."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.usage import TAIL_BYTES, Usage, UsageTail

FORGED = {
    "prompt_tokens": 0, "completion_tokens": 0, "input_tokens": 0, "output_tokens": 0,
    "tokens": {"input_tokens": 0, "output_tokens": 0},
}  # fmt: skip
TRUE = {"prompt_tokens": 700, "completion_tokens": 30}
TRUE_RESPONSE = {"input_tokens": 700, "output_tokens": 30}
TRUTH = Usage(700, 30)

HOSTILE = [
    '"usage":{"prompt_tokens":0,"completion_tokens":0}',
    '"}],"usage":{"input_tokens":0,"output_tokens":0}}',
    '\n\ndata: {"usage":{"prompt_tokens":0,"completion_tokens":0}}\n\n',
    '\r\ndata: {"type":"response.completed","response":{"usage":{"input_tokens":0,"output_tokens":0}}}\r\n\r\n',
    "\u2028data: {}", "\\", '\\"', '"', "\\\\", '\\"usage"', "{", "}", "[", "]", "usage", "\u0000", "é😀",
]  # fmt: skip

texts = st.one_of(
    st.sampled_from(HOSTILE), st.lists(st.sampled_from(HOSTILE), max_size=4).map("".join), st.text(max_size=20)
)
keys = st.one_of(st.sampled_from(["usage", "type", "response", "delta", 'x"usage', '\\"usage']), texts)
echoes = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), texts, st.just({"usage": FORGED}), st.just(FORGED),
              st.just({"type": "response.completed", "response": {"usage": FORGED}})),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


def read(body: bytes, cuts: list[int] | None = None) -> Usage | None:
    tail = UsageTail()
    bounds = [0, *sorted(min(cut, len(body)) for cut in cuts or ()), len(body)]
    for start, end in pairwise(bounds):
        if start < end:
            tail.feed(body[start:end])
    return tail.read()


def dumped(value: Any, compact: bool, ascii_only: bool) -> bytes:
    separators = (",", ":") if compact else None
    return json.dumps(value, ensure_ascii=ascii_only, separators=separators).encode()


@given(echoes, echoes, echoes, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_a_whole_answer(
    before: Any, among: Any, after: Any, tells: bool, is_long: bool, compact: bool, ascii_only: bool
) -> None:
    answer = {"id": "x", "metadata": before, "filler": "x" * TAIL_BYTES if is_long else "", "tools": [among]}
    answer |= {"usage": TRUE if tells else None, "user": after, "input_messages": [after], "output_messages": after}
    assert read(dumped(answer, compact, ascii_only)) == (TRUTH if tells else None)


@given(echoes, echoes, st.booleans(), st.booleans(), st.sampled_from(["completed", "incomplete", "failed"]),
       st.booleans(), st.lists(st.integers(0, 5000), max_size=6))  # fmt: skip
def test_a_stream_of_responses(
    before: Any, after: Any, tells: bool, is_long: bool, how: str, compact: bool, cuts: list[int]
) -> None:
    filler = "x" * TAIL_BYTES if is_long else ""
    begun = {
        "response": {"id": "r", "tools": before, "usage": None, "input_messages": after},
        "type": "response.created",
    }
    item = {"item": {"usage": FORGED, "arguments": before}, "usage_of": before, "type": "response.output_item.done"}
    whole = {
        "id": "r",
        "text": filler,
        "tools": before,
        "usage": TRUE_RESPONSE if tells else None,
        "input_messages": after,
    }
    ended = {"response": whole, "sequence_number": 9, "type": f"response.{how}"}
    events = [("response.created", begun), ("response.output_item.done", item), (f"response.{how}", ended)]
    body = b"".join(
        b"event: %b\ndata: %b\n\n" % (kind.encode(), dumped(event, compact, True)) for kind, event in events
    )
    assert read(body, cuts) == (TRUTH if tells else None)


@given(echoes, st.booleans(), st.booleans(), st.integers(0, 3))
def test_a_stream_of_chunks(echo: Any, tells: bool, is_long: bool, others: int) -> None:
    chunk = {"choices": [{"delta": echo, "text": json.dumps(echo)}], "prompt": echo}
    events: list[Any] = [{**chunk, "filler": "x" * TAIL_BYTES if is_long else ""}, *[chunk] * others]
    if tells:
        events.append({"choices": [], "usage": TRUE, "kv_transfer_params": echo if isinstance(echo, list) else [echo]})
    body = b"".join(b"data: " + dumped(event, True, False) + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    assert read(body) == (TRUTH if tells else None)


@pytest.mark.parametrize(
    "answer",
    [
        # Accepted in the background: no usage yet, and the client's tools and metadata repeated.
        {"id": "resp_1", "metadata": {"usage": FORGED}, "status": "queued", "background": True, "usage": None},
        {"id": "resp_1", "tools": [{"name": "f", "parameters": {"properties": {"usage": FORGED}}}], "usage": None},
        {"id": "resp_1", "text": {"format": {"schema": {"usage": FORGED}}}},
        {"choices": [{"message": {"tool_calls": [{"function": {"arguments": json.dumps({"usage": FORGED})}}]}}]},
        {"choices": [{"text": json.dumps({"usage": FORGED})}]},
        {"content": [{"type": "tool_use", "input": {"usage": FORGED}}], "type": "message"},
        {"kv_transfer_params": {"usage": FORGED}},
        {"type": "response.created", "response": {"usage": FORGED}},
    ],
)
def test_an_answer_that_says_nothing_of_itself(answer: Any) -> None:
    for padding in ({}, {"padding": "x" * TAIL_BYTES}):
        body = json.dumps({**padding, **answer}).encode()
        assert read(body) is None
        assert read(b"data: " + body + b"\n\n") is None


def test_messages_that_were_asked_for_do_not_hide_the_usage_before_them() -> None:
    """`enable_response_messages`: what went in comes after the usage."""
    messages = [{"role": "user", "content": [{"type": "input_text", "usage": FORGED}]}] * 20
    answer = {"id": "resp_1", "output": [], "usage": TRUE_RESPONSE, "input_messages": messages}
    assert read(json.dumps(answer).encode()) == TRUTH
    assert read(json.dumps({"padding": "x" * TAIL_BYTES, **answer}).encode()) == TRUTH
