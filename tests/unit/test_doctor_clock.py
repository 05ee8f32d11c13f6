"""doctor: what Date headers prove of a clock, and what they do not."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.doctor.clock import Offset, judge_clock, judge_clocks
from gateway.doctor.identity import Identity
from gateway.engine.transfers import NixlCounts
from scorer.types import EngineStats

PLAIN = Identity(url="http://w:8000", stats=EngineStats(scraped_at_s=0.0))
HANDS_OVER = Identity(url="http://w:8000", stats=EngineStats(scraped_at_s=0.0), nixl=NixlCounts())


def offset(*heard: tuple[float, float, float]) -> Offset:
    it = Offset()
    for each in heard:
        it.heard(*each)
    return it


def codes(me: Identity, it: Offset) -> list[str]:
    return [finding.code for finding in judge_clock(me, it, margin_s=5.0)]


@given(
    ahead_s=st.floats(-1e5, 1e5),
    delays=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 0.99)), min_size=1, max_size=20),
    began_s=st.floats(1e9, 2e9),
)
def test_never_more_than_the_truth(ahead_s: float, delays: list[tuple[float, float, float]], began_s: float) -> None:
    """However long an answer is on its way, and however stale uvicorn's Date is (up to a second)."""
    it, now_s = Offset(), began_s
    for there_s, back_s, stale_s in delays:
        date_s = float(math.floor(now_s + there_s + ahead_s - stale_s))
        it.heard(date_s, now_s, now_s + there_s + back_s)
        now_s += there_s + back_s + 0.1
    assert it.least_s - 1e-3 <= ahead_s <= it.most_s + 1e-3
    assert abs(it.skew_s) <= abs(ahead_s) + 1e-3


@pytest.mark.parametrize("ahead_s", [-7.5, 4.0, 60.0])
def test_quick_answers_come_close_to_the_truth(ahead_s: float) -> None:
    rng, it = random.Random(3), Offset()
    for n in range(20):
        now_s = 1e9 + n * rng.random()
        it.heard(float(math.floor(now_s + ahead_s)), now_s, now_s + 0.002)
    assert abs(it.skew_s - ahead_s) < 2.0


def test_a_slow_answer_proves_nothing() -> None:
    assert codes(PLAIN, offset((100.0, 100.2, 104.0))) == []
    assert codes(PLAIN, offset((104.0, 100.2, 104.0))) == []
    assert codes(PLAIN, Offset()) == []


def test_severity_goes_by_who_it_is() -> None:
    ahead, behind = offset((103.0, 100.2, 100.3)), offset((60.0, 100.2, 100.3))
    assert codes(PLAIN, ahead) == codes(HANDS_OVER, ahead) == ["clock-skew"]
    assert codes(PLAIN, behind) == ["clock-skew"]
    (found,) = judge_clock(HANDS_OVER, behind, margin_s=5.0)
    assert found.code == "clock-skew-lease"
    assert found.evidence == {"offset_s": -38.2}
    assert "38.2 s behind" in found.sentence


def test_a_clock_that_is_set_meanwhile_begins_anew() -> None:
    it = offset((200.0, 100.0, 100.1), (101.0, 101.0, 101.1))
    assert it.skew_s == 0.0


def test_workers_against_each_other() -> None:
    right, ahead = offset((100.0, 100.2, 100.3)), offset((110.0, 100.2, 100.3))
    assert judge_clocks([("a", right)]) == judge_clocks([]) == judge_clocks([("a", right), ("b", Offset())]) == []
    assert judge_clocks([("a", ahead), ("b", ahead)]) == []
    (found,) = judge_clocks([("a", right), ("b", ahead), ("c", Offset())])
    assert (found.code, found.evidence["ahead"], found.evidence["behind"]) == ("clocks-differ", "b", "a")
