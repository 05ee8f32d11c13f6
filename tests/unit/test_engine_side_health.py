"""Ejecting and readmitting workers, in simulated time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.health import End, Health, HealthSettings, State, Ticket

SETTINGS = HealthSettings()


class Fleet:
    """A Health with a clock that ticks every quarter of a second while it is moved on."""

    def __init__(self, *names: str, groups: dict[str, str] | None = None) -> None:
        self.health = Health(SETTINGS)
        self.now_s = 100.0
        self.changes: list[tuple[str, str]] = []
        for name in names:
            self.health.add(name, self.now_s, (groups or {}).get(name))
        self.tick()

    def tick(self) -> None:
        self.changes += [(change.worker, change.state.value) for change in self.health.tick(self.now_s)]

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now_s += 0.25
            self.tick()

    def start(self, name: str, quiet_s: float = 0.0) -> Ticket:
        return self.health.request_started(name, self.now_s, quiet_s)

    def end(self, ticket: Ticket, end: End) -> None:
        self.health.request_ended(ticket, end, self.now_s)

    def serve(self, name: str, end: End = End.OK, times: int = 1) -> None:
        for _ in range(times):
            self.end(self.start(name), end)

    def byte(self, ticket: Ticket) -> None:
        self.health.byte_received(ticket, self.now_s)

    def state(self, name: str) -> State:
        return self.health.state(name).state


@pytest.mark.parametrize("end", [End.RESET, End.SERVER_ERROR, End.TIMEOUT])
def test_faults_eject_when_another_answers(end: End) -> None:
    fleet = Fleet("a", "b")
    fleet.serve("a", end, 2)
    fleet.serve("b")
    assert fleet.state("a") is State.HEALTHY
    fleet.serve("a", end)
    assert fleet.state("a") is State.EJECTED
    assert not fleet.health.available("a")
    assert end.value in fleet.health.state("a").reason
    fleet.tick()
    assert fleet.changes == [("a", "ejected")]


def test_two_refused_connections_are_enough() -> None:
    fleet = Fleet("a", "b")
    fleet.serve("a", End.CONNECT)
    fleet.serve("b")
    fleet.serve("a", End.CONNECT)
    assert fleet.state("a") is State.EJECTED


def test_an_ejected_one_works_once_it_has_shown_it() -> None:
    fleet = Fleet("a", "b")
    fleet.serve("a", End.CONNECT, 2)
    fleet.serve("b")
    fleet.tick()
    assert (fleet.state("a"), fleet.health.works("a")) == (State.EJECTED, False)
    fleet.wait(0.25)
    fleet.health.checked("a", True, fleet.now_s)
    assert (fleet.state("a"), fleet.health.available("a"), fleet.health.works("a")) == (State.EJECTED, False, True)


def test_a_stalled_one_works_when_its_engine_moves_and_not_when_its_server_answers() -> None:
    fleet = Fleet("a", "b")
    fleet.start("a")
    while fleet.state("a") is State.HEALTHY:
        fleet.health.checked("a", True, fleet.now_s)
        fleet.health.checked("b", True, fleet.now_s)
        fleet.wait(0.25)
    fleet.health.checked("a", True, fleet.now_s)
    assert not fleet.health.works("a")
    fleet.wait(0.25)
    fleet.health.progressed("a", fleet.now_s)
    assert (fleet.health.available("a"), fleet.health.works("a")) == (False, True)


def test_a_stall_ejects_within_its_time() -> None:
    """Streams run on both; one goes silent with its connection open."""
    fleet = Fleet("a", "b")
    silent, talking = fleet.start("a"), fleet.start("b")
    fleet.byte(silent)
    stalled_at_s = fleet.now_s
    while fleet.state("a") is State.HEALTHY:
        fleet.byte(talking)
        fleet.wait(0.25)
    assert fleet.now_s - stalled_at_s == SETTINGS.eject_after_s
    assert "not a byte" in fleet.health.state("a").reason


def test_a_stall_ejects_while_the_other_is_idle_but_reachable() -> None:
    fleet = Fleet("a", "b")
    fleet.start("a")
    for _ in range(5):
        fleet.health.checked("a", True, fleet.now_s)  # an HTTP server that is well hides no stalled engine
        fleet.health.checked("b", True, fleet.now_s)
        fleet.wait(1.0)
    assert ("a", "ejected") in fleet.changes


def test_a_long_prompt_is_no_stall() -> None:
    """Silence that was announced, or during which the engine's counters move, is not held against a worker."""
    fleet = Fleet("a", "b")
    fleet.start("a", quiet_s=20.0)
    talking = fleet.start("b")
    for _ in range(20):
        fleet.byte(talking)
        fleet.wait(1.0)
    assert fleet.state("a") is State.HEALTHY
    for _ in range(10):
        fleet.byte(talking)
        fleet.health.progressed("a", fleet.now_s)
        fleet.wait(1.0)
    assert fleet.state("a") is State.HEALTHY
    for _ in range(5):
        fleet.byte(talking)
        fleet.wait(1.0)
    assert ("a", "ejected") in fleet.changes


def test_one_that_stays_silent_among_many_that_speak_is_no_stall() -> None:
    fleet = Fleet("a", "b")
    fleet.start("a")
    others = [fleet.start("a"), fleet.start("b")]
    for _ in range(20):
        for ticket in others:
            fleet.byte(ticket)
        fleet.wait(1.0)
    assert fleet.state("a") is State.HEALTHY


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """The gateway itself was frozen for a minute: everything seems silent, but nobody is to blame."""
    fleet = Fleet("a", "b")
    fleet.start("a")
    talking = fleet.start("b")
    fleet.now_s += 60.0
    fleet.byte(talking)
    fleet.tick()
    assert fleet.state("a") is State.HEALTHY


@pytest.mark.parametrize("end", [End.CLIENT_ERROR, End.CANCELLED])
def test_clients_faults_never_count(end: End) -> None:
    fleet = Fleet("a", "b")
    fleet.serve("b")
    fleet.serve("a", end, 1000)
    fleet.wait(10)
    assert fleet.changes == []


def test_a_few_faults_among_many_answers_are_survived() -> None:
    fleet = Fleet("a", "b")
    for _ in range(20):
        fleet.serve("a", End.SERVER_ERROR)
        fleet.serve("a", End.OK, 2)
        fleet.serve("b")
        fleet.wait(0.25)
    assert fleet.state("a") is State.HEALTHY


def test_half_of_the_requests_failing_ejects() -> None:
    fleet = Fleet("a", "b")
    fleet.serve("b")
    for _ in range(3):
        fleet.serve("a")
        fleet.serve("a", End.RESET)
        fleet.serve("b")
    assert fleet.state("a") is State.EJECTED


@pytest.mark.parametrize("end", [End.CONNECT, End.RESET, End.SERVER_ERROR, End.TIMEOUT])
def test_a_shared_cause_ejects_nobody(end: End) -> None:
    fleet = Fleet("a", "b", "c")
    for name in "abc":
        fleet.serve(name)
    fleet.wait(5)
    for _ in range(10):
        for name in "abc":
            fleet.serve(name, end)
        fleet.wait(0.25)
    assert fleet.changes == []
    assert end.value in (fleet.health.state("a").suspicion or "")


def test_a_stall_of_all_ejects_nobody() -> None:
    fleet = Fleet("a", "b", "c")
    tickets = [fleet.start(name) for name in "abc"]
    for ticket in tickets:
        fleet.byte(ticket)
        fleet.wait(0.25)
    for _ in range(20):
        for name in "abc":
            fleet.health.checked(name, True, fleet.now_s)
        fleet.wait(1.0)
    assert fleet.changes == []
    assert fleet.health.state("a").suspicion


def test_the_last_healthy_worker_stays() -> None:
    fleet = Fleet("a", "b")
    fleet.serve("b")
    fleet.serve("a", End.RESET, 3)
    fleet.serve("b")
    fleet.serve("a", End.RESET)
    assert fleet.state("a") is State.EJECTED
    fleet.serve("b", End.RESET, 50)
    assert fleet.state("b") is State.HEALTHY
    assert Fleet("only").health.available("only")


def test_groups_cannot_stand_in_for_each_other() -> None:
    fleet = Fleet("prefill", "decode", groups={"prefill": "p", "decode": "d"})
    for _ in range(5):
        fleet.serve("prefill")
        fleet.serve("decode", End.RESET)
    assert fleet.state("decode") is State.HEALTHY


def eject(fleet: Fleet, name: str, end: End) -> None:
    for _ in range(3):
        fleet.serve("b")
        fleet.serve(name, end)
    fleet.serve("b")
    if fleet.state(name) is not State.EJECTED:
        fleet.serve(name, end)
    assert fleet.state(name) is State.EJECTED


def test_half_open_admits_one_probe_and_a_good_one_readmits() -> None:
    fleet = Fleet("a", "b")
    eject(fleet, "a", End.SERVER_ERROR)
    fleet.wait(SETTINGS.backoff_min_s)
    assert fleet.state("a") is State.HALF_OPEN
    assert fleet.health.available("a")
    probe = fleet.start("a")
    assert not fleet.health.available("a")
    fleet.byte(probe)
    assert fleet.state("a") is State.HEALTHY
    assert fleet.health.available("a")


def test_a_failed_probe_doubles_the_back_off_up_to_its_bound() -> None:
    fleet = Fleet("a", "b")
    eject(fleet, "a", End.SERVER_ERROR)
    waits = []
    for _ in range(8):
        waits.append(fleet.health.state("a").backoff_s)
        fleet.wait(waits[-1])
        assert fleet.state("a") is State.HALF_OPEN
        fleet.serve("a", End.SERVER_ERROR)
        assert fleet.state("a") is State.EJECTED
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_probe_that_stalls_or_leaves() -> None:
    fleet = Fleet("a", "b")
    eject(fleet, "a", End.SERVER_ERROR)
    fleet.wait(1)
    fleet.serve("a", End.CANCELLED)  # the client left: the next one probes
    assert fleet.health.available("a")
    probe = fleet.start("a")
    fleet.wait(SETTINGS.eject_after_s)
    assert fleet.state("a") is State.EJECTED
    fleet.end(probe, End.OK)  # too late to matter
    assert fleet.state("a") is State.EJECTED


def test_a_check_readmits_after_broken_connections_but_not_after_5xx_or_a_stall() -> None:
    for end, readmitted in ((End.CONNECT, True), (End.RESET, True), (End.SERVER_ERROR, False)):
        fleet = Fleet("a", "b")
        eject(fleet, "a", end)
        fleet.health.checked("a", True, fleet.now_s)
        assert fleet.state("a") is State.EJECTED, "the back-off is not over"
        fleet.wait(1)
        fleet.health.checked("a", True, fleet.now_s)
        assert (fleet.state("a") is State.HEALTHY) == readmitted
    fleet = Fleet("a", "b")
    talking = fleet.start("b")
    stuck = fleet.start("a")
    for _ in range(5):
        fleet.byte(talking)
        fleet.wait(1)
    fleet.health.checked("a", True, fleet.now_s)
    assert fleet.state("a") is not State.HEALTHY
    fleet.wait(2)
    fleet.byte(stuck)
    assert fleet.state("a") is State.HEALTHY, "the stalled answer goes on"


def test_an_unreachable_worker_is_ejected_without_a_request_and_comes_back_by_itself() -> None:
    fleet = Fleet("a", "b")
    fleet.health.checked("a", False, fleet.now_s)
    assert fleet.state("a") is State.HEALTHY, "nobody else has answered yet"
    fleet.wait(0.25)
    fleet.health.checked("b", True, fleet.now_s)
    fleet.wait(0.25)
    assert fleet.state("a") is State.EJECTED
    for _ in range(10):
        fleet.wait(1)
        fleet.health.checked("b", True, fleet.now_s)
        fleet.health.checked("a", False, fleet.now_s)
        assert fleet.state("a") is State.EJECTED
    for _ in range(2):
        fleet.wait(1)
        fleet.health.checked("a", True, fleet.now_s)
    assert fleet.state("a") is State.HEALTHY


def test_a_restart_is_a_clean_slate() -> None:
    fleet = Fleet("a", "b")
    eject(fleet, "a", End.SERVER_ERROR)
    fleet.health.restarted("a", fleet.now_s)
    assert fleet.state("a") is State.HEALTHY
    fleet.serve("a", End.SERVER_ERROR)
    assert fleet.state("a") is State.HEALTHY


def test_nobody_healthy_left_cuts_the_back_off_short() -> None:
    fleet = Fleet("a", "b")
    eject(fleet, "a", End.SERVER_ERROR)
    fleet.health.remove("b")
    fleet.tick()
    assert fleet.health.available("a")


def test_requests_belong_to_the_worker_they_were_sent_to_not_to_its_name() -> None:
    """S3's kind: removed and added again while requests run; the old ones end without touching the new one."""
    fleet = Fleet("a", "b")
    old = [fleet.start("a") for _ in range(5)]
    fleet.health.remove("a")
    fleet.health.add("a", fleet.now_s)
    fleet.serve("b")
    new = fleet.start("a")
    for ticket in old:
        fleet.end(ticket, End.RESET)
        fleet.end(ticket, End.RESET)
    fleet.serve("b")
    fleet.tick()
    assert fleet.state("a") is State.HEALTHY
    assert fleet.health.state("a").in_flight == 1
    fleet.end(new, End.OK)
    assert fleet.health.state("a").in_flight == 0
    assert fleet.changes == []


def test_unknown_workers_are_not_judged() -> None:
    health = Health()
    assert health.available("who")
    health.request_ended(health.request_started("who", 1.0), End.RESET, 2.0)
    health.checked("who", False, 3.0)
    health.progressed("who", 3.0)
    health.restarted("who", 3.0)
    health.remove("who")
    assert health.tick(4.0) == []
    with pytest.raises(KeyError):
        health.state("who")


@given(seed=st.integers(0, 2**32), n=st.integers(1, 4), bad=st.floats(0, 1))
def test_invariants(seed: int, n: int, bad: float) -> None:
    """Whatever happens: a healthy worker is left, half open admits one, and what is ejected comes to be probed."""
    rng = random.Random(seed)
    names = [f"w{i}" for i in range(n)]
    fleet = Fleet(*names)
    open_tickets: dict[str, list[Ticket]] = {name: [] for name in names}
    for _ in range(300):
        name = rng.choice(names)
        tickets = open_tickets[name]
        step = rng.random()
        if step < 0.4:
            was_free = fleet.health.available(name)
            half_open = fleet.state(name) is State.HALF_OPEN
            tickets.append(fleet.start(name, rng.choice([0.0, 5.0])))
            if half_open and was_free:
                assert not fleet.health.available(name)
        elif step < 0.7 and tickets:
            end = rng.choice([End.CONNECT, End.RESET, End.SERVER_ERROR, End.TIMEOUT]) if rng.random() < bad else End.OK
            fleet.end(tickets.pop(rng.randrange(len(tickets))), end)
        elif step < 0.8 and tickets:
            fleet.byte(rng.choice(tickets))
        elif step < 0.9:
            fleet.health.checked(name, rng.random() > bad / 2, fleet.now_s)
        else:
            fleet.wait(rng.choice([0.25, 1.0]))
        assert any(fleet.state(name) is State.HEALTHY for name in names)
        for each in names:
            assert fleet.health.state(each).in_flight == len(open_tickets[each])
            assert SETTINGS.backoff_min_s <= fleet.health.state(each).backoff_s <= SETTINGS.backoff_max_s
            if fleet.state(each) is State.EJECTED:
                assert not fleet.health.available(each)
    for name in names:
        for ticket in open_tickets[name]:
            fleet.end(ticket, End.CANCELLED)
    fleet.wait(SETTINGS.backoff_max_s + 1)
    assert all(fleet.health.available(name) for name in names)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([End.OK, End.CLIENT_ERROR, End.CANCELLED]))))
def test_without_faults_nobody_is_ever_ejected(ends: list[tuple[str, End]]) -> None:
    fleet = Fleet("a", "b")
    for name, end in ends:
        fleet.serve(name, end)
        fleet.wait(0.5)
    assert fleet.changes == []


def test_silence_that_was_announced_is_no_excuse_while_the_metrics_are_late_too() -> None:
    """A frozen engine with nothing but long, unstreamed requests: out within 4 s; one whose metrics answer stays."""
    fleet = Fleet("a", "b")
    fleet.start("a", quiet_s=60.0)
    fleet.health.progressed("a", fleet.now_s)
    for step in range(16):
        fleet.health.checked("b", True, fleet.now_s)
        fleet.health.late("a", step > 10)
        fleet.wait(0.25)
        assert step > 10 or fleet.state("a") is State.HEALTHY
    assert fleet.changes[0] == ("a", "ejected")


def test_an_engine_known_to_be_slower_is_given_the_time_it_takes() -> None:
    fleet = Fleet("a", "b")
    fleet.health.paced("a", 4.0)
    fleet.start("a", quiet_s=2.0)
    for _ in range(40):
        fleet.health.checked("b", True, fleet.now_s)
        fleet.wait(0.25)
    assert fleet.state("a") is State.HEALTHY
    for _ in range(8):
        fleet.health.checked("b", True, fleet.now_s)
        fleet.wait(0.25)
    assert fleet.changes[0] == ("a", "ejected")
    with pytest.raises(ValueError, match="below 1"):
        fleet.health.paced("a", 0.5)


def test_a_failed_look_from_before_the_last_answer_is_old_news() -> None:
    """A worker that is back is not ejected for what its last scrape, still of the outage, said."""
    fleet = Fleet("a", "b")
    began_s = fleet.now_s
    fleet.wait(1)
    fleet.byte(fleet.start("a"))
    fleet.health.checked("b", True, fleet.now_s)
    fleet.health.checked("a", False, fleet.now_s, began_s)
    fleet.wait(0.25)
    assert fleet.state("a") is State.HEALTHY
    fleet.health.checked("b", True, fleet.now_s)
    fleet.health.checked("a", False, fleet.now_s, fleet.now_s)
    assert fleet.state("a") is State.EJECTED
