"""The times of any model on any GPUs: a roofline law, scaled from the known server that is most like it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from bench.advise.anchors import Anchor, anchors
from bench.advise.gpu import Gpu
from bench.advise.model_config import Model
from bench.engine.timing import Timing
from bench.sim.hardware import hardware

_REDUCE_S: Final = 15e-6
"""An all-reduce of a decode step between the GPUs of a server: latency, whatever its size."""
_SAME: Final = 1.02
"""Closer than that it is the same server, and nothing is scaled."""


@dataclass(frozen=True, slots=True)
class Work:
    """What each term of `Timing` costs one GPU by its data sheet, in seconds at full use.

    A prompt token: 2 FLOP for each active parameter; a pair of tokens: attention; a step: all weights read once; a KV
    token: its keys and values read once. `reduce_token_s` and `reduce_step_s` (two all-reduces a layer) do not shrink
    with more GPUs and are taken as they are.
    """

    token_s: float
    pair_s: float
    step_s: float
    kv_token_s: float
    reduce_token_s: float
    reduce_step_s: float


def work(model: Model, gpu: Gpu, tensor_parallel: int, kv_value_bytes: int = 2, context_tokens: int = 1) -> Work:
    """`context_tokens`: of a usual sequence, for models whose layers keep a window of it."""
    tp = tensor_parallel
    flop_per_s = gpu.low_flop_per_s if model.weights.low_precision else gpu.flop_per_s
    reduces = 2 * model.layers.total if tp > 1 else 0
    sent_bytes = reduces * model.hidden * 2 * 2 * (tp - 1) / tp
    held_bytes = model.kv_bytes_per_token(kv_value_bytes, context_tokens) * model.copies(tp)
    return Work(
        token_s=2 * model.weights.active_parameters / (tp * flop_per_s),
        pair_s=max(1, model.attention_flop_per_pair) / (tp * gpu.flop_per_s),
        step_s=model.weights.bytes / (tp * gpu.bytes_per_s),
        kv_token_s=held_bytes / (tp * gpu.bytes_per_s),
        reduce_token_s=sent_bytes / gpu.peer_bytes_per_s,
        reduce_step_s=reduces * _REDUCE_S,
    )


@dataclass(frozen=True, slots=True)
class Scaled:
    """`stretch`: by how much the worst term was scaled; 1: nothing was."""

    timing: Timing
    anchor: Anchor
    stretch: float

    @property
    def is_known(self) -> bool:
        return self.stretch == 1.0

    def told(self) -> str:
        """Where the times come from, in one sentence."""
        if self.is_known:
            return f"step times: {self.anchor.known} with this model and GPU ({self.anchor.hardware})"
        return (
            f"step times: scaled by compute and memory bandwidth (up to {self.stretch:.1f}x) from "
            f"{self.anchor.hardware}, which was {self.anchor.known}; not measured on this model and GPU"
        )


def scaled(
    model: Model,
    gpu: Gpu,
    tensor_parallel: int,
    kv_value_bytes: int = 2,
    context_tokens: int = 1,
    known: Sequence[Anchor] | None = None,
) -> Scaled:
    """From the anchor (of `known`; default all) whose terms have to be scaled least, of those whose products are
    computed in the same precision: FP8 is short of twice as fast by an amount of its own.
    """
    wanted = work(model, gpu, tensor_parallel, kv_value_bytes, context_tokens)
    low = model.weights.low_precision and gpu.low_flop_per_s > gpu.flop_per_s
    alike = [it for it in (anchors() if known is None else known) if it.model.weights.low_precision == low]
    found = [(_ratios(wanted, work(it.model, it.gpu, it.tensor_parallel)), it) for it in alike]
    ratios, anchor = min(found, key=lambda it: sum(abs(math.log(ratio)) for ratio in _told(it[0], model)))
    timing = hardware(anchor.hardware).timing
    if all(1 / _SAME < ratio < _SAME for ratio in ratios) and (anchor.gpu, anchor.tensor_parallel) == (
        gpu, tensor_parallel,
    ):  # fmt: skip
        return Scaled(timing, anchor, 1.0)
    own = work(anchor.model, anchor.gpu, anchor.tensor_parallel)
    token, pair, step, kv_token = ratios
    base_s = (timing.step_base_s - own.reduce_step_s) * step + wanted.reduce_step_s
    return Scaled(
        replace(
            timing,
            step_base_s=base_s,
            step_per_seq_s=timing.step_per_seq_s * token,
            step_per_kv_token_s=timing.step_per_kv_token_s * kv_token,
            prefill_per_token_s=(timing.prefill_per_token_s - own.reduce_token_s) * token + wanted.reduce_token_s,
            prefill_per_pair_s=timing.prefill_per_pair_s * pair,
            # Launching an eager step costs what it costs; what is computed in it meanwhile does not add up with it.
            prefill_floor_s=max(base_s, timing.prefill_floor_s + base_s - timing.step_base_s),
        ),
        anchor,
        max(max(ratio, 1 / ratio) for ratio in _told(ratios, model)),
    )


def _told(ratios: tuple[float, float, float, float], model: Model) -> list[float]:
    """Those that say how far a model is from a known one: not pairs of tokens, where no layer looks at all of them."""
    token, pair, step, kv_token = ratios
    return [token, pair, step, kv_token] if model.layers.full else [token, step, kv_token]


def _ratios(wanted: Work, known: Work) -> tuple[float, float, float, float]:
    return (
        wanted.token_s / known.token_s,
        wanted.pair_s / known.pair_s,
        wanted.step_s / known.step_s,
        wanted.kv_token_s / known.kv_token_s,
    )
