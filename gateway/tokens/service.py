"""Request body -> token ids, for every model of the gateway. The one face of this room."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from gateway.tokens.cache import IdCache
from gateway.tokens.given import GivenPrompt, OpaquePrompt, Size, prompts_of, size_of
from gateway.tokens.model import Budget, ModelTokens, Shared
from gateway.tokens.settings import TokenSettings
from gateway.tokens.types import EngineTokenize, Reason, Tokens
from gateway.tokens.worker import BoundedPool


class TokenService:
    """Tokenises prompts off the event loop, from the best source there is.

    `set_model` and `tokens_for` may be called before `start`; loading and checking begin with it.
    """

    def __init__(
        self,
        settings: TokenSettings | None = None,
        *,
        rng: random.Random | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings or TokenSettings()
        self._shared = Shared(
            self._settings,
            BoundedPool(self._settings.threads, self._settings.max_queued),
            IdCache(self._settings.cache_bytes),
            rng or random.Random(),  # noqa: S311 - picks samples, guards nothing
            clock_s,
        )
        self._models: dict[str, ModelTokens] = {}
        self._calls: dict[str, EngineTokenize | None] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._started = False

    async def start(self) -> None:
        self._started = True
        for name in self._models:
            self._bring_up(name)

    async def close(self) -> None:
        """Ends every task and thread of ours; prompts asked for afterwards are estimated."""
        for name in list(self._models):
            self.remove_model(name)
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._shared.pool.close()

    def set_model(self, name: str, root_path: str | None = None, engine_tokenize: EngineTokenize | None = None) -> None:
        """Declares or updates a model. Calling it again with the same arguments changes nothing.

        `root_path`: `root` of the engine's model card (for an adapter, that of its base model); used when it is a
        local path. `engine_tokenize`: see `aiohttp_tokenize`; pass the same object for the same engine, since another
        one means another engine, against which the local tokenizer is checked anew.
        """
        known = self._models.get(name)
        if known is not None and known.root_path == root_path:
            if self._calls[name] is not engine_tokenize:
                self._calls[name] = engine_tokenize
                known.replace_engine(engine_tokenize)
                self._bring_up(name)
            return
        self.remove_model(name)
        self._models[name] = ModelTokens(name, root_path, engine_tokenize, self._shared)
        self._calls[name] = engine_tokenize
        self._bring_up(name)

    def remove_model(self, name: str) -> None:
        """Forgets a model; unknown names are fine."""
        self._calls.pop(name, None)
        model = self._models.pop(name, None)
        for task in (self._tasks.pop(name, None), model.cancel() if model is not None else None):
            if task is not None and not task.done():
                task.cancel()
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)

    async def tokens_for(
        self, kind: str, body: Mapping[str, Any], model: str, *, body_bytes: int | None = None
    ) -> list[Tokens]:
        """Tokens of every prompt of a request, in order; at least one.

        `kind`: "chat", "completions", "messages", "responses" or "generate" (the API of the body). `body_bytes`: its
        length as JSON, where it is known: short prompts are then done at once. Never raises for a bad body or a failing
        source: such a prompt comes back as an estimate that says why.
        """
        budget = Budget(
            self._settings.local_budget_s, self._settings.engine_budget_s + self._settings.engine_length_max_s
        )
        known = self._models.get(model)
        out = []
        for prompt in prompts_of(kind, body):
            if isinstance(prompt, GivenPrompt):
                out.append(Tokens(prompt.ids, len(prompt.ids) // 4, "given"))
            elif isinstance(prompt, OpaquePrompt):
                out.append(self._estimate(Size(prompt.n_bytes), prompt.reason))
            elif known is None:
                out.append(self._estimate(size_of(prompt), Reason.UNKNOWN_MODEL))
            else:
                out.append(await known.tokens(prompt, budget, body_bytes))
        return out

    def status(self) -> dict[str, dict[str, Any]]:
        """Per model: source in force, local tokenizer, check, circuit breaker, last reason. No prompt text."""
        return {name: model.status() for name, model in sorted(self._models.items())}

    def usage(self) -> dict[str, int]:
        """Counters and levels of the shared pool and cache."""
        pool, cache = self._shared.pool, self._shared.cache
        return {
            "jobs": pool.jobs,
            "jobs_shed": pool.shed,
            "cache_bytes": cache.n_bytes,
            "cache_hits": cache.hits,
            "cache_misses": cache.misses,
            "cache_hit_bytes": cache.hit_bytes,
            "cache_miss_bytes": cache.miss_bytes,
        }

    def _estimate(self, size: Size, reason: Reason) -> Tokens:
        n_tokens = size.estimated_tokens(self._settings.bytes_per_token)
        return Tokens(None, n_tokens, "estimate", reason=str(reason), media_parts=size.media)

    def _bring_up(self, name: str) -> None:
        if not self._started:
            return
        if (old := self._tasks.get(name)) is not None:
            old.cancel()  # It checks against an engine that is no longer ours.
        self._tasks[name] = asyncio.create_task(self._models[name].run(), name=f"tokens {name}")
