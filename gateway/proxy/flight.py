"""One attempt to serve a request: what the plan booked, and its way back. However it ends, it ends once."""

from __future__ import annotations

import math
import time

from gateway.debug.pace import Series
from gateway.engine.health import End, Health, Ticket
from indexer import Holder
from scorer.planner import Planner
from scorer.types import Outcome, OutcomeKind, Plan, RequestFacts

_FIRST_TOKEN = Outcome(kind=OutcomeKind.FIRST_TOKEN)
_GUESSED_FIRST_TOKEN = Outcome(kind=OutcomeKind.FIRST_TOKEN, guessed=True)
_CANCELLED = Outcome(kind=OutcomeKind.CANCELLED)

_LINE_ENDS_PER_EVENT = 2
"""About a token each. Counting line ends gives the same number however the bytes are cut."""
REPORT_TOKENS = 16
"""Streamed tokens are reported to the ledger in lots of at least this many."""
_REPORT_ALIVE_S = 0.5


class Flight:
    """A booked attempt. Its outcome is END, ERROR or CANCELLED, whichever is said first; the rest is ignored."""

    __slots__ = (
        "_alive_again_s", "_gap_s", "_health", "_held_up", "_itl", "_last_s", "_line_ends", "_lot_s", "_paused",
        "_planner", "_ticket", "_tokens", "ended", "facts", "plan", "streamed_tokens",
    )  # fmt: skip

    def __init__(
        self, planner: Planner, health: Health, facts: RequestFacts, plan: Plan, itl: Series | None = None
    ) -> None:
        """`itl` is told the times between its tokens."""
        self._planner = planner
        self._health = health
        self.facts = facts
        self.plan = plan
        self.ended = False
        self.streamed_tokens = 0
        """About as many went by."""
        self._tokens = -1  # The first one ends no gap.
        self._line_ends = 0
        self._gap_s = 0.0
        self._last_s = math.inf
        self._itl = itl
        self._lot_s = math.inf
        self._alive_again_s = 0.0
        self._paused: tuple[float, float] | None = None
        self._held_up = False
        """Once for all: what could not be read in a pause comes at once, which does not tell how fast a worker is."""
        self._ticket: Ticket | None = None

    @property
    def holder(self) -> Holder:
        return self.plan.chosen.decode

    @property
    def worker(self) -> str:
        return self.plan.chosen.decode[0]

    def sent(self) -> None:
        """The worker is about to get the request; its silence counts from now."""
        if self._ticket is None:
            self._ticket = self._health.request_started(self.worker, time.monotonic(), self._quiet_s())

    def prefilled(self, at_s: float | None = None, *, guessed: bool = False) -> None:
        """The prefill worker has answered, at `at_s` or now; `guessed`: nobody has seen when."""
        outcome = Outcome(kind=OutcomeKind.PREFILL_DONE, guessed=guessed)
        self._planner.observe(self.facts.request_id, outcome, time.monotonic() if at_s is None else at_s)

    def first_byte(self, *, guessed: bool = False) -> None:
        """The first byte of a good answer's body is here. `guessed`: when it came says nothing of how fast it was."""
        now_s = time.monotonic()
        self._heard(now_s)
        self._last_s = self._lot_s = now_s
        self._planner.observe(self.facts.request_id, _GUESSED_FIRST_TOKEN if guessed else _FIRST_TOKEN, now_s)

    def passed(self, piece: bytes) -> None:
        """A piece of a stream went by."""
        line_ends = self._line_ends + piece.count(b"\n")
        self.streamed(line_ends // _LINE_ENDS_PER_EVENT)
        self._line_ends = line_ends % _LINE_ENDS_PER_EVENT

    def streamed(self, n_tokens: int) -> None:
        """About `n_tokens` more went by."""
        now_s = time.monotonic()
        if now_s >= self._alive_again_s:
            self._alive_again_s = now_s + _REPORT_ALIVE_S
            self._heard(now_s)
        self._gap_s = max(self._gap_s, now_s - self._last_s)
        self._last_s = now_s
        self.streamed_tokens += n_tokens
        self._tokens += n_tokens
        if self._tokens >= REPORT_TOKENS:
            outcome = Outcome(
                kind=OutcomeKind.TOKEN, n_tokens=self._tokens, longest_gap_s=self._gap_s, held_up=self._held_up
            )
            self._note_itl(self._tokens)
            self._tokens = 0
            self._gap_s = 0.0
            self._planner.observe(self.facts.request_id, outcome, now_s)

    def pause(self) -> None:
        """We wait for the client and do not read: the worker's silence is no stall until `resume`."""
        self._held_up = True
        if self._paused is None and self._ticket is not None:
            self._paused = time.monotonic(), self._ticket.due_s
            self._ticket.due_s = math.inf

    def resume(self) -> None:
        if self._paused is not None and self._ticket is not None:
            since_s, due_s = self._paused
            self._paused = None
            self._ticket.due_s = due_s + time.monotonic() - since_s

    def cached(self, n_tokens: int) -> None:
        outcome = Outcome(kind=OutcomeKind.CACHED_TOKENS, n_tokens=n_tokens)
        self._planner.observe(self.facts.request_id, outcome, time.monotonic())

    def end(self, output_tokens: int | None = None) -> None:
        """A whole good answer of so many tokens; None: the engine does not say."""
        n_tokens = self.streamed_tokens if output_tokens is None else output_tokens
        if self.streamed_tokens <= REPORT_TOKENS:
            self._note_itl(n_tokens - 1)  # No lot was full.
        self._close(Outcome(kind=OutcomeKind.END, n_tokens=n_tokens), End.OK)

    def failed(self, end: End, reason: str) -> None:
        """The worker's fault."""
        self._close(Outcome(kind=OutcomeKind.ERROR, worker_failed=True, reason=reason), end)

    def refused(self, status: int) -> None:
        """The worker answered with an error status. 501 is what it never can do, not a failure."""
        failed = status >= 500 and status != 501
        outcome = Outcome(kind=OutcomeKind.ERROR, status=status, worker_failed=failed, reason=f"status_{status}")
        self._close(outcome, End.SERVER_ERROR if failed else End.CLIENT_ERROR)

    def cancel(self) -> None:
        """The client left."""
        self._close(_CANCELLED, End.CANCELLED)

    def lost_sight(self) -> None:
        """Nothing more will be heard of it: its silence says nothing of the worker, and the booking stays."""
        if self._ticket is not None:
            self._health.request_ended(self._ticket, End.CANCELLED, time.monotonic())

    def expected_s(self) -> float:
        """How long it is predicted to take, to the last token."""
        cost, worker = self._planner.cost, self._planner.fleet.workers.get(self.worker)
        step_s = cost.step_s(1, self.facts.prompt_tokens, 1.0 if worker is None else worker.weight)
        return self.plan.chosen.price.ttft_s + cost.output_tokens(self.facts.max_output_tokens) * step_s

    def _note_itl(self, n_tokens: int) -> None:
        """So many tokens since the last ones that were noted, or the first."""
        if self._itl is not None and n_tokens > 0 and self._lot_s < self._last_s and not self._held_up:
            self._itl.add((self._last_s - self._lot_s) / n_tokens, self._last_s)
        self._lot_s = self._last_s

    def _heard(self, now_s: float) -> None:
        if self._ticket is not None:
            self._health.byte_received(self._ticket, now_s)

    def _quiet_s(self) -> float:
        """How long silence is to be expected: to the first token, or to the last if the answer comes in one piece."""
        return self.plan.chosen.price.ttft_s if self.facts.streaming else self.expected_s()

    def _close(self, outcome: Outcome, end: End) -> None:
        if self.ended:
            return
        self.ended = True
        now_s = time.monotonic()
        try:
            if self._ticket is not None:
                self._health.request_ended(self._ticket, end, now_s)
        finally:
            self._planner.observe(self.facts.request_id, outcome, now_s)
