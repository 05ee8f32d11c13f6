"""Which engines tokenise for which model: the same one as long as it is well, else at once another that serves it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import aiohttp
import msgspec

from gateway.engine.capabilities import Capabilities
from gateway.tokens import EngineTokenize, TokenService, aiohttp_tokenize

# How long an engine that failed to tokenise is asked last; by then its health is known.
_AVOID_S = 5.0


class _Engine(msgspec.Struct):
    url: str
    server_name: str | None
    call: EngineTokenize
    avoid_until_s: float = 0.0


class _Model(msgspec.Struct):
    """`home` is asked first, `others` have the same `root` and so the same tokenizer; `call` stands for all of them."""

    home: str
    home_url: str
    root: str | None
    call: EngineTokenize
    others: list[str]


class EngineTokenizers:
    """Keeps `tokens` told who tokenises. `is_well(worker)`: whether it may be asked now. Runs on one event loop."""

    def __init__(
        self,
        tokens: TokenService,
        session: aiohttp.ClientSession,
        headers: Mapping[str, str],
        is_well: Callable[[str], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens = tokens
        self._session = session
        self._headers = headers
        self._is_well = is_well
        self._now = now
        self._engines: dict[str, _Engine] = {}
        self._models: dict[str, _Model] = {}

    def declare(
        self, addresses: Mapping[str, tuple[str, str | None]], capabilities: Mapping[str, Capabilities]
    ) -> None:
        """Take in all workers that have an address (URL, and what its certificate names) and said what they serve."""
        known = {worker: said for worker, said in capabilities.items() if worker in addresses}
        for worker in set(self._engines) - set(known):
            del self._engines[worker]
        served: dict[str, list[str]] = {}
        for worker, said in known.items():
            engine = self._engines.get(worker)
            if engine is None or (engine.url, engine.server_name) != addresses[worker]:
                url, server_name = addresses[worker]
                call = aiohttp_tokenize(self._session, url, self._headers, server_name)
                self._engines[worker] = _Engine(url, server_name, call)
            for name in (*said.models, *(adapter.name for adapter in said.adapters)):
                served.setdefault(name, []).append(worker)
        for name in set(self._models) - set(served):
            del self._models[name]
            self._tokens.remove_model(name)
        for name, workers in served.items():
            self._declare_model(name, workers, known)

    def _declare_model(self, name: str, workers: list[str], capabilities: Mapping[str, Capabilities]) -> None:
        model = self._models.get(name)
        home = model.home if model is not None and model.home in workers else min(workers, key=self._preference)
        url, root = self._engines[home].url, capabilities[home].root
        others = sorted(w for w in workers if w != home and capabilities[w].root == root)
        if model is None or (model.home, model.home_url) != (home, url):
            # A new object, so that a local tokenizer is checked against the new engine.
            model = self._models[name] = _Model(home, url, root, partial(self._ask, name), others)
        model.root, model.others = root, others
        self._tokens.set_model(name, root, model.call)

    def _preference(self, worker: str) -> tuple[bool, bool, str]:
        return not self._is_well(worker), self._engines[worker].avoid_until_s > self._now(), worker

    def _order(self, model: _Model) -> Iterator[str]:
        home = self._engines.get(model.home)
        home_first = home is not None and home.avoid_until_s <= self._now() and self._is_well(model.home)
        if home_first:
            yield model.home
        rest = [w for w in ([] if home_first else [model.home]) + model.others if w in self._engines]
        yield from sorted(rest, key=self._preference)

    async def _ask(self, name: str, body: bytes) -> tuple[int, bytes]:
        """Raises what the last engine's connection raised, or ConnectionError when nobody serves the model any more."""
        model = self._models.get(name)
        answer: tuple[int, bytes] | None = None
        error: Exception = ConnectionError("no engine serves the model")
        for worker in () if model is None else self._order(model):
            engine = self._engines.get(worker)
            if engine is None:  # It left while another one was asked.
                continue
            try:
                answer = await engine.call(body)
            except (aiohttp.ClientError, OSError, UnicodeError) as exc:
                error = exc
            except asyncio.CancelledError:  # Most likely it was too slow.
                engine.avoid_until_s = self._now() + _AVOID_S
                raise
            else:
                if answer[0] < 500:
                    return answer
            engine.avoid_until_s = self._now() + _AVOID_S
        if answer is None:
            raise error
        return answer
