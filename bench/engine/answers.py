"""Response bodies and SSE frames, field for field as vLLM 0.32 sends them."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from bench.engine.protocol import Generation

to_json: Final = msgspec.json.encode
DONE: Final = b"data: [DONE]\n\n"


def usage(prompt: int, completion: int, details: dict[str, Any] | None = None, *, full: bool = True) -> dict[str, Any]:
    """`full` bodies carry the optional parts as null, stream chunks leave them out."""
    body: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    if full or details is not None:
        body["prompt_tokens_details"] = details
    if full:
        body["completion_tokens_details"] = None
    return body


def completion(
    job: Generation,
    created: int,
    fingerprint: str,
    choices: list[dict[str, Any]],
    usage_body: dict[str, Any],
    params: Any,
) -> dict[str, Any]:
    return {
        "id": job.request_id,
        "object": "text_completion",
        "created": created,
        "model": job.model.name,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": fingerprint,
        "usage": usage_body,
        "kv_transfer_params": params,
        "ec_transfer_params": None,
        "metrics": None,
    }


def completion_choice(
    job: Generation, index: int, text: str, ids: Sequence[int], prompt: Sequence[int], reason: str | None, stop: Any
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": reason,
        "stop_reason": stop,
        "token_ids": ids if job.return_token_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt if job.return_token_ids else None,
        "routed_experts": None,
    }


def chat_completion(
    job: Generation,
    created: int,
    fingerprint: str,
    choices: list[dict[str, Any]],
    usage_body: dict[str, Any],
    params: Any,
) -> dict[str, Any]:
    return {
        "id": job.request_id,
        "object": "chat.completion",
        "created": created,
        "model": job.model.name,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": fingerprint,
        "usage": usage_body,
        "prompt_logprobs": None,
        "prompt_token_ids": job.prompts[0] if job.return_token_ids else None,
        "prompt_text": None,
        "kv_transfer_params": params,
        "ec_transfer_params": None,
        "metrics": None,
    }


def chat_choice(
    job: Generation, index: int, text: str, ids: Sequence[int], reason: str | None, stop: Any
) -> dict[str, Any]:
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        },
        "logprobs": None,
        "finish_reason": reason,
        "stop_reason": stop,
        "token_ids": ids if job.return_token_ids else None,
        "routed_experts": None,
    }


class Chunks:
    """SSE frames of one stream; what does not change is encoded once."""

    def __init__(self, job: Generation, created: int, fingerprint: str) -> None:
        self._job = job
        self._fingerprint = fingerprint
        kind = "chat.completion.chunk" if job.is_chat else "text_completion"
        head = to_json({"id": job.request_id, "object": kind, "created": created, "model": job.model.name})
        self._head = b"data: " + head[:-1] + b',"choices":['

    def role(self, index: int, prompt_ids: Sequence[int]) -> bytes:
        ids = to_json(prompt_ids) if self._job.return_token_ids else b"null"
        delta = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        return self._head + delta + b'],"prompt_token_ids":' + ids + b',"prompt_text":null}\n\n'

    def text(
        self,
        index: int,
        text: str,
        ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] | None = None,
        reason: str | None = None,
        stop: Any = None,
        usage_body: dict[str, Any] | None = None,
        last: bool = False,
    ) -> bytes:
        """One delta. `last`: the stream's last delta when no usage chunk follows it (carries the fingerprint)."""
        shown = to_json(ids) if self._job.return_token_ids else b"null"
        if self._job.is_chat:
            choice = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":%b' % (
                index,
                to_json(text),
                to_json(reason),
            )
            if reason is not None:
                choice += b',"stop_reason":' + to_json(stop)
            choice += b',"token_ids":' + shown + b"}]"
        else:
            prompt = to_json(prompt_ids) if prompt_ids is not None and self._job.return_token_ids else b"null"
            choice = (
                b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b,"prompt_token_ids":%b,'
                b'"token_ids":%b}]' % (index, to_json(text), to_json(reason), to_json(stop), prompt, shown)
            )
        if usage_body is not None:
            choice += b',"usage":' + to_json(usage_body)
        if last:
            choice += b',"system_fingerprint":' + to_json(self._fingerprint)
        return self._head + choice + b"}\n\n"

    def usage(self, usage_body: dict[str, Any]) -> bytes:
        fingerprint = to_json(self._fingerprint)
        return self._head + b'],"usage":' + to_json(usage_body) + b',"system_fingerprint":' + fingerprint + b"}\n\n"

    @staticmethod
    def error(message: str) -> bytes:
        body = {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}
        return b"data: " + to_json(body) + b"\n\n"


def model_card(name: str, root: str, parent: str | None, max_model_len: int | None, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [
            {
                "id": f"modelperm-{name}",
                "object": "model_permission",
                "created": created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


def json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=to_json(body), status=status, content_type="application/json")
