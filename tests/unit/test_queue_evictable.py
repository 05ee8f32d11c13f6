"""Who goes when one must: beside a naive oracle, and what a place is thought to be beside what it then is."""

from __future__ import annotations

from itertools import combinations
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.access import Record
from gateway.proxy.flight import Flight
from gateway.queue.evictable import MOST_FOR_ONE, Evictable, Evictables
from gateway.queue.shed import Shed
from scorer.fleet import Fleet
from scorer.ledger import Booking
from scorer.saturation import Saturation
from scorer.types import ChangeKind, EngineStats, WorkerChange


class Stand:
    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.ended = False


class One(Evictable):
    def __init__(self, priority: int, worker: str | None) -> None:
        record = Record(request_id="r", method="POST", path="/", status=0)
        super().__init__(priority, record, lambda: None if worker is None else cast(Flight, Stand(worker)))

    def take_back(self, shed: Shed) -> bool:
        return True


ones = st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["a", "b", "c", None])), max_size=8)


@given(
    ones,
    st.integers(-1, 3),
    st.sets(st.sampled_from("abc")),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 3)),
)
def test_the_fewest_go_and_of_these_the_lowest_and_newest(
    made: list[tuple[int, str | None]], priority: int, allowed: set[str], needed: dict[str, int]
) -> None:
    evictables = Evictables()
    there = [One(*each) for each in made]
    for each in there:
        evictables.add(each)
    chosen = evictables.chosen(priority, allowed, lambda name, n: name in needed and n >= needed[name])

    def rank(evictable: Evictable) -> tuple[int, int]:
        return -evictable.priority, -evictable.number

    fit = [each for each in there if each.worker in allowed and each.priority > priority]
    possible: list[list[Any]] = []
    for n in range(1, MOST_FOR_ONE + 1):
        for group in combinations(sorted(fit, key=rank), n):
            workers = {each.worker for each in group}
            if len(workers) == 1 and needed.get(workers.pop() or "", 9) <= n:
                possible.append(list(group))
        if possible:
            break
    best = min(possible, key=lambda group: [rank(each) for each in group], default=[])
    assert chosen == best


def test_who_was_told_to_go_is_chosen_no_more_and_counted_until_it_is_gone() -> None:
    evictables = Evictables()
    one, other = One(1, "a"), One(1, "a")
    evictables.add(one)
    evictables.add(other)
    evictables.told(other)
    assert evictables.going == {other}
    assert evictables.chosen(0, "a", lambda name, n: True) == [one]
    evictables.remove(other)
    evictables.remove(other)
    assert not evictables.going
    evictables.told(other)  # It was over at once.
    assert not evictables.going
    assert len(evictables) == 1


worker = st.tuples(st.integers(0, 12), st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), st.booleans())


@given(st.lists(worker, min_size=1, max_size=3), st.data())
def test_a_place_is_there_when_those_have_gone_without_whom_it_was_said_to_be(
    rows: list[tuple[int, int, int, int, bool]], data: st.DataObject
) -> None:
    fleet, saturation = Fleet(), Saturation(2)
    booked: dict[str, list[Booking]] = {}
    for i, (inside, running, before, since, is_flat) in enumerate(rows):
        name = f"w{i}"
        fleet.apply(WorkerChange(kind=ChangeKind.ADDED, worker=name, url="http://w"))
        fleet.set_capabilities(name, models=["m"], ranks=range(1))
        it = fleet.workers[name]
        booked[name] = [Booking(it.loads[0], 0.05, 100, 0.0) for _ in range(before)]
        for _ in range(4 if is_flat else 1):  # Enough to learn a ceiling by.
            it.stats = EngineStats(scraped_at_s=0.0, running=running, waiting=inside)
            saturation.read(it)
        booked[name] += [Booking(it.loads[0], 0.05, 100, 0.0) for _ in range(since)]
    workers = list(fleet.workers.values())
    name = data.draw(st.sampled_from(sorted(booked)))
    n = data.draw(st.integers(0, len(booked[name])))
    said = saturation.has_place(workers, 0.1, {name: n})
    for booking in booked[name][:n]:
        booking.settle(0.1)
    assert saturation.has_place(workers, 0.1) == said
