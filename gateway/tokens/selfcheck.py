"""Does the local tokenizer make the ids the engine makes? On fixed prompts at the start, on samples ever after.

Each fixed case goes for one way the two can drift apart: special tokens, whitespace and Unicode, the template in force,
tools, roles, continued messages. None of them holds anything private.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from gateway.tokens.given import ChatPrompt, TextPrompt, prompts_of
from gateway.tokens.types import CannotTokenize, Json, Reason

Verdict = Literal["unverified", "verified", "mismatch"]
Tokenizable = TextPrompt | ChatPrompt
TokenIds = Callable[[Tokenizable], Awaitable[bytes]]

_WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Current weather of a place, e.g. <Zürich> & "Köln"',
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer", "enum": [1, 3, 7]}},
            "required": ["place"],
        },
    },
}
_USER: Json = {"role": "user", "content": "What is the capital of France?"}
_CALL: Json = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"place": "Zürich", "days": 3}'},
}

CASES: tuple[tuple[Literal["completions", "chat"], Json], ...] = (
    ("completions", {"prompt": "The quick brown fox jumps over the lazy dog.\n\n  def f(x):\n\treturn x ** 2  \n"}),
    (
        "completions",
        {
            "prompt": "naïve café, Straße, 你好\uff0c世界, नमस्ते, \U0001f469\u200d\U0001f469\u200d\U0001f467 "
            "\U0001f1fa\U0001f1f3, e\u0301, \u00a0\u3000\u200b 1234567890"
        },
    ),
    ("completions", {"prompt": "</s><s>[INST] <|im_start|>user<|eot_id|><|endoftext|> [/INST]"}),
    ("completions", {"prompt": "once more", "add_special_tokens": False}),
    ("chat", {"messages": [_USER]}),
    ("chat", {"messages": [_USER], "add_generation_prompt": False}),
    ("chat", {"messages": [{"role": "system", "content": "  Be brief.\n"}, _USER]}),
    ("chat", {"messages": [{"role": "developer", "content": "Be brief."}, _USER]}),
    (
        "chat",
        {
            "messages": [
                _USER,
                {"role": "assistant", "content": "Paris."},
                {"role": "user", "content": "Größer? 🗼 你好"},
            ]
        },
    ),
    (
        "chat",
        {
            "messages": [_USER, {"role": "assistant", "content": "The capital is "}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]},
    ),
    ("chat", {"messages": [_USER], "tools": [_WEATHER]}),
    (
        "chat",
        {
            "messages": [
                _USER,
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call00001", "content": "sunny, 21 °C"},
            ],
            "tools": [_WEATHER],
        },
    ),
    ("chat", {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": False}}),
)


class SelfCheck:
    """Compares one local tokenizer with one engine. `verdict` is in force as soon as it is known and a mismatch stays:
    ids that were wrong once cannot be believed until the tokenizer or the engine is another.

    `local_ids` and `engine_ids` raise CannotTokenize when they have none.
    """

    def __init__(self, local_ids: TokenIds, engine_ids: TokenIds) -> None:
        self._local_ids = local_ids
        self._engine_ids = engine_ids
        self.verdict: Verdict = "unverified"
        self.done = 0
        self.inconclusive = 0
        self.mismatches = 0

    async def run_fixed(self) -> Verdict:
        """The fixed cases. "unverified" means that the engine does not answer (yet)."""
        agreed = 0
        for kind, body in CASES:
            (prompt,) = prompts_of(kind, body)
            assert isinstance(prompt, TextPrompt | ChatPrompt)  # noqa: S101 - a case without text would check nothing
            try:
                same = await self._agree(prompt)
            except CannotTokenize:
                return self.verdict
            if same is False:
                return self.verdict
            agreed += same is True
        if agreed and self.verdict == "unverified":
            self.verdict = "verified"
        return self.verdict

    async def run_sample(self, prompt: Tokenizable, ids: bytes) -> None:
        """A prompt that was just served with local `ids`."""
        try:
            if await self._engine_says(prompt, ids) is False:
                await self._agree(prompt)
        except CannotTokenize:
            return

    async def _agree(self, prompt: Tokenizable) -> bool | None:
        """Whether both make the same ids; None when one of them refuses the prompt. Raises when the engine is away.

        A mismatch is looked at twice: templates may print the date, and midnight may fall in between.
        """
        for _ in range(2):
            try:
                ids = await self._local_ids(prompt)
            except CannotTokenize:
                return None
            same = await self._engine_says(prompt, ids)
            if same is not False:
                return same
        self.verdict = "mismatch"
        self.mismatches += 1
        return False

    async def _engine_says(self, prompt: Tokenizable, ids: bytes) -> bool | None:
        try:
            theirs = await self._engine_ids(prompt)
        except CannotTokenize as exc:
            self.inconclusive += 1
            if exc.reason is Reason.ENGINE_REJECTED:
                return None
            raise
        self.done += 1
        return theirs == ids
