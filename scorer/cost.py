"""Predicted seconds. The constants are priors measured on two H200 (see docs/architecture.md); hardware weights scale
them.

Symbols: n prompt tokens, h of them held, m = n - h to compute, q = (n^2 - h^2) / 2 their attention work.
"""

from __future__ import annotations

import msgspec


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker's time is made of."""

    front_base_s: float = 0.008
    front_per_token_s: float = 2.4e-6
    """Every server that sees a request reads all of it, cached or not."""
    comp_floor_s: float = 0.042
    """A prefill step takes this long however little there is to compute."""
    comp_per_token_s: float = 21e-6
    comp_per_attention_s: float = 1.0e-9
    hop_s: float = 0.002
    """From a prefill worker's answer to the decode worker."""
    pull_base_s: float = 0.002
    pull_per_block_s: float = 157e-6
    """36 layers at 4.35 us for each descriptor: in a cache that has been in use for a while no blocks merge. Blocks so
    large that their bytes take longer (`pull_bytes_per_s`) take that.
    """
    first_contact_s: float = 0.15
    """The handshake of two engines that have moved nothing between them yet: 0.12 to 0.17 s."""
    pull_stall_s: float = 0.008
    """What a pull adds to one step of the answers that run beside it."""
    step_base_s: float = 5.04e-3
    step_per_stream_s: float = 0.0116e-3
    step_per_kv_token_s: float = 3.31e-3 / 100_000
    kv_bytes_per_token: float = 147_456
    cpu_tier_bytes_per_s: float = 20e9
    disk_tier_bytes_per_s: float = 2e9
    reuse: float = 0.3
    """Share of cached blocks that are used again, where an engine does not tell its hits."""
    expected_output_tokens: float = 256
    """How long an answer is thought to be when the request does not bound it lower."""
    pull_bytes_per_s: float = 343e9
    text_per_token_s: float = 5.8e-6
    """What a server that gets text takes more than one that gets token ids, for rendering and tokenising."""


class CostModel:
    """Prices the parts of one request on one worker. `weight` is the worker's speed relative to the constants."""

    def __init__(self, constants: Constants | None = None) -> None:
        self.constants = constants or Constants()

    def front_s(self, n_tokens: int, *, text: bool = False) -> float:
        """Until a server begins to schedule a prompt that it gets as token ids, or as text."""
        c = self.constants
        ids_s = c.front_base_s + c.front_per_token_s * n_tokens
        return ids_s + c.text_per_token_s * n_tokens if text else ids_s

    def pull_s(self, blocks: int, block_size: int) -> float:
        """Moving so many blocks of so many tokens to a worker that has met the other."""
        c = self.constants
        per_block_s = c.kv_bytes_per_token * block_size / c.pull_bytes_per_s
        return c.pull_base_s + max(per_block_s, c.pull_per_block_s) * blocks

    def comp_s(
        self, n_tokens: int, held_tokens: int, weight: float = 1.0, floor_factor: float = 1.0, work_factor: float = 1.0
    ) -> float:
        """Computing what is not held, as one prefill. The factors are what was learned of the worker."""
        work_s = work_factor * self.work_s(n_tokens, held_tokens)
        floor_s = floor_factor * self.constants.comp_floor_s
        return (work_s if work_s > floor_s else floor_s) / weight

    def work_s(self, n_tokens: int, held_tokens: int) -> float:
        """What the tokens of a prefill take, were there no floor to a step."""
        c = self.constants
        attention = (n_tokens * n_tokens - held_tokens * held_tokens) / 2
        return c.comp_per_token_s * (n_tokens - held_tokens) + c.comp_per_attention_s * attention

    def load_s(self, cpu_tokens: int, disk_tokens: int) -> float:
        """Bringing blocks up from lower tiers. The token counts are what each tier adds to the one above."""
        c = self.constants
        return c.kv_bytes_per_token * (cpu_tokens / c.cpu_tier_bytes_per_s + disk_tokens / c.disk_tier_bytes_per_s)

    def step_s(self, streams: float, kv_tokens: float, weight: float = 1.0) -> float:
        """One decode step of `streams` running answers over `kv_tokens` of KV cache."""
        c = self.constants
        return (c.step_base_s + c.step_per_stream_s * streams + c.step_per_kv_token_s * kv_tokens) / weight

    def output_tokens(self, max_output_tokens: int | None) -> float:
        expected = self.constants.expected_output_tokens
        return expected if max_output_tokens is None else min(max_output_tokens, expected)
