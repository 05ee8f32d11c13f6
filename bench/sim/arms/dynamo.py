"""Dynamo's KV router: its cost in KV blocks and its conditional disaggregation (ai-dynamo 1.6.1 defaults)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from bench.sim.arms.choosing import lowest
from bench.sim.router import Arm, Factory, Placement, SimRequest, View, WorkerView
from indexer import Prompt
from scorer.types import Outcome, OutcomeKind

_OVER = (OutcomeKind.END, OutcomeKind.ERROR, OutcomeKind.CANCELLED)


def cost_blocks(
    *,
    isl_blocks: float,
    active_prefill_blocks: float,
    decode_blocks: float,
    device_overlap_blocks: float = 0.0,
    shared_overlap_blocks: float = 0.0,
    overlap_credit: float = 1.0,
    shared_cache_multiplier: float = 0.5,
    prefill_load_scale: float = 1.0,
    request_weight: float = 0.0,
    active_requests: int = 0,
    track_prefill: bool = True,
) -> float:
    """The cost of one worker, in blocks; the lowest wins.

    `decode_blocks` are those in use plus the new ones of this prompt; `shared_overlap_blocks` is the prefix a shared
    cache holds from block 0, of which only what goes beyond the device's counts. Without `track_prefill` the prompt
    itself costs nothing.
    """
    overlap = min(device_overlap_blocks, isl_blocks)
    credit = overlap_credit * overlap + shared_cache_multiplier * max(0.0, shared_overlap_blocks - overlap)
    prefill = active_prefill_blocks + isl_blocks if track_prefill else 0.0
    return prefill_load_scale * max(0.0, prefill - credit) + decode_blocks + request_weight * active_requests


def decode_cost_blocks(decode_blocks: float, device_overlap_blocks: float, overlap_credit: float = 1.0) -> float:
    """The cost of a decode worker behind a prefill pool, where what it holds is credited against what it will hold."""
    return max(0.0, decode_blocks - overlap_credit * device_overlap_blocks)


def is_local(
    isl_tokens: int, cached_tokens: int, *, least_tokens: float = 2048, least_share: float = 0.7, either: bool = False
) -> bool:
    """`isl_bounding` (both bounds hold) or, with `either`, `isl_or_load` without its load: what is computed where it
    decodes.
    """
    fresh = max(0, isl_tokens - cached_tokens)
    if not fresh:
        return True
    few, small = fresh < least_tokens, fresh < least_share * isl_tokens
    return few or small if either else few and small


class ActiveBlocks:
    """The distinct KV blocks of the prompts under way on each worker, each counted once."""

    def __init__(self) -> None:
        self._held: dict[str, Counter[int]] = {}
        self._of: dict[str, tuple[str, list[int]]] = {}

    def with_prompt(self, worker: str, keys: Sequence[int]) -> int:
        """How many there are, were these added."""
        held = self._held.get(worker)
        return len(keys) if not held else len(held) + sum(key not in held for key in keys)

    def add(self, request_id: str, worker: str, keys: list[int]) -> None:
        self._held.setdefault(worker, Counter()).update(keys)
        self._of[request_id] = worker, keys

    def drop(self, request_id: str) -> None:
        worker, keys = self._of.pop(request_id, ("", []))
        held = self._held.get(worker)
        if held is None:
            return
        for key in keys:
            if held[key] == 1:
                del held[key]
            else:
                held[key] -= 1


class Dynamo(Arm):
    """`scale`: prefill_load_scale. `bounds`: conditional disaggregation by (tokens, share), `either` or both; without
    it every prompt goes to a prefill worker where there is one, which is the default.
    """

    def __init__(
        self, name: str, scale: float = 1.0, bounds: tuple[int, float] | None = None, either: bool = False
    ) -> None:
        self.name = name
        self._scale = scale
        self._bounds = bounds
        self._either = either
        self._active = ActiveBlocks()

    def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
        cached = view.cached_tokens(request)
        keys = _keys(request, view.decoders[0].block_size)
        split = bool(view.prefillers)
        costs = [self._cost(request, worker, cached.get(worker.name, 0), keys, split) for worker in view.decoders]
        decode = lowest(view.decoders, costs, rng)
        self._active.add(request.request_id, decode.name, keys)
        held = cached.get(decode.name, 0)
        if not split or self._stays(request.prompt_tokens, held):
            return Placement(decode.name, cached_tokens=held)
        costs = [self._prefill_cost(request, worker, cached.get(worker.name, 0)) for worker in view.prefillers]
        prefill = lowest(view.prefillers, costs, rng).name
        return Placement(decode.name, prefill, held, cached.get(prefill, 0))

    def _stays(self, prompt_tokens: int, cached_tokens: int) -> bool:
        if self._bounds is None:
            return False
        tokens, share = self._bounds
        return is_local(prompt_tokens, cached_tokens, least_tokens=tokens, least_share=share, either=self._either)

    def _cost(
        self, request: SimRequest, worker: WorkerView, cached_tokens: int, keys: Sequence[int], split: bool
    ) -> float:
        size = worker.block_size
        decode_blocks = self._active.with_prompt(worker.name, keys)
        if split:
            return decode_cost_blocks(decode_blocks, cached_tokens / size)
        return cost_blocks(
            isl_blocks=request.prompt_tokens / size,
            active_prefill_blocks=worker.booked.uncached_tokens / size,
            decode_blocks=decode_blocks,
            device_overlap_blocks=cached_tokens / size,
            prefill_load_scale=self._scale,
        )

    def _prefill_cost(self, request: SimRequest, worker: WorkerView, cached_tokens: int) -> float:
        return cost_blocks(
            isl_blocks=request.prompt_tokens / worker.block_size,
            active_prefill_blocks=worker.booked.uncached_tokens / worker.block_size,
            decode_blocks=0.0,
            device_overlap_blocks=cached_tokens / worker.block_size,
            prefill_load_scale=self._scale,
        )

    def observe(self, request_id: str, outcome: Outcome, now_s: float) -> None:
        if outcome.kind in _OVER:
            self._active.drop(request_id)


def _keys(request: SimRequest, block_size: int) -> list[int]:
    if request.prompt is None:
        request.prompt = Prompt(request.tokens)
    chain = request.prompt.chain(None, block_size)
    return chain.upto(chain.n_blocks)


ARMS: dict[str, Factory] = {
    "dynamo": lambda setup: Dynamo("dynamo"),
    "dynamo-2": lambda setup: Dynamo("dynamo-2", scale=2.0),
    "isl-2048-0.7": lambda setup: Dynamo("isl-2048-0.7", bounds=(2048, 0.7)),
    "isl-ratio-4096-0.6": lambda setup: Dynamo("isl-ratio-4096-0.6", bounds=(4096, 0.6), either=True),
}
