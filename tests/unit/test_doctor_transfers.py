"""doctor: what the engine's own counts of NIXL transfers tell, on figures that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.doctor.findings import Finding
from gateway.doctor.identity import Identity, KvShape
from gateway.doctor.transfers import judge_transfers, kv_shape
from gateway.engine.capabilities import Models
from gateway.engine.settings import Settings
from gateway.engine.transfers import NixlCounts, parse_nixl
from scorer.types import EngineStats, Role

H200_SESSION = NixlCounts(transfers=82, n_bytes=int(77.1e9), seconds=1.32, descriptors=149_292)
"""Two H200 over NVLink, mixed load: 58 GB/s, 0.5 MB a descriptor."""
H200_AGED_16 = NixlCounts(transfers=10, n_bytes=int(12.1e9), seconds=0.685, descriptors=181_620)
"""The same with blocks of 16 tokens in a used cache: ten pulls of 8k tokens."""
TCP = NixlCounts(transfers=40, n_bytes=int(40 * 1.21e9), seconds=97.0, descriptors=40 * 4608)
"""Without RDMA on one host, as reported of vLLM 0.26: 0.5 GB/s."""


def judged(counts: NixlCounts | None, block_size: int = 64, **changes: Any) -> dict[str, Finding]:
    stats = EngineStats(scraped_at_s=0.0, block_size=block_size)
    return {it.code: it for it in judge_transfers(Identity(url="http://d", stats=stats, nixl=counts, **changes))}


def test_nvlink_and_tcp() -> None:
    fast = judged(H200_SESSION)
    assert list(fast) == ["nixl-speed"]
    assert fast["nixl-speed"].evidence["mb_per_s"] == pytest.approx(58_409, abs=1)
    slow = judged(TCP)
    assert list(slow) == ["nixl-slow"]
    assert slow["nixl-slow"].evidence == {
        "mb_per_s": 499.0,
        "transfers": 40,
        "bytes": 48_400_000_000,
        "ms_per_transfer": 2425.0,
        "us_per_descriptor": 526.26,
        "bytes_per_descriptor": 262_586,
    }
    assert "nvidia_peermem" in slow["nixl-slow"].fix
    assert "UCX_TLS" in slow["nixl-slow"].fix


def test_small_blocks_are_no_slow_network() -> None:
    """19 GB/s of 343: it is the descriptors, and the fix is another one."""
    found = judged(H200_AGED_16, block_size=16)
    assert list(found) == ["nixl-speed", "transfer-blocks"]
    shown = found["transfer-blocks"].evidence
    assert shown["recommended_block_size"] == 64
    assert shown["bytes_per_descriptor"] == 66_622
    assert shown["most_mb_per_s"] == 15_316
    aged_64 = NixlCounts(transfers=10, n_bytes=int(12.1e9), seconds=0.19, descriptors=42_300)
    assert list(judged(aged_64)) == ["nixl-speed"]


@pytest.mark.parametrize(
    "counts",
    [
        NixlCounts(),
        NixlCounts(transfers=3, n_bytes=int(1.5e6), seconds=0.05, descriptors=100),  # a tiny model over TCP
        NixlCounts(transfers=1000, n_bytes=int(1e9), seconds=9.0, descriptors=2000),  # a megabyte each: the base counts
    ],
)
def test_what_cannot_be_judged(counts: NixlCounts) -> None:
    assert list(judged(counts)) == ["nixl-unjudged"]


def test_who_does_not_decode_is_judged_by_what_it_fetched_only() -> None:
    assert judged(NixlCounts(), role=Role.PREFILL) == {}
    assert list(judged(TCP, role=Role.PREFILL)) == ["nixl-slow"]
    assert judged(None) == {}


def test_failures() -> None:
    found = judged(NixlCounts(failed=2, expired=3, late=1), role=Role.PREFILL)
    assert sorted(found) == ["lease-expired", "lease-outlived", "transfers-failed"]
    assert found["lease-outlived"].evidence == {"late": 1}
    assert found["lease-expired"].evidence == {"expired": 3}


def model(folder: Path, **config: Any) -> Identity:
    folder.mkdir(exist_ok=True)
    llama = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "vocab_size": 32000,
    }
    (folder / "config.json").write_text(json.dumps({**llama, **config}), encoding="utf-8")
    return Identity(url="http://d", models=Models(("m",), (), str(folder), 4096))


def test_blocks_by_the_models_own_config(tmp_path: Path) -> None:
    me = model(tmp_path / "m")
    assert kv_shape(me) == KvShape(36, 4096.0)
    me.settings = Settings(tensor_parallel=4)
    assert kv_shape(me) == KvShape(36, 1024.0)
    me.settings = Settings(tensor_parallel=16)
    assert kv_shape(me) == KvShape(36, 512.0)  # each KV head twice
    me.kv_cache_dtype = "fp8"
    assert kv_shape(me) == KvShape(36, 256.0)
    found = judged(NixlCounts(), block_size=16, kv_shape=KvShape(36, 4096.0))
    assert found["transfer-blocks"].evidence["recommended_block_size"] == 64
    assert list(judged(NixlCounts(), block_size=64, kv_shape=KvShape(36, 4096.0))) == ["nixl-unjudged"]


def test_small_models_have_few_descriptors_of_whatever_size() -> None:
    tiny = KvShape(2, 256.0)
    assert list(judged(NixlCounts(), block_size=32, kv_shape=tiny)) == ["nixl-unjudged"]
    counts = NixlCounts(transfers=1000, n_bytes=256 << 20, seconds=2.0, descriptors=32_000)
    assert "transfer-blocks" not in judged(counts, block_size=32)


def test_models_nothing_is_known_of(tmp_path: Path) -> None:
    assert kv_shape(model(tmp_path / "mla", kv_lora_rank=512, qk_rope_head_dim=64)) is None
    assert kv_shape(Identity(url="http://d")) is None
    assert kv_shape(Identity(url="http://d", models=Models(("m",), (), "org/name", None))) is None
    broken = model(tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("{}", encoding="utf-8")
    assert kv_shape(broken) is None


def test_series_of_all_ranks_are_added_up() -> None:
    text = "".join(
        f'vllm:nixl_{name}{{engine="{rank}",model_name="m"}} {value}\n'
        for rank in (0, 1)
        for name, value in (
            ("xfer_time_seconds_sum", "1.5"),
            ("xfer_time_seconds_count", "4.0"),
            ("bytes_transferred_sum", "1e9"),
            ("num_descriptors_sum", "100.0"),
            ("num_failed_transfers_total", "1.0"),
            ("num_kv_expired_reqs_total", "2.0"),
            ("num_notifications_after_expiry_total", "nan"),
            ("bytes_transferred_bucket", "oops"),
        )
    )
    counts = parse_nixl(text)
    assert counts == NixlCounts(transfers=8, n_bytes=int(2e9), seconds=3.0, descriptors=200.0, failed=2, expired=4)
    assert counts.since(NixlCounts(transfers=3, n_bytes=int(5e9))).transfers == 5
    assert counts.since(NixlCounts(transfers=3, n_bytes=int(5e9))).n_bytes == 0
    assert parse_nixl("vllm:num_requests_running 0.0\n") is None
