"""What a server is made of: how fast its steps are, how large its KV cache is, and what a gateway is told of that."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from bench.engine.timing import PRESETS, Timing
from bench.sim.transfers import Link
from scorer.cost import Constants

_MS: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Hardware:
    """One model on one server. `kv_bytes_per_token` is over all layers and heads; `kv_tokens` its usual cache."""

    timing: Timing
    layers: int
    kv_bytes_per_token: int
    kv_tokens: int
    chunk_tokens: int = 8192
    """`max_num_batched_tokens`."""
    max_num_seqs: int = 256

    def constants(self, link: Link, block_size: int) -> Constants:
        """The priors that describe it: what somebody who has measured such a server would configure. `block_size` is
        in what a block takes.
        """
        timing = self.timing
        per_block_s = max(self.kv_bytes_per_token * block_size / link.bytes_per_s, link.per_descriptor_s * self.layers)
        return msgspec.structs.replace(
            Constants(),
            front_base_s=timing.front_base_s,
            front_per_token_s=timing.front_per_token_s,
            comp_floor_s=timing.prefill_floor_s,
            comp_per_token_s=timing.prefill_per_token_s,
            comp_per_attention_s=timing.prefill_per_pair_s,
            hop_s=link.hop_s,
            pull_base_s=link.base_s,
            pull_per_block_s=per_block_s,
            first_contact_s=link.first_contact_s,
            step_base_s=timing.step_base_s,
            step_per_stream_s=timing.step_per_seq_s,
            step_per_kv_token_s=timing.step_per_kv_token_s,
            kv_bytes_per_token=self.kv_bytes_per_token,
            pull_bytes_per_s=math.inf,
            text_per_token_s=0.0,
        )


def _with_front(timing: Timing) -> Timing:
    """The front end as measured with vLLM 0.26 (it does not depend on the GPU); the tables know none."""
    return replace(timing, front_base_s=8 * _MS, front_per_token_s=2.4e-6)


def _preset(name: str) -> Timing:
    return _with_front(PRESETS[name])


_70B = {"layers": 80, "kv_bytes_per_token": 327_680}
_8B = {"layers": 32, "kv_bytes_per_token": 131_072}

# Prefill and decode constants: aiconfigurator 0.12 silicon tables for vLLM 0.24 (fitted within 5-8 % and 2-3 %), except
# `h200-7b` (measured) and those that say so. KV capacities: as published for the same model and GPUs where there is
# such a figure, else 0.9 of the memory less the weights.
HARDWARE: Final[dict[str, Hardware]] = {
    "h200-7b": Hardware(PRESETS["h200-7b"], 36, 147_456, 504_768, max_num_seqs=128),
    "h100-llama3-8b": Hardware(_preset("h100-llama3-8b"), **_8B, kv_tokens=420_000),
    "h200-llama3-8b": Hardware(_preset("h200-llama3-8b"), **_8B, kv_tokens=850_000),
    "h100x2-qwen3-32b": Hardware(_preset("h100x2-qwen3-32b"), 64, 262_144, 307_328),
    "h100x4-llama3-70b": Hardware(_preset("h100x4-llama3-70b"), **_70B, kv_tokens=461_376),
    "h100x8-llama3-70b": Hardware(
        _with_front(Timing(10.1 * _MS, 0.0226 * _MS, 1.35e-5 * _MS, 0.03612 * _MS, 5.07e-7 * _MS, 12 * _MS)),
        **_70B, kv_tokens=1_350_000,
    ),
    "h200x4-llama3-70b": Hardware(
        _with_front(Timing(12.2 * _MS, 0.0319 * _MS, 1.84e-5 * _MS, 0.05626 * _MS, 1.04e-6 * _MS, 15 * _MS)),
        **_70B, kv_tokens=1_100_000,
    ),
    "h200x2-llama3-70b-fp8": Hardware(
        _with_front(Timing(13.2 * _MS, 0.0398 * _MS, 2.60e-5 * _MS, 0.05949 * _MS, 2.22e-6 * _MS, 16 * _MS)),
        **_70B, kv_tokens=560_000,
    ),
    # Measured by Dynamo's profiler on one H200 (ai-dynamo 1.6.1 test data): prefill within 2.6 %, decode 6.5 %.
    "h200-llama3-8b-fp8": Hardware(
        _with_front(Timing(4.45 * _MS, 0.0222 * _MS, 3.16e-5 * _MS, 0.01411 * _MS, 9.84e-7 * _MS, 18.6 * _MS)),
        **_8B, kv_tokens=945_029,
    ),
    # The H100 row scaled by peak compute (312 to 989 TFLOP/s) and memory bandwidth (2.0 to 3.35 TB/s).
    "a100-llama3-8b": Hardware(
        _with_front(Timing(10.8 * _MS, 0.0173 * _MS, 7.05e-5 * _MS, 0.0540 * _MS, 2.61e-6 * _MS, 18 * _MS)),
        **_8B, kv_tokens=420_000,
    ),
    # Mooncake's published law, l (4 n^2 d + 22 n d^2) FLOP with l = 80, d = 8192, at half of 8 x 312 TFLOP/s; decoding
    # from weights and KV over 0.8 of 8 x 2 TB/s. 3 M tokens of cache in host memory, which cost nothing to load.
    "a800x8-llama3-70b": Hardware(
        _with_front(Timing(11.0 * _MS, 0.03 * _MS, 2.56e-5 * _MS, 0.0947 * _MS, 4.2e-6 * _MS, 15 * _MS)),
        **_70B, kv_tokens=3_000_000,
    ),
}  # fmt: skip


def hardware(name: str) -> Hardware:
    """The hardware called `name`; ValueError names the known ones."""
    try:
        return HARDWARE[name]
    except KeyError:
        raise ValueError(f"no hardware {name!r}; there is: {', '.join(HARDWARE)}") from None
