"""A request inside the engine: its tokens, its blocks and the hash chain over them."""

from array import array
from typing import Any, cast

import xxhash

from bench.engine.events import FULL_ATTENTION, MEDIUM_GPU, BlockStored, ExtraKeys
from bench.engine.request import Request, mix64


def root_hash(request: Request, engine_seed: int) -> int:
    """Where the hash chain of the request's namespace begins."""
    namespace = f"{request.lora_name!r}\0{request.cache_salt!r}"
    return xxhash.xxh3_64_intdigest(namespace.encode(), seed=mix64(engine_seed))


class Sequence:
    """A request's state inside the engine."""

    __slots__ = (
        "arrival_s",
        "blocks",
        "counted",
        "draw",
        "end",
        "garbage",
        "hashes",
        "num_cached",
        "num_computed",
        "output",
        "parent",
        "prompt_len",
        "remote",
        "request",
        "seen",
    )

    def __init__(self, request: Request, arrival_s: float, root: int) -> None:
        self.request = request
        self.arrival_s = arrival_s
        self.prompt_len = len(request.prompt_token_ids)
        self.output: list[int] = []
        self.blocks: list[int] = []
        self.hashes: list[int] = []
        self.parent = root
        self.num_computed = 0
        self.num_cached = 0  # blocks of ours that are findable
        self.draw = mix64(request.seed)
        self.end = 0  # how many tokens it will generate, as far as that is known
        self.remote = request.remote_tokens  # leading tokens still to be pulled
        self.garbage = 0  # wrong KV under it (`BlockPool.garbage`): its tokens are others
        self.seen = False  # admitted before (a resumed request is not counted again)
        self.counted = False  # among the prompt tokens by source

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + len(self.output)

    def tokens(self, start: int, end: int) -> list[int]:
        """An array if the prompt is one, which costs no int objects and does for a list."""
        split = self.prompt_len
        prompt = self.request.prompt_token_ids
        if isinstance(prompt, array):
            if end <= split:
                return cast(list[int], prompt[start:end])
            tail = array(prompt.typecode, self.output[max(0, start - split) : end - split])
            return cast(list[int], prompt[start:split] + tail)
        if end <= split:
            return list(self.request.prompt_token_ids[start:end])
        if start >= split:
            return self.output[start - split : end - split]
        return [*self.request.prompt_token_ids[start:split], *self.output[: end - split]]

    def hash_full_blocks(self, block_size: int) -> None:
        """Extend the chain over every block whose tokens are known."""
        first, last = len(self.hashes), self.num_tokens // block_size
        if first >= last:
            return
        tokens: Any = self.tokens(first * block_size, last * block_size)
        if not isinstance(tokens, array):
            tokens = array("q", tokens)
        raw = memoryview(tokens).cast("B")
        stride = tokens.itemsize * block_size
        parent = self.parent
        for at in range(0, len(raw), stride):
            parent = xxhash.xxh3_64_intdigest(raw[at : at + stride], seed=parent)
            self.hashes.append(parent)
        self.parent = parent


def stored(seq: Sequence, first: int, last: int, block_size: int) -> BlockStored:
    """The event that says blocks first..last-1 of the sequence are cached."""
    request = seq.request
    extra_keys: ExtraKeys = [[request.lora_name] if request.lora_name is not None else None for _ in range(first, last)]
    if first == 0 and request.cache_salt is not None:
        extra_keys[0] = [*(extra_keys[0] or ()), request.cache_salt]
    return BlockStored(
        block_hashes=list(seq.hashes[first:last]),
        parent_block_hash=seq.hashes[first - 1] if first else None,
        token_ids=seq.tokens(first * block_size, last * block_size),
        block_size=block_size,
        lora_id=request.lora_id,
        medium=MEDIUM_GPU,
        lora_name=request.lora_name,
        extra_keys=extra_keys,
        group_idx=0,
        kv_cache_spec_kind=FULL_ATTENTION,
        session_id=request.session_id,
    )
