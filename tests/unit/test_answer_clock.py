"""How long an answer was on its way, told by its Date header."""

from email.utils import formatdate

import pytest

from gateway.handoff import clock
from gateway.handoff.clock import AnswerClock

NOW_S = 1_800_000_000.0


def date(unix_s: float) -> str:
    return formatdate(unix_s, usegmt=True)


def test_an_answer_that_comes_at_once_was_not_on_its_way() -> None:
    it = AnswerClock()
    for passed_s in (0.0, 0.4, 0.99, 5.5):
        assert it.delay_s("p", date(NOW_S + passed_s), NOW_S + passed_s) == 0.0


@pytest.mark.parametrize("ahead_s", [-7200.0, -3.0, 0.0, 3.0, 7200.0])
def test_a_late_answer_shows_whatever_the_servers_clock_says(ahead_s: float) -> None:
    it = AnswerClock()
    assert it.delay_s("p", date(NOW_S + ahead_s), NOW_S) == 0.0
    assert it.delay_s("p", date(NOW_S + ahead_s), NOW_S + 9) == pytest.approx(8.0), "to the second that Date tells"
    assert it.delay_s("q", date(NOW_S), NOW_S + 9) == 0.0, "nothing is known of another worker's clock"


def test_a_second_late_may_be_the_dates_rounding() -> None:
    it = AnswerClock()
    it.delay_s("p", date(NOW_S), NOW_S)
    assert it.delay_s("p", date(NOW_S), NOW_S + 0.99) == 0.0


@pytest.mark.parametrize("text", [None, "", "yesterday", "Mon, 99 Foo 2026 99:99:99 GMT", "\ud800", "0" * 5000])
def test_what_is_no_date_says_nothing(text: str | None) -> None:
    assert AnswerClock().delay_s("p", text, NOW_S) == 0.0


def test_a_clock_that_was_set_is_believed_after_a_while() -> None:
    it = AnswerClock()
    it.delay_s("p", date(NOW_S), NOW_S)
    set_back_s = NOW_S - 3600
    assert it.delay_s("p", date(set_back_s), NOW_S + 1) > 3000
    assert it.delay_s("p", date(set_back_s + 601), NOW_S + 601) == 0.0
    assert it.delay_s("p", date(set_back_s + 602), NOW_S + 602) == 0.0


def test_workers_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_MOST_WORKERS", 5)
    it = AnswerClock()
    for i in range(20):
        it.delay_s(f"p{i}", date(NOW_S), NOW_S)
    assert len(it._least) == 5
