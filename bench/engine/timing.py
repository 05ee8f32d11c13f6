"""How long an engine step takes: a linear model of one GPU (or CPU) worker, with measured presets."""

from dataclasses import dataclass, replace
from typing import Final

_MS: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one engine step and of the HTTP front end before it.

    A step that decodes N streams holding K tokens of KV and prefills m new tokens behind q token pairs
    (q = sum of (n^2 - h^2) / 2 over its chunks) takes
    ``step_base_s + step_per_seq_s*N + step_per_kv_token_s*K + prefill_per_token_s*m + prefill_per_pair_s*q``,
    and at least ``prefill_floor_s`` if a chunk of more than one token is in it (an eager step, no CUDA graph).
    """

    step_base_s: float
    step_per_seq_s: float
    step_per_kv_token_s: float
    prefill_per_token_s: float
    prefill_per_pair_s: float
    prefill_floor_s: float = 0.0
    front_base_s: float = 0.0
    front_per_token_s: float = 0.0

    def busy_s(self, decode_seqs: int, kv_tokens: float, prefill_tokens: int, prefill_pairs: float) -> float:
        """The part that is the GPU's own."""
        return (
            self.step_base_s
            + self.step_per_seq_s * decode_seqs
            + self.step_per_kv_token_s * kv_tokens
            + self.prefill_per_token_s * prefill_tokens
            + self.prefill_per_pair_s * prefill_pairs
        )

    def step_s(self, decode_seqs: int, kv_tokens: float, prefill_tokens: int, prefill_pairs: float) -> float:
        busy_s = self.busy_s(decode_seqs, kv_tokens, prefill_tokens, prefill_pairs)
        return max(busy_s, self.prefill_floor_s) if prefill_tokens else busy_s

    def front_s(self, prompt_tokens: int) -> float:
        """From the request's arrival until the scheduler sees it."""
        return self.front_base_s + self.front_per_token_s * prompt_tokens

    def faster(self, factor: float) -> "Timing":
        """The same machine, `factor` times as fast."""
        if factor <= 0:
            raise ValueError(f"factor must be positive, got {factor}")
        return replace(self, **{name: getattr(self, name) / factor for name in self.__dataclass_fields__})


# Measured on vLLM 0.26, two H200, Qwen3-shaped 7.2B dense bf16: decode step fitted over 16 points (rms 0.09 ms),
# prefill and front end over 12 idle TTFTs (within 3.4 %).
_H200_7B: Final = Timing(
    5.04 * _MS, 0.0116 * _MS, 3.31e-5 * _MS, 0.021 * _MS, 1.0e-6 * _MS, 42 * _MS, front_base_s=8 * _MS,
    front_per_token_s=2.4e-6,
)  # fmt: skip

# Fits of aiconfigurator 0.12 silicon tables for vLLM 0.24 (prefill within 5-8 % on average, decode within 2-3 %).
# The tables hold a whole prefill's launch cost in its constant; here that is the floor of a step with prefill in it.
PRESETS: Final[dict[str, Timing]] = {
    "h200-7b": _H200_7B,
    "h100-llama3-8b": Timing(6.44 * _MS, 0.0103 * _MS, 4.21e-5 * _MS, 0.01705 * _MS, 8.23e-7 * _MS, 12 * _MS),
    "h200-llama3-8b": Timing(4.96 * _MS, 0.0108 * _MS, 2.98e-5 * _MS, 0.01751 * _MS, 8.34e-7 * _MS, 10 * _MS),
    "h100x2-qwen3-32b": Timing(13.6 * _MS, 0.0260 * _MS, 4.26e-5 * _MS, 0.04298 * _MS, 1.66e-6 * _MS, 16 * _MS),
    "h100x4-llama3-70b": Timing(15.2 * _MS, 0.0324 * _MS, 2.68e-5 * _MS, 0.05525 * _MS, 1.03e-6 * _MS, 18 * _MS),
    # Near a random-weight 13M model of vLLM 0.32 on two CPU cores (prefill 0.4 ms and decode 10 ms a token), sped up
    # so that a demonstration of a few hundred requests ends within seconds and cache hits can still be seen.
    "cpu-fast": Timing(4 * _MS, 0.05 * _MS, 1e-5 * _MS, 0.08 * _MS, 1e-6 * _MS, 0.0, front_base_s=1 * _MS),
    "instant": Timing(0.0, 0.0, 0.0, 0.0, 0.0),
}


def preset(name: str) -> Timing:
    """The preset called `name`; ValueError names the known ones."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(f"no timing preset {name!r}; there is: {', '.join(PRESETS)}") from None
