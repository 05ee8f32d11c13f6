"""Several sources that name the same workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.discovery import Source
from gateway.discovery.roster import Roster
from scorer.types import ChangeKind, WorkerChange

ADDED, CHANGED, DRAINING, REMOVED = ChangeKind.ADDED, ChangeKind.CHANGED, ChangeKind.DRAINING, ChangeKind.REMOVED


def said(kind: ChangeKind, name: str = "w", url: str = "http://a:1", weight: float = 1.0) -> WorkerChange:
    return WorkerChange(kind=kind, worker=name, url=url, weight=weight)


def kinds(changes: list[WorkerChange]) -> list[ChangeKind]:
    return [change.kind for change in changes]


def test_one_source_is_passed_on_as_it_is() -> None:
    roster = Roster()
    assert kinds(roster.take(Source.FILE, said(DRAINING))) == []
    assert kinds(roster.take(Source.FILE, said(ADDED))) == [ADDED]
    assert kinds(roster.take(Source.FILE, said(CHANGED, weight=2.0))) == [CHANGED]
    assert kinds(roster.take(Source.FILE, said(DRAINING))) == [DRAINING]
    assert kinds(roster.take(Source.FILE, said(ADDED))) == [ADDED]
    assert kinds(roster.take(Source.FILE, said(REMOVED))) == [REMOVED]
    assert roster.source("w") is None


def test_the_first_of_the_sources_is_believed_and_the_next_takes_over() -> None:
    roster = Roster()
    assert kinds(roster.take(Source.DNS, said(ADDED, weight=3.0))) == [ADDED]
    (change,) = roster.take(Source.FILE, said(ADDED, weight=2.0))
    assert (change.kind, change.weight, roster.source("w")) == (CHANGED, 2.0, Source.FILE)
    assert roster.take(Source.DNS, said(CHANGED, weight=4.0)) == []
    (change,) = roster.take(Source.FILE, said(DRAINING, weight=2.0))
    assert (change.kind, change.weight, roster.source("w")) == (CHANGED, 4.0, Source.DNS)
    assert kinds(roster.take(Source.DNS, said(DRAINING))) == [DRAINING]


def test_what_the_api_added_ends_where_a_list_names_it() -> None:
    roster = Roster()
    roster.take(Source.API, said(ADDED))
    assert roster.take(Source.FILE, said(ADDED)) == []  # The same server: nothing changes for it.
    assert roster.source("w") is Source.FILE
    assert kinds(roster.take(Source.FILE, said(DRAINING))) == [DRAINING]


def test_another_url_is_another_server() -> None:
    roster = Roster()
    roster.take(Source.API, said(ADDED))
    changes = roster.take(Source.FILE, said(ADDED, url="http://b:1"))
    assert [(change.kind, change.url) for change in changes] == [(REMOVED, None), (ADDED, "http://b:1")]


def test_a_drain_outlives_what_the_sources_say() -> None:
    roster = Roster()
    roster.take(Source.FILE, said(ADDED))
    assert kinds(roster.hold("w")) == [DRAINING]
    assert roster.hold("w") == []
    assert kinds(roster.take(Source.FILE, said(CHANGED, weight=2.0)))[-1] is DRAINING
    assert kinds(roster.take(Source.FILE, said(CHANGED, url="http://b:1"))) == [REMOVED, ADDED, DRAINING]
    assert roster.is_held("w")
    assert kinds(roster.lift("w")) == [ADDED]
    assert roster.lift("w") == []
    assert roster.hold("nobody") == []


def test_a_drain_ends_with_the_worker() -> None:
    roster = Roster()
    roster.take(Source.FILE, said(ADDED))
    roster.hold("w")
    assert kinds(roster.take(Source.FILE, said(DRAINING))) == [DRAINING]
    roster.gone("w")
    assert kinds(roster.take(Source.FILE, said(ADDED))) == [ADDED]


steps = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "take", "hold", "lift"]),
        st.sampled_from(Source),
        st.sampled_from([ADDED, CHANGED, DRAINING, REMOVED]),
        st.sampled_from(["http://a:1", "http://b:1"]),
        st.sampled_from([1.0, 2.0]),
    ),
    max_size=30,
)


@given(steps)
def test_the_fleet_knows_what_the_first_source_says(
    steps: list[tuple[str, Source, ChangeKind, str, float]],
) -> None:
    """Beside a naive oracle: claims by source, and what a follower of the changes makes of them."""
    roster = Roster()
    claims: dict[Source, tuple[str, float]] = {}
    held = False
    known: tuple[str | None, float] | None = None
    draining = False
    for what, source, kind, url, weight in steps:
        if what == "take":
            changes = roster.take(source, said(kind, url=url, weight=weight))
            if kind in (ADDED, CHANGED):
                claims[source] = url, weight
                if source is not Source.API:
                    claims.pop(Source.API, None)
            else:
                claims.pop(source, None)
        else:
            changes = roster.hold("w") if what == "hold" else roster.lift("w")
            held = what == "hold" and bool(claims)
        held = held and bool(claims)
        for change in changes:
            if change.kind is REMOVED:
                known, draining = None, False
                continue
            assert (change.kind is ADDED) or known is not None
            draining = change.kind is DRAINING
            if not draining:
                known = change.url, change.weight
        if claims:
            assert known == claims[min(claims, key=list(Source).index)]
            assert draining == held
            assert roster.is_held("w") == held
        else:
            assert known is None or draining
