"""Every message that crosses a boundary between deciding and serving, in one place.

A face fills `RequestFacts`, the planner answers with a `Plan`, the face carries it out and reports `Outcome`s back.
Discovery yields `WorkerChange`s. Times ending in `_s` are seconds; `now_s` is monotonic; token counts end in `_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from indexer import Holder, Link


class Role(Enum):
    """What a worker may be asked to do. BOTH serves whole requests; SOURCE decodes for somebody else, and here is asked
    only for prompts of which it holds more than those who decode here.
    """

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
    SOURCE = "source"

    @property
    def decodes(self) -> bool:
        """Whether clients' requests may be decoded there."""
        return self is Role.BOTH or self is Role.DECODE


class TokenSource(Enum):
    """Where a request's token ids came from. With ESTIMATE there are none, only a count."""

    GIVEN = "given"
    LOCAL = "local"
    ENGINE = "engine"
    ESTIMATE = "estimate"


class PdReason(Enum):
    """Why a prompt is computed where it is; the closed list of reasons in metrics, headers and explanations."""

    # Local, because the fleet or the request leaves no other way.
    NO_PREFILL_WORKER = "no_prefill_worker"
    PAIR_BROKEN = "pair_broken"
    PAIR_INCOMPATIBLE = "pair_incompatible"
    UNKNOWN_BLOCK_SIZE = "unknown_block_size"
    SHORT_PROMPT = "shorter_than_block"
    N_SEQUENCES = "n_sequences"
    SEVERAL_PROMPTS = "several_prompts"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ECHO = "echo"
    BEST_OF = "best_of"
    BEAM_SEARCH = "beam_search"
    NOT_GENERATION = "not_generation"
    NOT_READABLE = "not_readable"
    STORED_RESPONSE = "stored_response"
    WOULD_BE_REJECTED = "would_be_rejected"
    # Local or remote, because a rule says so.
    COST = "cost"
    POLICY = "policy"
    THRESHOLD = "threshold"
    HINT = "hint"
    NO_HINT = "no_hint"
    PLAN = "plan"
    # Local, and somebody in front of us has named a source that was of no use.
    SOURCE_UNUSABLE = "source_unusable"
    SOURCE_HOLDS_NO_MORE = "source_holds_no_more"
    # Local after all: what was tried remotely did not work.
    PREFILL_FAILED = "prefill_failed"
    PREFILL_TIMEOUT = "prefill_timeout"
    NO_PARAMS = "no_params"
    BAD_PARAMS = "bad_params"
    LEASE_OVER = "lease_over"
    KV_LOAD_FAILED = "kv_load_failed"
    DECODE_FAILED = "decode_failed"


class SessionOutcome(Enum):
    """What became of a session's affinity, in metrics, headers and explanations."""

    NEW = "new"
    KEPT = "kept"
    MOVED_CHEAPER = "moved_cheaper"
    MOVED_BUSY = "moved_busy"
    MOVED_UNAVAILABLE = "moved_unavailable"


LOCAL, REMOTE, PEER = CHOICES = ("local", "remote", "peer")
"""Values of `Plan.choice`."""


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision needs to know of one request, and no prompt text.

    `tokens` is a uint32 buffer, None when only `prompt_tokens` is estimated; `exact_prefix_tokens` says how far it is
    exact when it is not to the end (text before the first image). `keep_local` says why the request must not be split
    over two engines (n > 1, prompt logprobs, ...). `subset` limits the workers, by name.
    """

    request_id: str
    model: str
    prompt_tokens: int
    tokens: bytes | None = None
    exact_prefix_tokens: int | None = None
    token_source: TokenSource = TokenSource.ESTIMATE
    lora: str | None = None
    cache_salt: str | None = None
    extra_keys: Sequence[Any] | None = None
    media_links: tuple[Link, ...] = ()
    """Its prompt by reference, from the first image on (`indexer.references`)."""
    max_output_tokens: int | None = None
    n_sequences: int = 1
    streaming: bool = False
    keep_local: PdReason | None = None
    prefill_hint: tuple[str, ...] = ()
    """Prefill workers somebody in front of us has chosen, the preferred one first: remote without further questions."""
    rank: int | None = None
    """The data-parallel rank of the decode worker, where somebody in front of us has chosen it."""
    priority: int = 0
    tenant: str | None = None
    session: str | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    subset: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()
    """Workers that already failed this request."""
    kv_source: str | None = None
    """A worker said to hold the prompt's beginning (`x-kv-cache-source-host-port`): it is asked for it if it can be."""

    @property
    def is_text(self) -> bool:
        """Whether the engine that gets it first has to tokenise it."""
        return self.token_source is not TokenSource.GIVEN

    @property
    def is_text_at_decode(self) -> bool:
        """Whether the engine that fetches its KV has to, too: the ids go along, but an engine leaves them aside where
        there are images.
        """
        return self.is_text and self.exact_prefix_tokens is not None


class Price(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Predicted seconds of one choice, by component. `total_s` is what the choice is judged by.

    front: HTTP, template, tokens at the engine. wait: prefills ahead in its queue. adm: KV blocks still to be freed.
    load: blocks out of lower tiers. comp: computing the uncached prompt. hop, pull: handing over to the decode worker
    and moving the KV there. step: the first decode step. stall: what one running stream loses; harm: times the streams.
    decode: the answer's own decoding. queue: seconds others wait behind it. displaced: cached blocks it pushes out, as
    seconds to compute them again. viol: the price of the SLOs it is predicted to break. session: below 0, what is taken
    off where its session was served last.
    """

    front_s: float = 0.0
    wait_s: float = 0.0
    adm_s: float = 0.0
    load_s: float = 0.0
    comp_s: float = 0.0
    hop_s: float = 0.0
    pull_s: float = 0.0
    step_s: float = 0.0
    ttft_s: float = 0.0
    stall_s: float = 0.0
    harm_s: float = 0.0
    decode_s: float = 0.0
    queue_s: float = 0.0
    displaced_s: float = 0.0
    viol_s: float = 0.0
    session_s: float = 0.0
    total_s: float = 0.0


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One way to serve a request, with its price: `decode` serves it; with `prefill`, that worker computes the
    prompt. `peer`: it is no prefill worker, but holds more of the prompt.
    """

    decode: Holder
    prefill: Holder | None = None
    peer: bool = False
    cached_tokens: int = 0
    """Prompt tokens the decode worker need not compute."""
    prefill_cached_tokens: int = 0
    cpu_tokens: int = 0
    disk_tokens: int = 0
    approximate: bool = False
    price: Price = Price()
    reasons: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The decision, already booked. `considered` are the best candidates, the chosen one first, so that explaining is
    reading.
    """

    request_id: str
    chosen: Candidate
    considered: tuple[Candidate, ...]
    policy: str
    n_candidates: int
    reason: str
    pd_reason: PdReason
    decided_at_s: float
    session: SessionOutcome | None = None
    """None: the request is of no session, or those do not matter."""

    @property
    def remote(self) -> bool:
        """Whether another worker computes the prompt."""
        return self.chosen.prefill is not None

    @property
    def choice(self) -> str:
        """local, remote (a prefill worker computes the prompt) or peer (one that decodes too, and holds more of it)."""
        if self.chosen.prefill is None:
            return LOCAL
        return PEER if self.chosen.peer else REMOTE


class OutcomeKind(Enum):
    """What a face reports about a planned request. Every plan ends with exactly one of END, ERROR and CANCELLED.

    PREFILL_DONE: the prefill worker has answered. PAIR_FAILED: its KV did not get to the decode worker.
    """

    PREFILL_DONE = "prefill_done"
    PAIR_FAILED = "pair_failed"
    FIRST_TOKEN = "first_token"  # noqa: S105
    TOKEN = "token"  # noqa: S105
    CACHED_TOKENS = "cached_tokens"
    END = "end"
    ERROR = "error"
    CANCELLED = "cancelled"


class Outcome(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One observation. `worker_failed` tells a worker's fault from a client's; `n_tokens` goes with TOKEN,
    CACHED_TOKENS, and END (the whole answer; 0: not known). `held_up`: a client that did not take its answer has had a
    part in when its TOKENs came. `guessed`: when a PREFILL_DONE or FIRST_TOKEN happened was not seen, so that it is
    booked and nothing learned from it.
    """

    kind: OutcomeKind
    n_tokens: int = 0
    longest_gap_s: float = 0.0
    """Between two tokens, since the last TOKEN."""
    prefill_s: float | None = None
    pull_s: float | None = None
    status: int | None = None
    worker_failed: bool = False
    held_up: bool = False
    guessed: bool = False
    reason: str | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """One scrape of a worker's `/metrics`, summed or averaged over its engines (ranks). None: the engine does not say.

    Counters are since the process started; `process_start_s` (Unix seconds) tells one process from the next.
    """

    scraped_at_s: float
    running: float | None = None
    waiting: float | None = None
    waiting_for_room: float | None = None
    """Of those, the ones that do not wait for a transfer or an adapter (vLLM's reason "capacity")."""
    kv_usage: float | None = None
    """Share of KV blocks in use, 0..1."""
    block_size: int | None = None
    kv_blocks: int | None = None
    kv_capacity_tokens: int | None = None
    prefix_caching: bool | None = None
    prefix_queries_tokens: float | None = None
    prefix_hits_tokens: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    preemptions: float | None = None
    prefill_time_sum_s: float | None = None
    prefill_time_count: float | None = None
    nixl_bytes: float | None = None
    """KV fetched from others; None for an engine without NIXL."""
    nixl_transfer_s: float | None = None
    nixl_transfers: float | None = None
    """In so many transfers; one of several ranks is as many."""
    nixl_failed: float | None = None
    nixl_expired: float | None = None
    """Requests whose KV was held for others until the lease was over."""
    process_start_s: float | None = None


class ChangeKind(Enum):
    ADDED = "added"
    CHANGED = "changed"
    DRAINING = "draining"
    REMOVED = "removed"


class WorkerChange(msgspec.Struct, frozen=True, kw_only=True):
    """What discovery says about one worker, named for good by `worker`. `url` is its HTTP base; events and replay are
    ZMQ.
    """

    kind: ChangeKind
    worker: str
    url: str | None = None
    role: Role = Role.BOTH
    events_endpoint: str | None = None
    replay_endpoint: str | None = None
    nixl_endpoint: str | None = None
    server_name: str | None = None
    """Whom its certificate names, if not the host of `url`."""
    labels: Mapping[str, str] = {}
    weight: float = 1.0
    """Relative speed of its hardware: predicted compute seconds are divided by it."""
    rank: int = 0
    """The data-parallel rank of its engine, where that does not say which ranks it has."""
