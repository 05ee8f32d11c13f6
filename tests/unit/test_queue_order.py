"""In which order requests that wait leave, and how fast they are said to."""

import pytest

from scorer.queue import AGEING, Entry, FairQueue, Rate


def entry(
    *, priority: int = 0, tenant: str = "", deadline_s: float = 600.0, tokens: int = 100, since_s: float = 0.0
) -> Entry:
    return Entry(since_s=since_s, deadline_s=deadline_s, priority=priority, tenant=tenant, tokens=tokens, cost=tokens)


def drained(queue: FairQueue) -> list[Entry]:
    out = []
    while (head := queue.head()) is not None:
        assert queue.pop() is head
        out.append(head)
    return out


def test_the_lower_priority_number_goes_first() -> None:
    queue = FairQueue()
    late, soon, usual = entry(priority=5), entry(priority=-2), entry()
    for each in (late, usual, soon):
        queue.add(each)
    assert drained(queue) == [soon, usual, late]


def test_within_a_tenant_the_earliest_deadline_then_who_came_first() -> None:
    queue = FairQueue()
    first, second, urgent = entry(), entry(), entry(deadline_s=1.0)
    for each in (first, second, urgent):
        queue.add(each)
    assert drained(queue) == [urgent, first, second]


def test_a_flooding_tenant_takes_turns() -> None:
    queue = FairQueue()
    flood = [entry(tenant="flood") for _ in range(50)]
    for each in flood:
        queue.add(each)
    few = [entry(tenant="few") for _ in range(3)]
    for each in few:
        queue.add(each)
    order = drained(queue)
    assert [order.index(each) for each in few] == [1, 3, 5]


def test_turns_are_by_tokens() -> None:
    queue = FairQueue()
    for _ in range(4):
        queue.add(entry(tenant="long", tokens=10_000))
    for _ in range(40):
        queue.add(entry(tenant="short", tokens=1000))
    order = [each.tenant for each in drained(queue)]
    assert order[:12].count("long") == 2


def test_who_was_away_has_saved_no_credit_and_who_was_served_is_remembered() -> None:
    queue = FairQueue()
    queue.add(entry(tenant="a", tokens=5000))
    for _ in range(20):
        queue.add(entry(tenant="b", tokens=1000))
    assert [queue.pop().tenant for _ in range(3)] == ["a", "b", "b"]  # type: ignore[union-attr]
    queue.add(entry(tenant="a", tokens=5000))  # Back at once: what it had still counts.
    queue.add(entry(tenant="c", tokens=1000))  # New: as far as those who are served, not behind, not before them all.
    order = [each.tenant for each in drained(queue)]
    assert order.index("a") >= 3
    assert order.index("c") <= 2


def test_what_a_tenant_had_counts_though_somebody_looked_meanwhile() -> None:
    queue = FairQueue()
    for _ in range(6):
        queue.add(entry(tenant="b", tokens=60))
    queue.add(entry(tenant="a", tokens=100))
    assert [queue.pop().tenant for _ in range(3)] == ["b", "a", "b"]  # type: ignore[union-attr]
    queue.head()
    for _ in range(2):
        queue.add(entry(tenant="a", tokens=100))
    assert [each.tenant for each in drained(queue)] == ["a", "b", "b", "a", "b", "b"]


def test_a_low_priority_does_not_wait_for_ever() -> None:
    queue = FairQueue()
    low = entry(priority=9)
    queue.add(low)
    for _ in range(100):
        queue.add(entry())
    order = drained(queue)
    assert order.index(low) == AGEING - 1


def test_leaving_frees_the_place_and_its_tokens() -> None:
    queue = FairQueue()
    one, two = entry(tenant="a", tokens=10), entry(tenant="a", tokens=20)
    queue.add(one)
    queue.add(two)
    assert queue.remove(one)
    assert not queue.remove(one)
    assert (len(queue), queue.tokens, queue.of_tenant("a"), queue.oldest()) == (1, 20, (1, 20), two)
    assert drained(queue) == [two]
    assert not queue.remove(two)
    assert (len(queue), queue.tokens, queue.tenants(), queue.oldest(), queue.pop()) == (0, 0, {}, None, None)


def test_who_gives_way_is_the_last_of_the_lowest_class() -> None:
    queue = FairQueue()
    rows = [entry(priority=p) for p in (0, 3, 3, 1)]
    for each in rows:
        queue.add(each)
    assert queue.displaced_by(0) is rows[2]
    assert queue.displaced_by(3) is None
    assert FairQueue().displaced_by(0) is None


def test_how_many_are_ahead() -> None:
    queue = FairQueue()
    for _ in range(10):
        queue.add(entry(tenant="flood"))
    assert queue.ahead(0, "flood") == 10
    assert queue.ahead(0, "other") == 1
    assert queue.ahead(-1, "other") == 0


def test_tenants_without_requests_are_not_remembered_for_ever() -> None:
    queue = FairQueue()
    queue.add(entry(tenant="stays", deadline_s=1e9, tokens=1))
    for i in range(5000):
        gone = entry(tenant=f"t{i}", tokens=1_000_000)
        queue.add(gone)
        queue.remove(gone)
    assert len(queue._classes[0].tenants) < 2000
    assert len(drained(queue)) == 1


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate()
    rate.begin(100.0)
    assert rate.per_s(101.0) == 0
    for i in range(1, 41):
        rate.note(100 + i * 0.25)
    assert rate.per_s(110.0) == pytest.approx(4, rel=0.1)
    assert rate.per_s(140.0) < 0.5
    rate.begin(200.0)
    assert rate.per_s(200.0) == 0


def test_a_place_given_by_priority_leaves_the_turn_by_age() -> None:
    queue = FairQueue()
    low = Entry(since_s=0, deadline_s=600, priority=1)
    queue.add(low)
    for i in range(AGEING + 2):
        queue.add(Entry(since_s=i, deadline_s=600))
    for _ in range(AGEING - 1):
        queue.pop(by_priority=True)
    assert queue.head() is low
    given = queue.pop(by_priority=True)
    assert given is not None
    assert given.priority == 0
    assert queue.pop() is low
    assert queue.pop(by_priority=True) is not None
