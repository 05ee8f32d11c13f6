"""The engine's /tokenize over real HTTP: slow, failing, wrong, refusing, gone, and well again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.tokens import Tokens, TokenService, TokenSettings, aiohttp_tokenize
from gateway.tokens.given import ChatPrompt, TextPrompt, prompts_of
from gateway.tokens.local import LocalTokenizer, load
from tests.support.token_models import make_model, reference_ids

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


class StubEngine:
    """A server with vLLM's /tokenize, which a test can make ill."""

    def __init__(self, local: LocalTokenizer) -> None:
        self._local = local
        self.mood = "well"
        self.calls = 0
        self.cancelled = 0
        self.url = ""
        self._release = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_route("*", "/elsewhere", self._elsewhere)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        self._release.set()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _elsewhere(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"count": 1, "max_model_len": 4096, "tokens": [1], "token_strs": None})

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        self.calls += 1
        mood = self.mood
        body = await request.json()
        if mood == "slow":
            try:
                await self._release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if mood == "failing":
            return web.json_response({"error": {"message": "engine dead"}}, status=500)
        if mood == "refusing":
            return web.json_response({"error": {"message": "bad chat"}}, status=400)
        if mood == "absent":
            raise web.HTTPNotFound
        if mood == "redirecting":
            raise web.HTTPFound("/elsewhere")
        if mood == "babbling":
            return web.Response(body=b"<html>", content_type="text/html")
        if mood == "negative":
            return web.json_response({"tokens": [-1], "count": 1})
        if mood == "hanging up":
            assert request.transport is not None
            request.transport.abort()
        (prompt,) = prompts_of("completions" if "prompt" in body else "chat", body)
        assert isinstance(prompt, ChatPrompt | TextPrompt)
        ids = reference_ids(self._local.text_of(prompt).text, add_special_tokens=prompt.add_special_tokens)
        if mood == "wrong":
            ids = ids[:-1]
        return web.json_response({"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama3")


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[StubEngine]:
    stub = StubEngine(load(str(folder), TokenSettings()))
    await stub.start()
    yield stub
    await stub.stop()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Clock:
    """Time that passes when the test says so; only the breaker reads it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def make(
    engine: StubEngine, session: aiohttp.ClientSession, root: Path | None = None, **settings: Any
) -> tuple[TokenService, Clock]:
    clock = Clock()
    chosen = {"engine_budget_s": 10.0, "breaker_failures": 3, "check_rate": 0.0, "check_retry_s": 0.01} | settings
    service = TokenService(TokenSettings(**chosen), clock_s=clock)
    await service.start()
    service.set_model("m", None if root is None else str(root), aiohttp_tokenize(session, engine.url))
    return service, clock


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in other tasks
            await asyncio.sleep(0.005)


async def ask(service: TokenService, text: str) -> Tokens:
    async with asyncio.timeout(20):
        (tokens,) = await service.tokens_for("completions", {"prompt": text}, "m")
    return tokens


def breaker(service: TokenService) -> str:
    return str(service.status()["m"]["engine"]["breaker"])


async def test_ids_of_prompts_and_chats_come_from_the_engine(
    engine: StubEngine, session: aiohttp.ClientSession, folder: Path
) -> None:
    service, _ = await make(engine, session)
    text = await ask(service, "héllo 你好")
    assert list(text.as_array()) == reference_ids("héllo 你好", add_special_tokens=True)
    (chat,) = await service.tokens_for("chat", CHAT, "m")
    (prompt,) = prompts_of("chat", CHAT)
    assert isinstance(prompt, ChatPrompt)
    expected = load(str(folder), TokenSettings()).text_of(prompt).text
    assert list(chat.as_array()) == reference_ids(expected, add_special_tokens=False)
    assert (chat.source, chat.reason) == ("engine", "no_local_tokenizer")
    await service.close()


@pytest.mark.parametrize(
    ("mood", "reason"),
    [
        ("failing", "engine_error"),
        ("absent", "engine_error"),
        ("redirecting", "engine_error"),
        ("babbling", "engine_error"),
        ("negative", "engine_error"),
        ("hanging up", "engine_error"),
        ("slow", "engine_timeout"),
    ],
)
async def test_an_ill_engine_is_estimated_around_left_alone_and_taken_back(
    mood: str, reason: str, engine: StubEngine, session: aiohttp.ClientSession
) -> None:
    service, clock = await make(engine, session, engine_budget_s=0.5 if mood == "slow" else 10.0)
    engine.mood = mood
    for i in range(3):
        tokens = await ask(service, f"prompt {i}")
        assert (tokens.ids, tokens.source) == (None, "estimate")
        assert tokens.reason == f"no_local_tokenizer; {reason}"
        assert tokens.n_tokens == 2
    assert breaker(service) == "open"
    asked = engine.calls
    assert (await ask(service, "x")).reason == "no_local_tokenizer; engine_breaker_open"
    assert engine.calls == asked, "an open breaker asks nobody"
    assert service.status()["m"]["source"] == "estimate"
    clock.now_s += 1.0
    assert (await ask(service, "y")).ids is None
    assert engine.calls == asked + 1
    assert breaker(service) == "open"
    engine.mood = "well"
    clock.now_s += 1.0
    assert (await ask(service, "z")).reason == "no_local_tokenizer; engine_breaker_open", "the wait has doubled"
    clock.now_s += 1.0
    await service.close()


async def test_the_probe_brings_a_recovered_engine_back(engine: StubEngine, session: aiohttp.ClientSession) -> None:
    service, clock = await make(engine, session)
    engine.mood = "failing"
    for i in range(3):
        await ask(service, f"prompt {i}")
    engine.mood = "well"
    clock.now_s += 1.0
    assert breaker(service) == "half_open"
    assert (await ask(service, "w")).source == "engine"
    assert breaker(service) == "closed"
    assert service.status()["m"]["engine"]["opened"] == 1
    await service.close()


async def test_half_open_costs_one_caller_only(engine: StubEngine, session: aiohttp.ClientSession) -> None:
    service, clock = await make(engine, session)
    engine.mood = "failing"
    for i in range(3):
        await ask(service, f"prompt {i}")
    engine.mood = "slow"
    clock.now_s += 1.0
    asked = engine.calls
    probe = asyncio.create_task(ask(service, "probe"))
    await until(lambda: engine.calls == asked + 1)
    others = await asyncio.gather(*(ask(service, f"other {i}") for i in range(20)))
    assert {t.reason for t in others} == {"no_local_tokenizer; engine_breaker_open"}
    assert engine.calls == asked + 1
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    engine.mood = "well"
    assert (await ask(service, "next")).source == "engine", "a probe whose client left is given to the next"
    await service.close()


async def test_a_refused_chat_is_no_illness(engine: StubEngine, session: aiohttp.ClientSession) -> None:
    service, _ = await make(engine, session)
    engine.mood = "refusing"
    for i in range(10):
        assert (await ask(service, f"bad {i}")).reason == "no_local_tokenizer; engine_rejected"
    assert breaker(service) == "closed"
    await service.close()


async def test_a_late_answer_is_hung_up_on(engine: StubEngine, session: aiohttp.ClientSession) -> None:
    service, _ = await make(engine, session, engine_budget_s=1.0)
    engine.mood = "slow"
    assert (await ask(service, "x")).reason == "no_local_tokenizer; engine_timeout"
    await until(lambda: engine.cancelled == 1)
    await service.close()


async def test_no_more_calls_at_once_than_allowed(engine: StubEngine, session: aiohttp.ClientSession) -> None:
    service, _ = await make(engine, session, engine_max_inflight=2)
    engine.mood = "slow"
    waiting = [asyncio.create_task(ask(service, f"p{i}")) for i in range(2)]
    await until(lambda: engine.calls == 2)
    assert (await ask(service, "third")).reason == "no_local_tokenizer; engine_busy"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    engine.mood = "well"
    assert (await ask(service, "fourth")).source == "engine"
    await service.close()


async def test_a_prompt_too_long_for_the_budget_is_not_sent(engine: StubEngine, session: aiohttp.ClientSession) -> None:
    service, _ = await make(engine, session, engine_s_per_token=1e-3, engine_length_max_s=0.1)
    tokens = await ask(service, "x" * 4000)
    assert (tokens.reason, tokens.n_tokens) == ("no_local_tokenizer; engine_over_budget", 1000)
    assert engine.calls == 0
    assert breaker(service) == "closed"
    await service.close()


async def test_an_engine_that_is_not_there(session: aiohttp.ClientSession, engine: StubEngine) -> None:
    service, _ = await make(engine, session)
    await engine.stop()
    assert (await ask(service, "x")).reason == "no_local_tokenizer; engine_error"
    await service.close()


async def test_wrong_ids_put_the_local_tokenizer_aside_until_another_engine_agrees(
    engine: StubEngine, session: aiohttp.ClientSession, folder: Path
) -> None:
    engine.mood = "wrong"
    service, _ = await make(engine, session, folder)
    await until(lambda: service.status()["m"]["check"]["verdict"] == "mismatch")
    tokens = await ask(service, "hello world")
    assert (tokens.source, tokens.reason) == ("engine", "local_mismatch")
    engine.mood = "well"
    service.set_model("m", str(folder), aiohttp_tokenize(session, engine.url))
    await until(lambda: service.status()["m"]["check"]["verdict"] == "verified")
    assert (await ask(service, "hello world")).source == "local"
    await service.close()


@pytest.mark.parametrize("mood", ["slow", "failing"])
async def test_an_ill_engine_does_not_stop_the_local_tokenizer(
    mood: str, engine: StubEngine, session: aiohttp.ClientSession, folder: Path
) -> None:
    engine.mood = mood
    service, _ = await make(engine, session, folder, check_budget_s=0.5)
    await until(lambda: engine.calls >= 2)
    tokens = await ask(service, "hello world")
    assert (tokens.source, tokens.reason) == ("local", None)
    status = service.status()["m"]
    assert (status["check"]["verdict"], status["engine"]["breaker"]) == ("unverified", "closed")
    engine.mood = "well"
    await until(lambda: service.status()["m"]["check"]["verdict"] == "verified")
    await service.close()
