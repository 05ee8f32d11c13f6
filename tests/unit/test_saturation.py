"""When an engine has enough waiting inside."""

from scorer.fleet import Fleet, Worker
from scorer.ledger import Booking
from scorer.saturation import Saturation
from scorer.types import ChangeKind, EngineStats, WorkerChange

BOUND = 8


def worker(ranks: int = 1) -> Worker:
    fleet = Fleet()
    fleet.apply(WorkerChange(kind=ChangeKind.ADDED, worker="w", url="http://w"))
    fleet.set_capabilities("w", models=["m"], ranks=range(ranks))
    return fleet.workers["w"]


def told(it: Worker, saturation: Saturation, at_s: float, running: float, waiting: float, **more: float) -> None:
    it.stats = EngineStats(scraped_at_s=at_s, running=running, waiting=waiting, **more)  # type: ignore[arg-type]
    saturation.read(it)


def booked(it: Worker, n: int, rank: int = 0) -> list[Booking]:
    return [Booking(it.loads[rank], 0.05, 100, 0.0) for _ in range(n)]


def test_what_an_engine_does_not_say_holds_nobody() -> None:
    it, saturation = worker(), Saturation(BOUND)
    booked(it, 1000)
    assert saturation.is_open(it, 0.0)
    it.stats = EngineStats(scraped_at_s=0.0)
    assert saturation.is_open(it, 0.0)


def test_stale_figures_hold_nobody() -> None:
    it, saturation = worker(), Saturation(BOUND)
    told(it, saturation, 0.0, 4, 500)
    assert not saturation.is_open(it, 4.9)
    assert saturation.is_open(it, 5.1)


def test_from_the_bound_on_an_engine_is_sent_no_more() -> None:
    it, saturation = worker(), Saturation(BOUND)
    told(it, saturation, 0.0, 4, BOUND - 1)
    assert saturation.is_open(it, 0.1)
    (one,) = booked(it, 1)
    assert not saturation.is_open(it, 0.1)
    one.first_token(0.2)
    assert saturation.is_open(it, 0.2)


def test_what_leaves_between_two_readings_makes_room() -> None:
    it, saturation = worker(), Saturation(BOUND)
    bookings = booked(it, 20)
    told(it, saturation, 0.0, 8, 12)
    assert not saturation.is_open(it, 0.1)
    for booking in bookings[:5]:
        booking.settle(0.2)
    assert saturation.is_open(it, 0.2)


def test_an_engine_that_had_nothing_waiting_takes_a_burst() -> None:
    it, saturation = worker(), Saturation(BOUND)
    told(it, saturation, 0.0, 3, 0)
    booked(it, 200)
    assert saturation.is_open(it, 0.5)


def test_a_ceiling_is_learned_and_bounds_bursts() -> None:
    it, saturation = worker(), Saturation(BOUND)
    bookings = booked(it, 6)
    for at_s in (1.0, 2.0, 3.0):
        assert saturation.ceiling(it) is None
        told(it, saturation, at_s, 4, 2)
    assert saturation.ceiling(it) == 4
    for booking in bookings:
        booking.settle(3.5)
    told(it, saturation, 4.0, 0, 0)
    bookings = booked(it, 4 + BOUND - 1)
    assert saturation.is_open(it, 4.1)
    booked(it, 1)
    assert not saturation.is_open(it, 4.1)


def test_a_ceiling_is_given_up_when_the_engine_runs_more() -> None:
    it, saturation = worker(), Saturation(BOUND)
    for at_s in (1.0, 2.0, 3.0):
        told(it, saturation, at_s, 2, 1)
    booked(it, 2 + BOUND)
    assert not saturation.is_open(it, 3.1)
    told(it, saturation, 4.0, 10, 0)
    assert saturation.ceiling(it) is None
    assert saturation.is_open(it, 4.1)


def test_numbers_that_move_are_no_ceiling_and_a_new_process_has_none() -> None:
    it, saturation = worker(), Saturation(BOUND)
    for at_s, running in ((1.0, 2), (2.0, 3), (3.0, 4), (4.0, 4)):
        told(it, saturation, at_s, running, 5, process_start_s=1.0)
    assert saturation.ceiling(it) is None
    told(it, saturation, 5.0, 4, 5, process_start_s=1.0)
    assert saturation.ceiling(it) == 4
    told(it, saturation, 6.0, 0, 0, process_start_s=2.0)
    assert saturation.ceiling(it) is None


def test_who_waits_for_a_transfer_does_not_wait_for_room() -> None:
    it, saturation = worker(), Saturation(BOUND)
    told(it, saturation, 0.0, 4, 50, waiting_for_room=0.0)
    assert saturation.is_open(it, 0.1)


def test_each_rank_has_its_bound_and_a_worker_that_returns_begins_anew() -> None:
    it, saturation = worker(ranks=2), Saturation(BOUND)
    told(it, saturation, 0.0, 4, 2 * BOUND - 1)
    assert saturation.is_open(it, 0.1)
    told(it, saturation, 0.2, 4, 2 * BOUND)
    assert not saturation.is_open(it, 0.3)
    again = worker()
    assert saturation.is_open(again, 0.3)
    saturation.forget("w")
    assert saturation.ceiling(again) is None


def test_requests_of_others_count() -> None:
    it, saturation = worker(), Saturation(BOUND)
    for at_s in (1.0, 2.0, 3.0):
        told(it, saturation, at_s, 16, 1)
    told(it, saturation, 4.0, 16, 0)
    booked(it, BOUND - 1)
    assert saturation.is_open(it, 4.1)
    booked(it, 1)
    assert not saturation.is_open(it, 4.1)


def test_a_queue_is_not_poured_out_at_once() -> None:
    it, saturation = worker(), Saturation(BOUND)
    told(it, saturation, 0.0, 3, 0)
    bookings = booked(it, BOUND)
    assert not saturation.has_place([it], 0.1)
    bookings[0].first_token(0.2)
    assert saturation.has_place([it], 0.2)
    told(it, saturation, 1.0, 100, 0)
    booked(it, 99)
    assert saturation.has_place([it], 1.1)
    booked(it, 1)
    assert not saturation.has_place([it], 1.1)


def test_places_are_counted_over_all_wherever_the_planner_puts_them() -> None:
    warm, cold, saturation = worker(), worker(), Saturation(BOUND)
    cold.name = "cold"
    inside = booked(warm, BOUND)
    told(warm, saturation, 0.0, 4, BOUND)
    told(cold, saturation, 0.0, 4, 3)
    both = [warm, cold]
    booked(warm, 4)
    assert saturation.has_place(both, 0.1)
    booked(warm, 1)
    assert not saturation.has_place(both, 0.1)  # Though the cold one is as open as it was.
    inside[0].first_token(0.2)
    assert saturation.has_place(both, 0.2)


def test_what_others_have_waiting_at_one_worker_closes_no_other() -> None:
    theirs, ours, saturation = worker(), worker(), Saturation(BOUND)
    ours.name = "ours"
    told(theirs, saturation, 0.0, 4, 500)
    told(ours, saturation, 0.0, 0, 0)
    booked(theirs, BOUND - 1)
    assert saturation.has_place([theirs, ours], 0.1)
    booked(theirs, 1)
    assert not saturation.has_place([theirs, ours], 0.1)
    theirs.stats = EngineStats(scraped_at_s=-10.0)
    assert saturation.has_place([theirs, ours], 0.1)
