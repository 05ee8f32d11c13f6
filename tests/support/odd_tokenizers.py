"""Tokenizer files that must not be cut into pieces, and some that may: a small BPE with one thing changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.support.token_models import tokenizer_json

Json = dict[str, Any]


def changed(change: Callable[[Json], None]) -> str:
    """The tests' usual tokenizer.json after `change`."""
    content = json.loads(tokenizer_json())
    change(content)
    return json.dumps(content)


def token(content: str, token_id: int, **flags: bool) -> Json:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": content, **plain, **flags}


def with_token(content: str, **flags: bool) -> str:
    """Adds one token to the vocabulary, with flags of its own."""

    def change(file: Json) -> None:
        token_id = max(file["model"]["vocab"].values()) + 1
        file["model"]["vocab"][content] = token_id
        file["added_tokens"].append(token(content, token_id, **flags))

    return changed(change)


def with_flags(**flags: bool) -> str:
    """The same flags on every added token."""

    def change(file: Json) -> None:
        for each in file["added_tokens"]:
            each.update(flags)

    return changed(change)


def with_part(name: str, value: Json | None) -> str:
    """Another normalizer or pre_tokenizer, before the usual one."""

    def change(file: Json) -> None:
        if name == "normalizer":
            file[name] = value
        else:
            file[name] = {"type": "Sequence", "pretokenizers": [value, file[name]]}

    return changed(change)


def metaspace(prepend_scheme: str) -> str:
    """As converted from SentencePiece: spaces become a letter, one is put in front, bytes are the fallback."""

    def change(file: Json) -> None:
        special = [each["content"] for each in file["added_tokens"]]
        letters = [chr(c) for c in range(33, 127)] + ["\u2581"]
        words = [*special, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
        words += ["\u2581t", "\u2581th", "\u2581the", "he", "\u2581a"]
        merges = [["\u2581", "t"], ["\u2581t", "h"], ["\u2581th", "e"], ["h", "e"], ["\u2581", "a"]]
        vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
        file["model"] |= {
            "vocab": vocab,
            "merges": merges,
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": True,
        }
        file["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": prepend_scheme,
            "split": False,
        }
        for each in file["added_tokens"]:
            each["id"] = vocab[each["content"]]

    return changed(change)


PREPEND: Json = {"type": "Prepend", "prepend": "\u2581"}
NFC: Json = {"type": "NFC"}


def with_post_processor(value: Json | None) -> str:
    return changed(lambda file: file.update(post_processor=value))


def around(before: list[str], after: list[str]) -> Json:
    """A post-processor that puts tokens around a text."""
    ids = {each["content"]: each["id"] for each in json.loads(tokenizer_json())["added_tokens"]}

    def pieces(names: list[str]) -> list[Json]:
        return [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]

    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [*pieces(before), text, *pieces(after)],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in {*before, *after}},
    }


BYTE_LEVEL: Json = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}

WHOLE: dict[str, str] = {
    "metaspace_first": metaspace("first"),
    "metaspace_always": metaspace("always"),
    "prepend": with_part("normalizer", PREPEND),
    "prepend_inside": with_part("normalizer", {"type": "Sequence", "normalizers": [NFC, PREPEND]}),
    "strip": with_part("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}),
    "prefix_space": with_part(
        "pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    ),
    "lstrip": with_flags(lstrip=True),
    "rstrip": with_flags(rstrip=True),
    "single_word": with_flags(single_word=True),
    "one_single_word": with_token("maybe", single_word=True),
    "normalized": with_flags(normalized=True),
    "not_special": with_flags(special=False),
    "dropout": changed(lambda file: file["model"].update(dropout=0.1)),
    "swallowed": with_token("x<|im_start|>"),
    "swallowed_from_the_left": with_token("><|im_s"),
}
"""Files by why their prompts have to be tokenised as a whole, with a template that writes <|im_start|> and <|im_end|>;
in the last two one of these may be part of another token."""

PIECES: dict[str, str] = {
    "bytelevel": tokenizer_json(),
    "nfc": with_part("normalizer", NFC),
    "nfkc_lowercase": with_part(
        "normalizer", {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
    ),
    "replace": with_part("normalizer", {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}),
    "digits": with_part("pre_tokenizer", {"type": "Digits", "individual_digits": True}),
    "punctuation": with_part("pre_tokenizer", {"type": "Punctuation", "behavior": "Isolated"}),
    "greedy_neighbour": with_token("<|greedy|>", lstrip=True, rstrip=True),
    "plain_neighbour": with_token("hello", special=False, normalized=True),
    "longer_neighbour": with_token("<|im_start", special=False),
    "nothing_around": with_post_processor(None),
    "byte_level_around": with_post_processor(BYTE_LEVEL),
    "both_ends": with_post_processor(
        {"type": "Sequence", "processors": [BYTE_LEVEL, around(["<|bos|>", "<|im_start|>"], ["<|eos|>"])]}
    ),
    "two_around": with_post_processor(
        {"type": "Sequence", "processors": [around(["<|bos|>"], []), around([], ["<|eos|>"])]}
    ),
    "bert_around": with_post_processor({"type": "BertProcessing", "sep": ["<|eos|>", 2], "cls": ["<|bos|>", 1]}),
}
WHOLE_WITH_SPECIAL_TOKENS = frozenset({"two_around", "bert_around"})
"""Of these, those whose special tokens are not known to be the same around each text."""
"""Files whose chats may be cut at <|im_start|> or <|im_end|>, or at the other one of them."""
