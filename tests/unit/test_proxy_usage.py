"""Usage read off the end of an answer."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.usage import TAIL_BYTES, Usage, UsageTail

CHAT = {
    "prompt_tokens": 120,
    "total_tokens": 130,
    "completion_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 96},
}
CHAT_USAGE = Usage(120, 10, 96)


def read(body: bytes) -> Usage | None:
    tail = UsageTail()
    tail.feed(body)
    return tail.read()


def sse(*events: object) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


@given(st.lists(st.integers(0, 700), max_size=12))
def test_any_split_gives_the_same_numbers(cuts: list[int]) -> None:
    body = sse({"choices": [{"text": "häé€😀"}]}, {"choices": [], "usage": CHAT})
    tail = UsageTail()
    at = 0
    for cut in [*sorted(min(cut, len(body)) for cut in cuts), len(body)]:
        if cut > at:
            tail.feed(body[at:cut])
            at = cut
    assert tail.read() == CHAT_USAGE


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (json.dumps({"choices": [], "usage": CHAT, "kv_transfer_params": None}).encode(), CHAT_USAGE),
        (b'{"usage" : \n {"prompt_tokens": 7, "completion_tokens": 1}}', Usage(7, 1, None)),
        (b'{"usage":{"prompt_tokens":7,"completion_tokens":1,"prompt_tokens_details":null}}', Usage(7, 1, None)),
        (
            b'{"usage":{"input_tokens":9,"output_tokens":2,"input_tokens_details":{"cached_tokens":8}}}',
            Usage(9, 2, 8),
        ),
        (b'{"usage":{"input_tokens":9,"output_tokens":2,"cache_read_input_tokens":16}}', Usage(25, 2, 16)),
        (sse({"usage": CHAT}, {"usage": None}), CHAT_USAGE),
        (b"", None),
        (b'{"choices":[]}', None),
        (b'{"usage":null}', None),
        (b'{"usage":"oops"}', None),
        (b'{"usage":{"prompt_tokens":"1024"}}', None),
        (b'{"usage":{"prompt_tokens":5', None),
        (b'{"usage":[1]}', None),
        (b"\xff\xfe\x00", None),
    ],
)
def test_shapes(body: bytes, usage: Usage | None) -> None:
    assert read(body) == usage


def test_a_malformed_usage_does_not_hide_an_earlier_good_one() -> None:
    assert read(sse({"usage": CHAT}, {"usage": {"prompt_tokens": "x"}})) == CHAT_USAGE


def test_text_that_looks_like_usage_is_text() -> None:
    text = 'my "usage": {"prompt_tokens": 1, "completion_tokens": 2} ends here'
    assert read(json.dumps({"choices": [{"text": text}]}).encode()) is None
    assert read(json.dumps({"usage": CHAT, "text": text}).encode()) == CHAT_USAGE


@pytest.mark.parametrize(
    ("content_type", "tells"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/problem+json", True),
        ("text/event-stream; charset=utf-8", True),
        ("text/plain; charset=utf-8", False),
        ("text/plain; application/json", False),
        ("application/jsonp", False),
        ("application/x-subrip", False),
        ("text/vtt", False),
        ("audio/wav", False),
        ("", False),
        (None, False),
    ],
)
def test_only_json_and_streams_of_events_say_usage(content_type: str | None, tells: bool) -> None:
    tail = UsageTail(content_type=content_type)
    tail.feed(json.dumps({"usage": CHAT}).encode())
    assert tail.read() == (CHAT_USAGE if tells else None)


def test_only_the_tail_is_kept() -> None:
    tail = UsageTail()
    tail.feed(json.dumps({"usage": CHAT}).encode())
    for _ in range(2 * TAIL_BYTES // 100):
        tail.feed(b" " * 100)
    assert tail.read() is None
    tail.feed(json.dumps({"usage": CHAT}).encode())
    assert tail.read() == CHAT_USAGE


@pytest.mark.parametrize(
    ("pieces", "ended"),
    [((b"data: x\n\n",), True), ((b"data: x\n", b"\n"), True), ((b"data: x\r\n\r\n",), True), ((b"data: x\n",), False)],
)
def test_end_of_an_event(pieces: tuple[bytes, ...], ended: bool) -> None:
    tail = UsageTail()
    for piece in pieces:
        tail.feed(piece)
    assert tail.ends_event() is ended


@pytest.mark.parametrize("n", [-1, -(1 << 40), 1 << 60, 10**30])
@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens"])
def test_numbers_that_no_answer_takes_are_no_usage(field: str, n: int) -> None:
    """Counted against a key, one below 0 would give tokens back."""
    assert read(json.dumps({"usage": {"prompt_tokens": 1, "completion_tokens": 1, field: n}}).encode()) is None


def test_usage_of_cohere_chats() -> None:
    counted = {
        "billed_units": {"input_tokens": 5, "output_tokens": 3},
        "tokens": {"input_tokens": 9, "output_tokens": 4},
    }
    assert read(json.dumps({"id": "x", "usage": counted}).encode()) == Usage(9, 4)
    assert read(sse({"type": "message-end", "delta": {"usage": counted}})) == Usage(9, 4)
