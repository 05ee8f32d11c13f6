"""/v1/messages: Anthropic bodies and stream events as vLLM 0.32 makes them out of a chat completion."""

from typing import Any, Final

from bench.engine.frames import event
from bench.engine.generate import Choice, Delta, Run
from bench.engine.protocol import ApiError, EngineDeadError

# What vLLM's converter says when a chat chunk is an error: it takes it for a malformed chunk.
_MISSING: Final = (
    "  Field required [type=missing, input_value={'error': {'message': 'In...am': None, 'code': 500}}, "
    "input_type=dict]\n"
    "    For further information visit https://errors.pydantic.dev/2.14/v/missing"
)
_NOT_A_CHUNK: Final = f"2 validation errors for ChatCompletionStreamResponse\nmodel\n{_MISSING}\nchoices\n{_MISSING}"
_PASSED_ON: Final[tuple[str, ...]] = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stream",
    "tools",
    "cache_salt",
)


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """The chat request that a messages request amounts to; only the fields vLLM passes on."""
    messages = body.get("messages")
    if body.get("system") and isinstance(messages, list):
        messages = [{"role": "system", "content": body["system"]}, *messages]
    chat: dict[str, Any] = {
        name: body[name] for name in (*_PASSED_ON, "kv_transfer_params", "vllm_xargs") if name in body
    }
    return {**chat, "messages": messages, "stop": body.get("stop_sequences")}


def error_body(error: ApiError) -> dict[str, Any]:
    told = error.body["error"]
    return {"type": "error", "error": {"type": told["type"], "message": told["message"]}}


def answer(run: Run, offered: dict[str, Any] | None, *, details: bool) -> dict[str, Any]:
    """The whole message, offering `kv_transfer_params` after a prefill."""
    choice = run.choices[0]
    reason, sequence = _stop_reason(choice)
    body: dict[str, Any] = {
        "id": run.job.request_id,
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": choice.text}],
        "model": run.job.model.name,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(run, details),
        "kv_transfer_params": offered,
    }
    return {name: value for name, value in body.items() if value is not None}


class MessagesFrames:
    """Events of a stream; nothing leaves before the first token."""

    def __init__(self, run: Run, *, details: bool) -> None:
        self._run = run
        self._details = details
        self._begun = self._open = False

    def begin(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        frames = self._start()
        if not delta.text:
            return frames
        if not self._open:
            self._open = True
            frames += _event("content_block_start", content_block={"type": "text", "text": ""}, index=0)
        return frames + _event("content_block_delta", delta={"type": "text_delta", "text": delta.text}, index=0)

    def end(self) -> bytes:
        reason, sequence = _stop_reason(self._run.choices[0])
        frames = _event("content_block_stop", index=0) if self._open else b""
        frames += _event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=_usage(self._run, self._details),
        )
        return frames + _event("message_stop")

    def failed(self, error: ApiError) -> bytes | None:
        frames = b"" if isinstance(error, EngineDeadError) else self._start()
        return frames + _event("error", error={"type": "internal_error", "message": _NOT_A_CHUNK})

    def _start(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        message: dict[str, Any] = {
            "id": self._run.job.request_id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._run.job.model.name,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(self._run.choices[0].prompt), "output_tokens": 0},
        }
        return _event("message_start", message=message)


def _event(kind: str, **fields: Any) -> bytes:
    return event(kind, {"type": kind, **fields})


def _stop_reason(choice: Choice) -> tuple[str, str | None]:
    if choice.reason == "length":
        return "max_tokens", None
    return ("end_turn", None) if choice.stop is None else ("stop_sequence", choice.stop)


def _usage(run: Run, details: bool) -> dict[str, int]:
    prompt, output = len(run.choices[0].prompt), len(run.choices[0].ids)
    if not details:
        return {"input_tokens": prompt, "output_tokens": output}
    cached, created = run.cached_tokens(), run.created_tokens()
    return {
        "input_tokens": max(0, prompt - cached - created),
        "output_tokens": output,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
    }
