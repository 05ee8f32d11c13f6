"""Ids made by shortcuts are those of `tokenizers`, for any conversation and any tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.tokens import TokenSettings
from gateway.tokens.cache import IdCache
from gateway.tokens.given import ChatPrompt
from gateway.tokens.local import LocalTokenizer, load
from gateway.tokens.types import pack_ids
from tests.support.odd_tokenizers import PIECES, WHOLE
from tests.support.token_models import SPECIAL, make_model

HOSTILE = (
    *SPECIAL, "<|im_", "start|>", "<|im_start", "|>", "<|", "x<|im_start|>", "<|im_start|>x", "><|im_start|>", "maybe",
    "<|greedy|>", "hello", "HELLO", " ", "  ", "\n", "\r\n", "\u2581", "e\u0301", "\u0301", "\u212b", "\ufb01",
    "\u1100\u1161", "\u3000", "\u200d", "123", "\x00", "the ", "\uff1c\uff5cim_start\uff5c\uff1e", "\u0130",
)  # fmt: skip
hostile = st.sampled_from(HOSTILE)
texts = st.lists(hostile | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=8).map("".join)
chats = st.lists(st.lists(texts, min_size=1, max_size=4), min_size=1, max_size=3)


@cache
def loaded(name: str, cache_bytes: int) -> tuple[LocalTokenizer, Tokenizer]:
    file = (PIECES | WHOLE)[name]
    with TemporaryDirectory() as folder:
        local = load(str(make_model(Path(folder), "chatml", tokenizer=file)), TokenSettings(), IdCache(cache_bytes))
        local.speed_up()
    return local, Tokenizer.from_str(file)


def chat(turns: list[str]) -> ChatPrompt:
    roles = ("user", "assistant")
    return ChatPrompt({"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]})


@pytest.mark.parametrize(
    ("name", "cache_bytes"),
    [
        ("bytelevel", 0),
        ("bytelevel", 1 << 20),
        *((name, 3000) for name in PIECES),
        *((name, 1 << 20) for name in WHOLE if name != "dropout"),
    ],
)
@given(conversations=chats)
def test_ids_are_those_of_the_whole_text(name: str, cache_bytes: int, conversations: list[list[str]]) -> None:
    """Each conversation grows turn by turn, with the cache as all those before have left it."""
    local, plain = loaded(name, cache_bytes)
    for turns in conversations:
        for n in range(1, len(turns) + 1):
            text = local.text_of(chat(turns[:n])).text
            for special in (False, True):
                expected = plain.encode(text, add_special_tokens=special).ids
                assert local.encode(text, add_special_tokens=special) == pack_ids(expected)


@pytest.mark.parametrize("name", ["bytelevel", "greedy_neighbour"])
@given(text=texts, special=st.booleans())
def test_any_text_is_encoded_as_the_library_does(name: str, text: str, special: bool) -> None:
    local, plain = loaded(name, 1 << 20)
    assert local.encode(text, add_special_tokens=special) == pack_ids(
        plain.encode(text, add_special_tokens=special).ids
    )
