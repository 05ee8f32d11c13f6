"""Prompts with media in them: links of bodies, and who was given which."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tokens.references import media_links
from indexer import MediaReferences, Recalled

A, B = ("a", 0), ("b", 0)
CAT = {"type": "image_url", "image_url": {"url": "https://x/cat.png"}}
DOG = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1000}}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def said(value: str) -> dict[str, Any]:
    return {"role": "assistant", "content": value}


def keys(messages: list[Any], kind: str = "chat", **fields: Any) -> list[int]:
    name = "input" if kind == "responses" else "messages"
    return [key for key, _ in media_links(kind, {"model": "m", name: messages, **fields})]


FIRST = [{"role": "system", "content": "be brief"}, user(text("what is it?"), CAT)]


def test_the_next_turn_begins_with_the_links_of_the_one_before() -> None:
    before = keys(FIRST)
    after = keys([*FIRST, said("a cat"), {"role": "user", "content": "and its colour?"}])
    assert len(before) == 2
    assert after[:2] == before
    assert len(after) == 4


@pytest.mark.parametrize(
    "other",
    [
        [FIRST[0], user(text("what is it?"), DOG)],
        [FIRST[0], user(text("what was it?"), CAT)],
        [FIRST[0], user(CAT, text("what is it?"))],
        [{"role": "system", "content": "be long"}, FIRST[1]],
        [FIRST[0], user(text("what is it?"), {**CAT, "image_url": {**CAT["image_url"], "detail": "low"}})],
        [FIRST[0], {**FIRST[1], "name": "me"}],
    ],
)
def test_another_prompt_shares_none(other: list[Any]) -> None:
    assert not set(keys(other)) & set(keys(FIRST))


@pytest.mark.parametrize(
    "fields", [{"tools": [{"x": 1}]}, {"cache_salt": "s"}, {"model": "lora"}, {"tool_choice": "none"}]
)
def test_what_changes_the_whole_prompt_or_its_cache_changes_all(fields: dict[str, Any]) -> None:
    assert not set(keys(FIRST, **fields)) & set(keys(FIRST))


def test_another_question_about_the_same_image_shares_the_image() -> None:
    one, two = keys([user(CAT, text("what?"))]), keys([user(CAT, text("where?"))])
    assert one[0] == two[0]
    assert one[1] != two[1]


def test_a_uuid_is_the_items_identity_whatever_else_is_given() -> None:
    first = keys([user({**CAT, "uuid": "u1"}, text("x"))])
    assert first == keys([user({"type": "image_url", "image_url": None, "uuid": "u1"}, text("x"))])
    assert first != keys([user({**CAT, "uuid": "u2"}, text("x"))])


def test_every_api_with_media() -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    assert len(keys([user(text("x"), image)], "messages", max_tokens=1)) == 2
    assert len(keys([user(result)], "messages")) == 2
    item = {"role": "user", "content": [{"type": "input_image", "image_url": "https://x/cat.png"}]}
    assert (
        len(keys([item, {"type": "function_call_output", "call_id": "c", "output": item["content"]}], "responses")) == 4
    )
    assert keys([user({"type": "input_audio", "input_audio": {"data": "AA"}})])
    assert keys([user({"type": "video_url", "video_url": {"url": "x"}})])


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "x"},
        {"messages": [1, None, "x", {"role": "user"}, user(text("x"))]},
        {"messages": [user({"type": "image_url", "image_url": {"url": "\ud83d"}})]},
    ],
)
def test_without_media_or_sense_there_are_none(body: dict[str, Any]) -> None:
    assert media_links("chat", body) == ()
    assert media_links("completions", body) == ()


def test_links_are_bounded_and_say_how_long_the_prompt_is() -> None:
    turns = [user(CAT), *(said(f"{i}" * 400) for i in range(200))]
    links = media_links("chat", {"messages": turns})
    assert len(links) == 64
    assert [tokens for _, tokens in links] == sorted(tokens for _, tokens in links)
    (_, one), *_ = media_links("chat", {"messages": [user(CAT)]})
    (_, two), *_ = media_links("chat", {"messages": [user(text("x" * 4000), CAT)]})
    assert two - one == 1000
    assert "cat" not in json.dumps(links)


# ---- who was given what ----------------------------------------------------------------------------------------------

CHAIN = ((1, 600), (2, 700), (3, 800))


def test_what_was_given_is_assumed_and_not_said_to_be_known() -> None:
    media = MediaReferences()
    assert media.assume(CHAIN[:2], A, 0.0) == 0
    assert media.match(CHAIN, 1.0) == {A: Recalled(700, 0)}
    assert media.match(CHAIN[:1], 1.0) == {A: Recalled(600, 0)}
    assert media.match(((9, 600),), 1.0) == {}


def test_an_answer_confirms_what_it_found() -> None:
    media = MediaReferences()
    media.assume(CHAIN[:2], A, 0.0)
    media.computed(CHAIN[:2], A)
    known = media.assume(CHAIN, A, 1.0)
    assert known == 2
    media.confirm(CHAIN, A, known, 688)
    assert media.match(CHAIN, 2.0) == {A: Recalled(800, 688)}
    assert media.match(CHAIN[:1], 2.0) == {A: Recalled(600, 0)}  # Of the image alone it says nothing.


def test_an_answer_that_found_little_takes_the_assumption_back() -> None:
    media = MediaReferences()
    media.assume(CHAIN, A, 0.0)
    media.computed(CHAIN, A)
    media.confirm(CHAIN, A, media.assume(CHAIN, A, 1.0), 16)
    assert media.match(CHAIN, 2.0) == {A: Recalled(16, 16)}


def test_what_runs_beside_the_first_finds_nothing_which_says_nothing() -> None:
    media = MediaReferences()
    media.assume(CHAIN, A, 0.0)
    known = media.assume(CHAIN, A, 0.1)
    media.computed(CHAIN, A)
    media.confirm(CHAIN, A, known, 0)
    assert media.match(CHAIN, 1.0) == {A: Recalled(800, 0)}


def test_a_failed_request_leaves_nothing_but_what_others_speak_for() -> None:
    media = MediaReferences()
    media.assume(CHAIN[:1], A, 0.0)
    media.computed(CHAIN[:1], A)
    media.assume(CHAIN, A, 1.0)
    media.retract(CHAIN, A, 1.0)
    assert media.match(CHAIN, 2.0) == {A: Recalled(600, 0)}
    media.assume(CHAIN, A, 3.0)
    media.assume(CHAIN, A, 4.0)  # Another one, which is under way.
    media.retract(CHAIN, A, 3.0)
    assert media.match(CHAIN, 5.0) == {A: Recalled(800, 0)}


def test_a_restart_and_time_end_it() -> None:
    media = MediaReferences(ttl_s=10.0)
    for holder in (A, B, ("a", 1)):
        media.assume(CHAIN, holder, 0.0)
    media.clear("a", 1)
    assert set(media.match(CHAIN, 1.0)) == {A, B}
    media.clear("a")
    assert set(media.match(CHAIN, 1.0)) == {B}
    assert media.match(CHAIN, 10.0) == {}
    media.assume(CHAIN, A, 11.0)
    assert media.match(CHAIN, 12.0) == {A: Recalled(800, 0)}


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4), st.sampled_from([A, B])), max_size=60))
def test_it_stays_within_its_bounds_and_in_step(steps: list[tuple[int, int, Any]]) -> None:
    media = MediaReferences(most=10)
    for i, (first, n, holder) in enumerate(steps):
        links = tuple((key, key) for key in range(first, first + n))
        known = media.assume(links, holder, float(i))
        assert 0 <= known <= n
        assert media.match(links, float(i))[holder].assumed_tokens == links[-1][1]
        if i % 3 == 0:
            media.computed(links, holder)
        if i % 4 == 0:
            media.retract(links, holder, float(i))
        assert len(media) <= 10
        assert sum(map(len, media._holders.values())) == len(media)


@pytest.mark.parametrize("bounds", [{"ttl_s": 0.0}, {"most": 0}])
def test_bounds_are_positive(bounds: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="positive"):
        MediaReferences(**bounds)
