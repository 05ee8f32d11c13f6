"""Order of sources, the check and the status, with an engine that is a Python function."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.debug import health
from gateway.tokens import TokenService, TokenSettings
from gateway.tokens.cache import new_seed
from gateway.tokens.encoder import PlainEncoder
from gateway.tokens.local import LocalTokenizer, Lookup, load
from gateway.tokens.selfcheck import SelfCheck, Tokenizable
from gateway.tokens.types import CannotTokenize, EngineTokenize, Reason, pack_ids
from tests.support.token_models import make_model, reference_ids, tokenizer_json

USER = {"role": "user", "content": "What is the capital of France?"}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}


class Engine:
    """Answers /tokenize as vLLM would with the model in `folder`; counts and keeps what it was asked."""

    def __init__(self, folder: Path, shift: int = 0) -> None:
        self.local = load(str(folder), TokenSettings(trust_request_chat_template=True))
        self.shift = shift
        self.status = 200
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, body: bytes) -> tuple[int, bytes]:
        asked = json.loads(body)
        self.asked.append(asked)
        if self.status != 200:
            return self.status, b"{}"
        ids = engine_ids(self.local, asked)
        return 200, json.dumps({"count": len(ids), "tokens": [i + self.shift for i in ids]}).encode()


def engine_ids(local: LocalTokenizer, asked: dict[str, Any]) -> list[int]:
    from gateway.tokens.given import ChatPrompt, TextPrompt, prompts_of

    (prompt,) = prompts_of("completions" if "prompt" in asked else "chat", asked)
    assert isinstance(prompt, ChatPrompt | TextPrompt)
    text = local.text_of(prompt).text
    return reference_ids(text, add_special_tokens=prompt.add_special_tokens)


@asynccontextmanager
async def serving(
    root: Path | str | None, engine: EngineTokenize | None = None, **settings: Any
) -> AsyncIterator[TokenService]:
    defaults = {"check_rate": 0.0, "engine_budget_s": 5.0, "local_budget_s": 30.0}
    service = TokenService(TokenSettings(**defaults | settings), rng=random.Random(1))
    await service.start()
    service.set_model("m", None if root is None else str(root), engine)
    try:
        yield service
    finally:
        await service.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in other threads and tasks
            await asyncio.sleep(0.005)


def verdict(service: TokenService) -> str:
    check = service.status()["m"]["check"]
    return str(check["verdict"]) if check else "none"


def loaded(service: TokenService) -> bool:
    return bool(service.status()["m"]["local"]["state"] not in ("loading",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "chatml")


async def test_given_ids_need_nobody() -> None:
    async with serving(None) as service:
        (tokens,) = await service.tokens_for("completions", {"prompt": [3, 4, 5]}, "never heard of")
        assert (tokens.ids, tokens.n_tokens, tokens.source, tokens.reason) == (pack_ids([3, 4, 5]), 3, "given", None)


async def test_local_is_used_and_verified_against_the_engine(folder: Path) -> None:
    engine = Engine(folder)
    async with serving(folder, engine) as service:
        await until(lambda: verdict(service) == "verified")
        asked = len(engine.asked)
        (tokens,) = await service.tokens_for("chat", CHAT, "m")
        expected = reference_ids(
            f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
        )
        assert list(tokens.as_array()) == expected
        assert (tokens.n_tokens, tokens.source, tokens.reason) == (len(expected), "local", None)
        assert len(engine.asked) == asked, "the engine is not asked when the local tokenizer answers"
        status = service.status()["m"]
        assert status["source"] == "local"
        assert status["check"]["done"] >= 10
        assert status["check"]["mismatches"] == 0
        assert status["served"] == {"local": 1}


async def test_a_mismatch_switches_to_the_engine_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(folder, Engine(folder, shift=1)) as service:
        await until(lambda: verdict(service) == "mismatch")
        await until(lambda: caplog.messages)
        assert [f"the tokenizer at {folder} gives other ids" in message for message in caplog.messages] == [True]
        (tokens,) = await service.tokens_for("completions", {"prompt": "hi"}, "m")
        assert tokens.source == "engine"
        assert list(tokens.as_array()) == [i + 1 for i in reference_ids("hi", add_special_tokens=True)]
        assert tokens.reason == "local_mismatch"
        status = service.status()["m"]
        assert (status["source"], status["why_not_local"]) == ("engine", "local_mismatch")
        assert status["check"]["mismatches"] == 1


async def test_another_engine_clears_a_mismatch(folder: Path) -> None:
    async with serving(folder, Engine(folder, shift=1)) as service:
        await until(lambda: verdict(service) == "mismatch")
        good = Engine(folder)
        service.set_model("m", str(folder), good)
        await until(lambda: verdict(service) == "verified")
        asked = len(good.asked)
        service.set_model("m", str(folder), good)
        await asyncio.sleep(0)
        assert len(good.asked) == asked
        assert verdict(service) == "verified", "the same arguments change nothing"
        service.set_model("m", str(folder), None)
        assert service.status()["m"]["check"] is None
        assert (await service.tokens_for("chat", CHAT, "m"))[0].source == "local"


async def test_a_sample_finds_what_the_fixed_cases_miss(folder: Path) -> None:
    class Treacherous(Engine):
        async def __call__(self, body: bytes) -> tuple[int, bytes]:
            self.shift = int(b"secret" in body)
            return await super().__call__(body)

    async with serving(folder, Treacherous(folder), check_rate=1.0) as service:
        await until(lambda: verdict(service) == "verified")
        (tokens,) = await service.tokens_for("completions", {"prompt": "the secret word"}, "m")
        assert tokens.source == "local"
        await until(lambda: verdict(service) == "mismatch")


async def test_a_template_that_prints_the_time_gets_a_second_look(folder: Path) -> None:
    class Midnight(Engine):
        async def __call__(self, body: bytes) -> tuple[int, bytes]:
            self.shift = int(len(self.asked) == 0)
            return await super().__call__(body)

    async with serving(folder, Midnight(folder)) as service:
        await until(lambda: verdict(service) == "verified")


async def test_unverified_until_the_engine_answers(folder: Path) -> None:
    engine = Engine(folder)
    engine.status = 503
    async with serving(folder, engine, check_retry_s=0.01) as service:
        await until(lambda: loaded(service) and len(engine.asked) >= 3)
        assert verdict(service) == "unverified"
        (tokens,) = await service.tokens_for("chat", CHAT, "m")
        assert tokens.source == "local"
        engine.status = 200
        await until(lambda: verdict(service) == "verified")


async def test_no_local_tokenizer_means_engine(folder: Path) -> None:
    engine = Engine(folder)
    async with serving("org/some-model", engine) as service:
        await until(lambda: loaded(service))
        (tokens,) = await service.tokens_for("chat", CHAT, "m")
        assert (tokens.source, tokens.reason) == ("engine", "no_local_tokenizer")
        assert tokens.n_tokens == len(tokens.as_array()) > 0
        local = service.status()["m"]["local"]
        assert (local["state"], local["detail"]) == ("none", "the model's root is not local")
        again = await service.tokens_for("chat", CHAT, "m")
        assert again == [tokens]
        assert len(engine.asked) == 1, "the same prompt again comes from the cache"


async def test_a_configured_path_beats_the_model_card_and_must_exist(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving("org/x", None, tokenizer_paths={"m": str(folder)}) as service:
        await until(lambda: loaded(service))
        assert (await service.tokens_for("chat", CHAT, "m"))[0].source == "local"
    assert caplog.messages == []
    async with serving(folder, None, tokenizer_paths={"*": "/no/such/place"}) as service:
        service.set_model("an adapter", str(folder))
        await until(lambda: loaded(service))
        await until(lambda: service.status()["an adapter"]["local"]["state"] == "failed")
        assert len(caplog.messages) == 1
        assert "cannot be loaded: no such file or directory: /no/such/place" in caplog.messages[0]
        (tokens,) = await service.tokens_for("chat", CHAT, "m")
        assert (tokens.ids, tokens.source, tokens.reason) == (None, "estimate", "local_load_failed; no_engine")
        assert "/no/such/place" in service.status()["m"]["local"]["detail"]


async def test_the_engine_gets_what_the_chat_endpoint_would_use(folder: Path) -> None:
    engine = Engine(folder)
    body = {
        **CHAT,
        "messages": [USER, {"role": "assistant", "content": "x", "reasoning_content": "why"}],
        "documents": [{"title": "t", "text": "d"}],
        "reasoning_effort": "none",
        "chat_template_kwargs": {"flavour": "fig"},
        "add_generation_prompt": False,
        "continue_final_message": True,
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    async with serving(None, engine) as service:
        (tokens,) = await service.tokens_for("chat", body, "m")
    assert tokens.source == "engine"
    (asked,) = engine.asked
    assert asked["model"] == "m"
    assert asked["messages"][1] == {"role": "assistant", "content": "x", "reasoning": "why"}
    assert asked["chat_template_kwargs"] == {
        "flavour": "fig", "documents": body["documents"], "reasoning_effort": "none", "enable_thinking": False
    }  # fmt: skip
    assert (asked["add_generation_prompt"], asked["continue_final_message"]) == (False, True)
    assert asked["tools"] == body["tools"]
    assert asked["add_special_tokens"] is False


async def test_images_never_reach_the_engine(folder: Path) -> None:
    engine = Engine(folder)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:SECRET"}}]}
    body = {"messages": [{"role": "system", "content": "S"}, USER, image, USER]}
    async with serving(None, engine) as service:
        (tokens,) = await service.tokens_for("chat", body, "m")
        assert "SECRET" not in json.dumps(engine.asked)
        assert (tokens.source, tokens.prefix_only, tokens.media_parts) == ("engine", True, 1)
        assert tokens.reason == "no_local_tokenizer; media_after_prefix"
        assert tokens.n_tokens > len(tokens.as_array()) > 0
        (first,) = await service.tokens_for("chat", {"messages": [image]}, "m")
        assert (first.ids, first.source) == (None, "estimate")
        assert len(engine.asked) == 1


async def test_prefix_before_an_image_is_a_prefix_of_the_text_chat(folder: Path) -> None:
    text = [{"role": "system", "content": "S"}, USER]
    image = {
        "role": "user",
        "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}],
    }
    async with serving(folder) as service:
        await until(lambda: loaded(service))
        (plain,) = await service.tokens_for("chat", {"messages": text, "add_generation_prompt": False}, "m")
        (tokens,) = await service.tokens_for("chat", {"messages": [*text, image]}, "m")
    assert tokens.prefix_only
    assert tokens.source == "local"
    assert plain.ids is not None
    assert tokens.ids is not None
    assert tokens.ids.startswith(plain.ids)
    assert tokens.n_tokens > 500, "the image counts"


async def test_several_prompts_come_back_in_order(folder: Path) -> None:
    async with serving(folder) as service:
        await until(lambda: loaded(service))
        out = await service.tokens_for("completions", {"prompt": ["one", [9], "two three"]}, "m")
    assert [t.source for t in out] == ["local", "given", "local"]
    assert list(out[2].as_array()) == reference_ids("two three", add_special_tokens=True)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("auto", "local"), ("local", "local"), ("engine", "engine"), ("estimate", "estimate")],
)
async def test_modes(mode: str, expected: str, folder: Path) -> None:
    async with serving(folder, Engine(folder), mode=mode) as service:
        await until(lambda: loaded(service))
        (tokens,) = await service.tokens_for("chat", CHAT, "m")
        assert tokens.source == expected
        assert service.status()["m"]["source"] == expected
        assert tokens.n_tokens > 0


async def test_mode_local_does_not_serve_ids_known_to_be_wrong(folder: Path) -> None:
    async with serving(folder, Engine(folder, shift=1), mode="local") as service:
        await until(lambda: verdict(service) == "mismatch")
        (tokens,) = await service.tokens_for("chat", CHAT, "m")
        assert (tokens.ids, tokens.reason) == (None, "local_mismatch; mode")


async def test_a_full_queue_sheds_to_the_estimate_and_the_loop_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    entered = threading.Event()

    def stuck(self: Lookup) -> bytes:
        entered.set()
        assert release.wait(30)
        return pack_ids([1])

    engine = Engine(folder)
    async with serving(folder, engine, threads=1, max_queued=2) as service:
        await until(lambda: verdict(service) == "verified")
        asked = len(engine.asked)
        monkeypatch.setattr(Lookup, "ids", stuck)
        jobs = [asyncio.create_task(service.tokens_for("completions", {"prompt": f"p{i}"}, "m")) for i in range(2)]
        await until(entered.is_set)
        (shed,) = await service.tokens_for("completions", {"prompt": "one too many"}, "m")
        assert (shed.ids, shed.source, shed.reason) == (None, "estimate", "local_queue_full")
        assert len(engine.asked) == asked, "shedding must not move the load to the engines"
        assert service.usage()["jobs_shed"] == 1
        release.set()
        assert [(await job)[0].source for job in jobs] == ["local", "local"]
        await until(lambda: service.usage()["jobs"] == 0)
        assert (await service.tokens_for("completions", {"prompt": "again"}, "m"))[0].source == "local"


async def test_a_slow_local_tokenizer_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def stuck(self: Lookup) -> bytes:
        assert release.wait(30)
        return pack_ids([1])

    async with serving(folder, local_budget_s=0.05) as service:
        await until(lambda: loaded(service))
        monkeypatch.setattr(Lookup, "ids", stuck)
        (tokens,) = await service.tokens_for("completions", {"prompt": "p"}, "m")
        assert (tokens.ids, tokens.reason) == (None, "local_timeout")
        release.set()


async def test_what_is_short_or_known_needs_no_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def text(prompt: str) -> dict[str, Any]:
        return {"prompt": prompt, "add_special_tokens": False}

    async with serving(folder, threads=1, max_queued=1) as service:
        await until(lambda: service.status()["m"]["local"].get("encoder") == "fastokens")
        long = "<|im_start|>" + "x" * 3000
        assert (await service.tokens_for("completions", text(long), "m"))[0].ids
        pool = service._shared.pool

        async def no_thread(*_: object, **__: object) -> None:
            raise CannotTokenize(Reason.QUEUE_FULL)

        monkeypatch.setattr(pool, "run", no_thread)

        async def source(body: dict[str, Any], body_bytes: int | None) -> str:
            kind = "completions" if "prompt" in body else "chat"
            (tokens,) = await service.tokens_for(kind, body, "m", body_bytes=body_bytes)
            return tokens.source

        assert await source(text("never seen"), 100) == "local"
        assert await source(text(long + "<|im_start|> and more"), 4000) == "local", "little of it is new"
        assert await source(text(long), 70_000) == "local"
        assert await source(text(long), 300_000) == "estimate", "looking at it takes too long"
        assert await source(text("y" * 3000), 4000) == "estimate", "too much of it is new"
        assert await source(text("never seen either"), None) == "estimate", "nobody says how long it is"
        many = {"messages": [USER] * 257}
        assert await source(many, 4000) == "estimate", "a template may take its time over many messages"
        assert await source({"messages": [USER] * 65}, 4000) == "local"
        assert await source({"messages": [USER] * 65}, 70_000) == "estimate", "and over large tools"


async def test_a_prompt_over_the_bound_is_estimated(folder: Path) -> None:
    async with serving(folder, Engine(folder), max_prompt_bytes=1000) as service:
        await until(lambda: verdict(service) == "verified")
        (tokens,) = await service.tokens_for("completions", {"prompt": "x" * 4000}, "m")
        assert (tokens.ids, tokens.n_tokens, tokens.reason) == (None, 1000, "prompt_too_large")


async def test_an_unknown_model_and_a_removed_one(folder: Path) -> None:
    async with serving(folder) as service:
        (tokens,) = await service.tokens_for("chat", CHAT, "other")
        assert (tokens.ids, tokens.reason) == (None, "unknown_model")
        service.remove_model("m")
        service.remove_model("m")
        assert service.status() == {}
        assert (await service.tokens_for("chat", CHAT, "m"))[0].source == "estimate"


async def test_harmony_chats_are_flagged_text_is_not(folder: Path) -> None:
    engine = Engine(folder)
    async with serving("openai/gpt-oss-20b", engine) as service:
        await until(lambda: loaded(service))
        (chat,) = await service.tokens_for("chat", CHAT, "m")
        (text,) = await service.tokens_for("completions", {"prompt": "x"}, "m")
    assert (chat.ids, chat.reason) == (None, "no_local_tokenizer; harmony_rendered_by_engine")
    assert text.source == "engine"


async def test_models_with_other_tokenizers_do_not_share_cached_ids(folder: Path, tmp_path: Path) -> None:
    other = tokenizer_json("typing.py", 500)
    make_model(tmp_path, "chatml", tokenizer=other)
    async with serving(folder) as service:
        service.set_model("n", str(tmp_path))
        await until(lambda: all(s["local"]["state"] == "ready" for s in service.status().values()))
        text = "def argument_parser(self):"
        (one,) = await service.tokens_for("completions", {"prompt": text}, "m")
        (two,) = await service.tokens_for("completions", {"prompt": text}, "n")
    assert list(one.as_array()) == reference_ids(text, add_special_tokens=True)
    assert list(two.as_array()) == reference_ids(text, add_special_tokens=True, tokenizer=other)


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "What is known of it?"}),
    ("chat", {"messages": [{"role": "user", "content": "What is known of it?"}]}),
    ("messages", {"messages": [{"role": "user", "content": "What is known of it?"}], "max_tokens": 1}),
    ("responses", {"input": "What is known of it?"}),
]


@pytest.mark.parametrize(("kind", "body"), BODIES)
@pytest.mark.parametrize("mode", ["local", "engine"])
async def test_what_a_tenant_has_sent_makes_nothing_faster_for_another(
    kind: str, body: dict[str, Any], mode: str, folder: Path
) -> None:
    """The salt keeps their KV caches apart, and what is remembered here with them."""
    async with serving(folder, Engine(folder), mode=mode) as service:
        await until(lambda: loaded(service))
        seen: list[tuple[int, int]] = []
        for salt in ("a", "b", None, "a", "b", None):
            before = service.usage()
            (tokens,) = await service.tokens_for(kind, {**body, "cache_salt": salt}, "m")
            assert tokens.source == mode
            after = service.usage()
            seen.append(tuple(after[each] - before[each] for each in ("cache_hits", "cache_misses")))  # type: ignore[arg-type]
    assert [hits for hits, _ in seen[:3]] == [0, 0, 0]
    assert [misses for _, misses in seen[3:]] == [0, 0, 0]


def test_nobody_can_know_what_texts_are_hashed_with() -> None:
    """Of a text that collides with another's the ids would be sent in place of that one's."""
    seeds = [new_seed() for _ in range(64)]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) > 1 << 50
    assert all(0 <= 2 * seed + 1 < 1 << 64 for seed in seeds)


async def test_no_prompt_text_in_logs_status_or_reasons(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    word = "xylophonist"
    async with serving(folder, Engine(folder, shift=1), check_rate=1.0) as service:
        await until(lambda: verdict(service) == "mismatch")
        out = []
        for body in (
            {"messages": [{"role": "user", "content": word}]},
            {"messages": [{"role": "user", "content": [{"type": word}]}]},
            {"messages": [{"role": word, "content": None}], "chat_template": "{{" + word},
        ):
            out += await service.tokens_for("chat", body, "m")
        shown = json.dumps(service.status()) + repr([t.reason for t in out]) + caplog.text
    assert word not in shown


async def test_a_round_of_checks_ends_with_the_first_call_the_engine_misses() -> None:
    asked = 0

    async def local_ids(prompt: Tokenizable) -> bytes:
        return b""

    async def engine_ids(prompt: Tokenizable) -> bytes:
        nonlocal asked
        asked += 1
        raise CannotTokenize(Reason.ENGINE_REJECTED if asked == 1 else Reason.ENGINE_TIMEOUT)

    check = SelfCheck(local_ids, engine_ids)
    assert await check.run_fixed() == "unverified"
    assert asked == 2, "a refused case is skipped; an engine that is away is left alone until the next round"


class Erring:
    """In place of `fastokens`: every text has a token too many."""

    name = "fastokens"
    at_once_bytes = 2048

    def __init__(self, path: Path, added: object, tokenizer: object, plain: PlainEncoder) -> None:
        self.plain = plain

    def encode(self, texts: list[str], *, add_special_tokens: bool) -> list[bytes]:
        return [ids + bytes(4) for ids in self.plain.encode(texts, add_special_tokens=add_special_tokens)]


def encoder_of(service: TokenService) -> str | None:
    return service.status()["m"]["local"].get("encoder")


async def test_without_an_engine_samples_are_made_again_the_slow_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.tokens.local.fast_encoder", Erring)
    async with serving(folder, None, check_rate=1.0) as service:
        await until(lambda: encoder_of(service) == "fastokens")
        (wrong,) = await service.tokens_for("completions", {"prompt": "hello"}, "m")
        assert wrong.n_tokens == len(reference_ids("hello", add_special_tokens=True)) + 1
        await until(lambda: encoder_of(service) == "tokenizers")
        (right,) = await service.tokens_for("completions", {"prompt": "hello"}, "m")
        assert list(right.as_array()) == reference_ids("hello", add_special_tokens=True)
        local = service.status()["m"]["local"]
        assert local["why_not_fastokens"] == "it made other ids of a prompt than 'tokenizers'"
        assert (local["verified"], local["pieces"]) == (1, False)
        assert len(caplog.messages) == 1
        core = SimpleNamespace(tokens=service)
        (degradation,) = health._of_tokens(core)  # type: ignore[arg-type]
        assert degradation.what == "tokens_slow"
        assert "other ids of a prompt" in degradation.detail


async def test_an_encoder_that_errs_is_not_taken_for_another_tokenizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.tokens.local.fast_encoder", Erring)
    async with serving(folder, Engine(folder)) as service:
        await until(lambda: verdict(service) == "verified")
        assert encoder_of(service) == "tokenizers"
        (tokens,) = await service.tokens_for("chat", CHAT, "m")
        assert tokens.source == "local"


async def test_samples_rest_after_one_that_took_long(folder: Path) -> None:
    now_s = 100.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0  # A second for whatever lies between two looks at the clock.
        return now_s

    service = TokenService(TokenSettings(check_rate=1.0, local_budget_s=1e6), clock_s=clock)
    await service.start()
    service.set_model("m", str(folder))
    try:
        await until(lambda: encoder_of(service) == "fastokens")
        verified = []
        for i in range(60):
            await service.tokens_for("completions", {"prompt": f"p{i}"}, "m", body_bytes=10)
            await asyncio.gather(*(t for t in asyncio.all_tasks() if t is not asyncio.current_task()))
            verified.append(service.status()["m"]["local"]["verified"])
        assert verified[0] == 1
        assert 2 <= verified[-1] <= 5
    finally:
        await service.close()


async def test_a_model_and_its_adapters_share_a_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []

    def counting(path: str, *args: Any) -> LocalTokenizer:
        loads.append(path)
        return load(path, *args)

    monkeypatch.setattr("gateway.tokens.local.load", counting)
    async with serving(folder, None) as service:
        for name in ("adapter", "another"):
            service.set_model(name, str(folder))
        await until(lambda: all(s["local"].get("encoder") == "fastokens" for s in service.status().values()))
        assert loads == [str(folder)]
        assert (await service.tokens_for("chat", CHAT, "another"))[0].source == "local"
