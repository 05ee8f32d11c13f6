"""A prompt to look up, hashed once however many indexes and block sizes are asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from indexer.keys import Tokens, query_extras, root, token_bytes
from indexer.plane import Chain


class Prompt:
    """Token ids with what else tells one prompt's KV blocks from another's: the cache salt and media ids.

    `tokens` is best a uint32 buffer. `extra_keys` has one entry per block (None or that block's ids) or consists of
    MediaSpan. Raises ValueError for ids that are not uint32.
    """

    __slots__ = ("_chains", "_keyed", "cache_salt", "data", "extra_keys")

    def __init__(
        self, tokens: Tokens, *, cache_salt: str | None = None, extra_keys: Sequence[Any] | None = None
    ) -> None:
        self.data = token_bytes(tokens)
        self.cache_salt = cache_salt
        self.extra_keys = extra_keys
        self._chains: dict[tuple[str | int | None, int], Chain] = {}
        self._keyed: Chain | None = None

    @classmethod
    def of_keys(cls, keys: Sequence[int], block_size: int) -> Prompt:
        """A prompt of which only its block keys are known, for one block size and whichever adapter they are of."""
        prompt = cls(b"")
        prompt._keyed = Chain(0, b"", block_size, {})
        prompt._keyed.keys += keys
        prompt._keyed.n_blocks = len(prompt._keyed.keys)
        return prompt

    @property
    def n_tokens(self) -> int:
        return len(self.data) // 4

    def chain(self, adapter: str | int | None, block_size: int) -> Chain:
        """The keys of this prompt under `adapter` (None: the base model), in blocks of `block_size` tokens."""
        if self._keyed is not None and self._keyed.block_size == block_size:
            return self._keyed
        chain = self._chains.get((adapter, block_size))
        if chain is None:
            name = adapter if isinstance(adapter, str) else None
            n_blocks = self.n_tokens // block_size
            extras = query_extras(self.extra_keys, self.cache_salt, name, block_size, n_blocks)
            chain = Chain(root(adapter, block_size), self.data, block_size, extras)
            self._chains[adapter, block_size] = chain
        return chain
