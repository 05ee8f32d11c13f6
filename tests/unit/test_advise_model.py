"""KV bytes, layers and weights of models, from their config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.advise.errors import InputError
from bench.advise.model_config import parse_model, read_model
from tests.support.model_configs import (
    DEEPSEEK_V3,
    GEMMA_3_4B,
    GEMMA_3_27B,
    GPT_OSS_120B,
    KIMI_LINEAR,
    LLAMA_4_MAVERICK,
    LLAMA_70B,
    MIXTRAL,
)


def test_a_token_of_llama_70b_takes_320_kib() -> None:
    model = parse_model(LLAMA_70B)
    assert model.kv_bytes_per_token(2) == 80 * 8 * 128 * 2 * 2 == 320 * 1024
    assert model.kv_bytes_per_token(1) == 160 * 1024
    assert 4000 * model.kv_bytes_per_token(1) == pytest.approx(0.66e9, rel=0.01)
    assert model.weights.parameters == pytest.approx(70.6e9, rel=0.005)
    assert model.weights.bytes == 2 * model.weights.parameters
    assert model.max_context_tokens == 131072


def test_latent_attention_keeps_one_vector_not_a_key_and_a_value() -> None:
    model = parse_model(DEEPSEEK_V3)
    assert model.kv_bytes_per_token(2) == 61 * (512 + 64) * 2
    assert model.copies(8) == 8
    assert model.weights.parameters == pytest.approx(671e9, rel=0.01)
    assert model.weights.active_parameters == pytest.approx(37e9, rel=0.05)
    assert model.weights.bytes == pytest.approx(671e9, rel=0.02)
    assert any("MLA" in note for note in model.notes)


def test_heads_without_groups_and_an_own_head_dim() -> None:
    plain = {key: value for key, value in LLAMA_70B.items() if key != "num_key_value_heads"}
    assert parse_model(plain).kv_bytes_per_token(2) == 8 * parse_model(LLAMA_70B).kv_bytes_per_token(2)
    assert parse_model(LLAMA_70B | {"head_dim": 64}).kv_bytes_per_token(2) == 160 * 1024
    assert parse_model(LLAMA_70B | {"head_dim": None}).head_dim == 128


@pytest.mark.parametrize(("tensor_parallel", "copies"), [(1, 1), (8, 1), (16, 2)])
def test_more_ranks_than_heads_hold_copies(tensor_parallel: int, copies: float) -> None:
    assert parse_model(LLAMA_70B).copies(tensor_parallel) == copies


def test_a_multimodal_model_counts_its_language_part() -> None:
    model = parse_model({"vision_config": {"hidden_size": 1}, "text_config": LLAMA_70B})
    assert model.kv_bytes_per_token(2) == 320 * 1024
    assert any("multimodal" in note for note in model.notes)


def test_old_names() -> None:
    model = parse_model({"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "model_type": "gpt2"})
    assert model.kv_bytes_per_token(2) == 12 * 768 * 2 * 2


def test_a_window_bounds_what_its_layers_keep() -> None:
    types = ["sliding_attention"] * 40 + ["full_attention"] * 40
    model = parse_model(LLAMA_70B | {"layer_types": types, "sliding_window": 1024})
    assert model.kv_bytes(1000, 2) == 1000 * 320 * 1024
    assert model.kv_bytes(11_264, 2) == (40 * 11_264 + 40 * 1024) * 4096
    assert any("window of 1,024" in note for note in model.notes)


@pytest.mark.parametrize(
    ("extra", "full", "windowed"),
    [
        ({}, 80, 0),
        ({"sliding_window": 4096}, 0, 80),
        ({"sliding_window": 4096, "use_sliding_window": False}, 80, 0),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 70}, 70, 10),
        ({"sliding_window": 1024, "sliding_window_pattern": 6}, 13, 67),
        ({"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 20}, 20, 0),
        ({"layer_types": ["sliding_attention"] * 80}, 80, 0),
        ({"hybrid_override_pattern": "M-M*" * 20}, 20, 0),
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, 10, 0),
        ({"full_attention_interval": 4}, 20, 0),
        ({"attention_chunk_size": 8192, "no_rope_layers": [1, 1, 0, 1] * 20}, 20, 60),
    ],
)
def test_layers_that_keep_kv(extra: dict[str, Any], full: int, windowed: int) -> None:
    model = parse_model(LLAMA_70B | extra)
    assert (model.layers.full, model.layers.windowed) == (full, windowed)
    assert bool(model.notes) == ((full, windowed) != (80, 0))


@pytest.mark.parametrize(
    ("config", "full", "windowed", "billions", "active_billions"),
    [
        (GEMMA_3_27B, 10, 52, 27.0, 25.6),
        (GEMMA_3_4B, 5, 29, 3.88, 3.2),
        (GPT_OSS_120B, 18, 18, 117, 4.5),
        (LLAMA_4_MAVERICK, 12, 36, 400, 15),
        (KIMI_LINEAR, 7, 0, 48, 2.6),
    ],
)
def test_configs_that_leave_out_what_is_usual(
    config: dict[str, Any], full: int, windowed: int, billions: float, active_billions: float
) -> None:
    """As published by their makers; active parameters without the embeddings."""
    model = parse_model(config)
    assert (model.layers.full, model.layers.windowed) == (full, windowed)
    assert model.weights.parameters == pytest.approx(billions * 1e9, rel=0.03)
    assert model.weights.active_parameters == pytest.approx(active_billions * 1e9, rel=0.05)


@pytest.mark.parametrize(
    ("how", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "awq", "bits": 4}, 4.25),
        ({"quant_method": "gptq", "bits": 8}, 8.25),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.25),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 4),
        ({"quant_method": "something-new"}, 16),
    ],
)
def test_quantised_weights(how: dict[str, Any], bits: float) -> None:
    model = parse_model(LLAMA_70B | {"quantization_config": how})
    assert model.weights.bits == bits
    assert any("quantis" in note for note in model.notes)
    assert model.kv_bytes_per_token(2) == 320 * 1024


def test_products_in_8_bits_only_where_the_activations_are_too() -> None:
    def low(how: dict[str, Any]) -> bool:
        return parse_model(LLAMA_70B | {"quantization_config": how}).weights.low_precision

    group = {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}
    assert low({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}})
    assert not low({"quant_method": "awq", "bits": 4})


def test_experts_cost_the_chosen_ones() -> None:
    model = parse_model(MIXTRAL)
    assert model.weights.parameters == pytest.approx(46.7e9, rel=0.01)
    assert model.weights.active_parameters == pytest.approx(12.6e9, rel=0.02)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "no hidden_size"),
        (LLAMA_70B | {"num_hidden_layers": "80"}, "num_hidden_layers should be a positive whole number, got '80'"),
        (LLAMA_70B | {"num_key_value_heads": 0}, "num_key_value_heads should be"),
        (LLAMA_70B | {"is_encoder_decoder": True}, "encoder-decoder"),
        (DEEPSEEK_V3 | {"qk_rope_head_dim": None}, "no qk_rope_head_dim"),
        (LLAMA_70B | {"hidden_size": 1}, r"hidden_size \(1\) is below num_attention_heads \(64\)"),
        (LLAMA_70B | {"hidden_size": 10**400}, "hidden_size should be at most"),
        (LLAMA_70B | {"num_hidden_layers": 10**9, "attn_layer_period": 8}, "num_hidden_layers should be at most"),
        (LLAMA_70B | {"vocab_size": -(10**12)}, "vocab_size should be"),
        (MIXTRAL | {"num_local_experts": -8}, "num_local_experts should be"),
        (LLAMA_70B | {"quantization_config": {"bits": -3}}, "bits of the quantisation should be"),
        (LLAMA_70B | {"quantization_config": {"bits": 10**400}}, "bits of the quantisation should be"),
        (
            LLAMA_70B | {"quantization_config": {"config_groups": {"g": {"weights": {"num_bits": float("nan")}}}}},
            "num_bits of the quantisation should be",
        ),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        parse_model(config)


@pytest.mark.parametrize("group", [None, "x", {"weights": "x"}, {"weights": {"num_bits": "x"}}])
def test_a_quantisation_nobody_understands_is_taken_as_16_bits(group: Any) -> None:
    assert parse_model(LLAMA_70B | {"quantization_config": {"config_groups": {"g": group}}}).weights.bits == 16


@pytest.mark.parametrize(
    "keys",
    [
        {"layer_types": ["full_attention"] * 90}, {"sliding_window": 64, "layer_types": [[], {}, "sliding_attention"]},
        {"sliding_window": -5}, {"sliding_window": 64, "max_window_layers": -9}, {"hybrid_override_pattern": "*" * 99},
    ],
)  # fmt: skip
def test_there_are_no_more_layers_than_there_are(keys: dict[str, Any]) -> None:
    layers = parse_model(LLAMA_70B | keys).layers
    assert 0 < layers.full + layers.windowed <= layers.total
    assert min(layers.full, layers.windowed, layers.window_tokens) >= 0


def test_a_file_or_its_directory(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(InputError, match="no such file"):
        read_model(tmp_path)
    file.write_text(json.dumps(LLAMA_70B))
    assert read_model(tmp_path) == read_model(file)
    file.write_text("[]")
    with pytest.raises(InputError, match="holds no object"):
        read_model(file)
    for text in ("{", '{"text_config":' * 100_000):
        file.write_text(text)
        with pytest.raises(InputError, match="not JSON"):
            read_model(file)
