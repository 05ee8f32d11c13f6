"""From an accepted request to its answer: sequences on an engine, stop strings, streams and whole bodies."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from bench.engine import answers, tokenizer
from bench.engine.driver import Driver, Stream
from bench.engine.protocol import ApiError, EngineDeadError, Generation
from bench.engine.request import Request


@dataclass(slots=True)
class Delta:
    """New text of one choice. `reason` is set on the last one."""

    index: int
    text: str
    ids: list[int]
    reason: str | None = None
    stop: Any = None


@dataclass(slots=True)
class Choice:
    """One sequence of a request and what the detokenizer has seen of it."""

    index: int
    prompt: list[int]
    stream: Stream
    stops: list[str]
    hold_chars: int
    text: str = ""
    sent_chars: int = 0
    ids: list[int] = field(default_factory=list)
    reason: str | None = None
    stop: str | None = None

    def take(self, token_id: int, ended: str | None) -> Delta:
        """Turn a new id into text; the end of a possible stop string is held back until it is decided."""
        self.text += tokenizer.decode([token_id])
        self.ids.append(token_id)
        self.reason = ended
        if self.stops:
            found = [(self.text.find(it, max(0, self.sent_chars - len(it) + 1)), it) for it in self.stops]
            hits = [hit for hit in found if hit[0] >= 0]
            if hits:
                end, self.stop = min(hits)
                self.text, self.reason = self.text[:end], "stop"
        upto = len(self.text) if self.reason else max(self.sent_chars, len(self.text) - self.hold_chars)
        delta = Delta(self.index, self.text[self.sent_chars : upto], [token_id], self.reason, self.stop)
        self.sent_chars = upto
        return delta


class Run:
    """All sequences of one HTTP request on one engine. Use as a context manager: leaving it frees what still runs."""

    def __init__(self, job: Generation, driver: Driver, entropy: int, suffix: str, remote: bool, hold: bool, rank: int):
        self.job = job
        self.rank = rank
        self.driver = driver
        self.choices: list[Choice] = []
        self.created = int(time.time())
        hold_chars = max((len(stop) for stop in job.stops), default=1) - 1
        try:
            for number, prompt in enumerate(job.prompts):
                for child in range(job.n):
                    index = number * job.n + child
                    draw = job.draw(number, child, entropy)
                    request = Request(
                        request_id=job.engine_request_id(number, child, suffix),
                        prompt_token_ids=prompt,
                        max_tokens=job.max_tokens[number],
                        seed=draw,
                        stop_after=job.stop_after(draw),
                        stop_token_ids=job.stop_token_ids,
                        lora_id=job.model.lora_id,
                        lora_name=job.model.lora_name,
                        cache_salt=job.cache_salt,
                        session_id=job.session_id,
                        report_full=job.report_full,
                        remote_tokens=len(prompt) if remote else 0,
                        hold_blocks=hold,
                    )
                    self.choices.append(Choice(index, prompt, driver.submit(request), job.stops, hold_chars))
        except ValueError as error:
            self.close()
            raise ApiError(400, str(error)) from None

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for choice in self.choices:
            if choice.stream.reason is None and choice.reason is None:
                self.driver.cancel(choice.stream.request.request_id)

    async def deltas(self) -> AsyncIterator[Delta]:
        """New text of any choice, in order of appearance, until every choice ended; ApiError if the engine dies."""
        if len(self.choices) == 1:
            async for delta in self._follow(self.choices[0]):
                yield delta
            return
        queue: asyncio.Queue[Delta | BaseException] = asyncio.Queue()

        async def pump(choice: Choice) -> None:
            try:
                async for delta in self._follow(choice):
                    queue.put_nowait(delta)
            except ApiError as error:
                queue.put_nowait(error)

        pumps = [asyncio.create_task(pump(choice)) for choice in self.choices]
        open_choices = len(pumps)
        try:
            while open_choices:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                open_choices -= item.reason is not None
                yield item
        finally:
            for task in pumps:
                task.cancel()

    async def _follow(self, choice: Choice) -> AsyncIterator[Delta]:
        while True:
            ids = await choice.stream.read()
            if not ids:
                raise (
                    EngineDeadError
                    if self.driver.dead
                    else ApiError(500, "Internal server error", "InternalServerError")
                )
            ended = choice.stream.reason
            # A slow reader finds several tokens: one delta each, as the engine's steps made them.
            for left, token_id in zip(range(len(ids) - 1, -1, -1), ids, strict=True):
                delta = choice.take(token_id, None if left else ended)
                if delta.reason is not None and ended is None:
                    self.driver.cancel(choice.stream.request.request_id, "stop")
                yield delta
                if delta.reason is not None:
                    return

    def cached_tokens(self) -> int:
        """Of the first sequence of each prompt. What a decode request says the prefill side had cached replaces what
        was cached or pulled here, whether anything was pulled or not (vLLM's output processor)."""
        params = self.job.kv_transfer_params or {}
        told = params.get("remote_prefill_cached_tokens") if params.get("do_remote_prefill") else None
        if isinstance(told, int):
            return told * len(self.job.prompts)
        return self._present_tokens()

    def _present_tokens(self) -> int:
        admitted = [choice.stream.admitted for choice in self.choices[:: self.job.n]]
        return sum(it.cached_tokens + it.remote_tokens for it in admitted if it is not None)

    def created_tokens(self) -> int:
        """Prompt tokens that were computed into full, cacheable blocks (told by the chat APIs only)."""
        size = self.driver.engine.config.block_size
        full = sum(len(it) // size * size for it in self.job.prompts)
        return max(0, full - self._present_tokens())

    def usage(self, details: bool, *, full: bool) -> dict[str, Any]:
        prompt = sum(len(it) for it in self.job.prompts)
        generated = sum(len(choice.ids) for choice in self.choices)
        shown: dict[str, Any] | None = {"cached_tokens": self.cached_tokens()} if details else None
        if shown is not None:
            if self.job.is_chat:
                shown["created_cache_tokens"] = self.created_tokens()
            if full:
                shown.setdefault("created_cache_tokens", None)
                shown["multimodal_tokens"] = None
        return answers.usage(prompt, generated, shown, full=full)
