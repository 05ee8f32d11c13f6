"""What workers are assumed to hold because requests were routed to them: for engines that publish no events.

Same answers as `PrefixIndex.match`, marked approximate. Per (worker, rank) the assumed blocks form an LRU list as long
as the engine's cache, and lapse after `ttl_s`. The engine's own `cached_tokens` corrects it: a block that turned out
to be evicted tells that everything used less recently is gone too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from indexer.held import HeldBlocks, packed
from indexer.keys import Tokens
from indexer.match import Holder, Match
from indexer.plane import NO_PARENT, Plane
from indexer.prompt import Prompt
from indexer.serves import UNDECLARED, Serves

_NOTHING = Match()
_NOT_LOOSE: dict[int, int] = {}
"""Nothing is linked here, so that nothing is put in."""


class _Touch(msgspec.Struct, frozen=True, gc=False):
    at_s: float
    before_s: float | None
    """When the block had been used before that; None if it was not there."""


class _Assumed:
    """One (worker, rank)'s blocks, least recently used first."""

    __slots__ = ("bit", "blocks")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.blocks: OrderedDict[int, _Touch] = OrderedDict()


class _Worker(msgspec.Struct):
    serves: Serves
    block_size: int
    capacity_blocks: int


class ApproximateIndex:
    """Assumed holders of prompts. Times are monotonic seconds given by the caller. Not thread-safe.

    `block_size` and `capacity_blocks` hold for workers that `set_worker` says nothing else about. Raises ValueError for
    values that are not positive.
    """

    def __init__(self, *, ttl_s: float = 600.0, block_size: int = 16, capacity_blocks: int = 65536) -> None:
        if ttl_s <= 0 or block_size <= 0 or capacity_blocks <= 0:
            raise ValueError("ttl_s, block_size and capacity_blocks must be positive")
        self.ttl_s = ttl_s
        self._default = _Worker(UNDECLARED, block_size, capacity_blocks)
        self._workers: dict[str, _Worker] = {}
        self._plane = Plane(linked=False)
        self._assumed: dict[Holder, _Assumed] = {}
        self._holders: dict[int, Holder] = {}
        self._free_bits: list[int] = []
        self.corrections = 0

    def set_worker(
        self,
        worker: str,
        *,
        models: Iterable[str] | None = None,
        loras: Iterable[str] = (),
        block_size: int | None = None,
        capacity_blocks: int | None = None,
    ) -> None:
        """What `worker` serves, and its cache as the engine advertises it. Another block size empties its list."""
        before = self._workers.get(worker, self._default)
        serves = before.serves if models is None else Serves(models, loras)
        new = _Worker(serves, block_size or before.block_size, capacity_blocks or before.capacity_blocks)
        if new.block_size != before.block_size:
            self.clear(worker)
        self._workers[worker] = new
        for holder, assumed in self._assumed.items():
            if holder[0] == worker:
                self._fit(assumed, new.capacity_blocks)

    def remove_worker(self, worker: str) -> None:
        self.clear(worker)
        self._workers.pop(worker, None)

    def clear(self, worker: str, rank: int | None = None) -> None:
        for holder in [h for h in self._assumed if h[0] == worker and rank in (None, h[1])]:
            assumed = self._assumed.pop(holder)
            while assumed.blocks:
                self._drop(assumed, next(reversed(assumed.blocks)))
            del self._holders[assumed.bit]
            self._free_bits.append(assumed.bit)

    def blocks(self, worker: str) -> int:
        """Blocks assumed on all its ranks."""
        return sum(len(assumed.blocks) for (name, _), assumed in self._assumed.items() if name == worker)

    def assume(
        self,
        worker: str,
        rank: int,
        prompt: Prompt,
        now_s: float,
        *,
        model: str | None = None,
        lora: str | int | None = None,
        first_block: int = 0,
    ) -> list[int]:
        """`prompt` was routed there: that (worker, rank) will hold its full blocks from `first_block` on. Their
        keys.
        """
        keys = self._keys(worker, prompt, model, lora)[first_block:]
        self.assume_keys(worker, rank, keys, now_s)
        return keys

    def assume_keys(self, worker: str, rank: int, keys: Sequence[int], now_s: float) -> None:
        """The same for blocks by their keys, in the order of the prompt."""
        assumed = self._state((worker, rank))
        self._expire(assumed, now_s)
        blocks, bit, add = assumed.blocks, assumed.bit, self._plane.add
        before, touch = None, _Touch(now_s, None)
        # engines give up a prompt's tail first, so its head has to be the most recently used
        for key in reversed(keys):
            known = blocks.pop(key, None)
            if known is None:
                add(key, NO_PARENT, False, bit, _NOT_LOOSE)
            if known is not before:  # Blocks that were used together have one touch, and go on having one.
                before, touch = known, _Touch(now_s, None if known is None else known.at_s)
            blocks[key] = touch
        self._fit(assumed, self._workers.get(worker, self._default).capacity_blocks)

    def retract(self, worker: str, rank: int, keys: Iterable[int], assumed_at_s: float) -> None:
        """Forget those of `keys` that nothing but the `assume` call at `assumed_at_s` speaks for."""
        assumed = self._assumed.get((worker, rank))
        if assumed is None:
            return
        for key in keys:
            touch = assumed.blocks.get(key)
            if touch is not None and touch.before_s is None and touch.at_s == assumed_at_s:
                self._drop(assumed, key)

    def correct(
        self,
        worker: str,
        rank: int,
        prompt: Prompt,
        cached_tokens: int,
        assumed_at_s: float,
        *,
        model: str | None = None,
        lora: str | int | None = None,
    ) -> None:
        """The engine found `cached_tokens` of a prompt that had been assumed there at `assumed_at_s`, before it ran.

        If it found less than had been claimed, its cache had given up a block last used at some time, and with it, the
        cache being LRU, everything that was used no later.
        """
        assumed = self._assumed.get((worker, rank))
        if assumed is None:
            return
        keys = self._keys(worker, prompt, model, lora)
        size = self._workers.get(worker, self._default).block_size
        first_missing = cached_tokens // size
        # the last token of a prompt is always computed anew, and with it the block it ends, which so says nothing
        if first_missing >= min(len(keys), (prompt.n_tokens - 1) // size):
            return
        touch = assumed.blocks.get(keys[first_missing])
        if touch is None or touch.before_s is None or touch.at_s != assumed_at_s:
            return  # never claimed, or claimed anew by a request that has not been answered
        self.corrections += 1
        for key in [k for k, t in assumed.blocks.items() if t.at_s <= touch.before_s]:
            self._drop(assumed, key)

    def match(
        self,
        tokens: Tokens | Prompt,
        *,
        now_s: float,
        model: str | None = None,
        lora: str | int | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> dict[Holder, Match]:
        """How much of `tokens` each (worker, rank) is assumed to hold. See `PrefixIndex.match`."""
        prompt = tokens if isinstance(tokens, Prompt) else Prompt(tokens, cache_salt=cache_salt, extra_keys=extra_keys)
        wanted: dict[tuple[str | int | None, int], int] = {}
        for holder, assumed in self._assumed.items():
            self._expire(assumed, now_s)
            known = self._workers.get(holder[0], self._default)
            answers, adapter = known.serves.namespace(model, lora, ())
            if answers and assumed.blocks:
                place = (adapter, known.block_size)
                wanted[place] = wanted.get(place, 0) | assumed.bit
        out: dict[Holder, Match] = {}
        for (adapter, size), candidates in wanted.items():
            for depth, mask in self._plane.depths(prompt.chain(adapter, size), candidates):
                match = Match(depth * size, 0, 0, depth * size, True)
                rest = mask
                while rest:
                    low = rest & -rest
                    out[self._holders[low]] = match
                    rest ^= low
        return out

    def beyond(
        self,
        prompt: Prompt,
        held: Mapping[Holder, Match],
        *,
        now_s: float,
        model: str | None = None,
        lora: str | int | None = None,
    ) -> dict[Holder, Match]:
        """Who will hold more of `prompt` than `held` says, and how much: blocks that were assumed from where another
        request's known ones ended go on from where `held` ends.
        """
        out: dict[Holder, Match] = {}
        for holder, assumed in self._assumed.items():
            self._expire(assumed, now_s)
            blocks = assumed.blocks
            if not blocks:
                continue
            worker = self._workers.get(holder[0], self._default)
            answers, adapter = worker.serves.namespace(model, lora, ())
            if not answers:
                continue
            chain = prompt.chain(adapter, worker.block_size)
            known = held.get(holder, _NOTHING)
            depth = known.reach_tokens // worker.block_size
            if depth >= chain.n_blocks or chain.upto(depth + 1)[depth] not in blocks:
                continue
            keys = chain.upto(chain.n_blocks)
            while depth < chain.n_blocks and keys[depth] in blocks:
                depth += 1
            reach_tokens = depth * worker.block_size
            # What is only in another tier has to be loaded first, whatever follows it.
            gpu_tokens = reach_tokens if known.gpu_tokens == known.reach_tokens else known.gpu_tokens
            out[holder] = Match(gpu_tokens, known.cpu_tokens, known.disk_tokens, reach_tokens, True)
        return out

    def held_blocks(self) -> Iterator[HeldBlocks]:
        """What each (worker, rank) is assumed to hold, least recently used first."""
        for (worker, rank), assumed in self._assumed.items():
            block_size = self._workers.get(worker, self._default).block_size
            if assumed.blocks:
                yield HeldBlocks(
                    worker=worker, rank=rank, tier="gpu", block_size=block_size, keys=packed(assumed.blocks)
                )

    def take_back(self, blocks: HeldBlocks, now_s: float) -> None:
        """They are assumed to be held, from now on. Raises ValueError for what `held_blocks` never says."""
        assumed = self._state((blocks.worker, blocks.rank))
        for key in blocks.values():
            if key not in assumed.blocks:
                self._plane.add(key, NO_PARENT, False, assumed.bit, {})
                assumed.blocks[key] = _Touch(now_s, None)

    def stats(self) -> dict[str, Any]:
        workers: dict[str, dict[str, int]] = {}
        for (worker, rank), assumed in sorted(self._assumed.items()):
            workers.setdefault(worker, {})[str(rank)] = len(assumed.blocks)
        return {"assumed_blocks": workers, "corrections": self.corrections}

    def _keys(self, worker: str, prompt: Prompt, model: str | None, lora: str | int | None) -> list[int]:
        known = self._workers.get(worker, self._default)
        _, adapter = known.serves.namespace(model, lora, ())
        chain = prompt.chain(adapter, known.block_size)
        return chain.upto(chain.n_blocks)

    def _state(self, holder: Holder) -> _Assumed:
        assumed = self._assumed.get(holder)
        if assumed is None:
            bit = self._free_bits.pop() if self._free_bits else 1 << len(self._holders)
            assumed = self._assumed[holder] = _Assumed(bit)
            self._holders[bit] = holder
        return assumed

    def _expire(self, assumed: _Assumed, now_s: float) -> None:
        blocks = assumed.blocks
        while blocks:
            key = next(iter(blocks))
            if blocks[key].at_s + self.ttl_s > now_s:
                return
            self._drop(assumed, key)

    def _fit(self, assumed: _Assumed, capacity_blocks: int) -> None:
        while len(assumed.blocks) > capacity_blocks:
            self._drop(assumed, next(iter(assumed.blocks)))

    def _drop(self, assumed: _Assumed, key: int) -> None:
        del assumed.blocks[key]
        self._plane.remove(key, assumed.bit, _NOT_LOOSE)
