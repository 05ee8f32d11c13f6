"""Workers behind a DNS name."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.config.load import ConfigError, load_config
from gateway.config.schema import Worker
from gateway.discovery import DnsDiscovery
from gateway.discovery import dns as dns_module
from gateway.discovery.dns import EMPTY_ANSWERS, addresses_of
from scorer.types import Role, WorkerChange

AGAIN = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


class Zone:
    """A resolver that says what it is told to, and counts how often it was asked."""

    def __init__(self, **names: Any) -> None:
        self.names = names
        self.asked = 0

    def __call__(self, name: str) -> list[str]:
        self.asked += 1
        answer = self.names[name.partition(".")[0]]
        if isinstance(answer, Exception):
            raise answer
        return list(answer)


class Follower:
    def __init__(self, discovery: DnsDiscovery, zone: Zone) -> None:
        self.discovery = discovery
        self.zone = zone
        self.seen: list[tuple[str, str]] = []
        self.last: dict[str, WorkerChange] = {}

    async def follow(self) -> None:
        async for change in self.discovery.changes():
            self.seen.append((change.kind.value, change.worker))
            self.last[change.worker] = change

    async def looks(self, n: int = 1) -> list[tuple[str, str]]:
        """What was seen in the next `n` looks that began after now."""
        del self.seen[:]
        asked = self.zone.asked + (n + 1) * len(self.discovery._names)
        async with asyncio.timeout(5):
            while self.zone.asked < asked:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.002)
        return self.seen


@asynccontextmanager
async def following(*entries: Worker, zone: Zone) -> AsyncIterator[Follower]:
    discovery = DnsDiscovery(entries, interval_s=0.01, resolve=zone)
    follower = Follower(discovery, zone)
    task = asyncio.create_task(follower.follow())
    try:
        await follower.looks()
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


VLLM = Worker(url="http://vllm.ns.svc:8000")


async def test_each_address_is_a_worker_with_the_entrys_keys() -> None:
    entry = Worker(
        url="http://vllm.ns.svc:8000/base/",
        role="decode",
        weight=0.5,
        labels={"gpu": "l4"},
        events="tcp://*:5557",
        replay="tcp://*:5657",
    )
    async with following(entry, zone=Zone(vllm=["10.0.0.1", "10.0.0.2"])) as follower:
        assert set(follower.last) == {"10.0.0.1:8000/base", "10.0.0.2:8000/base"}
        change = follower.last["10.0.0.2:8000/base"]
        assert (change.url, change.role, change.weight) == ("http://10.0.0.2:8000/base", Role.DECODE, 0.5)
        assert (change.events_endpoint, change.replay_endpoint) == ("tcp://10.0.0.2:5557", "tcp://10.0.0.2:5657")
        assert change.labels == {"gpu": "l4"}
        assert await follower.looks(3) == []


async def test_pods_come_and_go() -> None:
    zone = Zone(vllm=["10.0.0.1", "10.0.0.2"])
    async with following(VLLM, zone=zone) as follower:
        zone.names["vllm"] = ["10.0.0.2", "10.0.0.3"]
        assert await follower.looks() == [("draining", "10.0.0.1:8000"), ("added", "10.0.0.3:8000")]
        zone.names["vllm"] = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
        assert await follower.looks() == [("added", "10.0.0.1:8000")]


async def test_a_resolver_that_fails_changes_nothing_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    zone = Zone(vllm=["10.0.0.1"])
    async with following(VLLM, zone=zone) as follower:
        assert follower.discovery.problem is None
        zone.names["vllm"] = AGAIN
        assert await follower.looks(2 * EMPTY_ANSWERS) == []
        says = "vllm.ns.svc cannot be resolved (Temporary failure in name resolution); what it had stays"
        assert follower.discovery.problem == says
        assert [record.getMessage() for record in caplog.records] == [f"DNS discovery: {says}"]
        zone.names["vllm"] = ["10.0.0.1"]
        assert await follower.looks() == []
        assert follower.discovery.problem is None


async def test_no_address_is_believed_after_a_few_answers() -> None:
    zone = Zone(vllm=["10.0.0.1"])
    async with following(VLLM, zone=zone) as follower:
        zone.names["vllm"] = []
        await follower.looks(EMPTY_ANSWERS + 2)
        assert follower.seen == [("draining", "10.0.0.1:8000")]
        assert follower.discovery.problem == "vllm.ns.svc has no address"


async def test_one_empty_answer_is_not() -> None:
    zone = Zone(vllm=["10.0.0.1"])
    answers: Callable[[str], list[str]] = zone.__call__

    def now_and_then(name: str) -> list[str]:
        found = answers(name)
        return [] if zone.asked % EMPTY_ANSWERS else found

    discovery = DnsDiscovery([VLLM], interval_s=0.001, resolve=now_and_then)
    follower = Follower(discovery, zone)
    task = asyncio.create_task(follower.follow())
    async with asyncio.timeout(5):
        while zone.asked < 20 * EMPTY_ANSWERS:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert follower.seen == [("added", "10.0.0.1:8000")]


async def test_a_name_that_was_never_there_is_told_and_harms_no_other() -> None:
    zone = Zone(gone=[], vllm=["10.0.0.1"], odd=UnicodeError("label too long"))
    entries = [Worker(url="http://gone.svc:1"), VLLM, Worker(url="http://odd.svc:1")]
    async with following(*entries, zone=zone) as follower:
        assert set(follower.last) == {"10.0.0.1:8000"}
        assert follower.discovery.problem == "gone.svc has no address; odd.svc cannot be resolved (label too long)"


async def test_a_server_behind_two_names_is_the_first_ones() -> None:
    zone = Zone(one=["10.0.0.1"], two=["10.0.0.1", "10.0.0.2"])
    entries = [Worker(url="http://one:8000", weight=2.0), Worker(url="http://two:8000")]
    async with following(*entries, zone=zone) as follower:
        assert {name: change.weight for name, change in follower.last.items()} == {
            "10.0.0.1:8000": 2.0,
            "10.0.0.2:8000": 1.0,
        }
        zone.names["one"] = ["10.0.0.9"]
        assert await follower.looks() == [("changed", "10.0.0.1:8000"), ("added", "10.0.0.9:8000")]


async def test_ipv6_addresses_are_written_as_urls_want_them() -> None:
    async with following(VLLM, zone=Zone(vllm=["fd00::1"])) as follower:
        assert follower.last["[fd00::1]:8000"].url == "http://[fd00::1]:8000"


async def test_a_resolver_that_hangs_takes_one_thread_and_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns_module, "_TIMEOUT_S", 0.02)
    let_go = threading.Event()
    zone = Zone(vllm=["10.0.0.1"])
    hanging = 0

    def resolve(name: str) -> list[str]:
        nonlocal hanging
        if name == "hangs":
            hanging += 1
            let_go.wait(10)
            return ["10.0.0.7"]
        return zone(name)

    discovery = DnsDiscovery([Worker(url="http://hangs:1"), VLLM], interval_s=0.001, resolve=resolve)
    follower = Follower(discovery, zone)
    task = asyncio.create_task(follower.follow())
    async with asyncio.timeout(5):
        while zone.asked < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        assert (hanging, set(follower.last)) == (1, {"10.0.0.1:8000"})
        assert discovery.problem == "hangs cannot be resolved (no answer)"
        let_go.set()
        while "10.0.0.7:1" not in follower.last:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert discovery.problem is None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_the_systems_resolver() -> None:
    assert addresses_of("localhost") == ["127.0.0.1"]
    assert addresses_of("no-such-name.invalid") == []


def test_of_a_server_with_both_kinds_of_address_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(*_: object, **__: object) -> list[Any]:
        v6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 0, 0, 0))
        return [v6, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert addresses_of("pod") == ["10.0.0.1"]


def test_a_name_cannot_be_given_for_all_of_them() -> None:
    with pytest.raises(ConfigError, match=r"discovery\.dns\[0\]\.name: cannot be given"):
        load_config(flags={("discovery", "dns"): "[{url: 'http://h:1', name: x}]"})
    with pytest.raises(ConfigError, match=r"discovery\.interval_s: expected a number >= 1"):
        load_config(flags={("discovery", "interval_s"): "0.1"})
    config = load_config(flags={("discovery", "dns"): "http://h:1,http://g:1"})
    assert [entry.url for entry in config.discovery.dns] == ["http://h:1", "http://g:1"]
