"""What keeps equal tokens apart: models, adapters, salts, media. And what must not."""

from typing import Any

import pytest

from indexer import MediaSpan, Prompt
from tests.support.kv_feed import Feed, prompt

TOKENS = prompt(4)


def workers(feed: Feed, **query: Any) -> set[str]:
    return {worker for worker, _ in feed.match(TOKENS, **query)}


# ---- models ---------------------------------------------------------------------------------------------------------


def test_every_name_of_a_model_reaches_its_blocks_and_no_other_model_does() -> None:
    feed = Feed()
    feed.index.set_worker("w", models=["llama", "llama-alias"])
    feed.index.set_worker("v", models=["qwen"])
    feed.store("w", TOKENS)
    feed.store("v", TOKENS)
    assert workers(feed, model="llama") == workers(feed, model="llama-alias") == {"w"}
    assert workers(feed, model="qwen") == {"v"}
    assert workers(feed, model="nobody") == set()
    assert workers(feed) == {"w", "v"}


def test_an_undeclared_worker_answers_to_any_model() -> None:
    feed = Feed()
    feed.store("w", TOKENS)
    assert workers(feed, model="anything") == {"w"}
    feed.index.set_worker("w", models=["llama"])
    assert workers(feed, model="anything") == set()
    assert workers(feed, model="llama") == {"w"}


def test_declaring_again_replaces() -> None:
    feed = Feed()
    feed.store("w", TOKENS)
    feed.index.set_worker("w", models=["a"])
    feed.index.set_worker("w", models=["b"])
    assert (workers(feed, model="a"), workers(feed, model="b")) == (set(), {"w"})
    feed.index.set_worker("w", removal_mode="logical")
    assert workers(feed, model="b") == {"w"}


# ---- adapters -------------------------------------------------------------------------------------------------------


def with_adapter(declared: bool, models: list[str] | None = None) -> Feed:
    feed = Feed()
    if models is not None:
        feed.index.set_worker("w", models=models, loras=["a"] if declared else [])
    feed.store("w", TOKENS, variant="a", lora_id=1, lora_name="a", extra_keys=[["a"]] * 4)
    feed.store("w", TOKENS, 0, 2)
    return feed


@pytest.mark.parametrize(
    "setting", [(True, ["base"]), (False, ["base"]), (False, None)], ids=["declared", "learned", "undeclared worker"]
)
def test_adapter_and_base_are_separate(setting: tuple[bool, list[str] | None]) -> None:
    feed = with_adapter(*setting)
    assert feed.held(TOKENS, model="base", lora="a") == 16
    assert feed.held(TOKENS, model="a") == 16
    assert feed.held(TOKENS, lora="a") == 16
    assert feed.held(TOKENS, model="base") == 8
    assert feed.held(TOKENS) == 8
    assert feed.held(TOKENS, model="base", lora="b") == 0
    assert feed.held(TOKENS, lora=1) == 0


def test_an_adapter_of_a_worker_that_serves_another_model() -> None:
    feed = with_adapter(True, ["base"])
    assert feed.held(TOKENS, model="other", lora="a") == 0
    assert feed.held(TOKENS, model="a", lora="a") == 16


def test_adapter_known_by_id_only_never_counts_as_base() -> None:
    feed = Feed()
    feed.store("w", TOKENS, lora_id=7)
    assert feed.match(TOKENS) == {}
    assert feed.held(TOKENS, lora=7) == 16
    assert feed.held(TOKENS, lora="7") == 0


def test_adapter_name_among_the_extra_keys_is_not_a_media_id() -> None:
    feed = Feed()
    feed.store("w", TOKENS, lora_name="adapter-116", extra_keys=[["adapter-116"], ["adapter-116"], None, None])
    assert feed.held(TOKENS, model="adapter-116") == 16
    assert feed.held(TOKENS, lora="adapter-116", extra_keys=[["adapter-116"]] * 4) == 16


def test_a_removed_worker_is_forgotten_with_its_names() -> None:
    feed = with_adapter(True, ["base"])
    feed.index.remove_worker("w")
    assert feed.index.stats()["workers"] == {}
    feed.store("w", TOKENS)
    assert feed.held(TOKENS, model="whatever") == 16
    assert feed.held(TOKENS, model="a") == 16, "its adapters are forgotten too, so `a` is any other model name"


# ---- salts ----------------------------------------------------------------------------------------------------------


def test_salts_are_separate() -> None:
    feed = Feed()
    for salt, worker in (("s1", "w1"), ("s2", "w2")):
        feed.store(worker, TOKENS, variant=salt, extra_keys=[[salt], None, None, None])
    feed.store("plain", TOKENS)
    assert workers(feed, cache_salt="s1") == {"w1"}
    assert workers(feed, cache_salt="s2") == {"w2"}
    assert workers(feed, cache_salt="s3") == set()
    assert workers(feed) == {"plain"}


def test_salted_adapter_with_an_image() -> None:
    feed = Feed()
    extras = [["a", "img", "salt"], ["a", "img"], ["a"], ["a"]]
    feed.store("w", TOKENS, lora_name="a", extra_keys=extras)
    media = [MediaSpan("img", 2, 4)]
    assert feed.held(TOKENS, lora="a", cache_salt="salt", extra_keys=media) == 16
    assert feed.held(TOKENS, lora="a", cache_salt="salt") == 0
    assert feed.held(TOKENS, lora="a", extra_keys=media) == 0
    assert feed.held(TOKENS, cache_salt="salt", extra_keys=media) == 0


# ---- media ----------------------------------------------------------------------------------------------------------


def test_two_images_behind_the_same_placeholder_tokens() -> None:
    feed = Feed()
    for worker, image in (("w1", "a" * 64), ("w2", "b" * 64)):
        feed.store(worker, TOKENS, variant=image, extra_keys=[None, [image], [image], None])
    span = {name: [MediaSpan(name * 64, 4, 8)] for name in "abc"}
    assert {w: m.gpu_tokens for (w, _), m in feed.match(TOKENS, extra_keys=span["a"]).items()} == {"w1": 16, "w2": 4}
    assert {w: m.gpu_tokens for (w, _), m in feed.match(TOKENS, extra_keys=span["b"]).items()} == {"w1": 4, "w2": 16}
    for query in ({}, {"extra_keys": span["c"]}):
        assert {m.gpu_tokens for m in feed.match(TOKENS, **query).values()} == {4}


@pytest.mark.parametrize("entry", [["img"], [["img", 3]], [["mm", "img", 3]], "img", [42, "img"]], ids=repr)
def test_legacy_and_tagged_media_keys_are_the_same_block(entry: Any) -> None:
    feed = Feed()
    feed.store("w", TOKENS, extra_keys=[None, entry, None, None])
    assert feed.held(TOKENS, extra_keys=[MediaSpan("img", 5, 1)]) == 16
    assert feed.held(TOKENS, extra_keys=[None, ["img"]]) == 16
    assert feed.held(TOKENS) == 4


def test_media_spans_fit_every_block_size_at_once() -> None:
    feed = Feed()
    tokens = prompt(8)
    feed.store("w4", tokens, extra_keys=[None, None, ["img"], ["img"], None, None, None, None])
    feed.store("w16", tokens, size=16, extra_keys=[["img"], None])
    found = feed.match(tokens, extra_keys=[MediaSpan("img", 8, 8)])
    assert {w: m.gpu_tokens for (w, _), m in found.items()} == {"w4": 32, "w16": 32}


def test_a_prompt_object_brings_salt_and_media_along() -> None:
    feed = Feed()
    feed.store("w", TOKENS, extra_keys=[["s"], ["img"], None, None])
    ask = Prompt(TOKENS, cache_salt="s", extra_keys=[MediaSpan("img", 4, 4)])
    assert feed.index.match(ask)["w", 0].gpu_tokens == 16
    assert feed.index.match(ask, model="x")["w", 0].gpu_tokens == 16
    assert feed.index.match(Prompt(TOKENS)) == {}


def test_media_beyond_the_last_full_block_changes_nothing() -> None:
    feed = Feed()
    feed.store("w", TOKENS)
    assert feed.held([*TOKENS, 1, 2], extra_keys=[MediaSpan("img", 16, 2)]) == 16


# ---- clearing a model -----------------------------------------------------------------------------------------------


def test_clear_model_reaches_every_worker_that_serves_it() -> None:
    feed = Feed()
    feed.index.set_worker("w1", models=["llama", "alias"])
    feed.index.set_worker("w2", models=["llama"])
    feed.index.set_worker("v", models=["qwen"])
    for worker in ("w1", "w2", "v"):
        feed.store(worker, TOKENS)
        feed.store(worker, TOKENS, rank=1)
    feed.index.clear_model("alias")
    assert workers(feed) == {"w2", "v"}
    feed.index.clear_model("llama")
    assert workers(feed) == {"v"}
