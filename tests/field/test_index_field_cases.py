"""Faults of prefix indexes that users met in the field (docs/field-cases.md), one test each."""

import re
import sys
from pathlib import Path

from indexer import Match, MediaSpan, Stream
from tests.support.kv_feed import SIZE, Feed, batch, payload, prompt, removed

TOKENS = prompt(4)


def test_i1_engines_with_random_hash_seeds_match() -> None:
    """I1: two workers hash the same prompt differently. Neither seed nor algorithm has to be known."""
    feed = Feed()
    feed.store("w1", TOKENS)
    feed.store("w2", TOKENS)
    assert not set(feed.hashes("w1", TOKENS)) & set(feed.hashes("w2", TOKENS))
    assert {h: m.gpu_tokens for h, m in feed.match(TOKENS).items()} == {("w1", 0): 16, ("w2", 0): 16}


def test_i3_adapter_name_in_extra_keys_is_no_media_id() -> None:
    """I3: BlockStored(lora_name="a", extra_keys=[["a"]]) and a query for model "a" match in full."""
    feed = Feed()
    feed.store("w", TOKENS, lora_name="a", lora_id=1, extra_keys=[["a"]] * 4)
    assert feed.held(TOKENS, model="a") == 16


def test_i4_base_and_adapter_do_not_share_blocks() -> None:
    """I4: the same tokens under the base model and under an adapter are different blocks, both ways."""
    feed = Feed()
    feed.index.set_worker("w1", models=["base"], loras=["a"])
    feed.index.set_worker("w2", models=["base"], loras=["a"])
    feed.store("w1", TOKENS)
    feed.store("w2", TOKENS, lora_name="a", extra_keys=[["a"]] * 4)
    assert set(feed.match(TOKENS, model="base")) == {("w1", 0)}
    assert set(feed.match(TOKENS, model="a")) == {("w2", 0)}


def test_i6_cache_salts_separate_tenants() -> None:
    """I6: the same tokens under two salts, and without one, are three prompts."""
    feed = Feed()
    for worker, salt in (("w1", "s1"), ("w2", "s2"), ("w3", None)):
        feed.store(worker, TOKENS, extra_keys=[[salt] if salt else None, None, None, None])
    for worker, salt in (("w1", "s1"), ("w2", "s2"), ("w3", None)):
        assert set(feed.match(TOKENS, cache_salt=salt)) == {(worker, 0)}


def test_i7_salted_request_finds_its_warm_worker() -> None:
    """I7: a salted request on a warm worker matches, with an adapter too."""
    feed = Feed()
    feed.store("w", TOKENS, lora_name="a", extra_keys=[["a", "salt"], ["a"], ["a"], ["a"]])
    assert feed.held(TOKENS, lora="a", cache_salt="salt") == 16
    assert feed.held(TOKENS, lora="a") == 0


def test_i9_media_are_part_of_the_structure_not_of_the_text() -> None:
    """I9: an image in a prompt is given as a span, and counts only where the engine says so too."""
    feed = Feed()
    feed.store("w", TOKENS, extra_keys=[None, ["img"], None, None])
    assert feed.held(TOKENS, extra_keys=[MediaSpan("img", 4, 4)]) == 16
    assert feed.held(TOKENS, extra_keys=[MediaSpan("img", 8, 4)]) == 4
    assert feed.held(TOKENS) == 4


def test_i10_restarted_worker_holds_nothing() -> None:
    """I10: a restart at the same address. Nothing is attributed to the new process but what it announces."""
    feed = Feed()
    stream = Stream(can_replay=False)
    event = feed.event("w", TOKENS)
    for action in stream.live(0, payload(event), batch(event)):
        feed.index.apply("w", 0, action.batch)  # type: ignore[union-attr]
    assert feed.held(TOKENS) == 16
    (action,) = stream.restarted("connection refused")
    assert type(action).__name__ == "Clear"
    feed.index.clear("w", 0)
    assert feed.match(TOKENS) == {}


def test_i12_every_holder_is_reported() -> None:
    """I12: the same prefix on two workers is held by both, so that load can choose."""
    feed = Feed()
    for worker in ("busy", "idle"):
        feed.store(worker, TOKENS)
    assert set(feed.match(TOKENS)) == {("busy", 0), ("idle", 0)}


def test_i13_later_blocks_without_the_earlier_ones_count_nothing() -> None:
    """I13: A holds blocks 0 and 1, B holds 2 and 3: two blocks and none, whether lost or never there."""
    feed = Feed()
    feed.store("A", TOKENS, 0, 2)
    feed.store("B", TOKENS)
    feed.remove("B", TOKENS, 1, 0)
    feed.store("C", TOKENS, 2)
    assert feed.match(TOKENS) == {("A", 0): Match(8, 0, 0, 8)}


def test_i15_unknown_medium_is_counted_and_not_credited() -> None:
    """I15: medium="object_store" is not as good as the GPU; the count is reported."""
    feed = Feed()
    feed.store("w", TOKENS, medium="object_store")
    assert feed.match(TOKENS) == {}
    assert feed.rank_stats()["blocks"] == {"gpu": 0, "cpu": 0, "disk": 0, "other": 4}


def test_i16_an_eviction_costs_the_same_in_a_full_cache() -> None:
    """I16: the work of one removal does not grow with the number of blocks held (counted in function calls)."""

    def calls_of_one_removal(n_prompts: int) -> int:
        feed = Feed()
        for i in range(n_prompts):
            feed.store("w", prompt(100, 1000 * i))
        hashes = feed.hashes("w", prompt(100))
        message = batch(removed(hashes[:49:-1]))
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            feed.index.apply("w", 0, message)
        finally:
            sys.setprofile(None)
        assert feed.held(prompt(100)) == 50 * SIZE
        return calls

    assert calls_of_one_removal(1000) == calls_of_one_removal(2)


def test_i18_new_weights_clear_a_model_or_a_worker() -> None:
    """I18: weights reloaded. One call forgets a worker, another every worker of a model, and no other."""
    feed = Feed()
    for worker, model in (("w1", "m"), ("w2", "m"), ("w3", "other")):
        feed.index.set_worker(worker, models=[model])
        feed.store(worker, TOKENS)
    feed.index.clear("w1")
    assert set(feed.match(TOKENS)) == {("w2", 0), ("w3", 0)}
    feed.store("w1", TOKENS)
    feed.index.clear_model("m")
    assert set(feed.match(TOKENS)) == {("w3", 0)}


NOT_YET = {f"X{number}" for number in (1, 2, 4, 5, 7, 8)}


def test_the_table_of_field_cases_names_tests_that_exist() -> None:
    """Every row of docs/field-cases.md has its test but those of NOT_YET, every named test exists, none is left out."""
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs/field-cases.md").read_text()
    rows = {
        row: re.findall(r"`(\S+?)::(test_\w+)`", rest)
        for row, rest in re.findall(r"^\| ([A-Z]\d+) \|(.*)$", page, re.M)
    }
    assert len(rows) > 70
    assert len(rows) == len(re.findall(r"^\| [A-Z]\d+ \|", page, re.M))
    named = {test for tests in rows.values() for test in tests}
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (root / path).read_text(), re.M), f"{path}::{name}"
    for row, tests in rows.items():
        assert any(f"_{row.lower()}_" in name for _, name in tests) or (not tests and row in NOT_YET), row
    for file in (root / "tests/field").glob("test_*_field_cases.py"):
        for name in re.findall(r"^(?:async )?def (test_[a-z]\d+_\w+)\(", file.read_text(), re.M):
            assert (f"tests/field/{file.name}", name) in named
