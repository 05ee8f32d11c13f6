"""Workers of the configuration, their names, and differences between lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.schema import Worker
from gateway.discovery import NameClashError, StaticDiscovery, worker_name
from gateway.discovery.base import by_name, differences
from scorer.types import ChangeKind, Role, WorkerChange


async def listed(workers: list[Worker]) -> list[WorkerChange]:
    return [change async for change in StaticDiscovery(workers).changes()]


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://a:8000", "a:8000"),
        ("http://a:8000/", "a:8000"),
        ("http://a", "a:80"),
        ("https://a", "a:443"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("http://gw:8000/m1", "gw:8000/m1"),
    ],
)
def test_names_come_from_urls(url: str, name: str) -> None:
    assert worker_name(Worker(url=url)) == name
    assert worker_name(Worker(url=url, name="mine")) == "mine"


async def test_every_worker_is_added_with_all_that_is_known() -> None:
    worker = Worker(
        url="http://a:8000/", role="decode", events="tcp://a:5557", replay="tcp://a:5558", labels={"rack": "1"}
    )
    changes = await listed([worker, Worker(url="http://b:8000")])
    assert [change.kind for change in changes] == [ChangeKind.ADDED] * 2
    first = changes[0]
    assert (first.worker, first.url, first.role) == ("a:8000", "http://a:8000", Role.DECODE)
    assert (first.events_endpoint, first.replay_endpoint, first.labels) == (
        "tcp://a:5557",
        "tcp://a:5558",
        {"rack": "1"},
    )
    assert changes[1].role is Role.BOTH


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(NameClashError, match="two workers are called a:8000"):
        StaticDiscovery([Worker(url="http://a:8000"), Worker(url="http://b:8000", name="a:8000")])


def kinds(before: list[Worker], after: list[Worker]) -> list[tuple[str, str]]:
    found = differences(by_name(before), by_name(after), ChangeKind.DRAINING)
    return [(change.kind.value, change.worker) for change in found]


def test_differences() -> None:
    a, b = Worker(url="http://a:1"), Worker(url="http://b:1")
    assert kinds([], [a, b]) == [("added", "a:1"), ("added", "b:1")]
    assert kinds([a, b], [b, a]) == []
    assert kinds([a, b], [b]) == [("draining", "a:1")]
    assert kinds([a], [Worker(url="http://a:1", role="prefill")]) == [("changed", "a:1")]
    moved = [Worker(url="http://a:1", name="w")], [Worker(url="http://c:1", name="w")]
    assert kinds(*moved) == [("removed", "w"), ("added", "w")]


lists = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(
        Worker, url=st.sampled_from(["http://x:1", "http://y:1"]), role=st.sampled_from(["both", "prefill", "decode"])
    ),
)


@given(lists, lists)
def test_a_follower_of_the_changes_knows_the_list(before: dict[str, Worker], after: dict[str, Worker]) -> None:
    known = {name: (worker.url, worker.role) for name, worker in before.items()}
    for change in differences(before, after, ChangeKind.REMOVED):
        assert (change.worker in known) == (change.kind is not ChangeKind.ADDED)
        if change.kind is ChangeKind.REMOVED:
            del known[change.worker]
        else:
            known[change.worker] = (change.url or "", change.role.value)
    assert known == {name: (worker.url, worker.role) for name, worker in after.items()}
