"""doctor on fleets that hand prompts over: a fake prefill and a fake decode server, one thing wrong at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from bench.engine.config import Faults
from bench.engine.nixl import NixlSide
from bench.engine.server import FakeVllm
from gateway.cli import main
from gateway.config.schema import Config, PdConfig
from gateway.doctor.examine import Options
from gateway.doctor.findings import Finding, Report, Severity
from scorer.types import Role
from tests.support.doctor_world import diagnose, free_port
from tests.support.engine_pair import config

MIB = 1 << 20
LARGE = {"kv_bytes_per_token": MIB}
"""A probe of 257 tokens is 288 MiB then."""


@asynccontextmanager
async def fleet(
    decode: dict[str, Any] | None = None, decode_size: int = 32, **prefill: Any
) -> AsyncIterator[tuple[FakeVllm, FakeVllm]]:
    theirs = config(**(decode or {})).with_engine(block_size=decode_size, num_gpu_blocks=200)
    async with FakeVllm(config(**prefill)) as p, FakeVllm(theirs) as d:
        yield p, d


async def report_on(p: FakeVllm, d: FakeVllm, **changes: Any) -> Report:
    roles = {p.url: Role.PREFILL, d.url: Role.DECODE}
    return await diagnose(p.url, d.url, options=Options(**{"timeout_s": 2.0, "roles": roles, **changes}))


def of(report: Report) -> dict[str, Finding]:
    return {finding.code: finding for finding in report.findings}


def problems(report: Report) -> list[str]:
    return sorted(finding.code for finding in report.findings if finding.severity >= Severity.WARNING)


# ---- well ------------------------------------------------------------------------------------------------------------


async def test_a_pair_that_is_well() -> None:
    async with fleet() as (p, d):
        report = await report_on(p, d)
        found = of(report)
        assert report.worst == Severity.NOTE
        assert {"connector", "side-channel", "handoff", "nixl-unjudged", "events"} <= set(found)
        assert found["handoff"].evidence["bytes"] == 9 * 32 * 1024
        assert (found["handoff"].evidence["prefill"], found["handoff"].evidence["decode"]) == (p.url, d.url)
        assert p.held_blocks == 0  # Nothing stays pinned.


async def test_ranks_have_ports_of_their_own() -> None:
    async with fleet(data_parallel_size=2) as (p, d):
        report = await report_on(p, d)
        assert problems(report) == []
        assert "side-channel" in of(report)


async def test_every_pair_is_tried() -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeVllm(config())) for _ in range(4)]
        urls = [engine.url for engine in engines]
        roles = dict.fromkeys(urls[:2], Role.PREFILL) | dict.fromkeys(urls[2:], Role.DECODE)
        report = await diagnose(*urls, options=Options(timeout_s=5.0, roles=roles))
        assert problems(report) == []
        tried = [(f.evidence["prefill"], f.evidence["decode"]) for f in report.findings if f.code == "handoff"]
        assert sorted(tried) == sorted((a, b) for a in urls[:2] for b in urls[2:])


async def test_engines_that_do_not_tell_their_set_up() -> None:
    async with fleet({"dev_mode": False}, dev_mode=False) as (p, d):
        report = await report_on(p, d)
        assert problems(report) == []
        assert {"settings-unknown", "handoff", "side-channel"} <= set(of(report))


async def test_without_a_probe() -> None:
    async with fleet() as (p, d):
        report = await report_on(p, d, probe=False)
        assert problems(report) == []
        assert {"handoff-skipped", "side-channel", "connector"} <= set(of(report))
        assert [stats.prompt_tokens for stats in (*p.stats(), *d.stats())] == [0, 0]
    async with fleet({"dev_mode": False}, dev_mode=False) as (p, d):
        assert "side-channel-unknown" in of(await report_on(p, d, probe=False))


async def test_command_with_the_flags_of_the_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    async with fleet() as (p, d):
        args = ["doctor", "--prefill", p.url, "--decode", d.url, "--json"]
        assert await asyncio.to_thread(main, args) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["workers"]) == [p.url, d.url]
    (handoff,) = [each for each in document["fleet"] if each["code"] == "handoff"]
    assert set(handoff) == {"severity", "code", "rank", "sentence", "evidence", "meaning", "fix"}


# ---- pairs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"version": "0.31.0"}, "vLLM versions"),
        ({"dtype": "torch.float16"}, "model types"),
        ({"root": "/other"}, "model paths"),
        ({"attention_backend": "FLASHINFER"}, "attention backends"),
    ],
)
async def test_p9_pairs_that_refuse_each_other(changes: dict[str, Any], what: str) -> None:
    """P9: engines that compare each other's set-up when they shake hands."""
    async with fleet({"attention_backend": "FLASH_ATTN", **changes}, attention_backend="FLASH_ATTN") as (p, d):
        report = await report_on(p, d)
        assert problems(report) == ["pair-incompatible"]
        shown = of(report)["pair-incompatible"]
        assert shown.evidence["what"] == what
        assert shown.evidence["pairs"] == [[p.url, d.url]]
        assert "handoff" not in of(report)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_no_connector_on_one_side(side: str) -> None:
    none: dict[str, Any] = {"kv_connector": False}
    async with fleet(none if side == "decode" else None, **(none if side == "prefill" else {})) as (p, d):
        report = await report_on(p, d)
        assert problems(report) == ["connector-missing"]
        assert of(report)["connector-missing"].worker == (p if side == "prefill" else d).url


@pytest.mark.parametrize("name", ["NixlPushConnector", "MooncakeConnector"])
async def test_another_connector(name: str) -> None:
    async with fleet({"kv_connector_name": name}) as (p, d):
        report = await report_on(p, d)
        assert problems(report) == ["connector-unsupported"]
        assert of(report)["connector-unsupported"].evidence == {"connector": name}


async def test_block_sizes_of_a_pair() -> None:
    async with fleet(decode_size=64) as (p, d):
        report = await report_on(p, d)
        assert problems(report) == ["pair-block-sizes"]
        assert of(report)["pair-block-sizes"].evidence["prefill"] == 32
        assert "handoff" in of(report)
    async with fleet(decode_size=16) as (p, d):
        report = await report_on(p, d)
        assert problems(report) == ["pair-incompatible"]
        assert of(report)["pair-incompatible"].evidence["what"].startswith("block sizes")


async def test_tensor_parallelism_of_a_pair() -> None:
    async with fleet({"tensor_parallel_size": 2}, tensor_parallel_size=4) as (p, d):
        report = await report_on(p, d)
        assert problems(report) == []
        assert of(report)["pair-tensor-parallel"].evidence["prefill"] == 4
    async with fleet({"tensor_parallel_size": 4}, tensor_parallel_size=2) as (p, d):
        assert "pair-tensor-parallel" not in of(await report_on(p, d))


async def test_leases_other_than_the_gateways() -> None:
    async with fleet(kv_lease_s=10.0) as (p, d):
        report = await report_on(p, d)
        assert problems(report) == ["lease-short"]
        assert of(report)["lease-short"].evidence == {"lease_s": 10.0, "pd_lease_s": 30.0}
        pd = PdConfig(lease_s=10.0)
        assert problems(await report_on(p, d, config=Config(pd=pd))) == []
        report = await report_on(p, d, config=Config(pd=PdConfig(lease_s=6.0)))
        assert problems(report) == []
        assert "lease-long" in of(report)


async def test_roles_that_vllm_does_not_hold_anybody_to() -> None:
    async with fleet({"kv_role": "kv_producer", "kv_load_failure_policy": "recompute"}) as (p, d):
        report = await report_on(p, d)
        assert problems(report) == []
        assert of(report)["kv-role"].worker == d.url
        assert "load-failures-hidden" in of(report)


async def test_d8_a_decode_worker_without_events() -> None:
    """D8: what it holds is guessed, and the policy goes by it."""
    async with fleet({"events_endpoint": None}) as (p, d):
        assert problems(await report_on(p, d)) == ["decode-without-events", "events-off"]
        always = Config(pd=PdConfig(policy="always-remote"))
        assert problems(await report_on(p, d, config=always)) == ["events-off"]


async def test_only_one_kind_of_worker() -> None:
    async with FakeVllm(config()) as engine:
        for role, code in ((Role.PREFILL, "no-decode-worker"), (Role.DECODE, "no-prefill-worker")):
            report = await diagnose(engine.url, options=Options(roles={engine.url: role}))
            assert problems(report) == [code]


async def test_peers_that_cannot_fetch_from_each_other() -> None:
    async with FakeVllm(config()) as one, FakeVllm(config(version="0.31.0")) as other:
        report = await diagnose(one.url, other.url)
        assert problems(report) == []
        assert "peer-incompatible" in of(report)
        without = Options(config=Config(pd=PdConfig(peers=False)))
        assert "peer-incompatible" not in of(await diagnose(one.url, other.url, options=without))


# ---- handoffs that go wrong ------------------------------------------------------------------------------------------


async def test_a_prefill_that_names_no_blocks() -> None:
    async with fleet(faults=Faults(offer=lambda offer: None)) as (p, d):
        assert problems(await report_on(p, d)) == ["handoff-no-params"]


async def test_a_prefill_that_names_them_wrongly() -> None:
    async with fleet(faults=Faults(offer_without=("remote_request_id",))) as (p, d):
        report = await report_on(p, d)
        assert problems(report) == ["handoff-bad-params"]
        assert "remote_request_id" in of(report)["handoff-bad-params"].sentence
        assert not d.dead


async def test_a_prefill_that_is_refused() -> None:
    async with fleet(faults=Faults(leg="prefill", error_rate=1.0)) as (p, d):
        assert problems(await report_on(p, d)) == ["handoff-failed"]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_p6_a_decode_worker_that_cannot_fetch(policy: str) -> None:
    """P6: an engine id that is no longer there, as after a restart; with `recompute` the answer is 200 all the same."""
    stale = Faults(offer={"remote_engine_id": "gone"})
    async with fleet({"kv_load_failure_policy": policy}, faults=stale) as (p, d):
        report = await report_on(p, d)
        assert problems(report) == ["handoff-failed", "transfers-failed"]
        assert of(report)["transfers-failed"].evidence["failed"] >= 1


async def test_a_transfer_that_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NixlSide, "_record", lambda *_: None)
    async with fleet() as (p, d):
        report = await report_on(p, d)
        assert problems(report) == []
        assert "handoff-unseen" in of(report)


async def test_handoffs_that_take_too_long_do_not_hide_the_side_channel() -> None:
    async with fleet(faults=Faults(leg="prefill", prefill_delay_s=30.0)) as (p, d):
        report = await report_on(p, d, timeout_s=60.0, deadline_s=2.0)
        found = of(report)
        assert "within 2 s" in found["handoff-skipped"].sentence
        assert "side-channel" in found


# ---- the side channel ------------------------------------------------------------------------------------------------


async def test_side_channel_that_nobody_listens_at() -> None:
    async with fleet() as (p, d):
        p._side_channel.close()
        report = await report_on(p, d)
        assert problems(report) == ["side-channel-unreachable"]
        assert of(report)["side-channel-unreachable"].evidence == {"host": "127.0.0.1", "port": p.nixl_ports[0]}


async def test_side_channel_where_the_gateway_does_not_look() -> None:
    async with fleet(nixl_host="127.0.0.9") as (p, d):
        assert problems(await report_on(p, d)) == ["side-channel-foreign"]
        assert problems(await report_on(p, d, nixl={p.url: "127.0.0.9"})) == []
        elsewhere = f"127.0.0.9:{p.nixl_ports[0] + 1}"
        assert problems(await report_on(p, d, nixl={p.url: elsewhere})) == ["side-channel-foreign"]


async def test_side_channel_of_two_engines() -> None:
    port = free_port()
    async with fleet({"nixl_port": port}, nixl_port=port) as (p, d):
        report = await report_on(p, d, probe=False)
        assert problems(report) == ["side-channel-shared"]
        assert of(report)["side-channel-shared"].evidence["port"] == port


# ---- transfers -------------------------------------------------------------------------------------------------------


async def test_transfers_as_slow_as_tcp() -> None:
    async with fleet({"kv_pull_per_block_s": 0.05, **LARGE}, **LARGE) as (p, d):
        report = await report_on(p, d)
        assert problems(report) == ["nixl-slow"]
        shown = of(report)["nixl-slow"]
        assert shown.worker == d.url
        assert 600 < shown.evidence["mb_per_s"] < 700  # 288 MiB in 0.452 s
        assert shown.evidence["transfers"] == 1


async def test_transfers_that_are_fast() -> None:
    async with fleet(LARGE, **LARGE) as (p, d):
        report = await report_on(p, d)
        assert problems(report) == []
        assert of(report)["nixl-speed"].evidence["mb_per_s"] > 100_000


async def test_descriptors_that_are_too_small() -> None:
    many = {"kv_layers": 20_000, **LARGE}  # Blocks of one prompt lie side by side here, and merge.
    async with fleet(many, **many) as (p, d):
        report = await report_on(p, d)
        assert problems(report) == ["transfer-blocks"]
        assert of(report)["transfer-blocks"].evidence["recommended_block_size"] == 128


# ---- clocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead_s", "expected"), [(30.0, ["clock-skew-lease"]), (-30.0, ["clock-skew-lease"]), (0.0, [])]
)
async def test_clocks(ahead_s: float, expected: list[str]) -> None:
    async with fleet({"clock_ahead_s": ahead_s}) as (p, d):
        report = await report_on(p, d)
        assert problems(report) == expected
        assert ("clocks-differ" in of(report)) == bool(expected)
        if expected:
            assert of(report)["clock-skew-lease"].worker == d.url
            assert abs(of(report)["clock-skew-lease"].evidence["offset_s"] - ahead_s) < 3.0
