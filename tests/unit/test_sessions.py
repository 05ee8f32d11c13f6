"""Sessions that prefer their worker, or stay with it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.load import ConfigError, load_config
from scorer.cost import CostModel
from scorer.planner import NoWorker
from scorer.sessions import Sessions, SessionSettings
from scorer.types import ChangeKind, OutcomeKind, Plan, SessionOutcome, WorkerChange
from tests.support.fleets import Rig, W, add, fleet, prompt

NEW, KEPT = SessionOutcome.NEW, SessionOutcome.KEPT


def rig_of(mode: str, *workers: W, policy: str = "warmroute", **settings: Any) -> Rig:
    rig = fleet(*workers, policy=policy)
    rig.planner.sessions = Sessions(SessionSettings(mode=mode, **settings), rig.planner.cost)
    return rig


def ask(rig: Rig, session: str | None, tokens: list[int] | int = 500, **kwargs: Any) -> Plan:
    plan = rig.route(tokens, session=session, **kwargs)
    rig.observe(plan, OutcomeKind.FIRST_TOKEN)
    rig.observe(plan, OutcomeKind.END)
    rig.now_s += 1
    return plan


@pytest.mark.parametrize("mode", ["prefer", "strict"])
def test_a_session_goes_where_it_was_served_last(mode: str) -> None:
    rig = rig_of(mode, *(W(f"w{i}", events=False) for i in range(4)))
    homes = {f"s{i}": ask(rig, f"s{i}", 5000) for i in range(8)}
    assert {plan.session for plan in homes.values()} == {NEW}
    for _ in range(3):
        for session, home in homes.items():
            plan = ask(rig, session, 5000)
            assert (plan.chosen.decode, plan.session) == (home.chosen.decode, KEPT)
    assert rig.planner.sessions.counts[KEPT] == 24


def test_off_is_off_and_so_is_a_request_of_no_session() -> None:
    rig = rig_of("off", W("a"), W("b"))
    assert ask(rig, "s").session is None
    assert len(rig.planner.sessions) == 0
    rig = rig_of("strict", W("a"), W("b"))
    assert ask(rig, None).session is None
    assert len(rig.planner.sessions) == 0


def test_of_another_tenants_session_nobody_hears() -> None:
    rig = rig_of("strict", W("a"), W("b"))
    owners = [("t", "m", "s"), ("u", "m", "s"), (None, "m", "s"), ("", "m", "s"), ("t", "m", "\0s")]
    for tenant, model, session in owners:
        assert ask(rig, session, tenant=tenant, model=model).session is NEW, (tenant, session)
    assert len(rig.planner.sessions) == len(owners)
    for tenant, model, session in owners:
        assert ask(rig, session, tenant=tenant, model=model).session is KEPT


def test_what_is_preferred_is_worth_what_it_saves_and_is_seen() -> None:
    """No token ids: the session is all that is known of the cache."""
    rig = rig_of("prefer", W("a"), W("b"))
    home = ask(rig, "s", 8000)
    plan = rig.route(9000, session="s")
    assert plan.chosen.decode == home.chosen.decode
    price, other = plan.considered[0].price, plan.considered[1].price
    cost = CostModel()
    assert price.session_s == pytest.approx(cost.comp_s(9000, 8000) - cost.comp_s(9000, 0))
    assert price.total_s == pytest.approx(other.total_s + price.session_s)
    assert plan.reason.endswith("session kept")


def test_a_preference_gives_way_to_a_backlog_that_costs_more() -> None:
    rig = rig_of("prefer", W("a"), W("b"))
    home = ask(rig, "s", 4000).chosen.decode[0]
    for i in range(6):
        rig.route(8000, available=[home], request_id=f"b{i}")
    plan = rig.route(4000, session="s")
    assert plan.chosen.decode[0] != home
    assert plan.session is SessionOutcome.MOVED_CHEAPER


def test_where_events_tell_a_session_only_settles_what_is_equal() -> None:
    rig = rig_of("prefer", W("a"), W("b"))
    text = prompt(4000)
    home = ask(rig, "s", text).chosen.decode[0]
    other = "b" if home == "a" else "a"
    rig.hold(other, text)
    rig.now_s += 1
    plan = rig.route(text, session="s")
    assert plan.chosen.decode[0] == other
    mine = next(c for c in plan.considered if c.decode[0] == home)
    assert mine.price.session_s == pytest.approx(-0.001)


def test_strict_stays_whatever_it_costs_up_to_its_bound() -> None:
    rig = rig_of("strict", W("a"), W("b"), wait_s=2.0)
    home = ask(rig, "s", 1000).chosen.decode[0]
    outcomes = []
    for i in range(12):
        rig.route(8000, available=[home], request_id=f"b{i}")
        plan = rig.route(1000, session="s", request_id=f"s{i}")
        price = next(c.price for c in plan.considered if c.decode[0] == home)
        outcomes.append(plan.session)
        assert (plan.session is KEPT) == (price.wait_s + price.adm_s <= 2.0)
        if plan.session is not KEPT:
            break
    assert outcomes[:3] == [KEPT] * 3
    assert outcomes[-1] is SessionOutcome.MOVED_BUSY
    assert ask(rig, "s", 1000).chosen.decode[0] != home  # It has moved.


@pytest.mark.parametrize("policy", ["round-robin", "random", "least-load"])
def test_strict_goes_with_every_policy(policy: str) -> None:
    rig = rig_of("strict", *(W(f"w{i}") for i in range(4)), policy=policy)
    home = ask(rig, "s").chosen.decode
    for _ in range(8):
        ask(rig, None)
        assert ask(rig, "s").chosen.decode == home


def test_strict_with_prefill_workers_decodes_at_home() -> None:
    from tests.support.fleets import D, P

    rig = fleet(D("d1"), D("d2"), P("p"), pd_policy="cost")
    rig.planner.sessions = Sessions(SessionSettings(mode="strict"), rig.planner.cost)
    home = ask(rig, "s", 200).chosen.decode
    other = "d2" if home[0] == "d1" else "d1"
    rig.hold(other, prompt(6000))
    assert rig.route(prompt(6000), session="s").chosen.decode == home


def test_a_worker_that_drains_fails_or_goes_frees_its_sessions() -> None:
    rig = rig_of("strict", W("a"), W("b"))
    home = ask(rig, "s").chosen.decode[0]
    rig.planner.fleet.workers[home].draining = True
    plan = ask(rig, "s")
    assert (plan.chosen.decode[0] != home, plan.session) == (True, SessionOutcome.MOVED_UNAVAILABLE)
    rig.planner.fleet.workers[home].draining = False
    plan = rig.route(500, session="s")
    rig.observe(plan, OutcomeKind.ERROR, worker_failed=True)
    assert rig.route(500, session="s").session is NEW


def test_another_life_under_the_same_name_is_another_worker() -> None:
    rig = rig_of("strict", W("a"), W("b"))
    home = ask(rig, "s").chosen.decode[0]
    rig.planner.fleet.apply(WorkerChange(kind=ChangeKind.REMOVED, worker=home))
    rig.planner.configure_worker(home)
    add(rig, W(home))
    assert rig.route(500, session="s").session is SessionOutcome.MOVED_UNAVAILABLE


def test_an_emptied_cache_leaves_a_session_no_history() -> None:
    rig = rig_of("prefer", W("a"), W("b"))
    home = ask(rig, "s", 8000).chosen.decode[0]
    rig.planner.forget_blocks(home)
    plan = rig.route(8000, session="s")
    assert plan.considered[0].price.session_s == pytest.approx(-0.001)


def test_sessions_are_bounded_and_end() -> None:
    rig = rig_of("strict", W("a"), W("b"), idle_s=60.0)
    rig.planner.sessions._most = 3
    for i in range(5):
        ask(rig, f"s{i}")
    assert len(rig.planner.sessions) == 3
    assert rig.route(500, session="s0").session is NEW
    assert rig.route(500, session="s4").session is KEPT
    rig.now_s += 61
    assert rig.route(500, session="s4").session is NEW


def test_models_have_sessions_of_their_own() -> None:
    rig = rig_of("strict", W("a", models=("m",)), W("b", models=("n",)))
    assert ask(rig, "s", model="m").chosen.decode[0] == "a"
    assert ask(rig, "s", model="n").chosen.decode[0] == "b"
    assert (ask(rig, "s", model="m").session, ask(rig, "s", model="n").session) == (KEPT, KEPT)


steps = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "ask", "drain", "undrain", "eject", "return", "remove", "add", "fail"]),
              st.sampled_from("abc"), st.integers(0, 3)),
    max_size=40,
)  # fmt: skip


@given(st.sampled_from(["prefer", "strict"]), steps)
def test_no_session_keeps_a_worker_that_cannot_serve_it(mode: str, steps: list[tuple[str, str, int]]) -> None:
    rig = rig_of(mode, W("a"), W("b"), W("c"))
    rig.rng = random.Random(0)
    out: set[str] = set()
    lives: dict[str, tuple[str, int]] = {}
    for what, name, number in steps:
        workers = rig.planner.fleet.workers
        if what == "ask":
            session, up = f"s{number}", [n for n, w in workers.items() if n not in out and not w.draining]
            try:
                plan = ask(rig, session, available=[n for n in workers if n not in out])
            except NoWorker:
                assert not up
                continue
            chosen = plan.chosen.decode[0]
            assert chosen in up
            life = chosen, workers[chosen].generation
            if plan.session is KEPT:
                assert lives[session] == life
            lives[session] = life
        elif what in ("drain", "undrain") and name in workers:
            workers[name].draining = what == "drain"
        elif what == "eject":
            out.add(name)
        elif what == "return":
            out.discard(name)
        elif what == "remove":
            rig.planner.fleet.apply(WorkerChange(kind=ChangeKind.REMOVED, worker=name))
            rig.planner.configure_worker(name)
        elif what == "add" and name not in workers:
            add(rig, W(name))
        elif what == "fail" and name in workers and name not in out and not workers[name].draining:
            plan = rig.route(500, session=f"s{number}", available=[name])
            rig.observe(plan, OutcomeKind.ERROR, worker_failed=True)
            lives.pop(f"s{number}", None)
    assert rig.planner.in_flight() == 0


def test_the_keys() -> None:
    config = load_config(flags={("scorer", "session_affinity"): "strict", ("scorer", "policy"): "round-robin"})
    assert (config.scorer.session_header, config.scorer.session_wait_s) == ("x-session-id", 10.0)
    with pytest.raises(ConfigError, match="prefer changes prices, which policy random ignores"):
        load_config(flags={("scorer", "session_affinity"): "prefer", ("scorer", "policy"): "random"})
    with pytest.raises(ConfigError, match="session_header: expected the name of an HTTP header"):
        load_config(flags={("scorer", "session_header"): "x: y"})
