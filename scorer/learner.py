"""From what happened to planned requests to factors of the calibration.

Only what speaks for itself is learned from: a prefill that had the worker's line to itself, a wait so long that the
rest hardly matters, steps between two reports of one stream that nobody held up and beside which nothing was computed,
the longest of them if one pull came in between, a transfer after which nothing but one step was due.
"""

from __future__ import annotations

from typing import Final

from scorer.calibrate import Calibration, Part
from scorer.cost import CostModel
from scorer.fleet import Worker
from scorer.ledger import Load
from scorer.pricing import pair_name
from scorer.types import Outcome, PdReason, Plan, Price, RequestFacts

_QUIET_S = 1e-3
"""A predicted wait below this is none."""

_FACTORS: Final = {
    Part.FRONT: "front_factor",
    Part.WAIT: "wait_factor",
    Part.FLOOR: "floor_factor",
    Part.WORK: "work_factor",
    Part.STEP: "step_factor",
    Part.STALL: "stall_factor",
}
"""What of a worker is learned, and where it has it."""


class Trace:
    """Times of one planned request, as they become known. `computed`, `pulled`: the prompts its decode worker had
    done when it last reported; None while one was being computed. `usual_pull_s`, `meeting_s`: as its pull was
    predicted when it was planned, which what has been learned since does not change.
    """

    __slots__ = (
        "computed", "meeting_s", "planned_s", "prefilled_s", "pulled", "reported_s", "took_s", "usual_pull_s",
    )  # fmt: skip

    def __init__(self, planned_s: float) -> None:
        self.planned_s = planned_s
        self.prefilled_s: float | None = None
        self.reported_s: float | None = None
        self.took_s: float | None = None
        """To the first token, until it is known whether its prompt was cached as far as was thought."""
        self.computed: int | None = None
        self.pulled = 0
        self.usual_pull_s = self.meeting_s = 0.0


class Learner:
    def __init__(self, calibration: Calibration, cost: CostModel) -> None:
        self._calibration = calibration
        self._cost = cost

    def recall(self, worker: Worker) -> None:
        """Give the worker what is known of it, or of the fleet: after a start, or when it comes back."""
        for part in _FACTORS:
            self._apply(part, worker)

    def first_token(self, facts: RequestFacts, plan: Plan, trace: Trace, worker: Worker, now_s: float) -> None:
        chosen, price = plan.chosen, plan.chosen.price
        trace.reported_s = now_s
        if not facts.streaming or price.adm_s >= _QUIET_S:
            return  # Its first byte is its last, too; or it had to wait for blocks.
        if chosen.prefill is None:
            if price.load_s < _QUIET_S:
                trace.took_s = now_s - trace.planned_s
        elif trace.prefilled_s is not None:
            front_s = worker.front_factor * self._cost.front_s(facts.prompt_tokens, text=facts.is_text_at_decode)
            took_s = now_s - trace.prefilled_s - self._cost.constants.hop_s - front_s - price.step_s
            self._pulled(pair_name(chosen.prefill[0], worker.name), trace, worker, took_s)

    def _pulled(self, name: str, trace: Trace, worker: Worker, took_s: float) -> None:
        calibration, pulls = self._calibration, worker.pulls
        usual_s = pulls.scale * trace.usual_pull_s
        if trace.meeting_s:
            pull_s = calibration.value(Part.PULL, name) * usual_s
            calibration.add(Part.MEETING, name, self._cost.constants.first_contact_s, took_s - pull_s)
            return
        calibration.add(Part.PULL, name, usual_s, took_s)
        pulls.came(trace.usual_pull_s, calibration.value(Part.PULL, name) * usual_s)
        if pulls.check():
            calibration.forget_pulls(worker.name)

    def prefill_done(self, facts: RequestFacts, plan: Plan, trace: Trace, worker: Worker, now_s: float) -> None:
        trace.prefilled_s = now_s
        chosen, price = plan.chosen, plan.chosen.price
        told = chosen.peer and plan.pd_reason is PdReason.HINT  # What it holds is known to who has named it.
        if not told:
            self._prompt(facts, worker, price, chosen.prefill_cached_tokens, now_s - trace.planned_s)

    def watch(self, trace: Trace, load: Load) -> None:
        """From now on, until the next report, nothing may be computed beside it."""
        trace.computed = None if load.computing or load.others.prefills else load.computed
        trace.pulled = load.pulled

    def tokens(
        self, facts: RequestFacts, trace: Trace, worker: Worker, load: Load, outcome: Outcome, now_s: float
    ) -> None:
        """One step brings a token to each of the request's sequences."""
        alone = trace.computed == load.computed and not load.computing and not load.others.prefills
        if trace.reported_s is not None and outcome.n_tokens and alone and not outcome.held_up:
            pulls = load.pulled - trace.pulled
            step_s = self._cost.step_s(load.streams, load.kv_tokens, worker.weight)
            if not pulls:
                took_s = (now_s - trace.reported_s) / (outcome.n_tokens / facts.n_sequences)
                self._learn(Part.STEP, worker, step_s, took_s)
            elif pulls == 1:
                over_s = outcome.longest_gap_s - worker.step_factor * step_s
                self._learn(Part.STALL, worker, self._cost.constants.pull_stall_s, over_s)
        trace.reported_s = now_s
        self.watch(trace, load)

    def cached_tokens(self, plan: Plan, trace: Trace, n_tokens: int) -> None:
        """The engine found so many tokens cached. Where others were expected, the time it took says nothing."""
        if n_tokens != plan.chosen.cached_tokens:
            trace.took_s = None

    def ended(self, facts: RequestFacts, plan: Plan, trace: Trace, worker: Worker, n_tokens: int) -> None:
        if trace.took_s is not None:
            self._prompt(facts, worker, plan.chosen.price, plan.chosen.cached_tokens, trace.took_s)
        if n_tokens:
            expected = self._cost.constants.expected_output_tokens
            self._calibration.add(Part.OUTPUT, facts.model, expected, n_tokens / facts.n_sequences)

    def _learn(self, part: Part, worker: Worker, predicted_s: float, observed_s: float) -> None:
        self._calibration.add(part, worker.name, predicted_s, observed_s)
        self._apply(part, worker)

    def _apply(self, part: Part, worker: Worker) -> None:
        value = self._calibration.value(part, worker.name)
        # A queue that goes faster than booked has had prompts that fit into one step, which the next ones may not.
        setattr(worker, _FACTORS[part], max(1.0, value) if part is Part.WAIT else value)

    def _prompt(self, facts: RequestFacts, worker: Worker, price: Price, held_tokens: int, took_s: float) -> None:
        wait_s, comp_s = price.wait_s, price.comp_s
        usual_front_s = self._cost.front_s(facts.prompt_tokens, text=facts.is_text)
        if wait_s >= _QUIET_S:
            if wait_s > comp_s:  # Of a shorter one, little could be told from how long the prompt itself took.
                usual_s = wait_s / worker.wait_factor
                waited_s = took_s - worker.front_factor * usual_front_s - comp_s
                self._learn(Part.WAIT, worker, usual_s, max(waited_s, 1e-3 * usual_s))
            return
        work_s = self._cost.work_s(facts.prompt_tokens, held_tokens) / worker.weight
        floor_s = self._cost.constants.comp_floor_s / worker.weight
        computing_s = took_s - worker.front_factor * usual_front_s
        if computing_s <= 0:  # What is thought of the front alone is more than everything took.
            usual_s = max(work_s, floor_s)
            self._learn(Part.FRONT, worker, usual_front_s, max(took_s - usual_s, 1e-3 * usual_front_s))
        elif worker.work_factor * work_s > worker.floor_factor * floor_s:
            self._learn(Part.WORK, worker, work_s, computing_s)
        elif usual_front_s < floor_s / 2:
            self._learn(Part.FLOOR, worker, floor_s, computing_s)
        else:  # A long prompt, nearly all of it cached.
            self._learn(Part.FRONT, worker, usual_front_s, took_s - worker.floor_factor * floor_s)
