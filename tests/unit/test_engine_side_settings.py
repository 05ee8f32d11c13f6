"""What `/server_info` tells, as vLLM 0.32 gives it, and changed one thing at a time."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.engine.settings import Settings, parse_settings

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "vllm_0.32_server_info.json").read_text(encoding="utf-8"))


def told(section: str, **changes: Any) -> Settings:
    info = copy.deepcopy(RECORDED["json"])
    info["vllm_config"][section] = {**(info["vllm_config"][section] or {}), **changes}
    return parse_settings(json.dumps(info).encode())


def test_recorded_as_json() -> None:
    assert parse_settings(json.dumps(RECORDED["json"]).encode()) == Settings(
        dtype="torch.float32",
        tensor_parallel=1,
        draft="none",
        hybrid_manager=True,
        connector="NixlConnector",
        kv_role="kv_producer",
        lease_s=20.0,
        load_failure_policy="fail",
        backends="UCX",
        cross_layer_blocks=False,
        side_channel_host="localhost",
        side_channel_port=5600,
    )


def test_recorded_as_text_which_names_no_connector() -> None:
    found = parse_settings(json.dumps(RECORDED["text"]).encode())
    assert found == Settings(
        dtype="torch.float32", tensor_parallel=1, draft="none", side_channel_host="localhost", side_channel_port=5600
    )
    assert found.transfer_mode is None


def test_no_connector_at_all() -> None:
    info = copy.deepcopy(RECORDED["json"])
    info["vllm_config"]["kv_transfer_config"] = None
    found = parse_settings(json.dumps(info).encode())
    assert (found.connector, found.lease_s, found.transfer_mode) == ("none", None, None)


@pytest.mark.parametrize(
    ("connector", "mode"),
    [
        ("NixlConnector", "pull"),
        ("NixlPullConnector", "pull"),
        ("NixlPushConnector", "push"),
        ("MooncakeConnector", None),
    ],
)
def test_transfer_mode(connector: str, mode: str | None) -> None:
    found = told("kv_transfer_config", kv_connector=connector)
    assert (found.connector, found.transfer_mode) == (connector, mode)


def test_lease_of_vllm_where_nobody_sets_it() -> None:
    assert told("kv_transfer_config", kv_connector_extra_config={}).lease_s == 30.0
    assert told("kv_transfer_config", kv_connector_extra_config={"kv_lease_duration": "x"}).lease_s is None


def test_nixl_within_a_multi_connector() -> None:
    nixl = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"kv_lease_duration": 7}}
    found = told(
        "kv_transfer_config",
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": [{"kv_connector": "OffloadingConnector"}, nixl]},
    )
    assert (found.connector, found.lease_s, found.kv_role) == ("NixlConnector", 7.0, "kv_producer")


def test_only_drafts_that_look_at_hidden_states_count() -> None:
    assert told("speculative_config", method="ngram", model="ngram").draft == "none"
    assert told("speculative_config", method="eagle3", model="/e").draft == "eagle3 /e"


def test_cross_layer_blocks_are_told_as_text_too() -> None:
    extra = {"enable_cross_layers_blocks": "True", "backends": ["UCX", "LIBFABRIC"]}
    found = told("kv_transfer_config", kv_connector_extra_config=extra)
    assert (found.cross_layer_blocks, found.backends) == (True, "LIBFABRIC, UCX")


def test_sections_of_other_shapes_tell_nothing() -> None:
    info = {"vllm_config": {name: [1] for name in RECORDED["json"]["vllm_config"]}, "vllm_env": {}}
    assert parse_settings(json.dumps(info).encode()) == Settings(draft="none", connector="none")
    for body in (b"", b"[]", b'{"vllm_config": 5}', b"\xff", b"{}"):
        with pytest.raises(msgspec.MsgspecError):
            parse_settings(body)
