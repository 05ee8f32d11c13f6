"""OpenAI request bodies -> `Generation`, with vLLM's rules and vLLM's error bodies."""

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
import xxhash

from bench.engine import chat, tokenizer
from bench.engine.request import mix64

_COMPLETION_DEFAULT_TOKENS: Final = 16  # the OpenAI API's default, kept by vLLM
_CHAT_MEAN_TOKENS: Final = 64.0
_MOST_SEQUENCES: Final = 16_384  # VLLM_MAX_N_SEQUENCES, as it is without being set

ApiKind = Literal["completions", "chat", "responses", "messages"]


class ApiError(Exception):
    """An error with vLLM's body; `status` is the HTTP status."""

    def __init__(
        self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None, headers: Any = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class EngineDeadError(ApiError):
    """The engine core is gone; every request gets this until the process is started anew."""

    def __init__(self) -> None:
        message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        super().__init__(500, message, "InternalServerError")


def invalid(kind: str, param: str, message: str, value: Any) -> ApiError:
    """A pydantic complaint as vLLM 0.32 words it."""
    detail = f"{{'type': {kind!r}, 'loc': 'body.{param}', 'msg': {message!r}, 'input': {value!r}}}"
    return ApiError(400, f"1 validation error:\n  {detail}", "Bad Request", f"body.{param}")


def parse_body(raw: bytes, content_type: str) -> dict[str, Any]:
    if content_type not in ("application/json", "application/octet-stream", ""):
        raise ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed", "Bad Request")
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(
            400,
            f"1 validation error:\n  {{'type': 'json_invalid', 'loc': 'body', 'msg': 'JSON decode error', "
            f"'ctx': {{'error': {str(error)!r}}}}}",
            "Bad Request",
            "body",
        ) from None
    if not isinstance(body, dict):
        raise ApiError(400, "1 validation error:\n  {'type': 'dict_type', 'loc': 'body'}", "Bad Request", "body")
    return body


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a model name in a request stands for."""

    name: str
    lora_id: int | None = None
    lora_name: str | None = None


@dataclass(slots=True, kw_only=True)
class Generation:
    """One request for text: `len(prompts) * n` sequences. `max_tokens` holds one limit per prompt."""

    api: ApiKind
    request_id: str
    model: ServedModel
    prompts: list[list[int]]
    max_tokens: list[int]
    n: int = 1
    seed: int | None = None
    stops: list[str] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()
    mean_tokens: float | None = None
    min_tokens: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    return_token_ids: bool = False
    cache_salt: str | None = None
    session_id: str | None = None
    report_full: bool = False
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def is_chat(self) -> bool:
        return self.api != "completions"

    def engine_request_id(self, prompt_index: int, child: int, suffix: str) -> str:
        """The sequence's id inside the engine, as it shows in `remote_request_id`; `suffix` is 8 hex digits."""
        inner = {"completions": f"-{prompt_index}", "responses": "_0"}.get(self.api, "")
        parent = f"{self.request_id}{inner}-{suffix}"
        return f"{child}_{parent}" if self.n > 1 else parent

    def draw(self, prompt_index: int, child: int, entropy: int) -> int:
        """The sequence's seed: from the prompt alone when sampling is greedy or seeded, else from `entropy`."""
        prompt = array("q", self.prompts[prompt_index]).tobytes()
        base = xxhash.xxh3_64_intdigest(prompt, seed=xxhash.xxh3_64_intdigest(repr(self.model.lora_name).encode()))
        return mix64(base ^ (entropy if self.seed is None else mix64(self.seed))) + child

    def stop_after(self, draw: int) -> int | None:
        """After how many tokens the model stops by itself: geometric with mean `mean_tokens`."""
        if self.mean_tokens is None:
            return None
        if self.mean_tokens <= 1:
            return max(1, self.min_tokens)
        uniform = (mix64(draw ^ 0x5707) + 0.5) / 2**64
        length = 1 + int(math.log(uniform) / math.log1p(-1.0 / self.mean_tokens))
        return max(length, self.min_tokens)


class Parser:
    """Checks bodies against one server's limits."""

    def __init__(self, *, max_model_len: int, mean_output_tokens: float | None, image_tokens: int = 0) -> None:
        self.max_model_len = max_model_len
        self.image_tokens = image_tokens
        self._mean = mean_output_tokens

    def completion(self, body: dict[str, Any], headers: Mapping[str, str], model: ServedModel, rid: str) -> Generation:
        prompts = self._completion_prompts(body.get("prompt"))
        limit = _integer(body, "max_tokens", _COMPLETION_DEFAULT_TOKENS, least=1)
        return self._generation("completions", body, headers, model, rid, prompts, limit)

    def chat(
        self, api: ApiKind, body: dict[str, Any], headers: Mapping[str, str], model: ServedModel, rid: str
    ) -> Generation:
        """Also for responses and messages, whose bodies were turned into a chat's."""
        prompt = self._forwarded_ids(body) or self.chat_prompt(body)
        limit = _integer(body, "max_completion_tokens", None, least=1) or _integer(body, "max_tokens", None, least=1)
        return self._generation(api, body, headers, model, rid, [prompt], limit)

    def _forwarded_ids(self, body: dict[str, Any]) -> list[int] | None:
        """`kv_transfer_params.prompt_token_ids`: ids of the prefill instead of rendered messages, if all text."""
        params = body.get("kv_transfer_params")
        ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
        if ids is None or body.get("echo") is True or not chat.is_text(body.get("messages")):
            return None
        where = "kv_transfer_params.prompt_token_ids"
        if not isinstance(ids, list) or not ids or any(type(it) is not int or it < 0 for it in ids):
            message = "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers."
            raise ApiError(400, f"{message} (parameter={where})", param=where)
        return self._ids(ids, where)

    def chat_prompt(self, body: dict[str, Any]) -> list[int]:
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise invalid("missing" if messages is None else "list_type", "messages", "Field required", messages)
        try:
            ids = chat.render(
                messages, body.get("tools"), body.get("add_generation_prompt", True) is not False, self.image_tokens
            )
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        return ids

    def prompt_of(self, prompt: Any) -> list[int]:
        """One prompt, as text or ids."""
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        return self._ids(prompt, "prompt")

    def _completion_prompts(self, prompt: Any) -> list[list[int]]:
        if prompt is None or prompt in ("", []):
            raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            return [self.prompt_of(item) for item in prompt]
        return [self.prompt_of(prompt)]

    def _ids(self, ids: Any, param: str) -> list[int]:
        if not isinstance(ids, list) or not all(type(it) is int for it in ids):
            raise invalid("string_type", param, "Input should be a valid string or a list of integers", str(ids)[:40])
        if ids and not 0 <= min(ids) <= max(ids) < tokenizer.VOCAB_SIZE:
            raise ApiError(400, f"Token id {max(ids) if min(ids) >= 0 else min(ids)} is out of vocabulary", param=param)
        return ids

    def _generation(
        self,
        api: ApiKind,
        body: dict[str, Any],
        headers: Mapping[str, str],
        model: ServedModel,
        rid: str,
        prompts: list[list[int]],
        limit: int | None,
    ) -> Generation:
        salt = body.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise ApiError(
                400,
                "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)",
                param="cache_salt",
            )
        params = body.get("kv_transfer_params")
        if params is not None and not isinstance(params, dict):
            raise invalid("dict_type", "kv_transfer_params", "Input should be a valid dictionary", params)
        xargs = body.get("vllm_xargs") or {}
        if not isinstance(xargs, dict):
            raise invalid("dict_type", "vllm_xargs", "Input should be a valid dictionary", xargs)
        options = body.get("stream_options") or {}
        stream = body.get("stream") is True
        if options and not stream:
            raise ApiError(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
        mean = self._mean if self._mean is not None or limit is not None else _CHAT_MEAN_TOKENS
        generation = Generation(
            api=api,
            request_id=rid,
            model=model,
            prompts=prompts,
            max_tokens=[self._limit(len(prompt), limit) for prompt in prompts],
            n=_integer(body, "n", 1, least=1, most=_MOST_SEQUENCES) or 1,
            seed=_seed(body),
            stops=_stops(body.get("stop")),
            stop_token_ids=frozenset(self._ids(body.get("stop_token_ids") or [], "stop_token_ids")),
            mean_tokens=None if body.get("ignore_eos") is True else mean,
            min_tokens=_integer(body, "min_tokens", 0, least=0) or 0,
            stream=stream,
            include_usage=options.get("include_usage") is True,
            continuous_usage=options.get("continuous_usage_stats") is True,
            echo=body.get("echo") is True,
            return_token_ids=body.get("return_token_ids") is True,
            cache_salt=salt,
            session_id=body.get("session_id") or headers.get("X-Session-ID") or xargs.get("session_id"),
            report_full=xargs.get("kv_cache_report_mode") == "full",
            kv_transfer_params=params,
        )
        if generation.n > 1 and body.get("temperature") == 0:
            raise ApiError(400, "n must be 1 when using greedy sampling, got " + str(generation.n) + ".", param="n")
        return generation

    def _limit(self, prompt_len: int, limit: int | None) -> int:
        room = self.max_model_len - prompt_len
        if room < 1:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt contains "
                f"{prompt_len} input tokens, which exceeds this limit even without any output tokens. Please reduce "
                f"the length of the input prompt. (parameter=input_tokens, value={prompt_len})",
                param="input_tokens",
            )
        if limit is not None and limit > room:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested {limit} "
                f"output tokens and your prompt contains {prompt_len} input tokens, for a total of "
                f"{limit + prompt_len} tokens. Please reduce the length of the input prompt or the number of requested "
                f"output tokens. (parameter=input_tokens, value={prompt_len})",
                param="input_tokens",
            )
        return room if limit is None else limit


def _integer(body: dict[str, Any], name: str, default: int | None, *, least: int, most: float = math.inf) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise invalid("int_type", name, "Input should be a valid integer", value)
    if value < least:
        raise ApiError(400, f"{name} must be at least {least}, got {value}.", param=name)
    if value > most:
        raise ApiError(400, f"{name} must be at most {most}, got {value}.", param=name)
    return value


def _seed(body: dict[str, Any]) -> int | None:
    seed = _integer(body, "seed", None, least=-(2**63))
    return 0 if seed is None and body.get("temperature") == 0 else seed


def _stops(stop: Any) -> list[str]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(it, str) for it in stops):
        raise invalid("list_type", "stop", "Input should be a valid string or list of strings", stop)
    return [it for it in stops if it]
