"""A request inside the engine: its tokens, its blocks and the hash chain over them."""

from array import array

import xxhash

from bench.engine.request import Request, mix64


class Sequence:
    """A request's state inside the engine."""

    __slots__ = (
        "arrival_s",
        "blocks",
        "counted",
        "draw",
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
        self.remote = request.remote_tokens  # leading tokens still to be pulled
        self.garbage = 0  # wrong KV under it (`BlockPool.garbage`): its tokens are others
        self.seen = False  # admitted before (a resumed request is not counted again)
        self.counted = False  # among the prompt tokens by source

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + len(self.output)

    def tokens(self, start: int, end: int) -> list[int]:
        split = self.prompt_len
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
        raw = memoryview(array("q", self.tokens(first * block_size, last * block_size))).cast("B")
        stride = 8 * block_size
        parent = self.parent
        for at in range(0, len(raw), stride):
            parent = xxhash.xxh3_64_intdigest(raw[at : at + stride], seed=parent)
            self.hashes.append(parent)
        self.parent = parent
