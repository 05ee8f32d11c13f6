"""doctor on answers that no engine gives: whatever they are, there is a finding or nothing, and no exception."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.schema import PdConfig
from gateway.doctor.fetch import Answer
from gateway.doctor.identity import PATHS, Identity, KvShape, identify
from gateway.doctor.pairs import judge_team, team_of
from gateway.doctor.side_channel import judge_addresses
from gateway.doctor.transfers import judge_transfers
from gateway.engine.settings import Settings, parse_settings
from gateway.engine.transfers import NixlCounts, parse_nixl
from scorer.types import EngineStats, Role

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SECTIONS = (
    "model_config",
    "parallel_config",
    "scheduler_config",
    "attention_config",
    "speculative_config",
    "kv_transfer_config",
)
KEYS = (
    "dtype",
    "tensor_parallel_size",
    "disable_hybrid_kv_cache_manager",
    "backend",
    "method",
    "kv_connector",
    "kv_role",
    "kv_connector_extra_config",
    "kv_lease_duration",
    "backends",
    "connectors",
    "enable_cross_layers_blocks",
)
VALUES = JSON | st.sampled_from(["NixlConnector", "MultiConnector", "eagle"])
CONFIGS = st.dictionaries(
    st.sampled_from(SECTIONS),
    JSON | st.dictionaries(st.sampled_from(KEYS), VALUES | st.dictionaries(st.sampled_from(KEYS), VALUES)),
)
MODELS, VERSION = Answer(200, b'{"data":[{"id":"vllm"}]}'), Answer(200, b'{"version":"0.32.0"}')
SERIES = ("bytes_transferred_sum", "xfer_time_seconds_sum", "xfer_time_seconds_count", "num_descriptors_sum")


@given(config=JSON | CONFIGS, env=JSON)
def test_any_server_info(config: Any, env: Any) -> None:
    with suppress(msgspec.MsgspecError):
        assert isinstance(parse_settings(json.dumps({"vllm_config": config, "vllm_env": env}).encode()), Settings)


@given(st.lists(st.tuples(st.sampled_from(SERIES), st.floats() | st.text(max_size=4))), st.integers(0, 10**9))
def test_any_counts(series: list[tuple[str, Any]], block_size: int) -> None:
    counts = parse_nixl("".join(f"vllm:nixl_{name} {value}\n" for name, value in series))
    me = Identity(url="http://w", stats=EngineStats(scraped_at_s=0.0, block_size=block_size or None), nixl=counts)
    for each in judge_transfers(me):
        json.dumps(each.evidence, allow_nan=False)


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**18),
    st.floats(0, 1e9),
    st.integers(0, 10**12),
    st.none() | st.builds(KvShape, st.integers(1, 200), st.floats(1, 1e6)),
)
def test_any_transfers(n: int, n_bytes: int, seconds: float, descriptors: int, shape: KvShape | None) -> None:
    counts = NixlCounts(transfers=n, n_bytes=n_bytes, seconds=seconds, descriptors=descriptors)
    stats = EngineStats(scraped_at_s=0.0, block_size=16)
    me = Identity(url="http://w", stats=stats, nixl=counts, kv_shape=shape)
    found = judge_transfers(me)
    assert found[0].code in ("nixl-speed", "nixl-slow", "nixl-unjudged")
    for each in found:
        json.dumps(each.evidence, allow_nan=False)


@given(
    st.lists(st.sampled_from(list(Role)), max_size=4),
    st.lists(st.none() | st.text(max_size=5), min_size=4, max_size=4),
    st.lists(st.none() | st.integers(0, 128), min_size=4, max_size=4),
    st.text(max_size=12),
)
def test_any_team(roles: list[Role], told: list[str | None], sizes: list[int | None], host: str) -> None:
    workers = []
    for i, role in enumerate(roles):
        settings = Settings(connector=told[i], dtype=told[-i], side_channel_host=host, side_channel_port=sizes[i] or 1)
        answers = {
            "/v1/models": Answer(200, b'{"data":[{"id":"vllm"}]}'),
            "/version": Answer(200, b'{"version":"0.32.0"}'),
        }
        answers = {"/v1/models": MODELS, "/version": VERSION}
        me, _ = identify(f"http://w{i}", {path: answers.get(path, Answer(404, b"")) for path in PATHS}, role)
        me.stats, me.settings, me.nixl = EngineStats(scraped_at_s=0.0, block_size=sizes[i]), settings, NixlCounts()
        workers.append(me)
    team = team_of(workers, PdConfig())
    if team is not None:
        for each in [*judge_team(team, workers, PdConfig(), {}), *judge_addresses(team.sources, team.decodes)]:
            json.dumps(each.evidence, allow_nan=False)
            assert each.sentence.isprintable()
