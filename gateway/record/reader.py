"""One recording under way: rows for whoever reads it, in bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from gateway.record.numbering import Numbering

BLOCK_TOKENS = 64
"""Tokens of a block of the trace. A multiple of the engines' usual 16, and what the simulator's engines use: finer
blocks would only make longer rows, coarser ones (Mooncake's 512) lose what prompts share below them.
"""
MOST_BLOCKS = 1 << 19
"""Numbered blocks remembered, 34 million tokens: some 100 MB when full."""
MOST_MODELS = 256
MOST_TOKENS = 1 << 22
"""A prompt said to be longer is written as one so long."""
MOST_BYTES = 8 << 20
"""Rows kept for a reader that does not take them; those that come then are lost."""


class Row(msgspec.Struct, frozen=True):
    """A request as a line of the trace. `timestamp`: milliseconds after the recording began, when it came.

    `hash_ids` numbers its prompt's blocks of `block_size` tokens; null: nobody knows the prompt's tokens.
    """

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int] | None
    block_size: int
    model: int
    """Which one, by number."""


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is said between the rows: at the beginning, whenever something was lost, and at the `end`."""

    lost_rows: int
    """All in all: the reader was too slow."""
    forgotten_blocks: int
    """All in all: when they come again it is not seen that they do."""
    end: str | None = None


class Reader:
    """Rows go in by `add` and come out by `take`."""

    def __init__(self, began_s: float, most_bytes: int = MOST_BYTES) -> None:
        self._began_s = began_s
        self._most_bytes = most_bytes
        self._blocks = Numbering(MOST_BLOCKS)
        self._models = Numbering(MOST_MODELS)
        self._lines: list[bytes] = []
        self._bytes = 0
        self._lost_rows = 0
        self._told: tuple[int, int] | None = None
        self._end: str | None = None
        self._is_over = False
        self._woken = asyncio.Event()
        self._woken.set()

    def add(
        self, began_s: float, model: str, keys: Sequence[int] | None, input_tokens: int, output_tokens: int
    ) -> None:
        """A request that began at `began_s`. `keys` name its first whole blocks, each with all before it; None: its
        tokens are not known. Requests from before the recording are left out.
        """
        if began_s < self._began_s or self._end is not None:
            return
        if self._bytes >= self._most_bytes:
            self._lost_rows += 1
            return
        input_tokens = min(max(1, input_tokens), MOST_TOKENS)
        hash_ids = None
        if keys is not None:
            # Engines share whole blocks only: what is cut, or not known, is like nothing else.
            known = keys[: input_tokens // BLOCK_TOKENS]
            hash_ids = self._blocks.path(known, -(-input_tokens // BLOCK_TOKENS) - len(known))
        row = Row(
            timestamp=round((began_s - self._began_s) * 1000),
            input_length=input_tokens,
            output_length=output_tokens,
            hash_ids=hash_ids,
            block_size=BLOCK_TOKENS,
            model=self._models.path([model])[0],
        )
        line = msgspec.json.encode(row) + b"\n"
        self._lines.append(line)
        self._bytes += len(line)
        self._woken.set()

    def end(self, reason: str) -> None:
        """What was added is still given out, then `reason`."""
        if self._end is None:
            self._end = reason
            self._woken.set()

    async def take(self) -> bytes:
        """The next lines, as soon as there are any; nothing after the end."""
        if self._is_over:
            return b""
        await self._woken.wait()
        self._woken.clear()
        lines, self._lines, self._bytes = self._lines, [], 0
        lost = self._lost_rows, self._blocks.forgotten
        if lost != self._told or self._end is not None:
            self._told = lost
            self._is_over = self._end is not None
            lines.append(msgspec.json.encode(Note(*lost, self._end)) + b"\n")
        return b"".join(lines)
