"""`/debug/decisions`: the last decisions, what each way was priced at, and how it went. No prompt text.

While requests are served a decision costs one append of what exists already; rows are made when somebody looks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.debug.pace import Pace
from gateway.proxy.access import Record
from scorer.types import Candidate, Plan, Price

KEPT = 200
COMPONENTS = (
    "front",
    "wait",
    "adm",
    "load",
    "comp",
    "hop",
    "pull",
    "step",
    "harm",
    "decode",
    "queue",
    "displaced",
    "viol",
    "session",
)
"""What `Price.total_s` is the sum of, in the order in which it is shown."""
_FIELDS = [(name, f"{name}_s") for name in COMPONENTS]
_LONGEST_NAME = 200
_SHOWN_MS = 0.05
"""What is less is left out."""


class Decision:
    """One plan of one request; a second attempt is a decision of its own, about the same `record`."""

    __slots__ = ("at_s", "number", "over", "plan", "record")

    def __init__(self, number: int, record: Record, plan: Plan) -> None:
        self.number = number
        self.record = record
        self.plan = plan
        self.at_s = time.time()
        self.over: Row | None = None
        """How it is shown for good."""


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decision as it is shown. `prices_ms`: the parts of the chosen price. `ttft_ms` and `predicted_ttft_ms` count
    from the decision on.
    """

    number: int
    at_s: float
    request_id: str
    model: str
    prompt_tokens: int
    tokens: str
    worker: str
    rank: int
    prefill: str | None = None
    choice: str
    reason: str
    became: str | None = None
    """What was done in the end, and why, where that is not what was decided."""
    total_ms: float
    prices_ms: dict[str, float]
    predicted_ttft_ms: float
    ttft_ms: float | None = None
    predicted_cached_tokens: int
    cached_tokens: int | None = None
    output_tokens: int | None = None
    queued_ms: float | None = None
    status: int | None = None
    """None while it is served."""
    duration_ms: float | None = None
    cut: str | None = None
    tried_again: bool = False
    """It did not do, and the request was decided anew."""


class Decisions:
    """The last `KEPT` decisions, and how fast answers to them come."""

    def __init__(self) -> None:
        self.made = 0
        self.pace = Pace()
        self._ring: deque[Decision] = deque(maxlen=KEPT)

    def note(self, record: Record, plan: Plan) -> None:
        """`record` goes on being filled in."""
        self.made += 1
        self._ring.append(Decision(self.made, record, plan))

    def last(self, n: int) -> list[Decision]:
        """The newest first."""
        ring = self._ring
        return [ring[-i] for i in range(1, min(n, len(ring)) + 1)]


def rows(decisions: Iterable[Decision]) -> list[Row]:
    """`decisions` are the newest, the newest first."""
    shown = list(decisions)
    again = tried_again(shown)
    return [decision.over or _row(decision, decision.number in again) for decision in shown]


def tried_again(decisions: Iterable[Decision]) -> set[int]:
    """Numbers of those whose request was decided anew. `decisions` are the newest, the newest first."""
    seen: set[int] = set()
    found: set[int] = set()
    for decision in decisions:
        record = id(decision.record)
        if record in seen:
            found.add(decision.number)
        seen.add(record)
    return found


def detailed(decision: Decision, *, tried_again: bool) -> dict[str, Any]:
    """The row, and every candidate that was considered."""
    plan = decision.plan
    return {
        **msgspec.to_builtins(_row(decision, tried_again)),
        "trace_id": decision.record.trace_id,
        "policy": plan.policy,
        "why": plan.reason,
        "session": None if plan.session is None else plan.session.value,
        "n_candidates": plan.n_candidates,
        "considered": [candidate_row(candidate) for candidate in plan.considered],
    }


def candidate_row(candidate: Candidate) -> dict[str, Any]:
    """One way to serve a request, in JSON's terms, with the parts of its price in ms."""
    price = candidate.price
    return {
        "worker": candidate.decode[0],
        "rank": candidate.decode[1],
        "prefill": None if candidate.prefill is None else candidate.prefill[0],
        "peer": candidate.peer,
        "cached_tokens": candidate.cached_tokens,
        "prefill_cached_tokens": candidate.prefill_cached_tokens,
        "approximate": candidate.approximate,
        "total_ms": round(price.total_s * 1000, 1),
        "ttft_ms": round(price.ttft_s * 1000, 1),
        "prices_ms": prices_ms(price),
    }


def prices_ms(price: Price) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, field in _FIELDS:
        value_ms = getattr(price, field) * 1000
        if abs(value_ms) >= _SHOWN_MS:
            found[name] = round(value_ms, 1)
    return found


def _row(decision: Decision, tried_again: bool) -> Row:
    record, plan = decision.record, decision.plan
    chosen, price = plan.chosen, plan.chosen.price
    over = record.duration_ms > 0
    choice, reason = plan.choice, plan.pd_reason.value
    became = None
    if not tried_again and record.choice is not None and (record.choice, record.pd_reason) != (choice, reason):
        became = f"{record.choice}: {record.pd_reason}"
    ttft_ms = None
    if record.ttft_ms is not None and not tried_again:
        ttft_ms = round(max(0.0, record.ttft_ms - (record.queued_ms or 0.0) - (record.overhead_ms or 0.0)), 1)
    row = Row(
        number=decision.number,
        at_s=round(decision.at_s, 1),
        request_id=record.request_id,
        model=_short(record.model or ""),
        prompt_tokens=record.prompt_tokens or 0,
        tokens=record.tokens or "",
        worker=chosen.decode[0],
        rank=chosen.decode[1],
        prefill=None if chosen.prefill is None else chosen.prefill[0],
        choice=choice,
        reason=reason,
        became=became,
        total_ms=round(price.total_s * 1000, 1),
        prices_ms=prices_ms(price),
        predicted_ttft_ms=round(price.ttft_s * 1000, 1),
        ttft_ms=ttft_ms,
        predicted_cached_tokens=chosen.cached_tokens,
        cached_tokens=None if tried_again else record.cached_tokens,
        output_tokens=None if tried_again else record.output_tokens,
        queued_ms=None if record.queued_ms is None else round(record.queued_ms, 1),
        status=record.status if over and not tried_again else None,
        duration_ms=round(record.duration_ms, 1) if over and not tried_again else None,
        cut=record.cut if over and not tried_again else None,
        tried_again=tried_again,
    )
    if over:
        decision.over = row
    return row


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "..."
