"""The ring of the last decisions, and how they are shown."""

import msgspec

from gateway.debug.decisions import COMPONENTS, KEPT, Decisions, detailed, rows, tried_again
from gateway.proxy.access import Record
from scorer.types import Candidate, PdReason, Plan, Price


def plan(worker: str = "a", prefill: str | None = None, **seconds: float) -> Plan:
    price = Price(**seconds, total_s=sum(value for name, value in seconds.items() if name != "ttft_s"))
    chosen = Candidate(
        decode=(worker, 0), prefill=None if prefill is None else (prefill, 0), cached_tokens=32, price=price
    )
    return Plan(
        request_id="x", chosen=chosen, considered=(chosen, Candidate(decode=("z", 0))), policy="warmroute",
        n_candidates=2, reason="because", pd_reason=PdReason.COST, decided_at_s=1.0,
    )  # fmt: skip


def record(**fields: object) -> Record:
    made = Record(request_id="r-1", method="POST", path="/v1/completions", status=499)
    for name, value in {"model": "tiny", "prompt_tokens": 64, "tokens": "local", **fields}.items():
        setattr(made, name, value)
    return made


def test_the_parts_are_all_of_the_price() -> None:
    parts = {name.removesuffix("_s") for name in Price.__struct_fields__} - {"total", "ttft", "stall"}
    assert set(COMPONENTS) == parts


def test_only_the_last_are_kept() -> None:
    decisions = Decisions()
    for _ in range(KEPT + 50):
        decisions.note(record(), plan())
    assert decisions.made == KEPT + 50
    kept = decisions.last(10_000)
    assert [each.number for each in kept] == list(range(KEPT + 50, 50, -1))
    assert [each.number for each in decisions.last(3)] == [KEPT + 50, KEPT + 49, KEPT + 48]


def test_what_comes_later_is_shown() -> None:
    decisions, mine = Decisions(), record()
    decisions.note(mine, plan(front_s=0.01, comp_s=0.05, ttft_s=0.06))
    (row,) = rows(decisions.last(9))
    assert (row.status, row.ttft_ms, row.cached_tokens, row.duration_ms) == (None, None, None, None)
    assert row.prices_ms == {"front": 10.0, "comp": 50.0}
    assert (row.total_ms, row.predicted_ttft_ms, row.predicted_cached_tokens) == (60.0, 60.0, 32)
    mine.status, mine.duration_ms, mine.ttft_ms, mine.overhead_ms, mine.queued_ms = 200, 90.0, 75.0, 5.0, 10.0
    mine.cached_tokens = 16
    (row,) = rows(decisions.last(9))
    assert (row.status, row.ttft_ms, row.cached_tokens, row.duration_ms) == (200, 60.0, 16, 90.0)


def test_a_second_attempt_is_a_decision_of_its_own() -> None:
    decisions, mine = Decisions(), record()
    decisions.note(mine, plan("a"))
    decisions.note(record(), plan("c"))
    decisions.note(mine, plan("b"))
    mine.status, mine.duration_ms, mine.ttft_ms = 200, 90.0, 75.0
    kept = decisions.last(9)
    assert tried_again(kept) == {1}
    second, _, first = rows(kept)
    assert (first.worker, first.tried_again, first.status, first.ttft_ms) == ("a", True, None, None)
    assert (second.worker, second.tried_again, second.status, second.ttft_ms) == ("b", False, 200, 75.0)


def test_what_became_of_a_plan_is_told() -> None:
    decisions, mine = Decisions(), record(choice="local", pd_reason="prefill_failed")
    decisions.note(mine, plan("a", "p"))
    (row,) = rows(decisions.last(1))
    assert (row.choice, row.reason, row.became, row.prefill) == ("remote", "cost", "local: prefill_failed", "p")


def test_all_ways_are_told_of_one() -> None:
    decisions = Decisions()
    decisions.note(record(), plan("a", comp_s=0.05, session_s=-0.02))
    told = detailed(decisions.last(1)[0], tried_again=False)
    assert [way["worker"] for way in told["considered"]] == ["a", "z"]
    assert told["considered"][0]["prices_ms"] == {"comp": 50.0, "session": -20.0}
    assert told["why"] == "because"
    msgspec.json.encode(told)


def test_long_names_are_cut() -> None:
    decisions = Decisions()
    decisions.note(record(model="m" * 100_000), plan())
    assert len(rows(decisions.last(1))[0].model) < 300
