"""What must hold for any body, any text and any order of events."""

from __future__ import annotations

import asyncio
import copy
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tokens import TokenService, TokenSettings, estimate
from gateway.tokens.breaker import CircuitBreaker, Ticket
from gateway.tokens.given import ChatPrompt, Truncation, prompts_of
from gateway.tokens.local import LocalTokenizer, load
from gateway.tokens.types import CannotTokenize, pack_ids
from tests.support.token_models import make_model, reference_ids

KINDS = ("chat", "completions", "messages", "responses", "generate", "unknown")
WORDS = [
    "role", "content", "type", "text", "user", "assistant", "system", "tool", "developer", "tool_calls", "function",
    "name", "arguments", "image_url", "input_text", "output_text", "tool_use", "tool_result", "thinking", "message",
    "reasoning", "refusal", "uuid", "input", "id",
]  # fmt: skip
FIELDS = [
    "messages", "prompt", "input", "system", "instructions", "tools", "documents", "chat_template_kwargs", "reasoning",
    "reasoning_effort", "kv_transfer_params", "truncate_prompt_tokens", "truncation_side", "add_special_tokens",
    "add_generation_prompt", "continue_final_message", "token_ids", "thinking", "output_config", "chat_template",
]  # fmt: skip

scalars = (
    st.none() | st.booleans() | st.integers(-2, 2**33) | st.floats(allow_nan=False) | st.sampled_from(WORDS) | st.text()
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=15,
)  # fmt: skip
bodies = st.dictionaries(st.sampled_from(FIELDS), anything, max_size=6)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
turns = st.lists(words, min_size=1, max_size=6).map(
    lambda texts: [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
)


@cache
def local(template: str) -> LocalTokenizer:
    with TemporaryDirectory() as folder:
        return load(str(make_model(Path(folder), template)), TokenSettings())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "vision")


def test_no_body_ever_raises_or_is_changed(folder: Path) -> None:
    async def run() -> None:
        async def engine(body: bytes) -> tuple[int, bytes]:
            json.loads(body)
            return 200, b'{"tokens": [1, 2, 3], "count": 3}'

        service = TokenService(TokenSettings(check_rate=0.0, engine_budget_s=5.0))
        await service.start()
        service.set_model("local", str(folder))
        service.set_model("engine", None, engine)
        while service.status()["local"]["local"]["state"] == "loading":  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        loop = asyncio.get_running_loop()

        @given(kind=st.sampled_from(KINDS), body=bodies, model=st.sampled_from(["local", "engine", "none"]))
        def check(kind: str, body: dict[str, Any], model: str) -> None:
            before = copy.deepcopy(body)
            tokens = asyncio.run_coroutine_threadsafe(service.tokens_for(kind, body, model), loop).result(30)
            assert tokens
            for one in tokens:
                assert one.n_tokens >= (0 if one.ids is not None else 1)
                assert (one.ids is None) == (one.source == "estimate")
                assert one.source in ("given", "local", "engine") or one.reason
                assert "internal_error" not in (one.reason or ""), (kind, body)
                assert one.ids is None or one.prefix_only or one.n_tokens * 4 == len(one.ids)
            assert body == before

        try:
            await asyncio.to_thread(check)
        finally:
            await service.close()

    asyncio.run(run())


@given(text=words, special=st.booleans())
def test_local_ids_are_those_of_plain_encode(text: str, special: bool) -> None:
    ids = local("chatml").encode(text, add_special_tokens=special)
    assert ids == pack_ids(reference_ids(text, add_special_tokens=special))


@given(messages=turns, extra=words)
def test_a_new_turn_keeps_the_ids_before_it(messages: list[Any], extra: str) -> None:
    """What prefix caching lives on: the ids of a chat begin with the ids of the chat before."""

    def ids(chat: list[Any]) -> bytes:
        (prompt,) = prompts_of("chat", {"messages": chat, "add_generation_prompt": False})
        assert isinstance(prompt, ChatPrompt)
        return local("chatml").encode(local("chatml").text_of(prompt).text, add_special_tokens=False)

    assert ids([*messages, {"role": "user", "content": extra}]).startswith(ids(messages))


@given(messages=turns, at=st.integers(0, 5), before=words, after=words, template=st.sampled_from(["vision", "chatml"]))
def test_media_prefix_is_true_text(messages: list[Any], at: int, before: str, after: str, template: str) -> None:
    """With the image replaced by any text, the chat still begins with what was taken as prefix."""
    parts = [{"type": "text", "text": before}, {"type": "image_url", "image_url": {"url": "x"}}]
    parts.append({"type": "text", "text": after})
    at %= len(messages)
    chat = [{**message, "content": parts} if i == at else message for i, message in enumerate(messages)]
    (prompt,) = prompts_of("chat", {"messages": chat})
    assert isinstance(prompt, ChatPrompt)
    rendered = local(template).text_of(prompt)
    assert rendered.prefix_only
    for stand_in in ("Q", "<|vision_start|>"):
        text = {"type": "text", "text": f"{before}{stand_in}" if template == "vision" else stand_in}
        other = [{**message, "content": [text]} if i == at else message for i, message in enumerate(messages)]
        (plain,) = prompts_of("chat", {"messages": other})
        assert isinstance(plain, ChatPrompt)
        assert local(template).text_of(plain).text.startswith(rendered.text)


@given(
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=20),
    keep=st.integers(0, 25),
    side=st.sampled_from(["left", "right", None]),
    default=st.sampled_from(["left", "right"]),
)
def test_truncation_is_a_slice(ids: list[int], keep: int, side: str | None, default: str) -> None:
    expected = (ids[-keep:] if keep else []) if (side or default) == "left" else ids[:keep]
    assert Truncation(keep, side).apply(pack_ids(ids), default) == pack_ids(expected)


@given(text=st.text())
def test_text_bytes_are_utf8_bytes(text: str) -> None:
    assert estimate.text_bytes([{"text": text}]) == len(text.encode("utf-8", "surrogatepass"))


class _World:
    """Random calls through a breaker, checked against what it promises."""

    def __init__(self, failures: int) -> None:
        self.breaker = CircuitBreaker(failures=failures, open_s=1.0, open_max_s=8.0)
        self.now_s = 0.0
        self.out: list[Ticket] = []
        self.opened_s = 0.0

    def step(self, what: str, amount: float) -> None:
        before = self.breaker.state(self.now_s)
        if what == "wait":
            self.now_s += amount
        elif what == "enter":
            ticket = self.breaker.enter(self.now_s)
            if before == "closed":
                assert ticket == "call"
            elif before == "open" or "probe" in self.out:
                assert ticket is None
            else:
                assert ticket == "probe"
            if ticket is not None:
                self.out.append(ticket)
        elif self.out:
            ticket = self.out.pop(int(amount * 7) % len(self.out))
            if what == "failure":
                self.breaker.failure(ticket, self.now_s)
            else:
                getattr(self.breaker, what)(ticket)
            after = self.breaker.state(self.now_s)
            if before != "closed" and after == "closed":
                assert (what, ticket) == ("success", "probe")
            if before != "open" and after == "open":
                assert what == "failure"


@settings(max_examples=200)
@given(
    failures=st.integers(1, 3),
    steps=st.lists(
        st.tuples(st.sampled_from(["enter", "enter", "wait", "success", "failure", "failure", "abandon"]),
                  st.floats(0, 3)),
        max_size=80,
    ),
)  # fmt: skip
def test_breaker_keeps_its_promises(failures: int, steps: list[tuple[str, float]]) -> None:
    world = _World(failures)
    for what, amount in steps:
        world.step(what, amount)


@given(messages=st.lists(anything, max_size=4), template=st.sampled_from(["chatml", "vision", "printed_parts"]))
def test_rendering_refuses_with_a_reason_or_not_at_all(messages: list[Any], template: str) -> None:
    chat = ChatPrompt({"messages": messages})
    try:
        local(template).text_of(chat)
    except CannotTokenize:
        return
