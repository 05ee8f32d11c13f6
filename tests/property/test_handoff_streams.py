"""Streams cut anywhere give the same, and what need not change does not."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.handoff.cached import CachedTokens
from gateway.handoff.opening import Opening, State

KINDS = st.sampled_from(["chat", "completions", "messages", "responses", "generate"])
counts = st.one_of(st.integers(-5, 200), st.none(), st.just("x"))
details = st.one_of(st.none(), st.fixed_dictionaries({}, optional={"cached_tokens": counts, "other": counts}))
usages = st.one_of(
    st.none(),
    st.just("oops"),
    st.fixed_dictionaries(
        {},
        optional={
            "prompt_tokens": counts,
            "input_tokens": counts,
            "prompt_tokens_details": details,
            "input_tokens_details": details,
            "cache_read_input_tokens": counts,
        },
    ),
)
choices = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "delta": st.fixed_dictionaries({}, optional={"role": st.just("assistant"), "content": st.text(max_size=4)}),
            "text": st.sampled_from(["", 'a "usage" {}', "é"]),
            "finish_reason": st.sampled_from([None, "stop", "error"]),
        },
    ),
    max_size=2,
)
types = st.sampled_from(["ping", "error", "response.created", "message_start", "content_block_delta"])
events = st.fixed_dictionaries(
    {},
    optional={
        "choices": choices,
        "usage": usages,
        "type": types,
        "error": st.sampled_from([None, {"code": 500}]),
        "response": st.fixed_dictionaries({"usage": usages}),
        "message": st.fixed_dictionaries({"usage": usages}),
    },
)
lines = st.one_of(
    st.builds(
        lambda told, space, ascii_only: f"data:{space}{json.dumps(told, ensure_ascii=ascii_only)}",
        events,
        st.sampled_from(["", " ", "  "]),
        st.booleans(),
    ),
    st.sampled_from(["", "", ": comment", "event: error", "event: ping", "data: [DONE]", "data: not-json", "d", "x"]),
    st.sampled_from(['data: {"usage":', "data:", "data: {", 'data: "usage"']),
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    ends = st.sampled_from(["\n", "\n\n", "\r\n", "\r\n\r\n", "\r", "\r\r"])
    text = "".join(line + draw(ends) for line in draw(st.lists(lines, max_size=8)))
    return (text + draw(st.one_of(st.just(""), lines))).encode()


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    places = sorted({0, len(stream), *(place % (len(stream) + 1) for place in at)})
    return [stream[start:end] for start, end in pairwise(places)]


cuts = st.lists(st.integers(0, 10_000), max_size=12)


@given(streams(), cuts, KINDS, st.one_of(st.none(), st.integers(0, 150)), st.booleans())
def test_any_split_gives_the_same_stream(
    stream: bytes, at: list[int], kind: str, n: int | None, add_absent: bool
) -> None:
    one, many = (CachedTokens(kind, n, add_absent=add_absent) for _ in range(2))
    right = one.feed(stream) + one.end()
    assert b"".join(map(many.feed, cut(stream, at))) + many.end() == right
    before, after = stream.splitlines(keepends=True), right.splitlines(keepends=True)
    assert len(before) == len(after)
    for line, changed in zip(before, after, strict=True):
        if b'"usage"' not in line or not line.startswith(b"data:"):
            assert changed == line
    again = CachedTokens(kind, n, add_absent=add_absent)
    assert again.feed(right) + again.end() == right


@given(streams(), cuts, KINDS)
def test_nothing_is_held_longer_than_a_line(stream: bytes, at: list[int], kind: str) -> None:
    cached, given_bytes, out = CachedTokens(kind, 7), 0, 0
    for piece in cut(stream, at):
        given_bytes += len(piece)
        sent = cached.feed(piece)
        out += len(sent)
        so_far = stream[:given_bytes]
        if so_far.endswith((b"\n", b"\r")):
            assert cached.end() == b""
        elif b"data:" not in so_far.splitlines()[-1] and len(so_far.splitlines()[-1]) > 5:
            assert sent.endswith(piece[-1:])


@given(streams(), cuts)
def test_any_split_gives_the_same_opening(stream: bytes, at: list[int]) -> None:
    one, many = Opening(), Opening()
    one.feed(stream)
    for piece in cut(stream, at):
        many.feed(piece)
    assert many.end() is one.end()
    assert many.error == one.error
    assert (one.error is not None) is (one.state is State.FAILED)
