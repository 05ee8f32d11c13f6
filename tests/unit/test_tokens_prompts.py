"""Bodies to prompts, given ids, truncation, estimates, the cache and the tokenizer on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.tokens import estimate
from gateway.tokens.cache import IdCache
from gateway.tokens.given import ChatPrompt, GivenPrompt, OpaquePrompt, TextPrompt, Truncation, prompts_of
from gateway.tokens.local import LoadError, load
from gateway.tokens.settings import TokenSettings
from gateway.tokens.types import CannotTokenize, Reason, Tokens, join_reasons, pack_ids
from tests.support.token_models import BOS, make_model, reference_ids, tokenizer_json

USER = {"role": "user", "content": "hi"}


def test_ids_are_uint32_little_endian() -> None:
    assert pack_ids([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    assert list(Tokens(pack_ids([7, 300]), 2, "given").as_array()) == [7, 300]
    assert list(Tokens(None, 2, "estimate").as_array()) == []
    for bad in ([-1], [2**32], [1.5], ["1"]):
        with pytest.raises((OverflowError, TypeError)):
            pack_ids(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a b", [TextPrompt("a b", True)]),
        (["a", "b"], [TextPrompt("a", True), TextPrompt("b", True)]),
        ([1, 2], [GivenPrompt(pack_ids([1, 2]))]),
        ([[1], [2, 3]], [GivenPrompt(pack_ids([1])), GivenPrompt(pack_ids([2, 3]))]),
        (["a", [2, 3]], [TextPrompt("a", True), GivenPrompt(pack_ids([2, 3]))]),
    ],
)
def test_completion_prompts(prompt: Any, expected: list[Any]) -> None:
    assert prompts_of("completions", {"prompt": prompt}) == expected


def test_special_tokens_default_on_for_completions_off_for_chats_on_for_responses() -> None:
    for kind, body, expected in (
        ("completions", {"prompt": "x"}, True),
        ("completions", {"prompt": "x", "add_special_tokens": False}, False),
        ("chat", {"messages": [USER]}, False),
        ("chat", {"messages": [USER], "add_special_tokens": True}, True),
        ("messages", {"messages": [USER]}, False),
        ("responses", {"input": "x"}, True),
    ):
        (prompt,) = prompts_of(kind, body)
        assert isinstance(prompt, TextPrompt | ChatPrompt)
        assert prompt.add_special_tokens is expected, (kind, body)


def test_forwarded_ids_of_a_chat_are_taken_unless_it_has_media_or_echo() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    forwarded = {"kv_transfer_params": {"prompt_token_ids": [5, 6]}}
    assert prompts_of("chat", {"messages": [USER], **forwarded}) == [GivenPrompt(pack_ids([5, 6]))]
    assert isinstance(prompts_of("chat", {"messages": [image], **forwarded})[0], ChatPrompt)
    assert isinstance(prompts_of("chat", {"messages": [USER], "echo": True, **forwarded})[0], ChatPrompt)


def test_generate_takes_ids() -> None:
    assert prompts_of("generate", {"token_ids": [1, 2]}) == [GivenPrompt(pack_ids([1, 2]))]


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        ("completions", {}, Reason.MALFORMED),
        ("completions", {"prompt": None}, Reason.MALFORMED),
        ("completions", {"prompt": []}, Reason.MALFORMED),
        ("completions", {"prompt": [1, "a"]}, Reason.MALFORMED),
        ("completions", {"prompt": [-1]}, Reason.MALFORMED),
        ("completions", {"prompt": [[1], None]}, Reason.MALFORMED),
        ("completions", {"prompt": "a", "truncate_prompt_tokens": "x"}, Reason.MALFORMED),
        ("completions", {"prompt": "a", "prompt_embeds": "AAAA"}, Reason.UNSUPPORTED),
        ("chat", {}, Reason.MALFORMED),
        ("chat", {"messages": []}, Reason.MALFORMED),
        ("chat", {"messages": "hi"}, Reason.MALFORMED),
        ("chat", {"messages": ["hi"]}, Reason.MALFORMED),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, Reason.UNSUPPORTED),
        ("responses", {"input": "x", "previous_response_id": "resp_1"}, Reason.UNSUPPORTED),
        ("responses", {"input": [{"type": "computer_call"}]}, Reason.UNSUPPORTED),
        ("responses", {"input": "x", "tools": [{"type": "custom", "name": "c"}]}, Reason.UNSUPPORTED),
        ("embeddings", {"input": "x"}, Reason.UNKNOWN_KIND),
    ],
)
def test_what_cannot_be_tokenised_says_why(kind: str, body: dict[str, Any], reason: Reason) -> None:
    (prompt,) = prompts_of(kind, body)
    assert isinstance(prompt, OpaquePrompt)
    assert prompt.reason is reason


def test_truncation() -> None:
    ids = pack_ids([1, 2, 3, 4])
    assert Truncation().apply(ids, "right") == ids
    assert Truncation(2).apply(ids, "right") == pack_ids([1, 2])
    assert Truncation(2).apply(ids, "left") == pack_ids([3, 4])
    assert Truncation(2, "left").apply(ids, "right") == pack_ids([3, 4])
    assert Truncation(9, "left").apply(ids, "right") == ids
    assert Truncation(0).apply(ids, "right") == b""
    assert Truncation(0, "left").apply(ids, "right") == b""
    assert Truncation(-1).apply(ids, "right") == ids
    with pytest.raises(CannotTokenize):
        Truncation(-1, "left").apply(ids, "right")
    with pytest.raises(CannotTokenize):
        Truncation(2, "left").apply(ids, "right", prefix_only=True)


def test_estimate_counts_text_and_no_media_payload() -> None:
    assert estimate.text_bytes(["abc", {"text": "é", "type": "text"}]) == 5
    url = {"url": "data:image/png;base64," + "A" * 100_000}
    message = {"role": "user", "content": [{"type": "text", "text": "abcd"}, {"type": "image_url", "image_url": url}]}
    assert estimate.body_bytes("chat", {"messages": [message]}) == 4
    assert estimate.media_parts([message, USER]) == 1
    assert estimate.tokens_of(0, 4.0) == 1
    assert estimate.tokens_of(9, 4.0) == 3
    assert estimate.tokens_of(0, 4.0, messages=2, media=1) == 2 * estimate.MESSAGE_TOKENS + estimate.IMAGE_TOKENS
    assert estimate.body_bytes("chat", {"tools": [{"a": 1}]}) == len('[{"a":1}]')


def test_reasons_are_joined_without_repeats() -> None:
    assert join_reasons(None) is None
    assert join_reasons(Reason.MODE, None, Reason.NO_ENGINE, Reason.MODE) == "mode; no_engine"


def test_cache_keeps_to_its_bytes_and_drops_the_oldest() -> None:
    cache = IdCache(1900)
    ids = b"1234" * 50
    keys = [IdCache.key(f"text {i}".encode(), 1) for i in range(5)]
    for key in keys:
        cache.put(key, ids)
        cache.get(keys[0], 6)
    assert cache.get(keys[0], 6) == ids
    assert cache.get(keys[1], 6) is None
    assert 0 < cache.n_bytes <= 1900
    assert (cache.hits, cache.misses) == (6, 1)
    assert (cache.hit_bytes, cache.miss_bytes) == (36, 6)
    cache.put(IdCache.key(b"huge", 1), b"1234" * 200)
    assert cache.get(IdCache.key(b"huge", 1), 4) is None
    assert IdCache.key(b"a", 1) != IdCache.key(b"a", 2)


def test_one_prompt_fills_a_quarter_of_the_cache_at_most() -> None:
    cache = IdCache(4000)
    cache.put(0, b"1234")
    cache.put_all((key, b"1234") for key in range(1, 100))
    assert cache.get(0, 1) == b"1234"
    assert sum(ids is not None for ids in cache.get_all(range(1, 100), [1] * 99)) == 1000 // 204


@pytest.mark.parametrize("text", ["", "hello", "<|bos|>héllo 你好<|eot_id|>", "def f(x):\n\treturn x\n" * 500])
@pytest.mark.parametrize("special", [True, False])
def test_local_ids_are_the_librarys(text: str, special: bool, tmp_path: Path) -> None:
    local = load(str(make_model(tmp_path, "chatml")), TokenSettings())
    expected = reference_ids(text, add_special_tokens=special)
    assert local.encode(text, add_special_tokens=special) == pack_ids(expected)
    assert not special or expected[0] == BOS


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    saved = json.loads(tokenizer_json())
    saved["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    saved["padding"] = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }  # fmt: skip
    local = load(str(make_model(tmp_path, None, tokenizer=json.dumps(saved))), TokenSettings())
    text = "import argparse and more words"
    expected = reference_ids(text, add_special_tokens=False)
    assert len(expected) > 3
    assert local.encode(text, add_special_tokens=False) == pack_ids(expected)


def test_a_tokenizer_file_alone_is_enough_for_text(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    local = load(str(tmp_path / "tokenizer.json"), TokenSettings())
    assert local.encode("x y", add_special_tokens=True) == pack_ids(reference_ids("x y", add_special_tokens=True))


def test_tokens_only_the_config_declares_are_added(tmp_path: Path) -> None:
    next_id = len(json.loads(tokenizer_json())["model"]["vocab"])
    added = {str(next_id): {"content": "<|new|>", "special": True}, "1": {"content": "<|bos|>", "special": True}}
    local = load(str(make_model(tmp_path, None, added_tokens_decoder=added)), TokenSettings())
    assert local.encode("<|new|>", add_special_tokens=False) == pack_ids([next_id])
    added = {str(next_id + 5): {"content": "<|new|>", "special": True}}
    with pytest.raises(LoadError, match="another id"):
        load(str(make_model(tmp_path / "b", None, added_tokens_decoder=added)), TokenSettings())


def test_half_a_surrogate_pair_is_malformed(tmp_path: Path) -> None:
    local = load(str(make_model(tmp_path, None)), TokenSettings())
    with pytest.raises(CannotTokenize) as caught:
        local.encode("a\ud800", add_special_tokens=False)
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "not json"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "{"),
        ("chat_template.jinja", "{% if %}"),
    ],
)
def test_a_broken_file_is_named(name: str, content: str, tmp_path: Path) -> None:
    make_model(tmp_path, "chatml")
    (tmp_path / name).write_text(content)
    with pytest.raises(LoadError, match="chat template does not compile" if "jinja" in name else name):
        load(str(tmp_path), TokenSettings())


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": 0},
        {"engine_budget_s": 0.0},
        {"engine_length_max_s": -0.001},
        {"check_rate": 1.5},
        {"cache_bytes": -1},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tokens"):
        TokenSettings(**wrong)


@pytest.mark.parametrize(("item", "bytes_each"), [("abcd", 4), ([5, 6], 8)])
def test_of_a_very_long_list_of_prompts_only_the_first_are_looked_at(item: Any, bytes_each: int) -> None:
    prompts = prompts_of("completions", {"prompt": [item] * 100_000})
    assert len(prompts) == 65
    assert prompts[-1] == OpaquePrompt(Reason.TOO_MANY_PROMPTS, (100_000 - 64) * bytes_each)
