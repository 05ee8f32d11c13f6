"""What handoffs keep account of: engine ids, stranded KV, where side channels are, which workers can pair."""

import asyncio
import socket
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.debug.handoffs import HandoffMetrics
from gateway.engine.capabilities import Capabilities
from gateway.engine.settings import Settings
from gateway.handoff import engine_ids
from gateway.handoff.engine_ids import EngineIds
from gateway.handoff.hosts import Hosts
from gateway.handoff.pairing import Pairing
from gateway.handoff.stranded import Stranded
from scorer.pairs import FAILURES, Pairs
from scorer.types import Role
from tests.support.fleets import D, P, Rig, W, fleet

# ---- engine ids ------------------------------------------------------------------------------------------------------


def test_an_engine_id_belongs_to_the_worker_that_brought_it_first() -> None:
    ids = EngineIds()
    assert ids.accept("p1", "e1", "r1", 1.0) is None
    assert ids.accept("p1", "e1", "r2", 2.0) is None
    assert ids.accept("p1", "e1_dp1", "r1", 2.0) is None, "each rank has its own"
    assert "p1" in (ids.accept("p2", "e1", "r3", 3.0, address=("other", "5600")) or "")


def test_one_engine_may_be_known_by_two_names() -> None:
    ids = EngineIds()
    here = ("10.0.0.1", "5600")
    assert ids.accept("by-address", "e1", "r1", 1.0, address=here) is None
    assert ids.accept("by-name", "e1", "r2", 2.0, address=here) is None


def test_a_worker_that_was_only_forgotten_comes_back_with_its_engine() -> None:
    ids = EngineIds()
    assert ids.accept("p1", "e1", "r1", 1.0, address=("a", "1")) is None
    ids.forget("p1")
    assert ids.accept("p1", "e1", "r2", 2.0, address=("a", "1")) is None
    assert ids.accept("p1", "e1", "r1", 3.0, address=("a", "1")) == "these params have been used"


def test_params_are_used_once() -> None:
    ids = EngineIds()
    assert ids.accept("p1", "e1", "r1", 1.0) is None
    assert ids.accept("p1", "e1", "r1", 1.0) == "these params have been used"
    assert ids.accept("p1", "e2", "r1", 1.0) is None, "a request id is an engine's own"


def test_a_restarted_workers_old_id_is_refused_for_good_from_everybody() -> None:
    ids = EngineIds()
    ids.accept("p1", "old", "r1", 1.0)
    ids.accept("p2", "other", "r1", 1.0)
    ids.retire("p1", 20.0, alive_s=5.0)
    assert "earlier process" in (ids.accept("p1", "old", "r2", 9.0) or "")
    assert "earlier process" in (ids.accept("p2", "old", "r2", 9.0) or "")
    assert ids.accept("p1", "new", "r2", 9.0) is None
    assert ids.accept("p2", "other", "r2", 9.0) is None


def test_the_new_process_may_answer_before_its_restart_is_noticed() -> None:
    """A scrape a second is slow against requests: the new id comes first, and must not be retired with the old."""
    ids = EngineIds()
    ids.accept("p1", "old", "r1", 1.0)
    ids.accept("p1", "new", "r2", 6.0)
    ids.retire("p1", 20.0, alive_s=5.0)
    assert ids.accept("p1", "new", "r3", 7.0) is None
    assert ids.accept("p1", "old", "r3", 7.0) is not None
    ids.retire("p1", 20.0, alive_s=10.0)
    assert ids.accept("p1", "new", "r4", 11.0) is not None, "with the next restart it is an old one"


def test_a_worker_that_is_gone_takes_all_its_ids_along() -> None:
    ids = EngineIds()
    ids.accept("p1", "e1", "r1", 1e9)
    ids.retire("p1", 20.0)
    assert ids.accept("p1", "e1", "r2", 2e9) is not None
    ids.retire("nobody", 20.0)


def test_an_id_the_configuration_gives_again_counts_once_the_old_leases_are_over() -> None:
    ids = EngineIds(lease_s=30.0)
    assert ids.accept("p1", "e", "r1", 1.0) is None
    ids.retire("p1", 20.0)
    assert "earlier process" in (ids.accept("p1", "e", "r2", 49.0) or "")
    assert ids.accept("p1", "e", "r3", 51.0) is None


def test_what_is_remembered_of_ids_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_ids, "_MOST_RETIRED", 10)
    monkeypatch.setattr(engine_ids, "_MOST_USED", 10)
    ids = EngineIds()
    for i in range(50):
        ids.accept("p", f"e{i}", f"r{i}", float(i))
        ids.retire("p", 20.0)
    assert len(ids._retired) == len(ids._used) == 10
    assert ids._owners == ids._ids == {}
    assert ids.accept("p", "e49", "r", 99.0) is not None


# ---- stranded KV -----------------------------------------------------------------------------------------------------


def test_stranded_tokens_count_until_released_or_the_lease_is_over() -> None:
    stranded = Stranded()
    first = stranded.add("p1", 100, until_s=10.0)
    stranded.add("p1", 20, until_s=20.0)
    stranded.add("p2", 3, until_s=30.0)
    assert stranded.tokens(0.0) == {"p1": 120, "p2": 3}
    stranded.release(first)
    stranded.release(first)
    assert stranded.tokens(0.0) == {"p1": 20, "p2": 3}
    assert stranded.tokens(20.0) == {"p2": 3}
    stranded.forget("p2")
    assert stranded.tokens(0.0) == {}
    assert stranded.total_tokens == 123


# ---- hosts -----------------------------------------------------------------------------------------------------------


async def test_a_host_is_found_under_its_name_and_its_addresses() -> None:
    hosts = Hosts()
    assert await hosts.of("127.0.0.1") == {"127.0.0.1"}
    assert {"localhost", "127.0.0.1"} <= await hosts.of("localhost")
    assert await hosts.side_channel("http://127.0.0.1:8000/base", None) == ({"127.0.0.1"}, None)
    assert await hosts.side_channel("http://somewhere.invalid:1", "10.0.0.7:5600") == ({"10.0.0.7"}, 5600)
    assert await hosts.side_channel("http://somewhere.invalid:1", "10.0.0.7") == ({"10.0.0.7"}, None)
    assert await hosts.side_channel("http://somewhere.invalid:1", "[::1]:5600") == ({"::1"}, 5600)


async def test_names_are_looked_up_once_in_a_while_and_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def look_up(host: str, *_: Any, **__: Any) -> Any:
        asked.append(host)
        if host.startswith("no"):
            raise socket.gaierror
        return [(socket.AF_INET, 1, 6, "", ("10.0.0.1", 0))]

    now_s = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up, raising=False)
    monkeypatch.setattr("gateway.handoff.hosts.time.monotonic", lambda: now_s)
    hosts = Hosts()
    for _ in range(3):
        assert await hosts.of("yes") == {"yes", "10.0.0.1"}
        assert await hosts.of("no") == {"no"}
    assert asked == ["yes", "no"]
    now_s = 6.0
    await hosts.of("yes")
    await hosts.of("no")
    assert asked == ["yes", "no", "no"], "what could not be found is looked for again sooner"
    now_s = 61.0
    await hosts.of("yes")
    assert asked[3:] == ["yes"]
    monkeypatch.setattr("gateway.handoff.hosts._MOST_KEPT", 5)
    for i in range(20):
        await hosts.of(f"host{i}")
    assert len(hosts._known) <= 6


# ---- pairing ---------------------------------------------------------------------------------------------------------

FULL: dict[str, Any] = {
    "version": "0.32.0",
    "root": "/models/m",
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "settings": Settings(dtype="torch.bfloat16"),
}


def pairing_of(*workers: W, told: dict[str, Capabilities | None]) -> tuple[Pairing, Rig, EngineIds, Stranded]:
    rig = fleet(*workers)
    ids, stranded = EngineIds(), Stranded()
    metrics = HandoffMetrics(CollectorRegistry())
    return Pairing(rig.planner.fleet, rig.planner.pairs, ids, stranded, metrics, told.get), rig, ids, stranded


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"version": "0.31.0"}, "different vLLM versions: 0.31.0 and 0.32.0"),
        ({"root": "/models/other"}, "different model paths: /models/other and /models/m"),
        ({"kv_cache_dtype": "fp8"}, "different KV cache types: fp8 and auto"),
        ({"settings": Settings(dtype="torch.float16")}, "different model types: torch.float16 and torch.bfloat16"),
        ({"block_size": 8}, None),
        ({"block_size": 32}, "different block sizes (who decodes needs a multiple): 32 and 16"),
        (dict.fromkeys(FULL), None),
    ],
)
def test_engines_that_would_refuse_each_other_are_not_paired(changed: dict[str, Any], why: str | None) -> None:
    told: dict[str, Capabilities | None] = {"p": Capabilities(**{**FULL, **changed}), "d": Capabilities(**FULL)}
    pairing, rig, _, _ = pairing_of(P("p"), D("d"), told=told)
    for name in ("p", "d"):
        pairing.compare(name)
        assert rig.planner.pairs.incompatible(("p", "d")) == why
    assert set(rig.planner.pairs.pairs) <= {("p", "d")}


def test_only_a_prefill_and_another_worker_make_a_pair() -> None:
    told: dict[str, Capabilities | None] = {
        name: Capabilities(version=version) for name, version in (("p1", "1"), ("p2", "2"), ("d", "3"), ("b", "4"))
    }
    pairing, rig, _, _ = pairing_of(P("p1"), P("p2"), D("d"), W("b"), told=told)
    for name in (*told, "unknown"):
        pairing.compare(name)
    assert set(rig.planner.pairs.pairs) == {("p1", "d"), ("p1", "b"), ("p2", "d"), ("p2", "b")}


def test_an_upgraded_worker_pairs_again() -> None:
    told: dict[str, Capabilities | None] = {"p": Capabilities(version="1"), "d": Capabilities(version="2")}
    pairing, rig, _, _ = pairing_of(P("p"), D("d"), told=told)
    pairing.compare("p")
    assert not rig.planner.pairs.allows(("p", "d"), 0.0)
    pairing.restarted("p")
    told["p"] = Capabilities(version="2")
    pairing.compare("p")
    assert rig.planner.pairs.allows(("p", "d"), 0.0)


def test_a_restart_forgets_breakers_stranded_kv_and_engine_ids() -> None:
    pairing, rig, ids, stranded = pairing_of(P("p"), P("q"), D("d"), told={})
    pairs: Pairs = rig.planner.pairs
    for names in (("p", "d"), ("q", "d")):
        for _ in range(FAILURES):
            pairs.start(names)
            pairs.broke(names, 0.0)
        ids.accept(names[0], f"{names[0]}-engine", "r1", 1.0)
        stranded.add(names[0], 5, 1e9)
    pairing.restarted("p", 5.0)
    assert pairs.allows(("p", "d"), 0.0)
    assert not pairs.allows(("q", "d"), 0.0)
    assert stranded.tokens(0.0) == {"q": 5}
    assert ids.accept("p", "p-engine", "r2", 6.0) is not None
    assert ids.accept("q", "q-engine", "r2", 6.0) is None


def test_a_worker_that_is_gone_leaves_no_series() -> None:
    rig = fleet(P("p"), D("d"))
    registry = CollectorRegistry()
    metrics = HandoffMetrics(registry)
    pairing = Pairing(rig.planner.fleet, rig.planner.pairs, EngineIds(), Stranded(), metrics, lambda _: None)
    metrics.prefilled("p", 0.1, 0.2)
    metrics.fetched("p", "d", 100, 0.1)
    metrics.handoff("p", "d", "bad_params")
    assert registry.get_sample_value("warmroute_pd_transfer_tokens_total", {"prefill": "p", "decode": "d"}) == 100
    for _ in range(2):
        pairing.gone("p")
        labelled = [s for f in registry.collect() for s in f.samples if "p" in s.labels.values()]
        assert labelled == []


def test_workers_that_decode_are_compared_where_both_could_hand_over_the_same_model() -> None:
    versions = {"a": "1", "b": "2", "c": "1", "plain": "2", "other": "2"}
    told: dict[str, Capabilities | None] = {name: Capabilities(version=version) for name, version in versions.items()}
    workers = [W("a", nixl=True), D("b", nixl=True), D("c", nixl=True), W("plain"), W("other", ("x",), nixl=True)]
    pairing, rig, _, _ = pairing_of(*workers, told=told)
    for name in told:
        pairing.compare(name)
    assert set(rig.planner.pairs.pairs) == {("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")}
    assert all(pair.incompatible for pair in rig.planner.pairs.pairs.values())


def test_a_source_hands_over_and_fetches_nothing() -> None:
    told: dict[str, Capabilities | None] = {"d": Capabilities(version="1"), "s": Capabilities(version="2")}
    pairing, rig, _, _ = pairing_of(D("d", nixl=True), W("s", role=Role.SOURCE, nixl=True), told=told)
    for name in told:
        pairing.compare(name)
    assert set(rig.planner.pairs.pairs) == {("s", "d")}
