"""Which layers of a model keep KV for the whole context, which for a window, and which for none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_FULL: Final = frozenset({"full_attention", "attention", "global", "full", "global_attention"})
_EVERY: Final = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "llama4_text": 4, "cohere2": 4}
"""Model type -> of so many layers the last looks at the whole context, where the config does not say (by their classes
in `transformers`).
"""
_WINDOWED: Final = frozenset({"sliding_attention", "chunked_attention", "sliding", "local", "local_attention"})


@dataclass(frozen=True, slots=True)
class Layers:
    """`full` + `windowed` <= `total`; the others (Mamba, linear attention, MLP only) keep nothing per token."""

    total: int
    full: int
    windowed: int = 0
    window_tokens: int = 0


def layers_of(text: Mapping[str, Any], total: int) -> tuple[Layers, list[str]]:
    """The layers, and what is to be said of them."""
    window = text.get("sliding_window") or text.get("attention_chunk_size") or 0
    window = max(0, window) if isinstance(window, int) and text.get("use_sliding_window") is not False else 0
    full, windowed = _counts(text, total, window)
    if not window:
        full, windowed = full + windowed, 0
    notes = []
    if windowed:
        notes.append(f"{windowed} of {total} layers keep a sliding window of {window:,} tokens only")
    if full + windowed < total:
        others = total - full - windowed
        notes.append(
            f"{others} of {total} layers keep no KV per token (Mamba, linear attention or MLP): their fixed state per "
            "sequence is not counted"
        )
    return Layers(total, full, windowed, window if windowed else 0), notes


def _counts(text: Mapping[str, Any], total: int, window: int) -> tuple[int, int]:
    """Layers of full attention, layers with a window. Those beyond the `total` (for speculation) do not count."""
    types = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(types, list):
        names = [it for it in types[:total] if isinstance(it, str)]
        return sum(it in _FULL for it in names), sum(it in _WINDOWED for it in names)
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str):  # Nemotron-H: "M-M*-...", a star for each attention layer
        return pattern[:total].count("*"), 0
    linear = text.get("linear_attn_config")
    if isinstance(linear, dict) and isinstance(named := linear.get("full_attn_layers"), list):  # Kimi Linear, from 1
        return len({it for it in named if isinstance(it, int) and 1 <= it <= total}), 0
    period = text.get("attn_layer_period") or text.get("full_attention_interval")
    if isinstance(period, int) and period > 0:  # Jamba, Qwen3-Next
        offset = text.get("attn_layer_offset", period - 1)
        return sum(i % period == offset for i in range(total)), 0
    if not window:
        return total, 0
    turning = text.get("no_rope_layers")
    if isinstance(turning, list) and turning:  # Llama 4: 0 for those that look at the whole context
        full = sum(it == 0 for it in turning[:total])
        return full, total - full
    every = text.get("sliding_window_pattern") or _EVERY.get(str(text.get("model_type")))
    if isinstance(every, int) and every > 0:
        return total // every, total - total // every
    below = text.get("max_window_layers")
    if isinstance(below, int):  # Qwen2: those from there on
        full = min(max(0, below), total)
        return full, total - full
    return 0, total
