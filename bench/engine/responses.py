"""/v1/responses: bodies and stream events of vLLM 0.32, without tools and reasoning."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from bench.engine.frames import event
from bench.engine.generate import Delta, Run
from bench.engine.protocol import ApiError


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """The chat request that a responses request amounts to."""
    messages = messages_of(body.get("input"))
    if body.get("instructions") and isinstance(messages, list):
        messages = [{"role": "system", "content": body["instructions"]}, *messages]
    chat = {**body, "messages": messages, "max_tokens": body.get("max_output_tokens")}
    for name in ("max_completion_tokens", "min_tokens", "n", "echo", "stream_options", "return_token_ids"):
        chat.pop(name, None)  # not fields of this API
    return chat


def messages_of(given: Any) -> Any:
    """The input as chat messages."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def answer(run: Run, body: dict[str, Any], offered: dict[str, Any] | None) -> dict[str, Any]:
    """The whole response, offering `kv_transfer_params` after a prefill."""
    choice = run.choices[0]
    status = "incomplete" if choice.reason == "length" else "completed"
    item = _item(f"msg_{uuid4().hex[:16]}", "completed", [_part(choice.text)] if choice.text else [])
    return _response(run, body, status, [item], _usage(run), offered)


class ResponsesFrames:
    """Events of a stream. A failed generation cuts the connection: vLLM cannot put its error into one of its events."""

    def __init__(
        self, run: Run, body: dict[str, Any], offered: Any, keep: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> None:
        """`keep` is given the whole response at its end."""
        self._run = run
        self._body = body
        self._offered = offered
        self._keep = keep
        self._sequence = 0
        self._item_id: str | None = None

    def begin(self) -> bytes:
        response = response_of(self._run, self._body, "in_progress")
        frames = self._event("response.created", response=response)
        return frames + self._event("response.in_progress", response=response)

    def delta(self, delta: Delta) -> bytes:
        if not delta.text:
            return b""
        frames = b""
        if self._item_id is None:
            self._item_id = f"msg_{uuid4().hex[:16]}"
            frames = self._event(
                "response.output_item.added", item=_item(self._item_id, "in_progress", []), output_index=0
            )
            frames += self._event("response.content_part.added", **self._place(), part={**_part(""), "logprobs": []})
        return frames + self._event("response.output_text.delta", **self._place(), delta=delta.text, logprobs=[])

    def end(self) -> bytes:
        choice = self._run.choices[0]
        frames = b""
        items: list[dict[str, Any]] = []
        if self._item_id is not None:
            part = _part(choice.text)
            items = [_item(self._item_id, "completed", [part])]
            frames = self._event("response.output_text.done", **self._place(), text=choice.text, logprobs=[])
            frames += self._event("response.content_part.done", **self._place(), part=part)
            frames += self._event("response.output_item.done", item=items[0], output_index=0)
        status = "incomplete" if choice.reason == "length" else "completed"
        response = _response(self._run, self._body, status, items, _usage(self._run), self._offered())
        self._keep(response)
        return frames + self._event("response.completed", response=response)

    def failed(self, error: ApiError) -> bytes | None:
        return None

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return event(kind, {**fields, "sequence_number": self._sequence - 1, "type": kind})


def _part(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def _item(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": item_id,
        "content": content,
        "role": "assistant",
        "status": status,
        "type": "message",
        "phase": None,
    }


def _usage(run: Run) -> dict[str, Any]:
    prompt, output = len(run.choices[0].prompt), len(run.choices[0].ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": run.cached_tokens(),
            "cache_write_tokens": run.created_tokens(),
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": output,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": prompt + output,
    }


def response_of(run: Run, body: dict[str, Any], status: str) -> dict[str, Any]:
    """The response before there is any answer."""
    return _response(run, body, status, [], None, None)


def _response(
    run: Run,
    body: dict[str, Any],
    status: str,
    output: list[dict[str, Any]],
    usage: dict[str, Any] | None,
    offered: dict[str, Any] | None,
) -> dict[str, Any]:
    job = run.job
    return {
        "id": job.request_id,
        "created_at": run.created,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": job.model.name,
        "object": "response",
        "output": output,
        "parallel_tool_calls": True,
        "temperature": float(body.get("temperature", 1.0)),
        "tool_choice": "none",
        "tools": [],
        "top_p": float(body.get("top_p", 1.0)),
        "background": body.get("background") is True,
        "max_output_tokens": job.max_tokens[0],
        "max_tool_calls": None,
        "previous_response_id": body.get("previous_response_id"),
        "prompt": None,
        "reasoning": None,
        "service_tier": "auto",
        "status": status,
        "text": None,
        "top_logprobs": None,
        "truncation": "disabled",
        "usage": usage,
        "user": body.get("user"),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "kv_transfer_params": offered,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }
