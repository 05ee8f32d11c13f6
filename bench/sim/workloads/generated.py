"""Conversations in a closed loop, and the mix of long and short prompts that was measured on two H200."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from bench.sim.load import Ask, Stage
from bench.sim.prompts import answer, stretch, unique
from bench.sim.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What one conversation is like: `shared_tokens` all have in common, the rest of `first_tokens` are its own, each
    further turn adds the answer and `turn_tokens`, `think_s` (mean, exponential) after it.
    """

    first_tokens: int
    turn_tokens: int
    turns: int
    output_tokens: int
    think_s: float
    shared_tokens: int = 0
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None


CHAT = Chat(first_tokens=5000, turn_tokens=50, turns=4, output_tokens=200, think_s=5, slo_ttft_s=1, slo_tpot_s=0.05)
"""The chat of the published 1P+3D comparisons (5k, 50 a turn, 4 turns); answers and pauses are ours."""
CODE = Chat(
    first_tokens=30_000, turn_tokens=1500, turns=15, output_tokens=300, think_s=2, slo_ttft_s=2, slo_tpot_s=0.05
)
"""Their coding agent (30k, 1,500 a turn, 15 turns)."""


class Sessions:
    """Conversations that begin by Poisson at `rate` a second for `duration_s`, and go on as fast as they are answered.

    A failed turn ends its conversation. `chat` may be a function that draws one.
    """

    def __init__(
        self, seed: int, chat: Chat | Callable[[random.Random], Chat], *, rate: float, duration_s: float
    ) -> None:
        rng = random.Random(f"sessions {seed}")
        self._seed = seed
        self._open: dict[str, tuple[int, Chat, bytes]] = {}
        """Session -> (its number, what it is like, its text up to the last question)."""
        self._begin: list[tuple[float, Chat]] = []
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(rate)) < duration_s:
            self._begin.append((at_s, chat if isinstance(chat, Chat) else chat(rng)))

    def start(self, stage: Stage) -> None:
        for number, (at_s, chat) in enumerate(self._begin):

            def text(number: int = number, chat: Chat = chat) -> bytes:
                own = chat.first_tokens - chat.shared_tokens
                prompt = stretch(0, chat.shared_tokens) + unique(1 + number, own)
                self._open[f"s{number}"] = number, chat, prompt
                return prompt

            stage.submit(at_s, self._ask(number, chat, 0, text))

    @staticmethod
    def _ask(number: int, chat: Chat, turn: int, text: Callable[[], bytes]) -> Ask:
        return Ask(
            text,
            chat.output_tokens,
            chat.output_tokens,
            chat.slo_ttft_s,
            chat.slo_tpot_s,
            session=f"s{number}",
            turn=turn,
            group="first turn" if not turn else "later turns",
            seed=number * 1000 + turn,
        )

    def ended(self, ask: Ask, record: Record, stage: Stage) -> None:
        number, chat, prompt = self._open.pop(ask.session or "")
        if not record.ok or ask.turn + 1 >= chat.turns:
            return
        turn = ask.turn + 1
        question = stretch(10_000_000 + number * 1000 + turn, chat.turn_tokens)
        prompt += answer(ask.seed, ask.output_tokens) + question

        def text() -> bytes:
            self._open[f"s{number}"] = number, chat, prompt
            return prompt

        # Drawn from the session, not from the run, so that every arm's users think equally long.
        think_s = random.Random(f"think {self._seed} {ask.seed}").expovariate(1 / chat.think_s) if chat.think_s else 0.0
        stage.submit(stage.now_s + think_s, self._ask(number, chat, turn, text))


class Mixed:
    """Poisson: `long_share` of the prompts long, the others short, nothing shared. The defaults are the load measured
    on two H200; its short prompts and answers were not written down, these fit the concurrency that was seen.
    """

    def __init__(
        self,
        seed: int,
        *,
        rate: float,
        duration_s: float = 20.0,
        long_share: float = 0.4,
        long_tokens: tuple[int, int] = (6000, 12_000),
        short_tokens: tuple[int, int] = (64, 1000),
        output_tokens: int = 128,
        slo_ttft_s: float | None = 1.0,
        slo_tpot_s: float | None = 0.020,
    ) -> None:
        rng = random.Random(f"mixed {seed}")
        self._slo = slo_ttft_s, slo_tpot_s
        self._output_tokens = output_tokens
        self._asks: list[tuple[float, bool, int]] = []
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(rate)) < duration_s:
            is_long = rng.random() < long_share
            self._asks.append((at_s, is_long, rng.randint(*(long_tokens if is_long else short_tokens))))

    def __len__(self) -> int:
        return len(self._asks)

    def start(self, stage: Stage) -> None:
        for number, (at_s, is_long, n) in enumerate(self._asks):

            def tokens(number: int = number, n: int = n) -> bytes:
                return unique(number, n)

            group, out = "long" if is_long else "short", self._output_tokens
            stage.submit(at_s, Ask(tokens, out, out, *self._slo, group=group, seed=number))

    def ended(self, ask: Ask, record: Record, stage: Stage) -> None:
        pass
