from __future__ import annotations

import pytest

from gateway.tokens.breaker import CircuitBreaker


def make(failures: int = 3) -> CircuitBreaker:
    return CircuitBreaker(failures=failures, open_s=1.0, open_max_s=4.0)


def trip(breaker: CircuitBreaker, now_s: float = 0.0) -> None:
    while breaker.state(now_s) == "closed":
        ticket = breaker.enter(now_s)
        assert ticket == "call"
        breaker.failure(ticket, now_s)


def test_failures_in_a_row_open_it() -> None:
    breaker = make()
    for _ in range(2):
        breaker.failure("call", 0.0)
    breaker.success("call")
    for _ in range(2):
        breaker.failure("call", 0.0)
    assert breaker.state(0.0) == "closed"
    breaker.failure("call", 0.0)
    assert breaker.state(0.0) == "open"
    assert breaker.enter(0.999) is None
    assert breaker.opened == 1


def test_half_open_lets_one_probe_through() -> None:
    breaker = make()
    trip(breaker)
    assert breaker.state(1.0) == "half_open"
    assert breaker.enter(1.0) == "probe"
    assert breaker.enter(1.0) is None
    assert breaker.enter(100.0) is None
    breaker.success("probe")
    assert breaker.state(1.0) == "closed"
    assert breaker.enter(1.0) == "call"


def test_failed_probes_wait_longer_up_to_the_bound() -> None:
    breaker = make()
    trip(breaker)
    now_s, waits_s = 0.0, []
    for _ in range(4):
        began_s = now_s
        while (ticket := breaker.enter(now_s)) is None:
            now_s += 0.5
        waits_s.append(now_s - began_s)
        breaker.failure(ticket, now_s)
    assert waits_s == [1.0, 2.0, 4.0, 4.0]


def test_recovery_forgets_the_long_wait() -> None:
    breaker = make()
    trip(breaker)
    assert breaker.enter(1.0) == "probe"
    breaker.failure("probe", 1.0)
    assert breaker.enter(3.0) == "probe"
    breaker.success("probe")
    trip(breaker, 3.0)
    assert breaker.enter(4.0) == "probe"


def test_an_abandoned_probe_is_given_to_the_next() -> None:
    breaker = make()
    trip(breaker)
    assert breaker.enter(1.0) == "probe"
    breaker.abandon("probe")
    assert breaker.enter(1.0) == "probe"


@pytest.mark.parametrize("outcome", ["success", "failure", "abandon"])
def test_calls_from_before_it_opened_change_nothing(outcome: str) -> None:
    breaker = make()
    late = breaker.enter(0.0)
    assert late == "call"
    trip(breaker)
    assert breaker.enter(1.0) == "probe"
    if outcome == "success":
        breaker.success(late)
    elif outcome == "failure":
        breaker.failure(late, 1.0)
    else:
        breaker.abandon(late)
    assert breaker.state(1.0) == "half_open"
    assert breaker.enter(1.0) is None
