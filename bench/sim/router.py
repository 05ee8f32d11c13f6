"""What stands between the simulated fleet and whoever decides: the interface of every arm.

An arm sees what a gateway could know: its own bookings, what was last scraped, what the KV events said so far. Nothing
else; engine internals and answer lengths are for `ClairvoyantView` alone. The core books each placement (`Booked`)
before the next request is placed, so a burst does not see the same idle worker twice, and settles it on every way out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from indexer import PrefixIndex, Prompt
from scorer.cost import Constants
from scorer.fleet import Fleet
from scorer.types import EngineStats, Outcome, Role


@dataclass(slots=True, eq=False)
class SimRequest:
    """A request as it reaches the gateway. `tokens` is a uint32 buffer of `prompt_tokens` ids.

    `max_output_tokens` is the client's bound (None: none was set), not how long the answer will be.
    """

    request_id: str
    tokens: bytes
    prompt_tokens: int
    arrival_s: float
    max_output_tokens: int | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    session: str | None = None
    turn: int = 0
    """0 for a session's first request."""
    group: str = ""
    """What the report tells apart (long/short, a tenant); arms do not look at it."""
    prompt: Prompt | None = field(default=None, repr=False)
    """Hashed once for all lookups; made by the view."""


@dataclass(frozen=True, slots=True)
class Placement:
    """`decode` serves the request; with `prefill`, that worker computes the prompt and hands its KV over.

    `cached_tokens` is what the arm thinks each of them holds of the prompt; None: what the view says.
    """

    decode: str
    prefill: str | None = None
    cached_tokens: int | None = None
    prefill_cached_tokens: int | None = None


@dataclass(slots=True, eq=False)
class BookedPrefill:
    """A prompt somebody was asked to compute and whose first token (at a prefill worker: answer) is not here yet."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    """Of them, what the view's match promised when it was placed; for a pull, all that comes from elsewhere too."""
    booked_s: float

    @property
    def uncached_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(slots=True, eq=False)
class Booked:
    """What was sent to one worker and has not come back, counted by the gateway itself."""

    prefills: dict[str, BookedPrefill] = field(default_factory=dict)
    """By request id, oldest first."""
    streams: dict[str, int] = field(default_factory=dict)
    """Answers under way: request id -> KV tokens (prompt and what was generated so far)."""
    uncached_tokens: int = 0
    """Sum over `prefills`: prompt tokens booked to be computed here."""
    kv_tokens: int = 0
    """Prompt and generated tokens of everything in flight here (shared blocks counted each time)."""

    @property
    def requests(self) -> int:
        return len(self.prefills) + len(self.streams)


@dataclass(slots=True, eq=False)
class WorkerView:
    """One worker as a gateway knows it. The core updates it in place; arms only read."""

    name: str
    role: Role
    weight: float
    """Relative speed that was configured for it (not necessarily its real one)."""
    block_size: int
    kv_blocks: int
    booked: Booked = field(default_factory=Booked)
    stats: EngineStats | None = None
    """The last scrape (each second); None before the first."""

    @property
    def kv_capacity_tokens(self) -> int:
        return self.kv_blocks * self.block_size


class View(Protocol):
    """What a gateway could know at one moment."""

    constants: Constants
    """The cost priors everybody starts from."""

    @property
    def decoders(self) -> Sequence[WorkerView]:
        """Workers that may serve a request (roles both and decode) and are up."""

    @property
    def prefillers(self) -> Sequence[WorkerView]:
        """Workers of role prefill that are up."""

    def worker(self, name: str) -> WorkerView: ...

    def cached_tokens(self, request: SimRequest, *, optimistic: bool = True) -> Mapping[str, int]:
        """Worker -> tokens of the prompt it holds, at most the last full block before the prompt's last token; workers
        that hold nothing are left out. From KV events; `optimistic` adds what was routed there lately and not
        announced yet.
        """


class EngineState(Protocol):
    """The inside of one engine, for the clairvoyant arm only."""

    name: str

    def waiting(self) -> Sequence[tuple[str, int]]:
        """(request id, prompt tokens still to be computed) of every request that has no first token, in order,
        chunks under way first.
        """

    def running(self) -> Sequence[tuple[str, int, int]]:
        """(request id, KV tokens, tokens still to be generated) of every answer under way."""

    def cached_tokens(self, request: SimRequest) -> int:
        """What of the prompt would be hit there now."""

    def prefill_s(self, prompt_tokens: int, cached_tokens: int) -> float:
        """What computing it takes there, alone (front end excluded)."""

    def step_s(self, streams: int, kv_tokens: int) -> float:
        """One decode step."""

    def front_s(self, prompt_tokens: int) -> float: ...

    def free_blocks(self) -> int: ...


class ClairvoyantView(View, Protocol):
    """Everything. Arms whose class attribute `clairvoyant` is True are given one."""

    def engine(self, name: str) -> EngineState: ...

    def output_tokens(self, request_id: str) -> int:
        """How long the answer is going to be."""

    def transfer_s(self, prefill: str, decode: str, tokens: int) -> float:
        """Moving the KV of so many tokens, its queue at the decode worker not counted."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What an arm may be built from. `fleet` and `index` are fed by the core as the gateway feeds its own."""

    fleet: Fleet
    index: PrefixIndex
    constants: Constants
    workers: Sequence[WorkerView]
    pd_policy: str = "local"
    """The default `pd_policy` of planners where there are prefill workers."""


class Router(Protocol):
    """An arm. `observe` is told PREFILL_DONE, FIRST_TOKEN, TOKEN (several at once, `n_tokens`), CACHED_TOKENS and one
    of END, ERROR, CANCELLED of every request it placed, when the gateway sees them.
    """

    name: str
    clairvoyant: bool
    """Whether `place` is given a `ClairvoyantView`."""
    own_books: bool
    """It looks prompts up and assumes blocks itself: the core need not, and its view assumes nothing."""

    def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
        """Where the request runs. The prefill worker is one of `view.prefillers`, or (where engines have a connector,
        `FleetSpec.nixl`) another of `view.decoders`.
        """

    def observe(self, request_id: str, outcome: Outcome, now_s: float) -> None: ...

    def scraped(self, worker: str, stats: EngineStats) -> None:
        """New figures of a worker (already in the fleet and its view)."""

    def restarted(self, worker: str) -> None:
        """The worker is a new process with an empty cache, or its cache is known to be cleared."""


class Arm:
    """A router that needs to hear nothing: what most arms derive from, overriding `place`."""

    name = ""
    clairvoyant = False
    own_books = False

    def observe(self, request_id: str, outcome: Outcome, now_s: float) -> None:
        pass

    def scraped(self, worker: str, stats: EngineStats) -> None:
        pass

    def restarted(self, worker: str) -> None:
        pass


Factory = Callable[[Setup], Router]
"""Builds an arm for one run. `bench.sim.arms.arms()` maps names to these."""
