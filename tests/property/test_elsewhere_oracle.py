"""What is believed of other replicas, beside one who knows what they said: messages lost, repeated, out of order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from indexer import Holder
from scorer.elsewhere import Elsewhere
from scorer.fleet import Fleet
from scorer.ledger import NOTHING, Booking, InFlight, Load
from scorer.types import ChangeKind, WorkerChange

HOLDERS: list[Holder] = [("a", 0), ("b", 0), ("b", 1)]
TTL_S = 3.0


class Sender:
    """A replica as it is: it sends what has changed, and now and then all there is."""

    def __init__(self) -> None:
        self.number = 0
        self.now: dict[Holder, InFlight] = {}
        self.changed: set[Holder] = set()

    def set(self, holder: Holder, in_flight: InFlight) -> None:
        self.now[holder] = in_flight
        self.changed.add(holder)

    def news(self) -> tuple[int, dict[Holder, InFlight]]:
        self.number += 1
        out = {holder: self.now.get(holder, NOTHING) for holder in self.changed}
        self.changed = set()
        return self.number, out

    def whole(self) -> tuple[int, dict[Holder, InFlight]]:
        self.number += 1
        return self.number, {holder: it for holder, it in self.now.items() if it != NOTHING}


# Without seconds: those pass by themselves, and are looked at below.
in_flight = st.builds(
    InFlight,
    prefills=st.integers(0, 5),
    comp_s=st.just(0.0),
    head_s=st.just(0.0),
    streams=st.integers(0, 5),
    kv_tokens=st.integers(0, 10_000),
)


def fleet_of(*holders: Holder) -> Fleet:
    fleet = Fleet()
    for name in {name for name, _ in holders}:
        fleet.apply(WorkerChange(kind=ChangeKind.ADDED, worker=name, url="http://x"))
        ranks = sorted(rank for each, rank in holders if each == name)
        fleet.set_capabilities(name, models=["m"], ranks=ranks)
    return fleet


class Sharing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fleet = fleet_of(*HOLDERS)
        self.elsewhere = Elsewhere(self.fleet)
        self.senders: dict[str, Sender] = {}
        self.born = 0
        self.wire: list[tuple[str, str, int, dict[Holder, InFlight]]] = []
        self.now_s = 0.0
        self.own: list[Booking] = []

    def load(self, holder: Holder) -> Load:
        return self.fleet.workers[holder[0]].loads[holder[1]]

    @precondition(lambda self: len(self.senders) < 3)
    @rule()
    def joins(self) -> None:
        self.born += 1
        self.senders[f"w{self.born}"] = Sender()

    @precondition(lambda self: self.senders)
    @rule(data=st.data(), holder=st.sampled_from(HOLDERS), it=in_flight)
    def changes(self, data: st.DataObject, holder: Holder, it: InFlight) -> None:
        self.senders[data.draw(st.sampled_from(sorted(self.senders)))].set(holder, it)

    @precondition(lambda self: self.senders)
    @rule(data=st.data(), kind=st.sampled_from(["news", "whole"]))
    def sends(self, data: st.DataObject, kind: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.senders)))
        self.wire.append((name, kind, *getattr(self.senders[name], kind)()))

    @precondition(lambda self: self.wire)
    @rule(data=st.data(), keep=st.booleans())
    def arrives(self, data: st.DataObject, keep: bool) -> None:
        """Any of what is under way; it may arrive again."""
        at = data.draw(st.integers(0, len(self.wire) - 1))
        name, kind, number, ranks = self.wire[at] if keep else self.wire.pop(at)
        getattr(self.elsewhere, kind)(name, number, ranks, self.now_s)

    @precondition(lambda self: self.wire)
    @rule(data=st.data())
    def is_lost(self, data: st.DataObject) -> None:
        self.wire.pop(data.draw(st.integers(0, len(self.wire) - 1)))

    @precondition(lambda self: self.senders)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        del self.senders[data.draw(st.sampled_from(sorted(self.senders)))]

    @rule(holder=st.sampled_from(HOLDERS), tokens=st.integers(1, 1000))
    def books(self, holder: Holder, tokens: int) -> None:
        self.own.append(Booking(self.load(holder), 0.0, tokens, self.now_s))

    @precondition(lambda self: self.own)
    @rule(data=st.data(), streamed=st.booleans())
    def settles(self, data: st.DataObject, streamed: bool) -> None:
        booking = self.own.pop(data.draw(st.integers(0, len(self.own) - 1)))
        if streamed:
            booking.first_token(self.now_s)
        booking.settle(self.now_s)

    @rule()
    def worker_returns(self) -> None:
        """Another life under the name: its loads are new, and what is known of others there is put in again."""
        self.fleet.apply(WorkerChange(kind=ChangeKind.REMOVED, worker="a"))
        self.fleet.workers |= fleet_of(("a", 0)).workers
        self.own = [each for each in self.own if each.load.kv_tokens and each.load is not None and self._is_there(each)]
        self.elsewhere.refold(self.now_s)

    def _is_there(self, booking: Booking) -> bool:
        return any(booking.load is self.load(holder) for holder in HOLDERS)

    @rule()
    def all_is_told(self) -> None:
        """Everybody alive says all it has, and that arrives: whatever was lost before, it is right then."""
        for name, sender in self.senders.items():
            self.elsewhere.whole(name, *sender.whole(), self.now_s)
        for name in set(self.elsewhere.writers) - set(self.senders):
            self.elsewhere.gone(name, self.now_s)
        for holder in HOLDERS:
            others = [sender.now.get(holder, NOTHING) for sender in self.senders.values()]
            found = self.load(holder).others
            assert (found.prefills, found.streams, found.kv_tokens) == (
                sum(it.prefills for it in others),
                sum(it.streams for it in others),
                sum(it.kv_tokens for it in others),
            )

    @rule(waits_s=st.floats(0.1, 4.0))
    def time_passes(self, waits_s: float) -> None:
        heard = dict(self.elsewhere.writers)
        self.now_s += waits_s
        late = self.elsewhere.expire(self.now_s, TTL_S)
        assert set(late) == {name for name, heard_s in heard.items() if self.now_s - heard_s > TTL_S}

    @invariant()
    def sums_are_own_and_others(self) -> None:
        for holder in HOLDERS:
            load = self.load(holder)
            assert load.in_line == len(load.prefills) + load.others.prefills
            assert load.streams == len(load.streaming) + load.others.streams
            own = sum(each.kv_tokens for each in (*load.prefills, *load.streaming))
            assert load.kv_tokens == own + load.others.kv_tokens
            assert load.own(self.now_s).kv_tokens == own
            if not self.elsewhere.writers:
                assert load.others == NOTHING


TestSharing = Sharing.TestCase


class Line(RuleBasedStateMachine):
    """Replicas that hear of each other at once see the line that one who sends everything would see: an engine computes
    one prompt after the other, whoever sent it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.all = Load()
        self.fleets = [fleet_of(("a", 0)) for _ in range(3)]
        self.hearing = [Elsewhere(fleet) for fleet in self.fleets]
        self.number = 0
        self.bookings: list[tuple[int, Booking, Booking]] = []

    def load(self, i: int) -> Load:
        return self.fleets[i].workers["a"].loads[0]

    def tell(self, i: int) -> None:
        self.number += 1
        for j, elsewhere in enumerate(self.hearing):
            if j != i:
                elsewhere.news(f"w{i}", self.number, {("a", 0): self.load(i).own(self.now_s)}, self.now_s)

    @rule(i=st.integers(0, 2), comp_s=st.floats(0.01, 2.0), waits_s=st.floats(0.001, 1.0))
    def books(self, i: int, comp_s: float, waits_s: float) -> None:
        self.now_s += waits_s
        own, one = (Booking(load, comp_s, 10, self.now_s) for load in (self.load(i), self.all))
        self.bookings.append((i, own, one))
        self.tell(i)

    @precondition(lambda self: self.bookings)
    @rule(data=st.data(), ends=st.booleans(), waits_s=st.floats(0.001, 1.0))
    def is_computed_or_lost(self, data: st.DataObject, ends: bool, waits_s: float) -> None:
        self.now_s += waits_s
        i, *both = self.bookings.pop(data.draw(st.integers(0, len(self.bookings) - 1)))
        for booking in both:
            booking.settle(self.now_s) if ends else booking.first_token(self.now_s)
        self.tell(i)

    @rule(waits_s=st.floats(0.001, 1.0))
    def time_passes(self, waits_s: float) -> None:
        self.now_s += waits_s

    @invariant()
    def all_see_the_same_line(self) -> None:
        for i in range(3):
            load = self.load(i)
            assert (load.in_line, load.streams) == (self.all.in_line, self.all.streams)
            assert load.prefill_backlog_s(self.now_s) == pytest.approx(self.all.prefill_backlog_s(self.now_s))


TestLine = Line.TestCase


def test_a_message_heard_again_is_no_sign_of_life() -> None:
    elsewhere = Elsewhere(fleet_of(("a", 0)))
    elsewhere.whole("w", 7, {("a", 0): InFlight(1)}, 0.0)
    elsewhere.whole("w", 7, {("a", 0): InFlight(1)}, 2.0)
    elsewhere.news("w", 6, {("a", 0): InFlight(2)}, 2.5)
    assert elsewhere.expire(3.5, TTL_S) == ["w"]


def test_a_gap_is_noticed() -> None:
    elsewhere = Elsewhere(fleet_of(("a", 0)))
    assert elsewhere.news("w", 5, {}, 0.0)
    assert elsewhere.news("w", 6, {}, 0.0)
    assert not elsewhere.news("w", 9, {}, 0.0)
    assert elsewhere.missed == 1
    assert elsewhere.news("w", 11, {}, 0.0, after=9)  # 10 was a whole.
    assert not elsewhere.news("w", 14, {}, 0.0, after=12)
    assert elsewhere.missed == 2
