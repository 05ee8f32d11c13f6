"""The queue's order beside one that looks at everything each time."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from scorer.queue import AGEING, Entry, FairQueue


@dataclass
class Naive:
    """A list of who waits; of each class, how far each tenant is, for ever."""

    waiting: list[Entry] = field(default_factory=list)
    clocks: dict[int, dict[str, float]] = field(default_factory=dict)
    now: dict[int, float] = field(default_factory=dict)
    came: dict[int, dict[str, int]] = field(default_factory=dict)
    served: int = 0

    def add(self, entry: Entry) -> None:
        clocks = self.clocks.setdefault(entry.priority, {})
        if all(other.tenant != entry.tenant or other.priority != entry.priority for other in self.waiting):
            now = self.now.setdefault(entry.priority, 0.0)
            came = self.came.setdefault(entry.priority, {})
            if clocks.get(entry.tenant, -1.0) < now or entry.tenant not in came:
                came.setdefault(entry.tenant, entry.number)
            clocks[entry.tenant] = max(now, clocks.get(entry.tenant, 0.0))
        self.waiting.append(entry)

    def remove(self, entry: Entry) -> None:
        self.waiting.remove(entry)
        self._forget(entry.priority)

    def candidates(self) -> list[Entry]:
        """Who may be next: several where tenants are equally far."""
        if not self.waiting:
            return []
        priority = min(entry.priority for entry in self.waiting)
        if self.served % AGEING == AGEING - 1:
            priority = self.waiting[0].priority
        members = [entry for entry in self.waiting if entry.priority == priority]
        clocks = self.clocks[priority]
        least = min(clocks[entry.tenant] for entry in members)
        firsts = []
        for tenant in {entry.tenant for entry in members if clocks[entry.tenant] == least}:
            own = [entry for entry in members if entry.tenant == tenant]
            firsts.append(min(own, key=lambda entry: (entry.deadline_s, entry.number)))
        return firsts

    def serve(self, entry: Entry) -> None:
        clocks = self.clocks[entry.priority]
        self.now[entry.priority] = max(self.now[entry.priority], clocks[entry.tenant])
        clocks[entry.tenant] += entry.cost
        self.waiting.remove(entry)
        self.served += 1
        self._forget(entry.priority)

    def _forget(self, priority: int) -> None:
        if all(entry.priority != priority for entry in self.waiting):
            del self.clocks[priority], self.now[priority], self.came[priority]


_steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(-1, 1),
            st.sampled_from("abc"),
            st.sampled_from([1.0, 5.0, 600.0]),
            st.sampled_from([1, 7, 100, 1000]),
        ),
        st.tuples(st.just("pop")),
        st.tuples(st.just("pop")),
        st.tuples(st.just("remove"), st.integers(0, 40)),
    ),
    max_size=120,
)


@given(_steps)
def test_the_order_is_that_of_looking_at_everything(steps: list[tuple[object, ...]]) -> None:
    queue, naive = FairQueue(), Naive()
    for step in steps:
        if step[0] == "add":
            _, priority, tenant, deadline_s, tokens = step
            entry = Entry(
                since_s=0, deadline_s=deadline_s, priority=priority, tenant=tenant, tokens=tokens, cost=tokens
            )  # type: ignore[arg-type]
            queue.add(entry)
            naive.add(entry)
        elif step[0] == "pop":
            allowed = naive.candidates()
            got = queue.pop()
            assert got in allowed if allowed else got is None
            if got is not None:
                naive.serve(got)
        elif naive.waiting:
            entry = naive.waiting[step[1] % len(naive.waiting)]  # type: ignore[operator]
            assert queue.remove(entry)
            naive.remove(entry)
        assert list(queue) == naive.waiting
        assert queue.tokens == sum(entry.tokens for entry in naive.waiting)
        assert {name: n for name, (n, _) in queue.tenants().items()} == {
            name: sum(entry.tenant == name for entry in naive.waiting) for name in {e.tenant for e in naive.waiting}
        }


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 500)), min_size=2, max_size=200))
def test_two_tenants_that_both_wait_are_never_far_apart(rows: list[tuple[str, int]]) -> None:
    """What they were given differs by no more than one request of each."""
    queue = FairQueue()
    for tenant, cost in rows:
        queue.add(Entry(since_s=0, deadline_s=600, tenant=tenant, tokens=cost, cost=cost))
    given_tokens = {"a": 0.0, "b": 0.0}
    while queue.tenants().keys() == {"a", "b"}:
        entry = queue.pop()
        assert entry is not None
        given_tokens[entry.tenant] += entry.cost
        assert abs(given_tokens["a"] - given_tokens["b"]) <= 500
