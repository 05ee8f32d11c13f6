"""The soak test's short form, and that it finds what it looks for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.soak.run import Soak, slope, wrong
from tests.soak.watched import AtRest


async def test_a_short_soak_leaves_nothing_behind() -> None:
    soak = Soak(seconds=14.0, cycles=7, rate=20.0)
    await soak.run()
    report = soak.report()
    assert report["wrong"] == []
    met = report["requests"]["gateway"]
    assert met["chat 200"] > 20
    assert met["realtime 101"]
    assert report["requests"]["epp"]["pick served"] > 20
    assert len(report["troubles"]) > 5


def rest(n: int, **changes: Any) -> AtRest:
    values = {
        "requests": 1000 * n, "rss_bytes": 100 << 20, "descriptors": 50, "tasks": 10, "threads": 4, "objects": 50_000,
        "index_bytes": 1 << 20, "booked": {}, "kinds": {"dict": 10}, **changes,
    }  # fmt: skip
    return AtRest(**values)


LEAKS: dict[str, dict[str, Any]] = {
    "a booking": {"booked": {"warmroute_worker_booked_streams{'worker': 'd1'}": 1.0}},
    "descriptors": {"descriptors": 80},
    "tasks": {"tasks": 40},
    "threads": {"threads": 20},
    "the index": {"index_bytes": 17 << 20},
}


@pytest.mark.parametrize("leak", LEAKS)
def test_what_is_left_behind_is_told(leak: str) -> None:
    assert wrong([rest(n) for n in range(1, 10)]) == []
    assert len(wrong([*(rest(n) for n in range(1, 9)), rest(9, **LEAKS[leak])])) == 1


def test_memory_that_grows_with_requests_is_told_and_what_is_filled_first_is_not() -> None:
    leaking = [rest(n, rss_bytes=(100 << 20) + 3000 * 1000 * n, objects=50_000 + 1500 * n) for n in range(1, 10)]
    assert [said.split(" more")[0] for said in wrong(leaking)] == ["3000 bytes of memory", "1.50 objects"]
    filling = [rest(n, rss_bytes=(100 << 20) + min(n, 3) * (20 << 20)) for n in range(1, 10)]
    assert wrong(filling) == []
    noisy = [rest(n, rss_bytes=(100 << 20) + (40 << 20 if n == 5 else 0)) for n in range(1, 10)]
    assert wrong(noisy) == []
    assert slope(noisy, "rss_bytes") == 0
