"""doctor: workers against each other."""

from __future__ import annotations

from typing import Any

from gateway.doctor.fleet import judge_fleet
from gateway.doctor.identity import Identity
from gateway.engine.capabilities import EventSource, Models
from scorer.types import EngineStats


def worker(number: int, **changes: Any) -> Identity:
    models = Models((changes.pop("model", "m"),), (), changes.pop("root", "/m"), changes.pop("max_model_len", 4096))
    stats = EngineStats(
        scraped_at_s=0.0,
        block_size=changes.pop("block_size", 16),
        process_start_s=changes.pop("start_s", 100.0 + number),
    )
    return Identity(url=f"http://w{number}:8000", version=changes.pop("version", "0.32.0"), models=models, stats=stats)


def source(endpoint: str, topic: str = "", *, connects: bool = False) -> dict[int, EventSource]:
    return {0: EventSource(endpoint=endpoint, topic=topic, engine_connects=connects)}


def codes(
    *workers: Identity, plan: dict[str, dict[int, EventSource]] | None = None, repeated: tuple[str, ...] = ()
) -> list[str]:
    return [finding.code for finding in judge_fleet(workers, plan or {}, repeated)]


def test_equal_workers_have_no_findings() -> None:
    plan = {f"http://w{n}:8000": source(f"tcp://w{n}:5557") for n in (1, 2)}
    assert codes(worker(1), worker(2), plan=plan) == []
    assert codes() == []


def test_differences() -> None:
    assert codes(worker(1), worker(2, model="other")) == ["models-differ"]
    assert codes(worker(1, model="a"), worker(2, model="b"), worker(3, model="a")) == ["models-differ"]
    assert codes(worker(1), worker(2, max_model_len=8192)) == ["max-model-len-differs"]
    assert codes(worker(1), worker(2, root="/n")) == ["roots-differ"]
    assert codes(worker(1), worker(2, version="0.31.0")) == ["versions-differ"]
    assert codes(worker(1), worker(2, block_size=32)) == ["block-sizes-differ"]


def test_a_difference_names_who_has_what() -> None:
    (found,) = judge_fleet([worker(1), worker(2, max_model_len=8192), worker(3)], {})
    assert "4096 at http://w1:8000, http://w3:8000" in found.sentence
    assert "8192 at http://w2:8000" in found.sentence


def test_unknown_values_are_no_difference() -> None:
    assert codes(worker(1), Identity(url="http://w2:8000")) == []


def test_url_given_twice() -> None:
    assert codes(worker(1), repeated=("http://w1:8000",)) == ["url-twice"]


def test_two_urls_of_one_server() -> None:
    first, second = worker(1, start_s=5.0), worker(2, start_s=5.0)
    plan = {first.url: source("tcp://localhost:5557"), second.url: source("tcp://127.0.0.1:5557")}
    assert codes(first, second, plan=plan) == ["same-server"]
    plan[second.url] = source("tcp://127.0.0.1:5558")
    assert codes(first, second, plan=plan) == []


def test_one_event_endpoint_for_two_workers() -> None:
    plan = {f"http://w{n}:8000": source("tcp://x:5557") for n in (1, 2)}
    assert codes(worker(1), worker(2), plan=plan) == ["event-endpoint-shared"]


def test_engines_that_connect_to_one_address_need_topics_of_their_own() -> None:
    def plan(*topics: str) -> dict[str, dict[int, EventSource]]:
        return {f"http://w{n}:8000": source("tcp://*:5557", t, connects=True) for n, t in enumerate(topics, 1)}

    assert codes(worker(1), worker(2), plan=plan("a", "b")) == []
    assert codes(worker(1), worker(2), plan=plan("a", "a")) == ["topic-shared"]
    assert codes(worker(1), worker(2), plan=plan("a", "")) == ["topic-missing"]
    assert codes(worker(1), plan=plan("")) == []
