"""What keeps two engines from handing KV over, by what they tell."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.engine.settings import Settings
from gateway.handoff.compatible import Side, differences, without_connector

TOLD = Settings(
    dtype="torch.bfloat16",
    tensor_parallel=1,
    attention_backend="FLASH_ATTN",
    draft="none",
    hybrid_manager=True,
    connector="NixlConnector",
    backends="UCX",
    cross_layer_blocks=False,
)
SIDE = Side(
    name="p",
    version="0.32.0",
    model_path="/m",
    kv_cache_dtype="fp8",
    block_size=32,
    hands_over=True,
    settings=TOLD,
)


def side(**changes: Any) -> Side:
    own = {name: changes.pop(name) for name in list(changes) if name in Side.__struct_fields__}
    return msgspec.structs.replace(SIDE, settings=msgspec.structs.replace(TOLD, **changes), **own)


def whats(decode: Side) -> list[str]:
    return [difference.what for difference in differences(SIDE, decode)]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"version": "0.31.0"}, "vLLM versions"),
        ({"model_path": "/n"}, "model paths"),
        ({"kv_cache_dtype": "bfloat16"}, "KV cache types"),
        ({"dtype": "torch.float16"}, "model types"),
        ({"attention_backend": "FLASHINFER"}, "attention backends"),
        ({"draft": "eagle3 /e"}, "draft models"),
        ({"hybrid_manager": False}, "hybrid KV cache managers"),
        ({"connector": "NixlPushConnector"}, "transfer modes"),
        ({"backends": "LIBFABRIC"}, "NIXL backends"),
        ({"cross_layer_blocks": True}, "cross-layer blocks"),
        ({"block_size": 16}, "block sizes (who decodes needs a multiple)"),
    ],
)
def test_each_difference_alone(changes: dict[str, Any], what: str) -> None:
    assert whats(side(**changes)) == [what]


def test_what_is_not_told_is_no_difference() -> None:
    assert whats(SIDE) == []
    assert whats(Side(name="d")) == []
    assert whats(side(block_size=64)) == whats(side(block_size=None)) == []
    assert whats(side(tensor_parallel=8, lease_s=5.0, kv_role="kv_consumer")) == []  # Engines do not compare these.


def test_a_difference_names_both() -> None:
    (found,) = differences(SIDE, side(version="0.31.0"))
    assert str(found) == "different vLLM versions: 0.32.0 and 0.31.0"


def test_a_connector_on_one_side_only() -> None:
    assert without_connector(SIDE, side(name="d", hands_over=False)) == "d"
    assert without_connector(side(hands_over=False), side(name="d")) == "p"
    assert without_connector(SIDE, side(name="d", hands_over=None)) is None
    assert without_connector(side(hands_over=False), side(name="d", hands_over=False)) is None
