"""Request bodies and headers -> `RequestFacts`, the same for every face.

Only the fields a decision needs are looked at. Everything else, known or not, is none of our business: the body goes
on as the bytes it came in, so nothing in it can be lost.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from gateway import form
from gateway.bad_request import BadRequest as BadRequest
from gateway.depth import check_depth
from gateway.handoff.bodies import BRINGS_NO_IDS, is_takeable, why_local
from gateway.handoff.local import LIMITS
from gateway.large import LARGE_BYTES, MOST_TOKENS, LargeBody, decode_large
from gateway.proxy.headers import is_encoded
from gateway.right_of_way import RightOfWay
from gateway.stored import LONGEST_ID, Place
from gateway.tokens import Tokens, TokenService
from gateway.tokens.references import media_links
from indexer import Link
from scorer.fleet import Fleet
from scorer.types import PdReason, RequestFacts, TokenSource

_BYTES_PER_TOKEN = 4
"""For bodies without a prompt we could read: enough to tell long from short."""
_LARGE_AT_ONCE = 2
_BYTES_PER_MEDIA_TOKEN = 256
"""Of files in forms: between MP3 (160 bytes a token of Whisper) and WAV (640)."""
_FORM_FIELDS = frozenset({"model", "stream"})
_TRUE = frozenset({"true", "1", "on", "yes", "t", "y"})
"""In forms, as pydantic reads them."""
_MOST_TOKENS = 1 << 31
_MOST_SEQUENCES = 1 << 14
"""Larger numbers in a body say nothing about its cost: an engine refuses them, and floats cannot hold them all."""
_WHOLE = re.compile(r"\s*\+?\d{1,10}(?:\.0+)?\s*", re.ASCII)


HolderOf = Callable[[str, Mapping[str, str], str | None], Awaitable[Place]]


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Objectives of requests that name none."""

    ttft_s: float | None = None
    tpot_s: float | None = None


def members_of(body: bytes) -> dict[str, Any] | None:
    """Of the JSON object in `body`. None: it is none, or not for sure, or too large to be read while others wait."""
    if len(body) > LARGE_BYTES:
        return None
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return decoded if isinstance(decoded, dict) else None


def decode_body(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises BadRequest."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        # Engines read JSON with Python's own parser: NaN, lone surrogates and a byte order mark are fine with it.
        try:
            decoded = json.loads(body)
        except (ValueError, RecursionError) as exc:
            reason = exc.msg if isinstance(exc, json.JSONDecodeError) else "it cannot be read"
            if isinstance(exc, RecursionError):
                reason = "it is nested too deep"
            raise BadRequest(f"The request body is not valid JSON: {reason}.", code="invalid_json") from None
    if not isinstance(decoded, dict):
        raise BadRequest("The request body must be a JSON object.", code="invalid_json")
    return decoded


class RequestReader:
    """Fills `RequestFacts`. Token ids are made by `tokens`, off the event loop."""

    def __init__(
        self,
        fleet: Fleet,
        tokens: TokenService,
        slo: Slo | None = None,
        *,
        session_header: str = "x-session-id",
        holder_of: HolderOf | None = None,
        look_again: Callable[[], Awaitable[None]] | None = None,
        try_unknown: bool = False,
        ask: Callable[[RequestFacts], Awaitable[None]] | None = None,
        right_of_way: RightOfWay | None = None,
    ) -> None:
        """`holder_of(response_id, headers, tenant)` says where a stored response is, or raises what the client is told.
        `look_again` brings the fleet's models up to date. `try_unknown`: a model that nobody lists is taken for an
        adapter of the only base model, which an engine may load when it is asked. `ask` asks who holds a prompt, where
        that is not known in this process. The loop takes the `right_of_way` before a prompt is read.
        """
        self._right_of_way = right_of_way or RightOfWay()
        self._session_header = session_header.lower()
        self._fleet = fleet
        self._tokens = tokens
        self.slo = slo or Slo()
        self._holder_of = holder_of
        self._look_again = look_again
        self._ask = ask
        self._try_unknown = try_unknown
        self._large_at_once = asyncio.Semaphore(_LARGE_AT_ONCE)

    async def read(
        self,
        request_id: str,
        kind: str | None,
        body: bytes,
        headers: Mapping[str, str],
        members: dict[str, Any] | None = None,
        tenant: str | None = None,
    ) -> RequestFacts:
        """`kind`: how to read the prompt (see `TokenService.tokens_for`); None: the request is placed by load.

        `headers` are looked up by lower-case names; `members` are `members_of(body)`, where they are known. Raises
        BadRequest.
        """
        self._right_of_way.take()
        content_type = headers.get("content-type", "")
        if content_type[:10].lower() == "multipart/":
            texts = form.fields(content_type, body, _FORM_FIELDS)
            fields: dict[str, Any] = {**texts, "stream": texts.get("stream", "").lower() in _TRUE}
            n_tokens = len(body) // _BYTES_PER_MEDIA_TOKEN
            return await self._opaque(request_id, fields, n_tokens, headers, keep_local=PdReason.NOT_READABLE)
        if is_encoded(headers):
            # The engine may know how to read it.
            return await self._opaque(
                request_id, {}, len(body) // _BYTES_PER_TOKEN, headers, keep_local=PdReason.NOT_READABLE
            )
        cut_tokens, left_out = 0, False
        if len(body) <= LARGE_BYTES:
            fields = decode_body(body) if members is None else members
        else:
            fields, left_out, cut_tokens = await self._large(body, kind)
        check_depth(fields)
        facts = await self._read(request_id, kind, body, headers, fields, left_out, cut_tokens)
        if self._ask is not None:
            await self._ask(facts)
        if kind == "responses" and isinstance(previous := fields.get("previous_response_id"), str) and previous:
            return await self._follow_up(facts, previous, headers, tenant)
        return facts

    async def _read(
        self,
        request_id: str,
        kind: str | None,
        body: bytes,
        headers: Mapping[str, str],
        fields: Mapping[str, Any],
        left_out: bool,
        cut_tokens: int,
    ) -> RequestFacts:
        if kind is None or left_out:
            keep_local = PdReason.NOT_GENERATION if kind is None else PdReason.NOT_READABLE
            return await self._opaque(request_id, fields, len(body) // _BYTES_PER_TOKEN, headers, keep_local=keep_local)
        model, lora = await self._served(fields.get("model"))
        prompts = await self._tokens.tokens_for(kind, fields, model, body_bytes=len(body))
        routed = max(prompts, key=_known_tokens)
        sampling = fields.get("sampling_params") if kind == "generate" else fields
        if not isinstance(sampling, Mapping):
            sampling = {}
        n_sequences = _positive(sampling.get("n"), _MOST_SEQUENCES) or 1
        ids = None if routed.ids is None else routed.ids[: 4 * MOST_TOKENS]
        is_prefix = ids is not None and (routed.prefix_only or cut_tokens > 0 or ids is not routed.ids)
        return RequestFacts(
            request_id=request_id,
            model=model,
            prompt_tokens=sum(prompt.n_tokens for prompt in prompts) + cut_tokens,
            tokens=ids,
            exact_prefix_tokens=len(ids) // 4 if is_prefix and ids is not None else None,
            token_source=TokenSource(routed.source),
            lora=lora,
            cache_salt=_text(fields.get("cache_salt")),
            media_links=await self._media_links(kind, fields, len(body)) if routed.media_parts else (),
            max_output_tokens=next(
                filter(None, (_positive(sampling.get(name)) for name in LIMITS.get(kind, ()))), None
            ),
            n_sequences=n_sequences * len(prompts),
            streaming=fields.get("stream") is True,
            keep_local=self._kept_local(kind, body, fields, routed, len(prompts)),
            priority=_priority(headers, fields),
            session=headers.get(self._session_header),
            slo_ttft_s=_milliseconds(headers, "x-slo-ttft-ms", self.slo.ttft_s),
            slo_tpot_s=_milliseconds(headers, "x-slo-tpot-ms", self.slo.tpot_s),
        )

    async def session(self, request_id: str, model: str | None, headers: Mapping[str, str]) -> RequestFacts:
        """Of a connection that lives long and has no prompt yet. Raises BadRequest."""
        return await self._opaque(request_id, {"model": model}, 1, headers, keep_local=PdReason.NOT_GENERATION)

    async def _follow_up(
        self, facts: RequestFacts, previous: str, headers: Mapping[str, str], tenant: str | None
    ) -> RequestFacts:
        """To the worker that has the response it follows, and the rank that has its KV."""
        if self._holder_of is None:
            return facts
        place = await self._holder_of(previous, headers, tenant)
        holder = self._fleet.workers.get(place.worker)
        if not any(worker.serves(facts.model) is not False for worker in self._fleet.workers.values()):
            return facts  # Nobody serves it, which is what there is to say.
        if holder is not None and holder.serves(facts.model) is False:
            text = f"The response `{previous[:LONGEST_ID]}` is held by a worker that does not serve `{facts.model}`."
            raise BadRequest(text, param="previous_response_id")
        ranks = () if holder is None else holder.loads
        rank = place.rank if place.rank in ranks and len(ranks) > 1 else None
        return msgspec.structs.replace(facts, subset=frozenset({place.worker}), rank=rank)

    async def _media_links(self, kind: str, fields: Mapping[str, Any], n_bytes: int) -> tuple[Link, ...]:
        if n_bytes <= LARGE_BYTES:
            return media_links(kind, fields)
        return await asyncio.to_thread(media_links, kind, fields)  # Images as data: URIs may be many MB.

    def _kept_local(
        self, kind: str, body: bytes, fields: Mapping[str, Any], routed: Tokens, n_prompts: int
    ) -> PdReason | None:
        why = why_local(kind, fields, n_prompts)
        if why is None and (not is_takeable(body) or (kind in BRINGS_NO_IDS and routed.ids is None)):
            # Without ids from anywhere the two engines may make different prompts of one text, which kills the second.
            return PdReason.NOT_READABLE
        return why

    async def _large(self, body: bytes, kind: str | None) -> LargeBody:
        async with self._large_at_once:
            large = await asyncio.to_thread(decode_large, body, kind)
        if large is None:
            raise BadRequest("The request body is not a valid JSON object.", code="invalid_json")
        return large

    async def _opaque(
        self,
        request_id: str,
        fields: Mapping[str, Any],
        n_tokens: int,
        headers: Mapping[str, str],
        *,
        keep_local: PdReason,
    ) -> RequestFacts:
        model, lora = await self._served(fields.get("model"))
        return RequestFacts(
            request_id=request_id,
            model=model,
            prompt_tokens=n_tokens,
            lora=lora,
            streaming=fields.get("stream") is True,
            keep_local=keep_local,
            session=headers.get(self._session_header),
        )

    def _model(self, model: object) -> str:
        if isinstance(model, str) and model:
            return model
        if model is not None and model != "":
            raise BadRequest("`model` must be a string.", param="model")
        common = self._only_base()
        if not common and any(worker.models for worker in self._fleet.workers.values()):
            raise BadRequest("You must provide a `model` parameter: several models are served here.", param="model")
        return min(common, default="")

    def _only_base(self) -> frozenset[str]:
        """The names that all workers have for their base model; none if they serve several."""
        bases = [worker.models for worker in self._fleet.workers.values() if worker.models]
        return frozenset.intersection(*bases) if bases else frozenset()

    async def _served(self, named: object) -> tuple[str, str | None]:
        """(model, adapter) that a request asks for by one name."""
        model = self._model(named)
        workers = self._fleet.workers.values()
        if self._look_again is not None and model and not any(worker.serves(model) for worker in workers):
            await self._look_again()
        if any(model in worker.adapters for worker in workers):
            return model, model
        if self._try_unknown and model and not any(worker.serves(model) for worker in workers):
            common = self._only_base()
            if common:
                return min(common), model
        return model, None


def _known_tokens(prompt: Tokens) -> int:
    return -1 if prompt.ids is None else len(prompt.ids)


def _positive(value: object, most: int = _MOST_TOKENS) -> int | None:
    """Engines take "5" and 5.0 for 5, too."""
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = int(float(value))
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    number = _integer(value)
    return number if number is not None and 0 < number <= most else None


def _priority(headers: Mapping[str, str], fields: Mapping[str, Any]) -> int:
    """As vLLM reads it: the lower the sooner, and the header, where there is one, instead of the field."""
    try:
        return _integer(int(headers["x-vllm-priority"])) or 0
    except (KeyError, ValueError):
        return _integer(fields.get("priority")) or 0


def _integer(value: object) -> int | None:
    """None for integers that no field of an engine can hold, too."""
    return value if type(value) is int and -_MOST_TOKENS <= value <= _MOST_TOKENS else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _milliseconds(headers: Mapping[str, str], name: str, default_s: float | None) -> float | None:
    """Of a header of that name or llm-d's newer one, which counts where both are there."""
    newer = name.replace("x-", "x-llm-d-", 1)
    value = headers.get(newer)
    if value is None:
        value = headers.get(name)
    else:
        name = newer
    if value is None:
        return default_s
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise BadRequest(f"The header {name} must be a number of milliseconds above 0.", param=name)
    return number / 1000
