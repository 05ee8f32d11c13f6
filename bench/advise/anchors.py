"""Servers whose times are known (`bench.sim.hardware`), with the model and the GPUs they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from bench.advise.gpu import GPUS, Gpu
from bench.advise.model_config import Model, parse_model

_8B: Final = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
_70B: Final = {
    "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
    "intermediate_size": 28672, "vocab_size": 128256,
}  # fmt: skip
_32B: Final = {
    "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 25600, "vocab_size": 151936,
}  # fmt: skip
_7B: Final = {
    "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 32000,
}  # fmt: skip
_FP8: Final = {"quantization_config": {"quant_method": "fp8"}}


@dataclass(frozen=True, slots=True)
class Anchor:
    """`hardware` names its entry in `bench.sim.hardware`; `known` says where its times come from."""

    hardware: str
    model: Model
    gpu: Gpu
    tensor_parallel: int
    known: str


@cache
def anchors() -> tuple[Anchor, ...]:
    """Those of `HARDWARE` that were measured or interpolated from measured tables (not those that were scaled)."""
    measured, tables = "measured on vLLM", "fitted to aiconfigurator's tables of vLLM"
    return tuple(
        Anchor(hardware, parse_model(config), GPUS[gpu], tp, known)
        for hardware, config, gpu, tp, known in (
            ("h200-7b", _7B, "h200", 1, measured),
            ("h200-llama3-8b-fp8", _8B | _FP8, "h200", 1, measured),
            ("h100-llama3-8b", _8B, "h100", 1, tables),
            ("h200-llama3-8b", _8B, "h200", 1, tables),
            ("h100x2-qwen3-32b", _32B, "h100", 2, tables),
            ("h100x4-llama3-70b", _70B, "h100", 4, tables),
            ("h100x8-llama3-70b", _70B, "h100", 8, tables),
            ("h200x4-llama3-70b", _70B, "h200", 4, tables),
            ("h200x2-llama3-70b-fp8", _70B | _FP8, "h200", 2, tables),
        )
    )
