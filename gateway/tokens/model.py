"""The token sources of one model, in order, and the check that keeps the local one honest."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from weakref import WeakValueDictionary

from gateway.tokens import estimate, local
from gateway.tokens.cache import IdCache, new_seed
from gateway.tokens.engine import EngineTokenizer, tokenize_body
from gateway.tokens.given import ChatPrompt, TextPrompt, size_of
from gateway.tokens.render import Rendered
from gateway.tokens.selfcheck import SelfCheck, Tokenizable
from gateway.tokens.settings import ANY_MODEL, TokenSettings
from gateway.tokens.types import CannotTokenize, EngineTokenize, Reason, Source, Tokens, join_reasons
from gateway.tokens.worker import BoundedPool

_log = logging.getLogger(__name__)

# Reasons that hold for every source, or that call for less work, not for more of it elsewhere.
_FINAL = frozenset(
    {Reason.MALFORMED, Reason.TOO_LARGE, Reason.TRUNCATED, Reason.HARMONY, Reason.QUEUE_FULL, Reason.LOCAL_TIMEOUT}
)

# Prompts up to this size are looked at on the event loop, and done there if what is new of them is short (`Lookup`):
# looking takes 0.1 to 0.6 ms, holding the interpreter's lock all the time, so that in a thread it would be no less in
# the loop's way, and handing it there and back takes 0.05 to 0.15 ms of CPU time on top.
_AT_ONCE_BYTES = 256 << 10
_AT_ONCE_BESIDE_TEXT_BYTES = 64 << 10
"""Tools and content in parts, which take longer to render than text."""
_AT_ONCE_MESSAGES = 256
# A verification is as slow as tokenising can be; this many times as long there is no other.
_REST = 20

LocalState = Literal["none", "loading", "ready", "failed"]


@dataclass(frozen=True, slots=True)
class Shared:
    """What all models of one service use together."""

    settings: TokenSettings
    pool: BoundedPool
    cache: IdCache
    rng: random.Random
    clock_s: Callable[[], float] = time.monotonic
    tokenizers: WeakValueDictionary[str, local.LocalTokenizer] = field(default_factory=WeakValueDictionary)
    """By path: one for a model and all its adapters."""
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    warned: set[str] = field(default_factory=set)
    """Faults of tokenizer files that were logged; a model's adapters share its file."""


@dataclass(slots=True)
class Budget:
    """Time one request may still spend in each source, over all its prompts."""

    local_s: float
    engine_s: float


@dataclass(frozen=True, slots=True)
class _Found:
    """Ids of a prompt, or of its part before the first media (`prefix_only`), and the bytes of text they stand for."""

    ids: bytes
    prefix_only: bool
    text_bytes: int


_Find = Callable[[Tokenizable, Budget, int | None], Awaitable[_Found]]


def _found(rendered: Rendered, lookup: local.Lookup) -> _Found:
    prefix_bytes = estimate.text_bytes(rendered.text) if rendered.prefix_only else 0
    return _Found(lookup.ids(), rendered.prefix_only, prefix_bytes)


def _is_at_once(prompt: Tokenizable, body_bytes: int) -> bool:
    """Whether the prompt's text is made in a time to spend on the event loop."""
    if body_bytes > _AT_ONCE_BYTES:
        return False
    if isinstance(prompt, TextPrompt):
        return True
    messages = prompt.messages
    if len(messages) > _AT_ONCE_MESSAGES or prompt.body.get("chat_template") is not None:
        return False
    if body_bytes <= _AT_ONCE_BESIDE_TEXT_BYTES:
        return True
    contents = (message.get("content") for message in messages)
    text_bytes = sum(len(content) for content in contents if isinstance(content, str))
    return body_bytes - text_bytes <= _AT_ONCE_BESIDE_TEXT_BYTES


class ModelTokens:
    """Sources of one model. `run` brings them up and checks them; `tokens` may be called before and during that."""

    def __init__(self, name: str, root_path: str | None, call: EngineTokenize | None, shared: Shared) -> None:
        self.name = name
        self.root_path = root_path
        self._shared = shared
        self._settings = shared.settings
        paths = self._settings.tokenizer_paths
        self._path = paths.get(name) or paths.get(ANY_MODEL) or root_path
        # A model card whose root is a hub name still tells this much; its chats never see a chat template.
        self._harmony = "gpt-oss" in f"{name} {root_path}".lower()
        self._local: local.LocalTokenizer | None = None
        self._local_state: LocalState = "loading" if self._path and self._settings.mode != "engine" else "none"
        self._local_detail: str | None = None
        self._sample: asyncio.Task[None] | None = None
        self._served = Counter[str]()
        self._last_reason: str | None = None
        self._verify_from_s = 0.0
        self._verified = 0
        self.replace_engine(call)

    def replace_engine(self, call: EngineTokenize | None) -> None:
        """Another engine serves the model now: what was found out about the local tokenizer must be found out anew."""
        self._engine_seed = new_seed()
        self.engine: EngineTokenizer | None = None
        self._check: SelfCheck | None = None
        if call is None or self._settings.mode == "estimate":
            return
        engine = EngineTokenizer(call, self._settings, clock_s=self._shared.clock_s)

        async def engine_ids(prompt: Tokenizable) -> bytes:
            return await engine.ask(tokenize_body(prompt, self.name, self._settings)[0], self._settings.check_budget_s)

        self.engine = engine
        self._check = SelfCheck(self._verified_ids, engine_ids)

    async def run(self) -> None:
        """Loads the local tokenizer, then checks it until the engine has said yes or no."""
        if self._local is None and self._local_state == "loading":
            await self._load()
        if self._local is not None:
            await asyncio.to_thread(self._local.speed_up)
        delay_s = self._settings.check_retry_s
        while self._local is not None and self._check is not None:
            if (verdict := await self._check.run_fixed()) != "unverified":
                if verdict == "mismatch":
                    self._warn_mismatch()
                return
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._settings.check_retry_max_s)

    def _failed(self, detail: str) -> None:
        self._local_state, self._local_detail = "failed", detail
        self._warn(f"the tokenizer cannot be loaded: {detail}")

    def _warn(self, text: str) -> None:
        if text not in self._shared.warned:
            self._shared.warned.add(text)
            _log.warning("%s: %s; prompts are tokenised by the engine or estimated", self.name, text)

    def _warn_mismatch(self) -> None:
        self._warn(f"the tokenizer at {self._path} gives other ids than the engine of {self.name}")

    def cancel(self) -> asyncio.Task[None] | None:
        """The background comparison under way, for the owner to cancel and await."""
        return self._sample

    async def tokens(self, prompt: Tokenizable, budget: Budget, body_bytes: int | None = None) -> Tokens:
        """Tokens of `prompt` from the best source that has any. Never raises for a bad prompt or source.

        `body_bytes`: the length of the JSON it came in, no shorter than its text.
        """
        reasons: list[Reason | None] = []
        sources: tuple[tuple[Source, _Find], ...] = (("local", self._from_local), ("engine", self._from_engine))
        for source, find in sources:
            try:
                found = await find(prompt, budget, body_bytes)
                side = "right" if self._local is None else self._local.truncation_side
                ids = prompt.truncation.apply(found.ids, side, prefix_only=found.prefix_only)
            except CannotTokenize as exc:
                reasons.append(exc.reason)
                if exc.reason in _FINAL:
                    break
                continue
            except Exception:  # A fault of ours must cost this prompt its prefix, not the request.
                reasons.append(Reason.INTERNAL)
                continue
            if found.prefix_only:
                reasons.append(Reason.MEDIA)
            elif source == "local":
                self._maybe_sample(prompt, found.ids)
            return self._served_as(source, ids, found, prompt, reasons)
        return self._served_as("estimate", None, None, prompt, reasons)

    def _served_as(
        self, source: Source, ids: bytes | None, found: _Found | None, prompt: Tokenizable, reasons: list[Reason | None]
    ) -> Tokens:
        reason = join_reasons(*reasons)
        self._served[source] += 1
        if reason is not None:
            self._last_reason = reason
        if ids is not None and found is not None and not found.prefix_only:
            return Tokens(ids, len(ids) // 4, source, reason=reason)
        size, per_token = size_of(prompt), self._settings.bytes_per_token
        if ids is None or found is None:
            n_tokens = size.estimated_tokens(per_token)
        else:
            rest = max(0, size.n_bytes - found.text_bytes)
            n_tokens = len(ids) // 4 + estimate.tokens_of(rest, per_token, media=size.media)
        return Tokens(ids, n_tokens, source, prefix_only=found is not None, reason=reason, media_parts=size.media)

    def _is_too_large(self, prompt: Tokenizable, body_bytes: int | None) -> bool:
        most = self._settings.max_prompt_bytes
        return (body_bytes is None or body_bytes > most) and size_of(prompt).n_bytes > most

    def _refusal(self) -> Reason | None:
        """Why the local tokenizer is not used, if it is not."""
        if self._settings.mode in ("engine", "estimate"):
            return Reason.MODE
        if self._local is None:
            return {"none": Reason.NO_TOKENIZER, "loading": Reason.LOADING}.get(self._local_state, Reason.LOAD_FAILED)
        return Reason.MISMATCH if self._check is not None and self._check.verdict == "mismatch" else None

    async def _from_local(self, prompt: Tokenizable, budget: Budget, body_bytes: int | None) -> _Found:
        if (refusal := self._refusal()) is not None:
            raise CannotTokenize(refusal)
        if self._is_too_large(prompt, body_bytes):
            raise CannotTokenize(Reason.TOO_LARGE)
        rest: Callable[[], _Found] = partial(self._tokenize, prompt)
        if body_bytes is not None and _is_at_once(prompt, body_bytes):
            rendered, lookup = self._look_up(prompt)
            if lookup.is_short:
                return _found(rendered, lookup)
            rest = partial(_found, rendered, lookup)
        if budget.local_s <= 0:
            raise CannotTokenize(Reason.LOCAL_TIMEOUT)
        began_s = self._shared.clock_s()
        try:
            return await self._shared.pool.run(rest, budget_s=budget.local_s)
        finally:
            budget.local_s -= self._shared.clock_s() - began_s

    def _look_up(self, prompt: Tokenizable) -> tuple[Rendered, local.Lookup]:
        assert self._local is not None  # noqa: S101 - `_refusal` has looked
        if self._harmony and isinstance(prompt, ChatPrompt):
            raise CannotTokenize(Reason.HARMONY)
        rendered = self._local.text_of(prompt)
        return rendered, self._local.look_up(
            rendered.text, add_special_tokens=prompt.add_special_tokens, part=prompt.part
        )

    def _tokenize(self, prompt: Tokenizable) -> _Found:
        """Renders and encodes; runs in a worker thread."""
        return _found(*self._look_up(prompt))

    async def _from_engine(self, prompt: Tokenizable, budget: Budget, body_bytes: int | None) -> _Found:
        if self._settings.mode in ("local", "estimate"):
            raise CannotTokenize(Reason.MODE)
        if self.engine is None:
            raise CannotTokenize(Reason.NO_ENGINE)
        if self._is_too_large(prompt, body_bytes):
            raise CannotTokenize(Reason.TOO_LARGE)
        if self._harmony and isinstance(prompt, ChatPrompt):
            raise CannotTokenize(Reason.HARMONY)  # /tokenize renders the template, which such a chat never sees.
        if budget.engine_s <= 0:
            raise CannotTokenize(Reason.ENGINE_OVER_BUDGET)
        if self.engine.state() == "open":
            raise CannotTokenize(Reason.BREAKER_OPEN)
        body, prefix_only = tokenize_body(prompt, self.name, self._settings)
        key = IdCache.key(body, (2 * self._engine_seed) ^ prompt.part)
        ids = self._shared.cache.get(key, len(body))
        if ids is None:
            n_tokens = estimate.tokens_of(len(body), self._settings.bytes_per_token)
            began_s = self._shared.clock_s()
            try:
                ids = await self.engine.tokenize(body, n_tokens)
            finally:
                budget.engine_s -= self._shared.clock_s() - began_s
            self._shared.cache.put(key, ids)
        return _Found(ids, prefix_only, len(body) if prefix_only else 0)

    async def _verified_ids(self, prompt: Tokenizable) -> bytes:
        """Ids made without shortcuts, which are given up if they make others."""
        if self._local is None or (self._harmony and isinstance(prompt, ChatPrompt)):
            raise CannotTokenize(Reason.HARMONY if self._harmony else Reason.LOADING)
        return await self._shared.pool.run(partial(self._local.verified, prompt))

    def _maybe_sample(self, prompt: Tokenizable, ids: bytes) -> None:
        """Compares what was just served with the engine's ids or, where it is silent, with slower ones of ours."""
        if self._sample is not None and not self._sample.done():
            return
        if self._shared.rng.random() >= self._settings.check_rate:
            return
        if self._check is not None and self.engine is not None and self.engine.state() == "closed":
            self._sample = asyncio.create_task(self._compare_with_engine(self._check, prompt, ids))
        elif self._local is not None and self._local.shortcuts and self._shared.clock_s() >= self._verify_from_s:
            self._sample = asyncio.create_task(self._verify(prompt))

    async def _compare_with_engine(self, check: SelfCheck, prompt: Tokenizable, ids: bytes) -> None:
        await check.run_sample(prompt, ids)
        if check.verdict == "mismatch":
            self._warn_mismatch()

    async def _verify(self, prompt: Tokenizable) -> None:
        began_s = self._shared.clock_s()
        try:
            await self._verified_ids(prompt)
            self._verified += 1
        except CannotTokenize:
            return
        finally:
            now_s = self._shared.clock_s()
            self._verify_from_s = now_s + _REST * (now_s - began_s)

    def source(self) -> Source:
        """The source in force for the next prompt."""
        if self._refusal() is None:
            return "local"
        usable = self.engine is not None and self._settings.mode != "local" and self.engine.state() != "open"
        return "engine" if usable else "estimate"

    def status(self) -> dict[str, Any]:
        """What an operator wants to know; holds no prompt text."""
        engine, check = self.engine, self._check
        return {
            "source": self.source(),
            "why_not_local": self._refusal(),
            "last_reason": self._last_reason,
            "served": dict(self._served),
            "local": {
                "state": self._local_state,
                "path": self._path,
                "detail": self._local_detail,
                "verified": self._verified,
                **({} if self._local is None else self._local.status()),
            },
            "check": None
            if check is None
            else {
                "verdict": check.verdict,
                "done": check.done,
                "inconclusive": check.inconclusive,
                "mismatches": check.mismatches,
            },
            "engine": None
            if engine is None
            else {
                "breaker": engine.state(),
                "opened": engine.breaker.opened,
                "calls": engine.calls,
                "failures": engine.failures,
            },
        }

    async def _load(self) -> None:
        path = self._path or ""
        if not await asyncio.to_thread(os.path.exists, path):
            # A hub name as root is normal; a configured path that is not there is a fault.
            if path != self.root_path:
                self._failed(f"no such file or directory: {path}")
            else:
                self._local_state, self._local_detail = "none", "the model's root is not local"
            return
        try:
            async with self._shared.loading:
                found = self._shared.tokenizers.get(path)
                if found is None:
                    found = await asyncio.to_thread(local.load, path, self._settings, self._shared.cache)
                    self._shared.tokenizers[path] = found
        except local.LoadError as exc:
            self._failed(str(exc))
            return
        except Exception as exc:  # A tokenizer file is foreign input; a bad one must not take the service down.
            self._failed(f"{path}: {type(exc).__name__}")
            return
        self._local = found
        self._harmony = self._harmony or found.harmony
        self._local_state = "ready"
