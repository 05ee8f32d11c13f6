"""Metrics of several processes as those of one."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.processes import families
from gateway.processes.families import Family
from gateway.processes.merge import Totals


def said(**changes: float) -> list[Family]:
    """What a process says that has counted so much."""
    registry = CollectorRegistry()
    counter = Counter("warmroute_requests", "Requests.", ("worker", "status"), registry=registry)
    for name, value in changes.items():
        if name.startswith("w"):
            counter.labels(name, "200").inc(value)
    in_flight = Gauge("warmroute_requests_in_flight", "Now.", registry=registry)
    in_flight.set(changes.get("in_flight", 0))
    Gauge("warmroute_worker_available", "Now.", ("worker",), registry=registry).labels("w1").set(
        changes.get("available", 1)
    )
    Gauge("warmroute_degraded", "Now.", ("what",), registry=registry).labels("x").set(changes.get("degraded", 0))
    Gauge("warmroute_learned_factor", "Now.", ("worker",), registry=registry).labels("w1").set(changes.get("f", 1))
    Counter("warmroute_events", "Events.", ("worker",), registry=registry).labels("w1").inc(changes.get("events", 0))
    Counter("warmroute_pd_transfer_bytes", "Bytes.", ("decode",), registry=registry).labels("w1").inc(
        changes.get("bytes", 0)
    )
    histogram = Histogram("warmroute_ttft", "First.", buckets=(1.0, 2.0), registry=registry)
    for _ in range(int(changes.get("n", 0))):
        histogram.observe(1.5)
    return families.decode(families.read(registry))


def told(totals: Totals) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in totals.told():
        for it in family.samples:
            key = it.name, tuple(sorted((name, value) for name, value in it.labels if name not in ("status",)))
            assert key not in found
            found[key] = it.value
    return found


W1 = (("worker", "w1"),)


def test_each_kind_has_its_rule() -> None:
    totals = Totals()
    totals.heard("0/11", said(w1=3, in_flight=2, available=1, n=2, f=1.5, events=7, bytes=100))
    totals.heard("1/12", said(w1=4, in_flight=1, available=0, degraded=1, n=1, f=0.5, events=7, bytes=90))
    totals.heard("hub/10", said(events=9))
    them = told(totals)
    assert them["warmroute_requests_total", W1] == 7
    assert them["warmroute_requests_in_flight", ()] == 3
    assert them["warmroute_worker_available", W1] == 0, "it is not, for some requests"
    assert them["warmroute_degraded", (("what", "x"),)] == 1
    assert them["warmroute_learned_factor", (("process", "0"), *W1)] == 1.5
    assert them["warmroute_learned_factor", (("process", "1"), *W1)] == 0.5
    assert them["warmroute_events_total", W1] == 9, "as the hub counts, whom the others only repeat"
    assert them["warmroute_pd_transfer_bytes_total", (("decode", "w1"),)] == 100, "the engine counts it"
    assert them["warmroute_ttft_count", ()] == 3
    assert them["warmroute_ttft_bucket", (("le", "2.0"),)] == 3
    assert them["warmroute_ttft_sum", ()] == 4.5


def test_what_the_dead_have_counted_stays_and_what_they_had_does_not() -> None:
    totals = Totals()
    totals.heard("0/11", said(w1=3, in_flight=2, n=2))
    totals.heard("1/12", said(w1=4, in_flight=1))
    before = told(totals)
    totals.gone("0/11")
    after = told(totals)
    assert after["warmroute_requests_total", W1] == before["warmroute_requests_total", W1] == 7
    assert after["warmroute_ttft_count", ()] == 2
    assert after["warmroute_requests_in_flight", ()] == 1
    assert ("warmroute_learned_factor", (("process", "0"), *W1)) not in after
    totals.heard("0/13", said(w1=1, n=1))
    assert told(totals)["warmroute_requests_total", W1] == 8
    assert told(totals)["warmroute_ttft_bucket", (("le", "+Inf"),)] == 3


def test_what_is_only_repeated_is_counted_once_whether_or_not_the_hub_is_there() -> None:
    totals, key = Totals(), ("warmroute_events_total", W1)
    totals.heard("0/11", said(events=7))
    totals.heard("1/12", said(events=8))
    assert told(totals)[key] == 8, "of another indexer"
    totals.heard("hub/9", [])
    assert told(totals)[key] == 8, "a hub that has the board alone counts none"
    totals.gone("hub/9")
    totals.heard("hub/10", said(events=9))
    assert told(totals)[key] == 9
    totals.gone("hub/10")
    assert told(totals)[key] == 9
    totals.heard("hub/13", said(events=2))
    assert told(totals)[key] == 11


def test_when_all_are_dead_the_counters_are_still_told() -> None:
    totals = Totals()
    totals.heard("0/11", said(w1=3))
    totals.gone("0/11")
    assert told(totals)["warmroute_requests_total", W1] == 3


def test_a_worker_that_leaves_takes_its_series_along() -> None:
    totals = Totals()
    totals.heard("0/11", said(w1=3, w2=5))
    totals.heard("1/12", said(w1=1, w2=1))
    totals.gone("0/11")
    totals.heard("0/13", said(w1=1, w2=0))
    assert told(totals)["warmroute_requests_total", (("worker", "w2"),)] == 6
    totals.heard("0/13", said(w1=1))
    totals.heard("1/12", said(w1=1))
    assert ("warmroute_requests_total", (("worker", "w2"),)) not in told(totals)
    totals.heard("1/12", said(w1=1, w2=0))
    assert told(totals)["warmroute_requests_total", (("worker", "w2"),)] == 0


def test_a_value_nobody_knows_is_no_value_of_the_others() -> None:
    totals = Totals()
    totals.heard("0/11", said(in_flight=math.nan))
    totals.heard("1/12", said(in_flight=2))
    assert told(totals)["warmroute_requests_in_flight", ()] == 2
    totals.heard("1/12", said(in_flight=math.nan))
    assert math.isnan(told(totals)["warmroute_requests_in_flight", ()])


@given(st.lists(st.tuples(st.sampled_from(["count", "die"]), st.integers(0, 2), st.integers(0, 9)), max_size=40))
def test_counters_are_the_sum_of_all_that_was_counted_and_never_go_back(
    steps: list[tuple[str, int, int]],
) -> None:
    totals, lives, counted, all_counted, last = Totals(), [0, 0, 0], [0, 0, 0], 0, 0.0
    for what, process, n in steps:
        if what == "die":
            totals.gone(f"{process}/{lives[process]}")
            lives[process] += 1
            counted[process] = 0
        else:
            counted[process] += n
            all_counted += n
            totals.heard(f"{process}/{lives[process]}", said(w1=counted[process]))
        now = told(totals).get(("warmroute_requests_total", W1), 0.0)
        assert now == all_counted
        assert now >= last
        last = now
