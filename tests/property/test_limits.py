"""Limits of a key beside a naive oracle in exact numbers, and in simulated time."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.limits import Account, Exceeded, Limits, shown_s


class Oracle:
    """All that ever happened, added up anew for each question."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken: list[tuple[Fraction, Fraction]] = []

    def level(self, now_s: Fraction) -> Fraction:
        level, at_s = Fraction(self.limit), Fraction(0)
        for when_s, n in [*self.taken, (now_s, Fraction(0))]:
            level = min(Fraction(self.limit), level + (when_s - at_s) * self.limit / 60)
            level = min(Fraction(self.limit), level - n)
            at_s = when_s
        return level


# Eighths of a second are exact in floats too.
STEPS = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.sampled_from(["enter", "leave", "reserve", "settle"]),
        st.integers(0, 90),
        st.integers(0, 90),
    ),
    max_size=60,
)


@given(st.integers(1, 40), st.integers(1, 100), st.integers(1, 4), STEPS)
def test_an_account_allows_what_the_oracle_does(per_minute: int, tokens: int, at_once: int, steps: list) -> None:  # type: ignore[type-arg]
    limits = Limits(requests_per_minute=per_minute, tokens_per_minute=tokens, concurrent_requests=at_once)
    account, requests, budget = Account(limits, 0.0), Oracle(per_minute), Oracle(tokens)
    now, running, reserved = Fraction(0), 0, []
    slack = Fraction(1, 1000)
    for pause, what, a, b in steps:
        now += Fraction(pause, 8)
        if what == "enter":
            room = running < at_once
            levels = [requests.level(now), budget.level(now)]
            try:
                account.enter(float(now))
            except Exceeded as exc:
                refused = exc
            else:
                refused = None
            if refused is not None and refused.what == "concurrent requests":
                assert not room
            elif refused is not None:
                oracle = requests if refused.what == "requests" else budget
                assert oracle.level(now) < 1 + slack
                wanted = (1 - oracle.level(now)) * 60 / oracle.limit
                assert refused.after_s == pytest.approx(float(max(Fraction(0), wanted)), abs=1e-3)
            else:
                assert room
                assert min(levels) > 1 - slack
                requests.taken.append((now, Fraction(1)))
                running += 1
        elif what == "leave" and running:
            account.leave()
            running -= 1
        elif what == "reserve":
            wanted = min(a + b, tokens)
            try:
                taken = account.reserve(a, b, float(now))
            except Exceeded as exc:
                too_large, taken = exc.what == "size", None
            if taken is None:
                assert a > tokens if too_large else budget.level(now) < wanted + slack
            else:
                assert taken == wanted
                assert a <= tokens
                assert budget.level(now) > wanted - slack
                budget.taken.append((now, Fraction(wanted)))
                reserved.append(taken)
        elif what == "settle" and reserved:
            before = reserved.pop(0)
            account.settle(before, a + b, float(now))
            budget.taken.append((now, Fraction(a + b - before)))
        assert account.running == running
        shown = dict(account.headers(float(now)))
        for name, oracle in (("requests", requests), ("tokens", budget)):
            level = oracle.level(now)
            assert int(shown[f"x-ratelimit-limit-{name}"]) == oracle.limit
            assert abs(int(shown[f"x-ratelimit-remaining-{name}"]) - max(0, level)) <= 1 + slack


@given(st.integers(1, 600), st.integers(1, 20), st.floats(0, 0.5))
def test_nobody_gets_more_than_a_burst_and_the_rate(per_minute: int, minutes: int, step_s: float) -> None:
    account = Account(Limits(requests_per_minute=per_minute), 0.0)
    now_s = 0.0
    served = 0
    for _ in range(400):
        try:
            account.enter(now_s)
        except Exceeded as exc:
            now_s += exc.after_s + 1e-6
            account.enter(now_s)  # As it was told.
        served += 1
        now_s += step_s
        if now_s > 60 * minutes:
            break
    assert served <= per_minute + now_s * per_minute / 60 + 1


def test_a_debt_is_paid_before_anything_else() -> None:
    account = Account(Limits(tokens_per_minute=600), 0.0)
    account.enter(0.0)
    reserved = account.reserve(100, 500, 0.0)
    assert reserved == 600
    account.settle(reserved, 1200, 0.0)
    with pytest.raises(Exceeded) as refused:
        account.enter(30.0)
    assert (refused.value.what, round(refused.value.after_s, 3)) == ("tokens", 30.1)
    account.enter(60.2)


def test_what_was_not_used_comes_back_at_once() -> None:
    account = Account(Limits(tokens_per_minute=100), 0.0)
    account.settle(account.reserve(10, 1_000_000, 0.0), 20, 0.0)
    assert dict(account.headers(0.0))["x-ratelimit-remaining-tokens"] == "80"
    with pytest.raises(Exceeded, match="size"):
        account.reserve(101, 0, 0.0)


def test_new_limits_forget_nothing_that_was_taken() -> None:
    account = Account(Limits(requests_per_minute=10, tokens_per_minute=10), 0.0)
    for _ in range(6):
        account.enter(0.0)
    account.configure(Limits(requests_per_minute=8, concurrent_requests=20), 0.0)
    assert account.headers(0.0) == [
        ("x-ratelimit-limit-requests", "8"),
        ("x-ratelimit-remaining-requests", "2"),
        ("x-ratelimit-reset-requests", "45s"),
    ]
    account.configure(Limits(), 0.0)
    assert account.headers(0.0) == []
    assert account.running == 6


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0121, "12ms"), (1, "1s"), (1.5, "1.5s"), (59.999, "59.999s"), (360, "6m0s"), (3661.25, "1h1m1.25s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert shown_s(seconds) == text
