"""`/debug/record`: a trace of the requests that end, one JSON object a line, for as long as somebody reads it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from aiohttp import web

from gateway.proxy import errors
from gateway.proxy.errors import SERVER_NAME, ApiError
from gateway.record.reader import BLOCK_TOKENS, Reader
from indexer import Prompt
from scorer.types import RequestFacts

PATH = "/debug/record"
CONTENT_TYPE = "application/x-ndjson"
MOST_READERS = 2


class Takes(Protocol):
    """As `Reader` does."""

    def add(
        self, began_s: float, model: str, keys: Sequence[int] | None, input_tokens: int, output_tokens: int
    ) -> None: ...

    def end(self, reason: str) -> None: ...


class Recorder:
    """While nobody reads, `active` is false and nothing is to be noted."""

    def __init__(self) -> None:
        self._readers: list[Takes] = []
        self._end: str | None = None

    @property
    def active(self) -> bool:
        return bool(self._readers)

    def note(self, facts: RequestFacts, began_s: float, input_tokens: int, output_tokens: int) -> None:
        """A request has ended that came at `began_s` (monotonic)."""
        keys = None
        if facts.tokens is not None:
            prompt = Prompt(facts.tokens, cache_salt=facts.cache_salt, extra_keys=facts.extra_keys)
            # Models share nothing, and neither do the adapters of one.
            chain = prompt.chain(facts.model, BLOCK_TOKENS)
            keys = chain.upto(chain.n_blocks)
        self.add(began_s, facts.model, keys, input_tokens, output_tokens)

    def add(
        self, began_s: float, model: str, keys: Sequence[int] | None, input_tokens: int, output_tokens: int
    ) -> None:
        """The same, with the keys of its whole blocks."""
        for reader in self._readers:
            reader.add(began_s, model, keys, input_tokens, output_tokens)

    @contextmanager
    def followed_by(self, reader: Takes) -> Iterator[None]:
        """`reader` hears of requests meanwhile. Raises ApiError."""
        if self._end is not None or len(self._readers) >= MOST_READERS:
            why = self._end or f"{MOST_READERS} recordings are under way, and more are not allowed"
            raise ApiError(503, f"Nothing can be recorded: {why}.", code="no_recording")
        self._readers.append(reader)
        try:
            yield
        finally:
            self._readers.remove(reader)

    def end(self, reason: str) -> None:
        """End all recordings, and begin no others."""
        self._end = reason
        for reader in self._readers:
            reader.end(reason)

    async def page(self, request: web.BaseRequest) -> web.StreamResponse:
        """Rows (`Row`) and notes (`Note`) until the reader leaves or the gateway goes down. Raises ApiError."""
        if request.method != "GET":
            raise errors.method_not_allowed(request.method, PATH, frozenset({"GET"}))
        reader = Reader(time.monotonic())
        with self.followed_by(reader):
            response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE, "Server": SERVER_NAME})
            response.force_close()
            try:
                await response.prepare(request)
                while lines := await reader.take():
                    await response.write(lines)
                await response.write_eof()
            except ConnectionError:
                pass  # The reader has left.
        return response
