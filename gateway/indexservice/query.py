"""An indexer asked once for each request, within a budget. No copy is kept: less memory here, decisions that wait.

A request never waits longer than the budget: then it is decided by what is known here, which is what was sent lately.
An answer that comes after that still counts if the request has to be decided again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import msgspec
import xxhash

from gateway.engine.feed import FeedStatus
from gateway.indexservice.addresses import Addresses
from gateway.indexservice.followed import Followed
from gateway.indexservice.server import SERVICE
from gateway.indexservice.wire import little_endian, match_of, status_of
from gateway.pb import indexer_pb2 as pb
from indexer import Holder, Match, PrefixIndex, Prompt
from indexer.keys import Tokens
from scorer.types import RequestFacts

_log = logging.getLogger(__name__)
_POLL_S = 1.0
_POLL_TIMEOUT_S = 2.0
_LEAST_WAIT_S = 0.02
_LATE_S = 2.0
"""So long an answer is still waited for, if not by the request."""
_MOST_ANSWERS = 1024
_ANSWER_TTL_S = 60.0
_CLOSE_S = 5.0

_Name = tuple[bytes, str | None, str | None, str | None]
"""(digest of the token ids, cache salt, model, adapter)"""


class _Unready(Exception):
    """It has said so itself."""


class _Answer(msgspec.Struct):
    """`found` None: it has not come, and was not waited for any longer."""

    found: dict[Holder, Match] | None
    at_s: float


class AskedIndex(PrefixIndex):
    """Knows what an indexer has answered about a prompt, and how much each holder has by its own count."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: OrderedDict[_Name, _Answer] = OrderedDict()
        self.held: dict[Holder, pb.HolderStats] = {}

    def match(
        self,
        tokens: Tokens | Prompt,
        *,
        model: str | None = None,
        lora: str | int | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> dict[Holder, Match]:
        """As it was answered; nothing for what was not asked."""
        prompt = tokens if isinstance(tokens, Prompt) else Prompt(tokens, cache_salt=cache_salt)
        name = _name(prompt.data, prompt.cache_salt, model, lora if isinstance(lora, str) else None)
        answer = self.answers.get(name)
        return {} if answer is None or answer.found is None else dict(answer.found)

    def blocks(self, worker: str) -> int:
        return sum(it.resident_blocks for it in list(self.held.values()) if it.worker == worker)

    def resident_blocks(self, holder: Holder) -> int:
        held = self.held.get(holder)
        return 0 if held is None else held.resident_blocks

    def held_tokens(self) -> dict[Holder, dict[str, int]]:
        return {
            holder: {"gpu": it.gpu_tokens, "cpu": it.cpu_tokens, "disk": it.disk_tokens, "other": 0}
            for holder, it in list(self.held.items())
        }


class QueryLink(Followed):
    """An `Intake` whose workers an indexer knows. Create it inside a running event loop, which is where it lives."""

    def __init__(self, addresses: Addresses, index: AskedIndex, *, budget_s: float) -> None:
        super().__init__(addresses)
        self._index = index
        self._budget_s = budget_s
        self._loop = asyncio.get_running_loop()
        self._channel: grpc.aio.Channel | None = None
        self._look_now = asyncio.Event()
        self._asking: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    # ---- each request ------------------------------------------------------------------------------------------------

    async def ask(self, facts: RequestFacts) -> None:
        """Ask about its prompt and wait for the answer, no longer than the budget."""
        channel = self._channel
        if facts.tokens is None or channel is None or not self.is_live:
            return
        name = _name(facts.tokens, facts.cache_salt, facts.model, facts.lora)
        answers = self._index.answers
        answers[name] = _Answer(None, time.monotonic())
        answers.move_to_end(name)
        while len(answers) > _MOST_ANSWERS:
            answers.popitem(last=False)
        task = self._loop.create_task(self._match(channel, name, facts), name="index query")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        done, _ = await asyncio.wait({task}, timeout=self._budget_s)
        if not done:
            self._counters["late"] += 1

    async def _match(self, channel: grpc.aio.Channel, name: _Name, facts: RequestFacts) -> None:
        assert facts.tokens is not None  # noqa: S101 - `ask` has seen to it
        request = pb.MatchRequest(
            model=facts.model,
            lora=facts.lora or "",
            cache_salt=facts.cache_salt or "",
            token_ids=little_endian(facts.tokens),
        )
        method = channel.unary_unary(
            f"/{SERVICE}/Match", pb.MatchRequest.SerializeToString, pb.MatchResponse.FromString
        )
        try:
            answer = await method(request, timeout=_LATE_S, metadata=self._addresses.metadata)
        except grpc.aio.AioRpcError as exc:
            self._counters["failed"] += 1
            self.problem = exc.details() or exc.code().name
            self._look_now.set()
            return
        except asyncio.CancelledError:
            raise
        except Exception:
            self._counters["unexpected"] += 1
            _log.exception("unexpected while asking the indexer; going on")
            return
        self._counters["answered"] += 1
        known = self._index.answers.get(name)
        if known is not None:
            known.found = {(it.worker, it.rank): match_of(it) for it in answer.holdings}

    def note(self, facts: RequestFacts) -> str | None:
        if self.is_stale or not self.is_live:
            return "index unknown"
        if facts.tokens is None:
            return None
        answer = self._index.answers.get(_name(facts.tokens, facts.cache_salt, facts.model, facts.lora))
        return "index late" if answer is None or answer.found is None else None

    # ---- an intake ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = self._loop.create_task(self._poll(), name="index service")

    def stop(self) -> None:
        """From another thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_CLOSE_S)

    def forget(self, worker: str, reason: str) -> None:
        """Told to the indexer."""
        for answer in list(self._index.answers.values()):
            if answer.found is not None:
                answer.found = {holder: match for holder, match in answer.found.items() if holder[0] != worker}
        channel = self._channel
        if channel is not None:
            self._loop.call_soon_threadsafe(self._tell_to_forget, channel, worker)

    def degraded(self) -> Iterator[tuple[str, str]]:
        if self.is_stale:
            age_s = time.monotonic() - self._live_until_s
            why = self.problem or "none has answered yet"
            yield "indexer_lost", f"no indexer has answered for {age_s:.0f} s; {self.address}: {why}"

    def status(self) -> dict[Holder, FeedStatus]:
        stale = self.is_stale
        return {
            holder: status_of(holder, it.feed, stale=stale, heard_s_ago=None)
            for holder, it in list(self._index.held.items())
            if it.HasField("feed")
        }

    def counters(self) -> dict[str, int]:
        return {f"query_{name}": n for name, n in list(self._counters.items())}

    def replay_levels(self) -> dict[str, int]:
        return {}

    def unmatched_topics(self) -> dict[str, int]:
        return {}

    # ---- how the indexer is ------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        while True:
            try:
                await self._look()
                wait_s = _POLL_S
            except grpc.aio.AioRpcError as exc:
                wait_s = await self._lost(f"{exc.code().name}: {exc.details()}")
            except _Unready as exc:
                wait_s = await self._lost(str(exc))
            except Exception as exc:
                _log.exception("unexpected while asking the indexer how it is; going on")
                wait_s = await self._lost(type(exc).__name__) + _POLL_S
            self._look_now.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), max(wait_s, _LEAST_WAIT_S))

    async def _look(self) -> None:
        channel = self._channel
        if channel is None:
            options, credentials = self._addresses.options(), self._addresses.credentials()
            if credentials is None:
                channel = grpc.aio.insecure_channel(self.address, options)
            else:
                channel = grpc.aio.secure_channel(self.address, credentials, options)
            self._channel = channel
        method = channel.unary_unary(
            f"/{SERVICE}/Stats", pb.StatsRequest.SerializeToString, pb.StatsResponse.FromString
        )
        stats = await method(pb.StatsRequest(), timeout=_POLL_TIMEOUT_S, metadata=self._addresses.metadata)
        if not stats.ready:
            raise _Unready("it is still catching up, or going down")
        if not self.is_live:
            _log.info("asking the indexer at %s", self.address)
        before, self._index.held = self._index.held, {(it.worker, it.rank): it for it in stats.holders}
        self._addresses.worked()
        self.is_live, self.problem, self._live_until_s = True, None, time.monotonic()
        for holder, it in self._index.held.items():
            known = before.get(holder)
            if known is not None and known.feed.epoch != it.feed.epoch:
                self.on_clear(*holder, "its indexer says so")
            if known is None or known.feed.batches != it.feed.batches:
                self.on_news(*holder)
        self._expire()

    def _expire(self) -> None:
        answers, until_s = self._index.answers, time.monotonic() - _ANSWER_TTL_S
        while answers and next(iter(answers.values())).at_s < until_s:
            answers.popitem(last=False)

    async def _lost(self, why: str) -> float:
        """How long to wait before the next one is tried."""
        if self.is_live:
            _log.warning("the indexer at %s is lost: %s", self.address, why)
        self._counters["lost"] += 1
        self.is_live, self.problem = False, why
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
        return self._addresses.failed()

    def _tell_to_forget(self, channel: grpc.aio.Channel, worker: str) -> None:
        task = self._loop.create_task(self._forget(channel, worker), name="index forget")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _forget(self, channel: grpc.aio.Channel, worker: str) -> None:
        method = channel.unary_unary(
            f"/{SERVICE}/Forget", pb.ForgetRequest.SerializeToString, pb.ForgetResponse.FromString
        )
        try:
            await method(pb.ForgetRequest(worker=worker), timeout=_POLL_TIMEOUT_S, metadata=self._addresses.metadata)
        except grpc.aio.AioRpcError as exc:
            self._counters["forgets_failed"] += 1
            _log.warning("the indexer was not told that the cache of %s is empty: %s", worker, exc.details())

    async def _close(self) -> None:
        tasks = [*self._asking, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()


def _name(tokens: bytes, cache_salt: str | None, model: str | None, lora: str | None) -> _Name:
    return xxhash.xxh3_128_digest(tokens), cache_salt, model, lora
