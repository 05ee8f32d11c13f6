"""Metrics, hit statistics and top prefixes."""

from array import array

from prometheus_client import generate_latest

from gateway.debug.faces import masked
from gateway.debug.hits import HitBook
from gateway.debug.metrics import Metrics
from gateway.debug.prefixes import TopPrefixes
from indexer import Prompt


def test_a_workers_series_are_there_from_its_registration_and_gone_with_it() -> None:
    metrics = Metrics("warmroute")
    metrics.add_worker("a")
    metrics.add_worker("a")
    text = generate_latest(metrics.registry).decode()
    for name in ("requests_total", "ejections_total"):
        assert f"warmroute_{name}{{" in text
        assert 'worker="a"' in text
    assert 'warmroute_retries_total{reason="connect"} 0.0' in text
    assert "_created" not in text
    metrics.request("a", 200, 0.1)
    metrics.request("a", 599, 0.1)
    metrics.request("a", 598, 0.1)
    metrics.remove_worker("a")
    metrics.remove_worker("a")
    assert 'worker="a"' not in generate_latest(metrics.registry).decode()


def test_labels_stay_bounded() -> None:
    metrics = Metrics("warmroute")
    metrics.add_worker("a")
    for status in range(100, 1000):
        metrics.request("a", status, 0.1)
        metrics.request("unknown", status, 0.1)
    workers = {s.labels["worker"] for f in metrics.registry.collect() for s in f.samples if "worker" in s.labels}
    statuses = {s.labels["status"] for f in metrics.registry.collect() for s in f.samples if "status" in s.labels}
    assert workers == {"a", "none"}
    assert len(statuses) < 80


def test_what_happens_to_an_unknown_worker_is_not_booked() -> None:
    metrics, hits = Metrics("x"), HitBook()
    metrics.ejected("gone")
    hits.predicted("gone", 1, 1)
    hits.reported("gone", 1, 1, 1)
    assert hits.workers == {}


def test_hits_tell_too_much_from_too_little() -> None:
    hits = HitBook()
    hits.add_worker("a")
    hits.reported("a", 100, 64, 32)
    hits.reported("a", 100, 0, 48)
    stats = hits.workers["a"]
    assert (stats.compared, stats.actual_tokens, stats.over_tokens, stats.under_tokens) == (2, 80, 32, 48)


def prompt(*ids: int) -> Prompt:
    return Prompt(array("I", ids).tobytes())


def test_top_prefixes_count_what_they_save() -> None:
    top = TopPrefixes(per_second=1e9)
    shared = list(range(64))
    for i in range(10):
        top.note(prompt(*shared, *([1000 + i] * 64)), None, 16, 64, now_s=float(i))
    for i in range(3):
        top.note(prompt(*([7] * 128)), None, 16, 128, now_s=100.0 + i)
    rows = top.top(5)
    assert [(row["depth_tokens"], row["hits"], row["saved_tokens"]) for row in rows] == [(64, 10, 640), (128, 3, 384)]


def test_more_cached_than_the_text_before_an_image_is_no_mistake() -> None:
    top = TopPrefixes(per_second=1e9)
    top.note(prompt(*range(40)), None, 16, 1600, now_s=0.0)
    assert [row["depth_tokens"] for row in top.top(5)] == [32]


def test_salted_prompts_are_different_prefixes() -> None:
    top = TopPrefixes(per_second=1e9)
    for salt in ("a", "b"):
        top.note(
            Prompt(array("I", range(16)).tobytes(), cache_salt=salt), None, 16, 16, now_s=0.0 if salt == "a" else 1.0
        )
    assert len({row["key"] for row in top.top(5)}) == 2


def test_heavy_prefixes_survive_a_flood_of_others_in_bounded_memory() -> None:
    top = TopPrefixes(capacity=32, per_second=1e9)
    for i in range(2000):
        top.note(prompt(*([i + 10] * 16)), None, 16, 16, now_s=float(i))
        if i % 4 == 0:
            top.note(prompt(*([1] * 16)), None, 16, 16, now_s=i + 0.5)
    (first, *_) = top.top(1)
    assert first["hits"] - first["hits_error"] <= 500 <= first["hits"]
    assert len(top._entries) == 32


def test_notes_that_were_skipped_are_made_up_for() -> None:
    top = TopPrefixes(per_second=1.0)
    for i in range(100):
        top.note(prompt(*([1] * 16)), None, 16, 16, now_s=i / 10)
    assert 90 <= top.top(1)[0]["hits"] <= 100


def test_secrets_are_masked() -> None:
    config = {"api_key": "sk-1", "nested": [{"password": "p", "budget_tokens": 5, "tokenizer": "/x"}], "secret": None}
    assert masked(config) == {
        "api_key": "********",
        "nested": [{"password": "********", "budget_tokens": 5, "tokenizer": "/x"}],
        "secret": None,
    }
