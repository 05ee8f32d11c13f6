"""What a model's `config.json` (Hugging Face) says of its KV cache, its weights and its arithmetic."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.advise.errors import InputError
from bench.advise.layers import Layers, layers_of
from bench.advise.weights import MOST, Weights, weights_of

_NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_ALIASES: Final = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "model_max_length"),
}
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
        "max_position_embeddings": 131_072, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Model type -> what its config leaves out when it is as usual (`Gemma3TextConfig` of `transformers`)."""
_MOST_LAYERS: Final = 10_000
KV_DTYPES: Final = {
    "auto": 2, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
"""vLLM's `--kv-cache-dtype` -> bytes of a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`latent_values`: multi-head latent attention keeps one vector of so many values per token and layer (not a key
    and a value for each head); 0: it has ordinary keys and values. `notes` are what was assumed.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    latent_values: int
    layers: Layers
    weights: Weights
    max_context_tokens: int | None
    notes: tuple[str, ...] = ()

    @property
    def kv_values_per_layer(self) -> int:
        """Values per token: a key and a value for each KV head, or the latent."""
        return self.latent_values or self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def attention_flop_per_pair(self) -> int:
        """FLOP for each (query, key) pair of tokens, over the layers that look at the whole context."""
        return 2 * self.heads * (self.head_dim + self.value_dim) * self.layers.full

    def kv_bytes(self, tokens: int, value_bytes: int) -> int:
        """KV cache of one sequence; layers with a sliding window keep the window only."""
        grown = self.layers.full * tokens + self.layers.windowed * min(tokens, self.layers.window_tokens)
        return grown * self.kv_values_per_layer * value_bytes

    def kv_bytes_per_token(self, value_bytes: int, context_tokens: int = 1) -> float:
        """On average over a sequence of `context_tokens`."""
        return self.kv_bytes(context_tokens, value_bytes) / context_tokens

    def copies(self, tensor_parallel: int) -> float:
        """How many times the ranks of one server hold each token's KV: heads are divided, single ones repeated."""
        return float(tensor_parallel) if self.latent_values else max(1.0, tensor_parallel / self.kv_heads)


def read_model(path: Path) -> Model:
    """From a `config.json` or the directory that holds one. Raises InputError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file}: no such file; give the model's config.json (Hugging Face format)") from None
    except (ValueError, RecursionError) as exc:  # Not UTF-8, not JSON, numbers too long to be any.
        raise InputError(f"{file}: not JSON ({exc})") from None
    if not isinstance(config, dict):
        raise InputError(f"{file}: not a model's config.json: it holds no object")
    try:
        return parse_model(config, name=str(config.get("_name_or_path") or file.resolve().parent.name))
    except InputError as exc:
        raise InputError(f"{file}: {exc}") from None


def parse_model(config: Mapping[str, Any], *, name: str = "model") -> Model:
    """Raises InputError that names the missing or wrong key."""
    if config.get("is_encoder_decoder"):
        raise InputError("encoder-decoder models are not supported")
    text, notes = _text(config)
    hidden, heads = _count(text, "hidden_size"), _count(text, "num_attention_heads")
    n_layers = _count(text, "num_hidden_layers", most=_MOST_LAYERS)
    kv_heads = _count(text, "num_key_value_heads", 1 if text.get("multi_query") else heads)
    head_dim = _count(text, "head_dim", hidden // heads)
    if not head_dim:
        raise InputError(f"hidden_size ({hidden}) is below num_attention_heads ({heads})")
    value_dim, latent = _count(text, "v_head_dim", head_dim), 0
    if text.get("kv_lora_rank"):
        rope_dim = _count(text, "qk_rope_head_dim")
        latent = _count(text, "kv_lora_rank") + rope_dim
        head_dim = _count(text, "qk_nope_head_dim", head_dim) + rope_dim
        notes.append(f"latent attention (MLA): one vector of {latent} values per token and layer, whole on each rank")
    layers, layer_notes = layers_of(text, n_layers)
    weights, weight_notes = weights_of(
        text, config, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim,
        layers=layers,
    )  # fmt: skip
    return Model(
        name=name,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        latent_values=latent,
        layers=layers,
        weights=weights,
        max_context_tokens=_count(text, "max_position_embeddings", 0) or None,
        notes=(*notes, *layer_notes, *weight_notes),
    )


def _text(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The language model's part, under the usual names."""
    found, notes = dict(config), list[str]()
    while nested := next((key for key in _NESTED if isinstance(found.get(key), dict)), None):
        if not notes:
            notes.append("a multimodal model: only its language part is counted, no images and no encoder")
        found = {key: value for key, value in found.items() if key not in _NESTED} | dict(found[nested])
    for name, others in _ALIASES.items():
        if found.get(name) is None:
            found[name] = next((found[other] for other in others if found.get(other) is not None), None)
    for name, usual in _DEFAULTS.get(str(found.get("model_type")), {}).items():
        if found.get(name) is None:
            found[name] = usual
    return found, notes


def _count(text: Mapping[str, Any], key: str, default: int | None = None, *, most: int = MOST) -> int:
    value = text.get(key)
    if value is None:
        if default is None:
            raise InputError(f"no {key}: is it the config.json of a decoder model?")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (value == 0 and default != 0):
        raise InputError(f"{key} should be a positive whole number, got {value!r}")
    if value > most:
        raise InputError(f"{key} should be at most {most:,}")
    return value
