"""How many parameters a model has and how many bytes they take, estimated from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bench.advise.errors import InputError
from bench.advise.layers import Layers

_PLAIN_MLP: Final = ("opt", "gpt2", "gptj", "gpt_neox", "gpt_bigcode", "falcon", "phi", "mpt", "bloom", "starcoder2")
"""Model types whose MLP has two matrices; all others have three (gate, up, down)."""
_CHOSEN: Final = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
_BITS: Final = {
    "fp8": 8.0, "fbgemm_fp8": 8.0, "awq": 4.25, "gptq": 4.25, "mxfp4": 4.25, "nvfp4": 4.5, "modelopt_fp4": 4.5,
}  # fmt: skip
"""Quantisation method -> bits of a weight, scales included."""
MOST: Final = 10**9
"""No number of a model's shape is larger, so that what is computed of them stays a number."""
_MOST_BITS: Final = 64


@dataclass(frozen=True, slots=True)
class Weights:
    """`parameters` with `embedding_parameters` (input and output, never quantised); `active_parameters` are those of
    the layers that one token is multiplied with. `bits` of a quantised weight; `low_precision`: its products are
    computed in 8 or 4 bits, where the GPU can.
    """

    parameters: int
    embedding_parameters: int
    active_parameters: int
    bits: float = 16.0
    low_precision: bool = False

    @property
    def bytes(self) -> float:
        return (self.parameters - self.embedding_parameters) * self.bits / 8 + self.embedding_parameters * 2


def weights_of(
    text: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    layers: Layers,
) -> tuple[Weights, list[str]]:
    """Attention, MLP or experts and embeddings; norms, biases and vision towers are left out. Raises InputError for
    numbers that cannot be.
    """
    notes: list[str] = []
    attention = _attention(text, hidden, heads, kv_heads, head_dim, value_dim)
    inner = _number(text, "intermediate_size") or 4 * hidden
    dense_inner = _number(text, "intermediate_size_mlp") or inner
    matrices = 2 if text.get("model_type") in _PLAIN_MLP else 3
    dense = matrices * hidden * dense_inner
    experts = _number(text, "n_routed_experts") or _number(text, "num_experts") or _number(text, "num_local_experts")
    sparse = moe = moe_active = 0
    if experts:
        one = 3 * hidden * (_number(text, "moe_intermediate_size") or inner)
        shared_inner = _number(text, "shared_expert_intermediate_size")
        n_shared = _number(text, "n_shared_experts") or _number(text, "num_shared_experts")
        if text.get("model_type") == "llama4_text":
            n_shared = 1
        shared = 3 * hidden * shared_inner if shared_inner else one * n_shared
        chosen = next(filter(None, (_number(text, key) for key in _CHOSEN)), 1)
        first = _number(text, "first_k_dense_replace")
        step = _number(text, "decoder_sparse_step") or _number(text, "interleave_moe_layer_step") or 1
        sparse = max(0, layers.total - first) // step
        moe, moe_active = experts * one + shared, chosen * one + shared
        notes.append(f"mixture of experts ({chosen} of {experts}): prompts cost the active ones, decode steps read all")
    body = layers.total * attention + (layers.total - sparse) * dense + sparse * moe
    active = layers.total * attention + (layers.total - sparse) * dense + sparse * moe_active
    embedding = _number(text, "vocab_size") * hidden * (1 if text.get("tie_word_embeddings") else 2)
    bits, low, said = _precision(text, config)
    notes += said
    return Weights(body + embedding, embedding, active, bits, low), notes


def _attention(text: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head_dim: int, value_dim: int) -> int:
    latent = _number(text, "kv_lora_rank")
    if not latent:
        return hidden * (heads * head_dim + kv_heads * (head_dim + value_dim)) + heads * value_dim * hidden
    queries, rope = _number(text, "q_lora_rank"), _number(text, "qk_rope_head_dim")
    q = queries * (hidden + heads * head_dim) if queries else hidden * heads * head_dim
    kv = hidden * (latent + rope) + latent * heads * (head_dim - rope + value_dim)
    return q + kv + heads * value_dim * hidden


def _precision(text: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[float, bool, list[str]]:
    how = config.get("quantization_config") or text.get("quantization_config") or config.get("compression_config")
    if not isinstance(how, dict):
        dtype = str(text.get("torch_dtype") or text.get("dtype") or "").lower()
        if "fp8" in dtype or "float8" in dtype:
            return 8.0, True, ["weights in 8 bits"]
        return 16.0, False, []
    method = str(how.get("quant_method") or how.get("quant_algo") or "").lower()
    bits, low = _BITS.get(str(how.get("quant_algo") or method).lower(), 0.0), False
    groups = how.get("config_groups")
    if isinstance(groups, dict) and groups:  # compressed-tensors
        group = _dict(next(iter(groups.values())))
        bits, low = _bits(_dict(group.get("weights")), "num_bits") or 16.0, group.get("input_activations") is not None
    elif own := _bits(how, "bits"):
        bits = own + 0.25
    elif how.get("load_in_4bit"):
        bits = 4.25
    elif how.get("load_in_8bit"):
        bits = 8.0
    low = low or bits in (8.0, 4.5)
    if not bits:
        return 16.0, False, [f"quantisation {method or 'of unknown kind'} is not known here: weights taken as 16 bits"]
    return bits, low, [f"weights quantised ({method or 'config'}): {bits:g} bits each, embeddings 16"]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _bits(how: Mapping[str, Any], key: str) -> float:
    """0: it does not say."""
    value = how.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value == 0:
        return 0.0
    if not 0 < value <= _MOST_BITS:
        raise InputError(f"{key} of the quantisation should be from 1 to {_MOST_BITS}, got {value!r:.40}")
    return float(value)


def _number(text: Mapping[str, Any], key: str) -> int:
    """0: it does not say."""
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    if not 0 <= value <= MOST:
        raise InputError(f"{key} should be a whole number from 0 to {MOST:,}")
    return value
