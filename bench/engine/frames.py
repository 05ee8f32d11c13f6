"""What a stream is made of, and the frames of the two OpenAI APIs; responses and messages have their own modules."""

from typing import Protocol

from bench.engine import answers, tokenizer
from bench.engine.generate import Delta, Run
from bench.engine.protocol import ApiError, EngineDeadError


class Frames(Protocol):
    """The SSE frames of one stream, in the order of the methods."""

    def begin(self) -> bytes:
        """Before the engine has answered."""

    def delta(self, delta: Delta) -> bytes: ...

    def end(self) -> bytes: ...

    def failed(self, error: ApiError) -> bytes | None:
        """Instead of the end; None if the connection is cut there."""


class OpenAiFrames:
    """Chunks of /v1/completions and /v1/chat/completions."""

    def __init__(self, run: Run, details: bool, fingerprint: str) -> None:
        self._run = run
        self._details = details
        self._chunks = answers.Chunks(run.job, run.created, fingerprint)
        self._begun: set[int] = set()
        self._open = len(run.choices)

    def begin(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        job, choice = self._run.job, self._run.choices[delta.index]
        frames = b""
        text = delta.text
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            if job.is_chat:
                frames = self._chunks.role(delta.index, choice.prompt)
            elif job.echo:
                text = tokenizer.decode(choice.prompt) + text
        self._open -= delta.reason is not None
        return frames + self._chunks.text(
            delta.index,
            text,
            delta.ids,
            prompt_ids=choice.prompt if len(choice.ids) == 1 else None,
            reason=delta.reason,
            stop=delta.stop,
            usage_body=self._run.usage(False, full=False) if job.continuous_usage else None,
            last=self._open == 0 and not job.include_usage,
        )

    def end(self) -> bytes:
        usage = b""
        if self._run.job.include_usage:
            usage = self._chunks.usage(self._run.usage(self._details, full=False))
        return usage + answers.DONE

    def failed(self, error: ApiError) -> bytes | None:
        frames = b""
        if self._run.job.is_chat and not self._begun and not isinstance(error, EngineDeadError):
            frames = self._chunks.role(0, self._run.choices[0].prompt)  # vLLM looks at the reason only after it
        return frames + self._chunks.error(str(error)) + answers.DONE


def event(name: str, body: object) -> bytes:
    """A frame with its type in front, as responses and messages send them."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), answers.to_json(body))
