"""doctor: prefill and decode workers against each other, and where they say that their side channels are."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from gateway.config.schema import PdConfig
from gateway.doctor.handoff import MOST_PAIRS, Handoffs, spread
from gateway.doctor.identity import Identity
from gateway.doctor.pairs import judge_team, team_of
from gateway.doctor.side_channel import address_of, judge_addresses
from gateway.engine.capabilities import EventSource, Models
from gateway.engine.settings import Settings
from gateway.engine.transfers import NixlCounts
from scorer.types import EngineStats, Role

TOLD = Settings(connector="NixlConnector", kv_role="kv_both", lease_s=30.0, tensor_parallel=1, side_channel_port=5600)


def worker(host: str, role: Role, **changes: Any) -> Identity:
    own = {name: changes.pop(name) for name in list(changes) if name in Identity.__struct_fields__}
    settings = msgspec.structs.replace(TOLD, **{"side_channel_host": host, **changes})
    known: dict[str, Any] = {
        "models": Models(("m",), (), "/m", 4096),
        "stats": EngineStats(scraped_at_s=0.0, block_size=16),
        "nixl": NixlCounts(),
        "version": "0.32.0",
        "settings": settings,
        **own,
    }
    return Identity(url=f"http://{host}:8000", role=role, **known)


def judged(*workers: Identity, **pd: Any) -> list[str]:
    settings = PdConfig(**pd)
    team = team_of(workers, settings)
    assert team is not None
    events = {me.url: {0: EventSource(endpoint="tcp://x:1")} for me in workers}
    found = judge_team(team, workers, settings, events)
    return sorted(finding.code for finding in found if finding.code != "connector")


P1, P2 = worker("10.0.0.1", Role.PREFILL), worker("10.0.0.2", Role.PREFILL)
D1, D2 = worker("10.0.0.3", Role.DECODE), worker("10.0.0.4", Role.DECODE)


def test_workers_that_pair() -> None:
    assert judged(P1, P2, D1, D2) == []


def test_fleets_that_hand_nothing_over() -> None:
    alone = worker("10.0.0.5", Role.BOTH)
    assert team_of([alone], PdConfig()) is None
    assert team_of([alone, worker("10.0.0.6", Role.BOTH, nixl=None, settings=None)], PdConfig()) is None
    assert team_of([alone, worker("10.0.0.6", Role.BOTH)], PdConfig(policy="local")) is None
    assert team_of([alone, worker("10.0.0.6", Role.BOTH)], PdConfig()) is not None


def test_one_finding_for_each_difference_names_everybody() -> None:
    old = worker("10.0.0.9", Role.PREFILL, version="0.31.0")
    team = team_of([P1, old, D1, D2], PdConfig())
    assert team is not None
    found = [it for it in judge_team(team, [P1, old, D1, D2], PdConfig(policy="local"), {}) if it.code != "connector"]
    (apart,) = [it for it in found if it.code == "pair-incompatible"]
    assert apart.evidence["pairs"] == [[old.url, D1.url], [old.url, D2.url]]
    assert D1.url in apart.sentence
    assert D2.url in apart.sentence
    assert P1.url not in apart.sentence


def test_workers_of_other_models_are_no_pair() -> None:
    other = worker("10.0.0.9", Role.DECODE, models=Models(("n",), (), "/n", 4096))
    assert judged(P1, D1, other) == []


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"settings": None, "nixl": None}, ["connector-missing"]),
        ({"settings": None}, ["settings-unknown"]),
        ({"connector": "MooncakeConnector"}, ["connector-unsupported"]),
        ({"lease_s": 10.0}, ["lease-short"]),
        ({"lease_s": 60.0}, ["lease-long"]),
        ({"kv_role": "kv_consumer"}, ["kv-role"]),
        ({"load_failure_policy": "recompute"}, []),
        ({"tensor_parallel": 2}, ["pair-tensor-parallel"]),
        ({"stats": EngineStats(scraped_at_s=0.0, block_size=8)}, ["pair-block-sizes"]),
        ({"stats": EngineStats(scraped_at_s=0.0, block_size=32)}, ["pair-incompatible"]),
    ],
)
def test_what_a_prefill_worker_can_have_wrong(changes: dict[str, Any], codes: list[str]) -> None:
    assert judged(worker("10.0.0.1", Role.PREFILL, **changes), D1) == codes


def test_old_engines_may_count_nothing() -> None:
    old: dict[str, Any] = {"settings": None, "nixl": None, "version": "0.19.1"}
    assert judged(worker("10.0.0.1", Role.PREFILL, **old), worker("10.0.0.3", Role.DECODE, **old)) == [
        "settings-unknown",
        "settings-unknown",
    ]
    assert worker("10.0.0.1", Role.PREFILL, **{**old, "nixl": NixlCounts()}).hands_over
    assert worker("10.0.0.1", Role.PREFILL, **{**old, "version": "nightly"}).hands_over is False


def test_leases_of_those_who_compute_for_nobody_do_not_matter() -> None:
    assert judged(P1, worker("10.0.0.3", Role.DECODE, lease_s=5.0)) == []


def test_roles_that_are_missing() -> None:
    assert judged(P1, P2) == ["no-decode-worker"]
    assert judged(D1) == ["no-prefill-worker"]
    assert judged(D1, policy="header") == []


# ---- the side channel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0", "::1", "::"])
def test_an_address_that_means_another_machine_there(host: str) -> None:
    me = worker("10.0.0.1", Role.PREFILL, side_channel_host=host)
    (found,) = judge_addresses([me], [D1])
    assert (found.code, found.worker) == ("side-channel-local", me.url)
    assert found.evidence == {"host": host, "port": 5600, "decode": [D1.url]}
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in found.fix
    neighbour = worker("10.0.0.1", Role.DECODE, side_channel_port=5700)
    neighbour.url = "http://10.0.0.1:9000"
    assert judge_addresses([me], [neighbour]) == []


def test_what_a_prefill_announced_beats_the_settings() -> None:
    me = worker("10.0.0.1", Role.PREFILL, announced=("localhost", 5601))
    (found,) = judge_addresses([me], [D1])
    assert found.evidence["port"] == 5601
    assert judge_addresses([worker("10.0.0.1", Role.PREFILL, announced=("10.0.0.1", 5601))], [D1]) == []


def test_ports_are_one_for_each_rank() -> None:
    two = worker("10.0.0.1", Role.PREFILL, engines=(0, 1))
    beside = worker("10.0.0.1", Role.PREFILL, side_channel_port=5601)
    beside.url = "http://10.0.0.1:9000"
    (found,) = judge_addresses([two, beside], [D1])
    assert (found.code, found.evidence["port"]) == ("side-channel-shared", 5601)
    apart = worker("10.0.0.1", Role.PREFILL, side_channel_port=5602)
    apart.url = "http://10.0.0.1:9000"
    assert judge_addresses([two, apart], [D1]) == []


def test_an_engine_that_does_not_say() -> None:
    for given in (None, "10.0.0.1"):
        (found,) = judge_addresses([worker("10.0.0.1", Role.PREFILL, settings=None, nixl_address=given)], [D1])
        assert found.code == "side-channel-unknown"
    told = worker("10.0.0.1", Role.PREFILL, settings=None, nixl_address="[fd00::1]:5600")
    assert address_of(told) == ("fd00::1", 5600)
    assert judge_addresses([told], [D1]) == []


# ---- which pairs are tried -------------------------------------------------------------------------------------------


def test_everybody_is_in_a_pair_that_is_tried() -> None:
    prefills = [worker(f"10.0.1.{n}", Role.PREFILL) for n in range(20)]
    decodes = [worker(f"10.0.2.{n}", Role.DECODE) for n in range(20)]
    pairs = [(p, d) for p in prefills for d in decodes]
    chosen = spread(pairs, MOST_PAIRS)
    assert len(chosen) == MOST_PAIRS
    assert {me.url for pair in chosen for me in pair} == {me.url for me in (*prefills, *decodes)}
    assert spread(pairs[:5], MOST_PAIRS) == pairs[:5]


async def test_pairs_that_are_left_out_are_named() -> None:
    handoffs = Handoffs({}, Mock())
    short = Models(("m",), (), "/m", 8)  # not even a probe fits, so nothing is sent
    p = worker("10.0.0.1", Role.PREFILL, models=short)
    pairs = [(p, worker(f"10.0.2.{n}", Role.DECODE)) for n in range(70)]
    await handoffs.run(pairs)
    (found,) = handoffs.found
    assert (found.code, found.evidence) == ("handoff-skipped", {"tried": 64, "pairs": 70})
