"""A random prompt through one rank and back: is it announced, found by our index, and reused as predicted?

The prompt is random token ids, a few hundred of them, with one token of output. It is sent twice: the first time it is
new to every cache, the second time the engine must reuse what it announced.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from gateway.doctor.fetch import Fault, Http
from gateway.doctor.tap import Tap, until
from gateway.proxy.headers import RANK_HEADER
from indexer.events import BlockStored
from indexer.holder import FULL_PREFIX_KINDS, GPU, tier_of

MIN_TOKENS = 256
MIN_BLOCKS = 2
_IDS = (10, 1000)
"""Every vocabulary has these, and a random run of them is new to any cache."""
_DEFAULT_BLOCK_SIZE = 16


class Outcome(msgspec.Struct, kw_only=True):
    """One probe.

    `failure` says why there is no answer. `announced`: its rank published something after it was sent; `undelivered`:
    that can only be had as a replay; `waited_s`: how long events were waited for at the most. `matched` is how many of
    its tokens our index holds for each rank, `predicted_tokens` what the repeat should reuse,
    `repeat_cached` what the engine says it reused (None: it does not say). `unmatched`: the code and sentence for why
    events came but the prompt is not found.
    """

    rank: int
    n_tokens: int
    waited_s: float = 0.0
    failure: str | None = None
    announced: bool = False
    undelivered: bool = False
    matched: dict[int, int] = {}
    predicted_tokens: int | None = None
    repeat_cached: int | None = None
    unmatched: tuple[str, str] | None = None

    @property
    def matched_tokens(self) -> int:
        return max(self.matched.values(), default=0)

    @property
    def is_good(self) -> bool:
        return (
            self.failure is None
            and self.predicted_tokens is not None
            and self.repeat_cached == self.predicted_tokens
            and (self.rank in self.matched or len(self.matched) == 1)
        )


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Completion(msgspec.Struct):
    usage: _Usage


class _Error(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error


_completion = msgspec.json.Decoder(_Completion)
_refusal = msgspec.json.Decoder(_Refusal)


def probe_length(block_size: int | None, max_model_len: int | None) -> int | None:
    """Tokens of a probe: whole blocks and one more, so that every block can be reused. None: too little fits."""
    size = block_size or _DEFAULT_BLOCK_SIZE
    blocks = max(MIN_BLOCKS, -(-MIN_TOKENS // size))
    if max_model_len is not None:
        blocks = min(blocks, (max_model_len - 2) // size)
    return blocks * size + 1 if blocks >= MIN_BLOCKS else None


def random_ids(rng: random.Random, n_tokens: int) -> list[int]:
    return [rng.randrange(*_IDS) for _ in range(n_tokens)]


class Prober:
    """Probes of one worker. `pick_rank`: name the rank in each request (a server with several of them)."""

    def __init__(self, http: Http, model: str, n_tokens: int, *, pick_rank: bool, rng: random.Random) -> None:
        self._http = http
        self._model = model
        self._n_tokens = n_tokens
        self._pick_rank = pick_rank
        self._rng = rng

    async def run(self, rank: int, tap: Tap | None) -> tuple[Outcome, list[int]]:
        """The outcome and the prompt. `tap` None: there are no events to listen to.

        What can be chance (a slow joiner, an eviction) is given a second try.
        """
        outcome, ids = await self._once(rank, tap)
        if outcome.failure is None and not (outcome.is_good or (tap is None and outcome.repeat_cached)):
            outcome, ids = await self._once(rank, tap)
        return outcome, ids

    async def _once(self, rank: int, tap: Tap | None) -> tuple[Outcome, list[int]]:
        ids = random_ids(self._rng, self._n_tokens)
        outcome = Outcome(rank=rank, n_tokens=self._n_tokens)
        before = self._batches(rank, tap)
        first = await self._send(ids, rank)
        if isinstance(first, str):
            outcome.failure = first
            return outcome, ids
        if tap is not None:
            await self._listen(tap, ids, rank, before, outcome)
        repeat = await self._send(ids, rank)
        if isinstance(repeat, str):
            outcome.failure = repeat
            return outcome, ids
        outcome.repeat_cached = _cached(repeat)
        return outcome, ids

    async def _listen(self, tap: Tap, ids: list[int], rank: int, before: int, outcome: Outcome) -> None:
        worker = self._http.url

        def complete() -> bool:
            sizes = {size for r in tap.status(worker) for size in tap.heard(worker, r).block_sizes}
            held = max(tap.matches(worker, ids).values(), default=0)
            return held > 0 and held > len(ids) - max(sizes, default=0) - 1

        outcome.waited_s = self._http.timeout_s
        await until(complete, outcome.waited_s)
        outcome.matched = tap.matches(worker, ids)
        outcome.announced = self._batches(rank, tap) > before
        if outcome.matched:
            outcome.predicted_tokens = min(outcome.matched_tokens, len(ids) - 1)
        elif outcome.announced:
            stored = [event for r in tap.status(worker) for event in tap.heard(worker, r).stored]
            outcome.unmatched = explain(stored, ids)

    def _batches(self, rank: int, tap: Tap | None) -> int:
        """Batches of that rank so far; of a server with one rank under whatever number it gives itself."""
        if tap is None:
            return 0
        worker = self._http.url
        ranks = (rank,) if self._pick_rank else tuple(tap.status(worker))
        return sum(tap.heard(worker, each).batches for each in ranks)

    async def _send(self, ids: list[int], rank: int) -> _Usage | str:
        """What the engine says it used, or why there is no answer."""
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0, "stream": False}
        headers = {RANK_HEADER: str(rank)} if self._pick_rank else {}
        answer = await self._http.post("/v1/completions", body, headers=headers)
        if isinstance(answer, Fault):
            return answer.sentence
        if answer.status != 200:
            return f"/v1/completions has status {answer.status}{error_text(answer.body)}"
        try:
            return _completion.decode(answer.body).usage
        except msgspec.MsgspecError:
            return "/v1/completions is not what vLLM answers"


def _cached(usage: _Usage) -> int | None:
    return None if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens


def error_text(body: bytes) -> str:
    """What an OpenAI error says, in brackets, to be put behind its status."""
    try:
        message = _refusal.decode(body).error.message
    except msgspec.MsgspecError:
        return ""
    lines = message.strip().splitlines()
    return f" ({lines[0][:120]})" if lines else ""


def explain(stored: Sequence[BlockStored], ids: Sequence[int]) -> tuple[str, str]:
    """Why a prompt whose computation was announced is not in the index: a code and a sentence (no key is shown)."""
    mine = [
        event
        for event in stored
        if event.token_ids and event.block_size and event.token_ids[: event.block_size] == list(ids[: event.block_size])
    ]
    if not mine:
        return "events-unmatched", "events came, but none of them names the prompt that was sent"
    named = [event for event in mine if event.lora_name is None and event.lora_id is None]
    if not named:
        return "extra-keys", "a prompt to the base model is announced under an adapter"
    plain = [event for event in named if not any(event.extra_keys or ())]
    if not plain:
        return "extra-keys", "a plain prompt is announced with extra keys"
    full = [event for event in plain if (event.kv_cache_spec_kind or "full_attention") in FULL_PREFIX_KINDS]
    if not full:
        kinds = sorted({str(event.kv_cache_spec_kind) for event in plain})
        return "no-full-attention", f"its blocks are of kind {', '.join(kinds)} only"
    if all(tier_of(event.medium, event.locality) != GPU for event in full):
        media = sorted({str(event.medium) for event in full})
        return "events-unmatched", f"the prompt is announced in medium {', '.join(media)} only, not on the GPU"
    if all(event.parent_block_hash is not None for event in full):
        return "events-unmatched", "the prompt is announced as the continuation of another one"
    return "events-unmatched", "the prompt is announced, but was gone again before it could be looked up"
