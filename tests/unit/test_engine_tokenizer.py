"""The toy tokenizer and chat template."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engine import chat, tokenizer


@given(st.text())
def test_decode_gives_the_text_back(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode("utf-8", "replace").decode()


@given(st.text(alphabet="abc XY.é", max_size=30), st.text(alphabet="abc XY.é", max_size=30))
def test_a_common_beginning_gives_common_ids(head: str, tail: str) -> None:
    """All but the last piece of the beginning, which the tail may extend."""
    alone, longer = tokenizer.encode(head), tokenizer.encode(head + tail)
    assert longer[: max(0, len(alone) - 1)] == alone[:-1]


def test_ids_lie_in_the_vocabulary_and_one_piece_has_one_id() -> None:
    ids = tokenizer.encode("a ab abc abcd zzz zzzz Z 0\x00")
    assert max(ids) < tokenizer.VOCAB_SIZE
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert tokenizer.decode([tokenizer.VOCAB_SIZE - 1]) == " zzz"


def test_generated_ids_are_words() -> None:
    first, last = tokenizer.GENERATED_IDS
    assert tokenizer.decode([first, last - 1]) == " aaa zzz"


def test_template_puts_each_message_between_its_role_and_an_end() -> None:
    ids = chat.render([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}])
    assert ids == [
        tokenizer.BOS,
        tokenizer.SYSTEM,
        *tokenizer.encode("be brief"),
        tokenizer.END,
        tokenizer.USER,
        *tokenizer.encode("hi"),
        tokenizer.END,
        tokenizer.ASSISTANT,
    ]


def test_a_conversation_begins_like_its_next_turn() -> None:
    turn = [{"role": "user", "content": "hi"}]
    longer = [*turn, {"role": "assistant", "content": " bez ech"}, {"role": "user", "content": "more"}]
    first = chat.render(turn)
    assert chat.render(longer)[: len(first)] == first


def test_text_parts_are_joined_and_other_parts_are_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat.content_text(parts, 0) == "a\nb"
    with pytest.raises(ValueError, match="image_url"):
        chat.render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(ValueError, match="role"):
        chat.render([{"role": "wizard", "content": ""}])
