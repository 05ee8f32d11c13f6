"""Token ids from the engine's own ``/tokenize``, within a time budget and behind a circuit breaker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from gateway.tokens import estimate
from gateway.tokens.breaker import CircuitBreaker
from gateway.tokens.given import ChatPrompt, TextPrompt
from gateway.tokens.render import template_kwargs, tools_of
from gateway.tokens.settings import TokenSettings
from gateway.tokens.types import CannotTokenize, EngineTokenize, Json, Reason, pack_ids

if TYPE_CHECKING:
    import aiohttp

_AUTH_OR_GONE = frozenset({401, 403, 404, 405, 408, 429})


class _Answer(msgspec.Struct):
    tokens: list[int]


_decoder = msgspec.json.Decoder(_Answer)


def aiohttp_tokenize(
    session: aiohttp.ClientSession,
    base_url: str,
    headers: Mapping[str, str] | None = None,
    server_name: str | None = None,
) -> EngineTokenize:
    """POSTs to ``{base_url}/tokenize`` through `session`."""
    url = base_url.rstrip("/") + "/tokenize"
    sent = {**(headers or {}), "Content-Type": "application/json"}

    async def call(body: bytes) -> tuple[int, bytes]:
        async with session.post(
            url, data=body, headers=sent, allow_redirects=False, server_hostname=server_name
        ) as response:
            return response.status, await response.read()

    return call


class EngineTokenizer:
    """One engine's ``/tokenize``. Never waits longer than its budget, never queues."""

    def __init__(
        self, call: EngineTokenize, settings: TokenSettings, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.call = call
        self.breaker = CircuitBreaker(
            failures=settings.breaker_failures, open_s=settings.breaker_open_s, open_max_s=settings.breaker_open_max_s
        )
        self._settings = settings
        self._clock_s = clock_s
        self._inflight = 0
        self.calls = 0
        self.failures = 0

    async def tokenize(self, body: bytes, n_tokens: int) -> bytes:
        """Token ids, uint32 little-endian, for a ``/tokenize`` body of about `n_tokens` tokens.

        Raises CannotTokenize, always within the budget.
        """
        length_s = self._settings.engine_s_per_token * n_tokens
        if length_s > self._settings.engine_length_max_s:
            raise CannotTokenize(Reason.ENGINE_OVER_BUDGET)
        if self._inflight >= self._settings.engine_max_inflight:
            raise CannotTokenize(Reason.ENGINE_BUSY)
        ticket = self.breaker.enter(self._clock_s())
        if ticket is None:
            raise CannotTokenize(Reason.BREAKER_OPEN)
        self._inflight += 1
        try:
            ids = await self.ask(body, self._settings.engine_budget_s + length_s)
        except CannotTokenize as exc:
            if exc.reason is Reason.ENGINE_REJECTED:  # It is well; the prompt is not.
                self.breaker.success(ticket)
            else:
                self.failures += 1
                self.breaker.failure(ticket, self._clock_s())
            raise
        except BaseException:
            self.breaker.abandon(ticket)
            raise
        else:
            self.breaker.success(ticket)
            return ids
        finally:
            self._inflight -= 1

    async def ask(self, body: bytes, budget_s: float) -> bytes:
        """As `tokenize`, but for background work: its own budget, and the breaker neither asked nor told."""
        self.calls += 1
        try:
            async with asyncio.timeout(budget_s):
                status, answer = await self.call(body)
        except TimeoutError as exc:
            raise CannotTokenize(Reason.ENGINE_TIMEOUT) from exc
        except Exception as exc:  # Whatever the transport raises means one thing: no ids.
            raise CannotTokenize(Reason.ENGINE_ERROR) from exc
        return _ids(status, answer)

    def state(self) -> str:
        return self.breaker.state(self._clock_s())


def _ids(status: int, answer: bytes) -> bytes:
    if status != 200:
        refused = 400 <= status < 500 and status not in _AUTH_OR_GONE
        raise CannotTokenize(Reason.ENGINE_REJECTED if refused else Reason.ENGINE_ERROR)
    with suppress(msgspec.MsgspecError, TypeError, OverflowError):
        return pack_ids(_decoder.decode(answer).tokens)
    raise CannotTokenize(Reason.ENGINE_ERROR)


def tokenize_body(prompt: TextPrompt | ChatPrompt, model: str, settings: TokenSettings) -> tuple[bytes, bool]:
    """The ``/tokenize`` body for `prompt`, and whether it covers only the messages before the first media part.

    Media never goes along: the engine would fetch and decode it. Raises CannotTokenize.
    """
    try:
        if isinstance(prompt, TextPrompt):
            body: Json = {"model": model, "prompt": prompt.text, "add_special_tokens": prompt.add_special_tokens}
            return msgspec.json.encode(body), False
        return _chat_body(prompt, model, settings)
    except (TypeError, ValueError, AttributeError, msgspec.MsgspecError) as exc:
        raise CannotTokenize(Reason.MALFORMED) from exc


def _chat_body(chat: ChatPrompt, model: str, settings: TokenSettings) -> tuple[bytes, bool]:
    messages = [_renamed(message) for message in chat.messages]
    if chat.api == "messages" and any(message["role"] == "system" for message in messages[1:]):
        raise CannotTokenize(Reason.UNSUPPORTED)  # Where vLLM puts them depends on a template we do not have.
    prefix_only = estimate.media_parts(messages) > 0
    if prefix_only:
        messages = messages[: next(i for i, message in enumerate(messages) if estimate.media_parts([message]))]
        if not messages:
            raise CannotTokenize(Reason.MEDIA)
    # /tokenize has no fields of its own for documents and reasoning effort, but passes template kwargs on.
    kwargs = template_kwargs(chat.body, {})
    add_generation_prompt = bool(kwargs.pop("add_generation_prompt", False)) and not prefix_only
    continue_final_message = bool(kwargs.pop("continue_final_message", False)) and not prefix_only
    body: Json = {
        "model": model,
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "add_special_tokens": chat.add_special_tokens,
    }
    if kwargs:
        body["chat_template_kwargs"] = kwargs
    if (template := chat.body.get("chat_template")) is not None:
        body["chat_template"] = template
    if (tools := tools_of(chat.body, settings)) is not None:
        body["tools"] = tools
    return msgspec.json.encode(body), prefix_only


def _renamed(message: Json) -> Json:
    """/tokenize, unlike /v1/chat/completions, does not know the old name of `reasoning`."""
    if "reasoning_content" not in message:
        return message
    message = dict(message)
    reasoning = message.pop("reasoning_content")
    if reasoning is not None and message.get("reasoning") is None:
        message["reasoning"] = reasoning
    return message
