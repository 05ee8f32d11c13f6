"""What the workers of a large fleet hold, and what they say of it; made from a seed, so that who asks knows it too."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import msgspec

from bench.kv_frames import BLOCK_SIZE, frame, removal

BLOCKS_PER_BATCH = 64
"""A step of 1,024 new tokens."""
CHAIN_BLOCKS = 16
"""Of a prompt that comes and goes while everything runs."""
CHAINS = 32
"""Of each worker; half of them are held at any time."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """`blocks` of each worker, in prompts of `prompt_blocks`: the first half of each is held by `sharers` workers, who
    are others for each prompt, the second half by one.
    """

    workers: int = 512
    blocks: int = 20_000
    sharers: int = 64
    prompt_blocks: int = 512
    seed: int = 9

    @property
    def prompts(self) -> int:
        """Of each worker."""
        return max(1, (self.blocks - CHAINS // 2 * CHAIN_BLOCKS) // self.prompt_blocks)

    @property
    def copies(self) -> int:
        """(block, worker) pairs."""
        return self.workers * (self.prompts * self.prompt_blocks + CHAINS // 2 * CHAIN_BLOCKS)

    def sharers_of(self, prompt: int) -> list[list[int]]:
        """The workers that have the same beginning in their prompt of that number."""
        workers = list(range(self.workers))
        random.Random(f"{self.seed} sharers {prompt}").shuffle(workers)
        n = min(self.sharers, self.workers)
        return [workers[i : i + n] for i in range(0, len(workers), n)]

    def tokens(self, prompt: int, worker: int) -> array[int]:
        """Of a worker's prompt, both halves."""
        group = next(i for i, group in enumerate(self.sharers_of(prompt)) if worker in group)
        half = self.prompt_blocks // 2
        first = _tokens(self._shared(prompt, group), half)
        return array("I", first + _tokens(self._own(prompt, worker), self.prompt_blocks - half))

    def batches(self) -> list[list[bytes]]:
        """The payloads of each worker's events until everything is held, those of shared blocks shared too."""
        out: list[list[bytes]] = [[] for _ in range(self.workers)]
        half = self.prompt_blocks // 2
        for prompt in range(self.prompts):
            for group, workers in enumerate(self.sharers_of(prompt)):
                hashes, first = _chain(self._shared(prompt, group), half, None)
                for worker in workers:
                    own = _chain(self._own(prompt, worker), self.prompt_blocks - half, hashes[-1])[1]
                    out[worker] += first
                    out[worker] += own
        for worker, batches in enumerate(out):
            batches += [stored for stored, _ in self.chains(worker)[CHAINS // 2 :]]
        return out

    def chains(self, worker: int) -> list[tuple[bytes, bytes]]:
        """What is said when each of the short prompts is stored, and when it is removed."""
        return [_come_and_gone(f"{self.seed} chain {worker} {i}") for i in range(CHAINS)]

    def churn(self, worker: int) -> list[bytes]:
        """Payloads to send in a circle once `batches` are sent: each stores one short prompt and removes another."""
        chains = self.chains(worker)
        return [_both(chains[(i + CHAINS // 2) % CHAINS][1], chains[i][0]) for i in range(CHAINS)]

    def _shared(self, prompt: int, group: int) -> str:
        return f"{self.seed} shared {prompt} {group}"

    def _own(self, prompt: int, worker: int) -> str:
        return f"{self.seed} own {prompt} {worker}"


def _tokens(seed: str, blocks: int) -> list[int]:
    return array("H", random.Random(seed).randbytes(2 * blocks * BLOCK_SIZE)).tolist()


def _hashes(seed: str, blocks: int) -> list[int]:
    return [h >> 1 for h in array("Q", random.Random(f"{seed} hashes").randbytes(8 * blocks))]


def _chain(seed: str, blocks: int, parent: int | None) -> tuple[list[int], list[bytes]]:
    hashes, ids = _hashes(seed, blocks), _tokens(seed, blocks)
    payloads = []
    for i in range(0, blocks, BLOCKS_PER_BATCH):
        part = hashes[i : i + BLOCKS_PER_BATCH]
        payloads.append(frame(part, parent, ids[i * BLOCK_SIZE : (i + len(part)) * BLOCK_SIZE], BLOCKS_PER_BATCH))
        parent = part[-1]
    return hashes, payloads


def _come_and_gone(seed: str) -> tuple[bytes, bytes]:
    hashes = _hashes(seed, CHAIN_BLOCKS)
    return frame(hashes, None, _tokens(seed, CHAIN_BLOCKS), CHAIN_BLOCKS), removal(hashes[::-1])


def _both(*payloads: bytes) -> bytes:
    events = [event for payload in payloads for event in msgspec.msgpack.decode(payload)[1]]
    return msgspec.msgpack.encode([0.0, events, 0])


def questions(held: Held, n: int) -> Iterator[array[int]]:
    """Prompts that are held, of all numbers and workers in turn."""
    for i in range(n):
        yield held.tokens(i % held.prompts, i * 7 % held.workers)
