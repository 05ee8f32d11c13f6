"""From what happened to planned requests to factors of the calibration.

Only what speaks for itself is learned from: a prefill that had the worker's line to itself, steps between two reports
of one stream that nobody held up, a pull after which nothing but one step was due.
"""

from __future__ import annotations

from scorer.calibrate import Calibration, Part
from scorer.cost import CostModel
from scorer.fleet import Worker
from scorer.ledger import Load
from scorer.pricing import pair_name
from scorer.types import Outcome, PdReason, Plan, RequestFacts

_QUIET_S = 1e-3
"""A predicted wait below this is none."""


class Trace:
    """Times of one planned request, as they become known."""

    __slots__ = ("n_tokens", "planned_s", "prefilled_s", "reported_s")

    def __init__(self, planned_s: float) -> None:
        self.planned_s = planned_s
        self.prefilled_s: float | None = None
        self.reported_s: float | None = None
        self.n_tokens = 0


class Learner:
    def __init__(self, calibration: Calibration, cost: CostModel) -> None:
        self._calibration = calibration
        self._cost = cost

    def recall(self, worker: Worker) -> None:
        """Give the worker what is known of it, or of the fleet: after a start, or when it comes back."""
        worker.floor_factor = self._calibration.value(Part.FLOOR, worker.name)
        worker.work_factor = self._calibration.value(Part.WORK, worker.name)
        worker.step_factor = self._calibration.value(Part.STEP, worker.name)

    def first_token(self, facts: RequestFacts, plan: Plan, trace: Trace, worker: Worker, now_s: float) -> None:
        price = plan.chosen.price
        trace.reported_s = now_s
        if not facts.streaming:
            return  # Its first byte is its last, too.
        if plan.chosen.prefill is None:
            if price.wait_s < _QUIET_S and price.adm_s < _QUIET_S and price.load_s < _QUIET_S:
                took_s = now_s - trace.planned_s - price.front_s
                self._prefill(worker, facts.prompt_tokens, plan.chosen.cached_tokens, took_s)
        elif trace.prefilled_s is not None and price.adm_s < _QUIET_S:
            decode = plan.chosen.decode[0]
            name = pair_name(plan.chosen.prefill[0], decode)
            c = self._cost.constants
            front_s = self._cost.front_s(facts.prompt_tokens)
            took_s = now_s - trace.prefilled_s - c.hop_s - front_s - price.step_s
            self._calibration.add(Part.PULL, name, price.pull_s / self._calibration.value(Part.PULL, name), took_s)

    def prefill_done(self, facts: RequestFacts, plan: Plan, trace: Trace, worker: Worker, now_s: float) -> None:
        trace.prefilled_s = now_s
        price = plan.chosen.price
        told = plan.chosen.peer and plan.pd_reason is PdReason.HINT  # What it holds is known to who has named it.
        if price.wait_s < _QUIET_S and not told:
            took_s = now_s - trace.planned_s - self._cost.front_s(facts.prompt_tokens)
            self._prefill(worker, facts.prompt_tokens, plan.chosen.prefill_cached_tokens, took_s)

    def tokens(
        self, facts: RequestFacts, trace: Trace, worker: Worker, load: Load, outcome: Outcome, now_s: float
    ) -> None:
        """One step brings a token to each of the request's sequences."""
        n_tokens = outcome.n_tokens
        trace.n_tokens += n_tokens
        if trace.reported_s is not None and n_tokens and not load.prefills and not outcome.held_up:
            predicted_s = self._cost.step_s(load.streams, load.kv_tokens, worker.weight)
            steps = n_tokens / facts.n_sequences
            self._calibration.add(Part.STEP, worker.name, predicted_s, (now_s - trace.reported_s) / steps)
            worker.step_factor = self._calibration.value(Part.STEP, worker.name)
        trace.reported_s = now_s

    def ended(self, facts: RequestFacts, trace: Trace) -> None:
        if trace.n_tokens:
            expected = self._cost.constants.expected_output_tokens
            self._calibration.add(Part.OUTPUT, facts.model, expected, trace.n_tokens / facts.n_sequences)

    def _prefill(self, worker: Worker, n_tokens: int, held_tokens: int, took_s: float) -> None:
        """To the floor or to the work, whichever bounds it by what is known now."""
        work_s = self._cost.work_s(n_tokens, held_tokens) / worker.weight
        floor_s = self._cost.constants.comp_floor_s / worker.weight
        if worker.work_factor * work_s > worker.floor_factor * floor_s:
            self._calibration.add(Part.WORK, worker.name, work_s, took_s)
            worker.work_factor = self._calibration.value(Part.WORK, worker.name)
        else:
            self._calibration.add(Part.FLOOR, worker.name, floor_s, took_s)
            worker.floor_factor = self._calibration.value(Part.FLOOR, worker.name)
