"""The KV block pool: one free queue in eviction order, hashes kept on free blocks, copies not de-duplicated.

Theory of operation, after vLLM's v1 block pool. A block is free (reference count 0, in the free queue) or in use. A
free block keeps its hash and can be hit until it is handed out again. Requests give their blocks back tail first, so a
chain is evicted from its tail; a block without a hash goes to the head of the queue, as nothing is lost by reusing it.
Two requests that fill the same block at the same time own two physical copies with one hash.
Block 0 is the null block and is never handed out: `num_blocks - 1` are usable.

There is no KV, so two marks stand for it: `generation` counts how often a block was handed out (a reader that comes too
late finds another one), and garbage marks a block whose KV is not that of its tokens, until it is handed out again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from bench.engine.request import mix64


class BlockPool:
    """Physical blocks by id. Hashes are opaque ints."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.num_usable = num_blocks - 1
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._refs = [0] * num_blocks
        self._hash: list[int | None] = [None] * num_blocks
        self._holder: dict[int, int] = {}  # hash -> the block a hit takes
        self._copies: dict[int, list[int]] = {}  # hash -> further blocks with that hash
        self._garbage: dict[int, int] = {}  # block -> a number that stands for the wrong KV in it
        self.generation = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    def lookup(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Blocks holding the longest prefix of `hashes`, at most `limit` of them. Does not touch them."""
        found: list[int] = []
        holder = self._holder
        for block_hash in hashes[:limit]:
            block = holder.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` sit in the free queue, i.e. would leave it when touched."""
        return sum(1 for block in blocks if not self._refs[block])

    def touch(self, blocks: Iterable[int]) -> None:
        """Take another reference on resident blocks."""
        for block in blocks:
            if not self._refs[block]:
                del self._free[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> tuple[list[int], list[int]]:
        """`count` fresh blocks, and the hashes that were evicted for them in order; one entry per physical copy."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        blocks: list[int] = []
        evicted: list[int] = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            block_hash = self._hash[block]
            if block_hash is not None:
                self._forget(block, block_hash)
                evicted.append(block_hash)
            self._refs[block] = 1
            self.generation[block] += 1
            blocks.append(block)
        if self._garbage:
            for block in blocks:
                self._garbage.pop(block, None)
        return blocks, evicted

    def cache(self, block: int, block_hash: int) -> None:
        """Make a block in use findable under its hash."""
        self._hash[block] = block_hash
        if self._holder.setdefault(block_hash, block) != block:
            self._copies.setdefault(block_hash, []).append(block)

    def spoil(self, blocks: Iterable[int], garbage: int) -> None:
        """Put wrong KV into blocks in use; `garbage` is any number but 0."""
        self._garbage.update(dict.fromkeys(blocks, garbage))

    def garbage(self, blocks: Iterable[int]) -> int:
        """What the wrong KV among `blocks` amounts to; 0 if all of it is right."""
        if not self._garbage:
            return 0
        found = 0
        for block in blocks:
            if block in self._garbage:
                found = mix64(found ^ self._garbage[block])
        return found

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each of a request's blocks, given in prompt order."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            self._free[block] = None
            if self._hash[block] is None:
                self._free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget every hash. Refused (False) while a block is in use."""
        if self.num_used:
            return False
        self._hash = [None] * (self.num_usable + 1)
        self._holder.clear()
        self._copies.clear()
        return True

    def resident(self) -> Iterator[tuple[int, int]]:
        """(hash, number of physical copies) of everything that can be hit."""
        for block_hash in self._holder:
            yield block_hash, 1 + len(self._copies.get(block_hash, ()))

    def _forget(self, block: int, block_hash: int) -> None:
        self._hash[block] = None
        copies = self._copies.get(block_hash)
        if copies is None:
            del self._holder[block_hash]
            return
        if self._holder[block_hash] == block:
            self._holder[block_hash] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[block_hash]
