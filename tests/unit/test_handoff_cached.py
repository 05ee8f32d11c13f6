"""The client's cached-token figure is the prefill worker's, and no other byte changes."""

import json
from typing import Any

import pytest

from gateway.handoff.cached import MOST_HELD_BYTES, CachedTokens

USAGE = b'{"prompt_tokens" : 100,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens": 49,"x":null}}'
CHUNK = b'data: {"id":"c","choices":[],"usage":' + USAGE + b"}\n\n"
RIGHT = CHUNK.replace(b"49", b"7")
TEXT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"say \\"usage\\": {}"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def whole(usage: Any, cached: int | None = 7, kind: str = "chat", **how: bool) -> Any:
    answer = {"id": "x", "choices": [{"index": 0}], "usage": usage}
    return json.loads(CachedTokens(kind, cached, **how).whole(json.dumps(answer).encode()))["usage"]


@pytest.mark.parametrize(
    ("details", "cached", "right"),
    [
        ({"cached_tokens": 49}, 7, {"cached_tokens": 7}),
        ({}, 7, {"cached_tokens": 7}),
        (None, 7, {"cached_tokens": 7}),
        ({"cached_tokens": 49}, None, {"cached_tokens": 0}),
        ({"cached_tokens": 49}, 0, {"cached_tokens": 0}),
        ({"cached_tokens": 49}, 1000, {"cached_tokens": 100}),
        ({"cached_tokens": 49, "created_cache_tokens": 3}, 7, {"cached_tokens": 7, "created_cache_tokens": 3}),
        (None, None, None),
        ({}, None, {}),
        ({"cached_tokens": "many"}, 7, {"cached_tokens": "many"}),
    ],
)
def test_49_cached_tokens_of_a_json_answer(details: Any, cached: int | None, right: Any) -> None:
    """llm-d D5 49: prefill 7, decode 49."""
    assert whole({"prompt_tokens": 100, "prompt_tokens_details": details}, cached) == {
        "prompt_tokens": 100,
        "prompt_tokens_details": right,
    }


def test_49_no_details_at_all() -> None:
    """llm-d D5 49: added, unless the prefill worker does not report any either."""
    assert whole({"prompt_tokens": 100}) == {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 7}}
    assert whole({"prompt_tokens": 100}, add_absent=False) == {"prompt_tokens": 100}
    assert whole({"prompt_tokens": 100}, None) == {"prompt_tokens": 100}
    assert whole({"prompt_tokens_details": {"cached_tokens": 49}}) == {"prompt_tokens_details": {"cached_tokens": 7}}


def test_49_cached_tokens_of_a_stream() -> None:
    """llm-d D5 49, SSE: with details, and without."""
    cached = CachedTokens("chat", 7)
    assert cached.feed(TEXT + CHUNK + DONE) == TEXT + RIGHT + DONE
    bare = b'data: {"choices":[],"usage":{"prompt_tokens":100}}\n\n'
    added = b'data: {"choices":[],"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":7}}}\n\n'
    assert cached.feed(bare) == added
    running = b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":100}}\n\n'
    assert cached.feed(running) == running  # Usage with every token; the last one tells.
    assert cached.end() == b""


def test_50_cuts_anywhere() -> None:
    """llm-d D5 50: `da` and `ta:`, inside the JSON, a last line without its end, a line that is not JSON."""
    cached = CachedTokens("chat", 7)
    assert cached.feed(b"da") == b""
    assert cached.feed(CHUNK[2:40]) == b""
    assert cached.feed(CHUNK[40:] + b"data: [DONE]\n") == RIGHT + b"data: [DONE]\n"
    assert cached.feed(b"event: ping\ndata: not-json\n\n") == b"event: ping\ndata: not-json\n\n"
    assert cached.feed(CHUNK[:-2]) == b""
    assert cached.end() == RIGHT[:-2]


def test_h1_usage_and_done_in_pieces() -> None:
    """H1: the same for every split."""
    stream = TEXT + CHUNK + DONE
    for at in range(len(stream)):
        cached = CachedTokens("chat", 7)
        assert cached.feed(stream[:at]) + cached.feed(stream[at:]) + cached.end() == TEXT + RIGHT + DONE


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_h5_line_ends_and_spaces(line_end: bytes) -> None:
    """H5."""
    for space in (b"data: ", b"data:", b"data:  "):
        stream = (TEXT + CHUNK + DONE).replace(b"data: ", space).replace(b"\n", line_end)
        assert CachedTokens("chat", 7).feed(stream) == stream.replace(b"49", b"7")


def test_what_needs_no_look_goes_on_at_once() -> None:
    cached = CachedTokens("chat", 7)
    assert cached.feed(TEXT) is TEXT
    for piece in (
        b": comm",
        b"ent\n",
        b"event: x",
        b"\n",
        b"data: [DO",
        b"NE]\n",
        b"id",
        b": 3\n",
        b"data: no",
        b"t\n",
    ):
        assert cached.feed(piece) == piece
    assert cached.feed(b"d") == b""
    assert cached.feed(b"ollars") == b"dollars"
    assert cached.feed(b"\n" + TEXT[:-1]) == b"\n" + TEXT[:-1]
    assert cached.feed(b"\n") == b"\n"


def test_a_line_longer_than_can_be_held_passes() -> None:
    cached = CachedTokens("chat", 7)
    long = b'data: {"x":"' + b"y" * MOST_HELD_BYTES
    rest = b'","choices":[],' + CHUNK[CHUNK.index(b'"usage"') :]
    assert cached.feed(long) == long
    assert cached.feed(rest + CHUNK) == rest + RIGHT
    assert CachedTokens("chat", 7).feed(long + rest) == long + rest


@pytest.mark.parametrize("line", [CHUNK.replace(b"49", b"7"), TEXT, b'data: {"usage":null}\n\n', b'data: "usage"\n\n'])
def test_what_is_right_stays_the_same_object(line: bytes) -> None:
    assert CachedTokens("chat", 7).feed(line) == line
    body = line[6:-2]
    assert CachedTokens("chat", 7).whole(body) is body


@pytest.mark.parametrize("usage", ["oops", 3, [], {"prompt_tokens": "1024"}, {"prompt_tokens_details": "x"}])
def test_x7_a_usage_of_the_wrong_shape_stays(usage: Any) -> None:
    """X7."""
    body = json.dumps({"usage": usage}).encode()
    for kind in ("chat", "messages", "responses"):
        assert CachedTokens(kind, 7).whole(body) is body


def test_p16_never_more_than_the_prompt_and_never_negative() -> None:
    """P16."""
    assert whole({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 9}})["prompt_tokens_details"] == {
        "cached_tokens": 5
    }
    assert whole({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": -9}}, -3)["prompt_tokens_details"] == {
        "cached_tokens": 0
    }


def test_only_the_number_changes() -> None:
    body = b'{ "a":{"usage":' + USAGE + b',"n":1.50} ,"usage" :  ' + USAGE + b', "b":1E5 }'
    assert CachedTokens("chat", 7).whole(body) == body[:-60] + body[-60:].replace(b"49", b"7")


def test_responses() -> None:
    usage = {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 49}}
    assert whole(usage, kind="responses")["input_tokens_details"] == {"cached_tokens": 7}
    line = b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r","usage":%b}}\n\n'
    told = b'{"input_tokens":100,"input_tokens_details":{"cached_tokens":49}}'
    cached = CachedTokens("responses", 7)
    assert cached.feed(line % told) == line % told.replace(b"49", b"7")
    created = b'data: {"type":"response.created","response":{"id":"r","usage":null}}\n\n'
    assert cached.feed(created) == created
    assert cached.feed(line % b'{"input_tokens":100}') == line % (
        b'{"input_tokens":100,"input_tokens_details":{"cached_tokens":7}}'
    )


def test_messages_move_both_figures() -> None:
    usage = {"input_tokens": 51, "cache_read_input_tokens": 49, "cache_creation_input_tokens": 30, "output_tokens": 5}
    right = {"input_tokens": 93, "cache_read_input_tokens": 7, "cache_creation_input_tokens": 30, "output_tokens": 5}
    assert whole(usage, kind="messages") == right
    assert whole(usage, 1000, kind="messages")["input_tokens"] == 0
    assert whole({"input_tokens": 100}, kind="messages") == {"input_tokens": 93, "cache_read_input_tokens": 7}
    assert whole({"input_tokens": 100}, kind="messages", add_absent=False) == {"input_tokens": 100}
    assert whole({"output_tokens": 3}, kind="messages") == {"output_tokens": 3}
    cached = CachedTokens("messages", 7)
    start = b'data: {"type":"message_start","message":{"usage":{"input_tokens":100,"output_tokens":0}}}\n\n'
    assert cached.feed(start) == start
    delta = b'data: {"type":"message_delta","usage":{"input_tokens":%d,"cache_read_input_tokens":%d}}\n\n'
    assert cached.feed(delta % (51, 49)) == delta % (93, 7)
