"""The breaker of each pair of a prefill and a decode worker."""

import pytest

from scorer.pairs import BACKOFF_MAX_S, BACKOFF_MIN_S, FAILURES, Pairs

PD = ("p", "d")
OTHER = ("p", "e")


def opened(now_s: float = 0.0) -> Pairs:
    pairs = Pairs()
    for _ in range(FAILURES):
        pairs.start(PD)
        pairs.broke(PD, now_s)
    return pairs


def test_a_pair_nobody_knows_may_be_tried() -> None:
    pairs = Pairs()
    assert pairs.allows(PD, 0.0)
    assert pairs.incompatible(PD) is None
    assert pairs.pairs == {}


def test_one_failure_opens_nothing_and_a_success_forgets_it() -> None:
    pairs = Pairs()
    for _ in range(5):
        pairs.start(PD)
        pairs.broke(PD, 0.0)
        assert pairs.allows(PD, 0.0)
        pairs.start(PD)
        pairs.worked(PD)
    assert pairs.pairs[PD].state(0.0) == "closed"
    assert (pairs.pairs[PD].handoffs, pairs.pairs[PD].failed) == (10, 5)


def test_failures_in_a_row_open_the_pair_and_no_other() -> None:
    pairs = opened(100.0)
    assert not pairs.allows(PD, 100.0)
    assert not pairs.allows(PD, 100.0 + BACKOFF_MIN_S - 0.01)
    assert pairs.allows(OTHER, 100.0)
    assert pairs.pairs[PD].state(100.0) == "open"


def test_half_open_lets_one_probe_through() -> None:
    pairs = opened()
    now_s = BACKOFF_MIN_S
    assert pairs.allows(PD, now_s)
    assert pairs.pairs[PD].state(now_s) == "half_open"
    pairs.start(PD)
    assert not pairs.allows(PD, now_s)
    assert not pairs.allows(PD, now_s + 1000)
    assert pairs.pairs[PD].state(now_s) == "half_open"


def test_a_probe_that_works_closes_it_and_the_back_off_starts_anew() -> None:
    pairs = opened()
    pairs.start(PD)
    pairs.broke(PD, BACKOFF_MIN_S)  # the probe: 10 s now
    pairs.start(PD)
    pairs.worked(PD)
    assert pairs.pairs[PD].state(0.0) == "closed"
    for _ in range(FAILURES):
        pairs.start(PD)
        pairs.broke(PD, 100.0)
    assert not pairs.allows(PD, 100.0)
    assert pairs.allows(PD, 100.0 + BACKOFF_MIN_S)


def test_a_failed_probe_doubles_the_back_off_up_to_its_bound() -> None:
    pairs, now_s, waited = opened(), 0.0, []
    for _ in range(10):
        retry_at_s = pairs.pairs[PD].retry_at_s
        assert retry_at_s is not None
        waited.append(retry_at_s - now_s)
        now_s = retry_at_s
        assert pairs.allows(PD, now_s)
        pairs.start(PD)
        pairs.broke(PD, now_s)
        assert not pairs.allows(PD, now_s)
    assert waited[:4] == [5.0, 10.0, 20.0, 40.0]
    assert waited[-1] == BACKOFF_MAX_S == max(waited)


def test_a_probe_that_ended_without_showing_anything_may_be_repeated() -> None:
    pairs = opened()
    pairs.start(PD)
    pairs.gave_up(PD)
    assert pairs.allows(PD, BACKOFF_MIN_S)
    assert pairs.pairs[PD].state(BACKOFF_MIN_S) == "half_open"


def test_a_pair_has_met_once_a_handoff_worked_or_while_one_may() -> None:
    pairs = Pairs()
    assert not pairs.have_met(PD)
    pairs.start(PD)
    assert pairs.have_met(PD), "the handshake is under way"
    pairs.gave_up(PD)
    assert not pairs.have_met(PD), "nothing is known of it"
    pairs.start(PD)
    pairs.start(PD)
    pairs.broke(PD, 0.0)
    assert pairs.have_met(PD), "the other one is under way"
    pairs.broke(PD, 0.0)
    pairs.broke(PD, 0.0, "found out after it had been given up")
    assert not pairs.have_met(PD)
    pairs.start(PD)
    pairs.worked(PD)
    pairs.start(PD)
    pairs.broke(PD, 0.0)
    assert pairs.have_met(PD)
    pairs.forget("p")
    assert not pairs.have_met(PD), "another process"


def test_incompatible_pairs_are_not_tried_until_they_are_no_longer_so() -> None:
    pairs = Pairs()
    pairs.set_incompatible(PD, None)
    assert pairs.pairs == {}, "nothing to be remembered of pairs that fit"
    pairs.set_incompatible(PD, "different vLLM versions: 1 and 2")
    assert not pairs.allows(PD, 1e9)
    assert pairs.incompatible(PD) == "different vLLM versions: 1 and 2"
    assert pairs.pairs[PD].state(1e9) == "incompatible"
    assert pairs.allows(OTHER, 0.0)
    pairs.set_incompatible(PD, None)
    assert pairs.allows(PD, 0.0)


@pytest.mark.parametrize(("gone", "left"), [("p", []), ("d", [OTHER])])
def test_a_restart_forgets_what_the_pairs_of_the_worker_did(gone: str, left: list[tuple[str, str]]) -> None:
    pairs = opened()
    pairs.start(OTHER)
    pairs.forget(gone)
    assert list(pairs.pairs) == left
    assert pairs.allows(PD, 0.0)


def test_pairs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scorer.pairs._MOST_PAIRS", 10)
    pairs = Pairs()
    for i in range(50):
        pairs.start((f"p{i}", "d"))
    assert len(pairs.pairs) == 10
    assert ("p49", "d") in pairs.pairs
