"""Objectives, rewrites, endpoints and addresses of the endpoint picker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from gateway.config import Config
from gateway.config.schema import EppConfig, PdConfig
from gateway.discovery import Source
from gateway.epp.addressed import Addressed, resolve
from gateway.epp.objectives import Objectives, read_objectives
from gateway.epp.picker import route_of
from gateway.epp.places import Places
from gateway.epp.rewrites import Rewrites, Rule, Target, read_rewrites
from gateway.epp.run import _with_sidecar
from gateway.errors import UserError
from scorer.fleet import Fleet
from scorer.types import ChangeKind, WorkerChange

RNG = random.Random(1)


def test_a_discoverys_objectives_stand_above_the_configured_ones() -> None:
    objectives = Objectives(read_objectives(["a=1", "b = -2", "x=y=3"]))
    assert [objectives.priority(name) for name in ("a", "b", "x=y", "c")] == [1, -2, 3, None]
    objectives.replace({"a": 7, "c": 0})
    assert [objectives.priority(name) for name in ("a", "b", "c")] == [7, -2, 0]
    objectives.replace({})
    assert objectives.priority("a") == 1
    assert len(objectives) == 3
    objectives.replace({"a": 7})
    objectives.configure({"b": 5})
    assert [objectives.priority(name) for name in ("a", "b", "x=y")] == [7, 5, None]


@pytest.mark.parametrize("entry", ["a", "a=", "=1", "a=x", "a=1.5", "a=2147483648"])
def test_objectives_that_cannot_be_read(entry: str) -> None:
    with pytest.raises(UserError, match=r"epp\.objectives"):
        read_objectives([entry])


def test_of_several_rules_for_a_model_the_first_counts_and_a_name_beats_any() -> None:
    rewrites = Rewrites(read_rewrites(["m=configured", "n=x"]))
    assert rewrites.target("m", RNG) == "configured"
    assert rewrites.target("other", RNG) == "other"
    rewrites.replace(
        [Rule((), (Target("any"),)), Rule(("m", "o"), (Target("found"),)), Rule(("m",), (Target("later"),))]
    )
    assert [rewrites.target(model, RNG) for model in ("m", "o", "n", "other")] == ["found", "found", "x", "any"]
    rewrites.configure(read_rewrites(["m=anew", "n=y"]))
    assert [rewrites.target(model, RNG) for model in ("m", "n", "other")] == ["found", "y", "any"]
    rewrites.replace([])
    assert [rewrites.target(model, RNG) for model in ("m", "n", "other")] == ["anew", "y", "other"]


def test_what_has_no_weight_is_not_taken() -> None:
    rewrites = Rewrites(
        [Rule(("m",), (Target("a", 0), Target("b", 0))), Rule(("n",), ()), Rule(("o",), (Target("c", -1),))]
    )
    assert [rewrites.target(model, RNG) for model in ("m", "n", "o")] == ["m", "n", "o"]
    assert not Rewrites()


@pytest.mark.parametrize("entry", ["m", "m=", "=t", "m=t*", "m=t*x", "m=t*-1", "m=*3"])
def test_rewrites_that_cannot_be_read(entry: str) -> None:
    with pytest.raises(UserError, match=r"epp\.rewrites"):
        read_rewrites([entry])


def places(*urls: str) -> Places:
    fleet = Fleet()
    for i, url in enumerate(urls):
        fleet.apply(WorkerChange(kind=ChangeKind.ADDED, worker=f"w{i}", url=url))
    return Places(fleet.workers)


def test_endpoints_are_addresses() -> None:
    here = places("http://10.0.0.1:8000", "https://[fd00::1]", "http://pod:8000", "http://[::ffff:10.0.0.2]:1")
    assert [here.endpoint(f"w{i}") for i in range(5)] == [
        "10.0.0.1:8000", "[fd00::1]:443", None, "10.0.0.2:1", None,
    ]  # fmt: skip
    assert here.at("[fd00:0::1]:443") == "w1"
    assert here.at("10.0.0.9:1") is None


@pytest.mark.parametrize(
    ("hint", "names"),
    [
        (["10.0.0.1:8080"], {"w0"}),
        (["10.0.0.1"], {"w0", "w1"}),
        (["10.0.0.1:8080", "10.0.0.2"], {"w0", "w2", "w3"}),
        (["10.0.0.1:3000"], set()),
        (["nonsense:x", "", "10.0.0.2:9090"], {"w3"}),
        (["[fd00::1]"], {"w4"}),
        (["fd00::1"], {"w4"}),
    ],
)
def test_subset_hints_as_the_reference_picker_reads_them(hint: list[str], names: set[str]) -> None:
    urls = [f"http://10.0.0.{i}:{port}" for i in (1, 2) for port in (8080, 9090)]
    assert places(*urls, "http://[fd00::1]:8080").among(hint) == names


def test_apis_below_a_prefix() -> None:
    assert route_of("/v1/chat/completions").tokens == "chat"
    assert route_of("/team/v1/completions").tokens == "completions"
    assert route_of("/nothing").tokens is None


# ---- addresses -------------------------------------------------------------------------------------------------------


class Told:
    source = Source.STATIC
    problem: str | None = None

    def __init__(self, *changes: WorkerChange) -> None:
        self._changes = changes

    async def changes(self) -> AsyncIterator[WorkerChange]:
        for change in self._changes:
            yield change


def added(name: str, url: str) -> WorkerChange:
    return WorkerChange(kind=ChangeKind.ADDED, worker=name, url=url)


class Names:
    """A resolver that knows a name from its second question on."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, host: str) -> str:
        self.asked.append(host)
        if host == "late" and self.asked.count("late") < 2:
            raise OSError("not yet")
        return {"late": "10.0.0.9", "six": "fd00::6"}[host]


async def test_names_become_addresses_and_those_without_wait() -> None:
    names = Names()
    told = Told(added("late", "http://late:8000"), added("a", "http://10.0.0.1:8000"), added("six", "https://six/"))
    discovery = Addressed(told, names, again_s=0.01)
    seen, problems = [], []
    async with asyncio.timeout(10):
        async for change in discovery.changes():
            seen.append((change.worker, change.url, change.server_name))
            problems.append(discovery.problem)
    assert seen == [
        ("a", "http://10.0.0.1:8000", None),
        ("six", "https://[fd00::6]:443/", "six"),
        ("late", "http://10.0.0.9:8000", "late"),
    ]
    assert problems[0] == "late is left out: late has no address (not yet)"
    assert problems[-1] is None


async def test_a_path_cannot_be_told_to_a_proxy() -> None:
    discovery = Addressed(Told(added("a", "http://10.0.0.1:8000/below")), again_s=0.01)
    changes = discovery.changes()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await anext(changes)
    assert "path" in (discovery.problem or "")
    await changes.aclose()  # type: ignore[attr-defined]


async def test_who_leaves_is_not_waited_for() -> None:
    gone = WorkerChange(kind=ChangeKind.REMOVED, worker="late", url="http://late:8000")
    discovery = Addressed(Told(added("late", "http://late:8000"), gone), Names(), again_s=60)
    async with asyncio.timeout(10):
        assert [change.kind async for change in discovery.changes()] == [ChangeKind.REMOVED]
    assert discovery.problem is None


async def test_what_ends_a_discovery_is_told() -> None:
    class Broken(Told):
        async def changes(self) -> AsyncIterator[WorkerChange]:
            yield added("a", "http://10.0.0.1:8000")
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        assert [change async for change in Addressed(Broken()).changes()]


async def test_a_real_resolver() -> None:
    assert await resolve("localhost") in ("127.0.0.1", "::1")
    with pytest.raises(OSError):  # noqa: PT011 - a resolver's own kinds
        await resolve("no-such-name.invalid")


# ---- sidecars --------------------------------------------------------------------------------------------------------


def test_only_what_a_sidecar_carries_out_is_planned() -> None:
    ours = _with_sidecar(Config())
    assert (ours.pd.policy, ours.pd.peers) == ("cost", True)
    llm_d = _with_sidecar(Config(epp=EppConfig(sidecar="llm-d")))
    assert (llm_d.pd.policy, llm_d.pd.peers) == ("cost", False)
    none = _with_sidecar(Config(epp=EppConfig(sidecar="none")))
    assert (none.pd.policy, none.pd.peers) == ("local", False)
    with pytest.raises(UserError, match=r"epp\.sidecar"):
        _with_sidecar(Config(epp=EppConfig(sidecar="none"), pd=PdConfig(policy="cost")))
