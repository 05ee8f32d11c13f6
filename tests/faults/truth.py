"""What every answer must be: the fake engines' text is a function of the request, whoever computes it."""

from __future__ import annotations

from itertools import count
from typing import Any

from bench.engine import responses, tokenizer
from bench.engine.config import FakeVllmConfig
from bench.engine.model import Engine
from bench.engine.protocol import Parser, ServedModel
from bench.engine.request import Request
from bench.engine.timing import preset

MODEL = "tiny"


def engine_config() -> FakeVllmConfig:
    """Of all engines, but for ports and seeds. The cache is small, so that blocks are evicted all the time; a replay
    can always begin at the first batch, so that an index that lost something can be whole again.
    """
    config = FakeVllmConfig(model=MODEL, store_responses=True, buffer_steps=100_000)
    return config.with_engine(timing=preset("cpu-fast"), max_model_len=4096, num_gpu_blocks=600)


class Truth:
    """An engine that serves one request at a time, in no time."""

    def __init__(self) -> None:
        config = engine_config()
        self._parser = Parser(max_model_len=config.engine.max_model_len, mean_output_tokens=None)
        self._engine = Engine(config.engine)
        self._ids = count()

    def of(self, api: str, body: dict[str, Any]) -> str:
        """The text that answers it. `api`: completions, chat or responses; no previous response."""
        model, name = ServedModel(MODEL), str(next(self._ids))
        if api == "completions":
            job = self._parser.completion(body, {}, model, name)
        elif api == "responses":
            job = self._parser.chat("responses", responses.chat_body(body), {}, model, name)
        else:
            job = self._parser.chat("chat", body, {}, model, name)
        assert job.seed is not None, "only what is greedy has one answer"
        draw = job.draw(0, 0, 0)
        self._engine.add_request(
            Request(request_id=name, prompt_token_ids=job.prompts[0], max_tokens=job.max_tokens[0], seed=draw), 0.0
        )
        ids: list[int] = []
        ended, now_s = False, 1e6
        while not ended:
            for token in self._engine.step(now_s).tokens:
                ids.append(token.token_id)
                ended = token.finish_reason is not None
        return "".join(tokenizer.decode([each]) for each in ids)
