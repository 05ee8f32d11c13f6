"""EDPP (BLIS, 2026): drift plus penalty. A prompt is prefilled remotely when the decode pool's backlog is the larger
one by more than the transfer costs and the deficits in TTFT and inter-token latency speak for.

    remote  iff  W (q_d / W*_d - q_p / W*_p)  >  V (c_xfer / tau) (tau_ref / tau)
                                                 + z_ttft (TTFT_P - TTFT_D) / tau  -  z_itl c chunk / tau_itl

W is the prompt's prefill work, q the waiting work of a pool over its capacity W* = mu tau, mu the share of an iteration
that is not its fixed cost. The virtual queues z grow with every miss of the target and shrink with every hit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.sim.arms.choosing import by_fresh_tokens
from bench.sim.arms.llmd import weighted
from bench.sim.router import Arm, Factory, Placement, Setup, SimRequest, View, WorkerView
from scorer.cost import Constants
from scorer.types import Outcome, OutcomeKind

PENALTY = 1.0
TRANSFER_S = 0.005
TAU_TTFT_S, TAU_ITL_S, TAU_REF_S = 0.5, 0.1, 0.5
NOMINAL_PREFILL_TOKENS = 512
CHUNK_TOKENS = 8192
_LEAST_MU = 1e-3
_OVER = (OutcomeKind.END, OutcomeKind.ERROR, OutcomeKind.CANCELLED)


def prefill_work_s(fresh_tokens: float, prompt_tokens: float, c: Constants) -> float:
    return c.comp_per_token_s * fresh_tokens + c.comp_per_attention_s * fresh_tokens * (
        prompt_tokens - fresh_tokens / 2
    )


def decode_work_s(prompt_tokens: float, output_tokens: float, c: Constants) -> float:
    """The marginal part of every step the answer takes."""
    return output_tokens * (
        c.step_per_stream_s + c.step_per_kv_token_s * (prompt_tokens + max(0.0, output_tokens - 1) / 2)
    )


def useful_share(fixed_s: float, iteration_s: float) -> float:
    """mu: what of an iteration is not its fixed cost."""
    return min(1.0, max(_LEAST_MU, 1 - fixed_s / iteration_s))


def is_remote(
    *,
    work_s: float,
    decode_backlog_s: float,
    prefill_backlog_s: float,
    decode_capacity_s: float,
    prefill_capacity_s: float,
    ttft_remote_s: float,
    ttft_local_s: float,
    chunk_s: float,
    ttft_deficit_s: float = 0.0,
    itl_deficit_s: float = 0.0,
    tau_ttft_s: float = TAU_TTFT_S,
    tau_itl_s: float = TAU_ITL_S,
) -> bool:
    """The rule above. Backlogs and capacities (W*) are seconds of work, deficits the virtual queues in seconds."""
    balance = work_s * (decode_backlog_s / decode_capacity_s**2 - prefill_backlog_s / prefill_capacity_s**2)
    penalty = PENALTY * TRANSFER_S / tau_ttft_s * TAU_REF_S / tau_ttft_s
    late = ttft_deficit_s / tau_ttft_s * (ttft_remote_s - ttft_local_s) / tau_ttft_s
    slow = itl_deficit_s / tau_itl_s * chunk_s / tau_itl_s
    return balance > penalty + late - slow


@dataclass(slots=True)
class _Waiting:
    arrival_s: float
    tau_ttft_s: float
    tau_itl_s: float
    credited_s: float = 0.0
    """Of its own lateness, what is in the virtual queue already."""
    first_token_s: float | None = None
    tokens: int = 0


class Edpp(Arm):
    """Decode workers by llm-d's weights, as in the study. A prompt counts as waiting while a whole step's worth of
    others is ahead of it: that an engine has admitted it a gateway cannot see.
    """

    name = "edpp"

    def __init__(self, setup: Setup) -> None:
        self._c = setup.constants
        self._choose = weighted(3, 2, 2)
        self._waiting: dict[str, _Waiting] = {}
        self._ttft_deficit_s = self._itl_deficit_s = 0.0
        self._answers = self._answer_tokens = 0

    def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
        self._credit(now_s)
        cached = view.cached_tokens(request)
        decode = self._choose(request, view.decoders, cached, rng)
        held = cached.get(decode.name, 0)
        fresh = request.prompt_tokens - held
        self._waiting[request.request_id] = _Waiting(now_s, *_targets(request))
        if not view.prefillers or not self._remote(request, view, decode, fresh):
            return Placement(decode.name, cached_tokens=held)
        prefill = by_fresh_tokens(request, view.prefillers, cached, rng).name
        return Placement(decode.name, prefill, held, cached.get(prefill, 0))

    def _remote(self, request: SimRequest, view: View, decode: WorkerView, fresh: int) -> bool:
        c = self._c
        tau_ttft_s, tau_itl_s = _targets(request)
        chunk = min(fresh, CHUNK_TOKENS)
        chunks = math.ceil(fresh / chunk)
        chunk_s = c.comp_per_token_s * chunk
        resident = min(CHUNK_TOKENS, decode.booked.uncached_tokens)
        iteration_d_s = (
            c.step_base_s
            + c.step_per_stream_s * len(decode.booked.streams)
            + c.step_per_kv_token_s * decode.booked.kv_tokens
            + c.comp_per_token_s * resident
        )
        resident = sum(min(CHUNK_TOKENS, worker.booked.uncached_tokens) for worker in view.prefillers)
        iteration_p_s = c.step_base_s + c.comp_per_token_s * resident
        nominal_s = c.step_base_s + c.comp_per_token_s * NOMINAL_PREFILL_TOKENS
        answer = self._answer_tokens / self._answers if self._answers else 1.0
        decode_backlog_s = self._backlog_s(view.decoders, answer)
        prefill_backlog_s = self._backlog_s(view.prefillers, 0.0)
        ttft_remote_s = prefill_backlog_s / useful_share(c.step_base_s, iteration_p_s)
        ttft_local_s = decode_backlog_s / useful_share(c.step_base_s, iteration_d_s)
        return is_remote(
            work_s=prefill_work_s(fresh, request.prompt_tokens, c),
            decode_backlog_s=decode_backlog_s,
            prefill_backlog_s=prefill_backlog_s,
            decode_capacity_s=useful_share(c.step_base_s, tau_itl_s) * tau_ttft_s,
            prefill_capacity_s=useful_share(c.step_base_s, nominal_s) * tau_ttft_s,
            ttft_remote_s=ttft_remote_s + chunks * (iteration_p_s + chunk_s) + TRANSFER_S,
            ttft_local_s=ttft_local_s + chunks * (iteration_d_s + chunk_s),
            chunk_s=chunk_s,
            ttft_deficit_s=self._ttft_deficit_s,
            itl_deficit_s=self._itl_deficit_s,
            tau_ttft_s=tau_ttft_s,
            tau_itl_s=tau_itl_s,
        )

    def _backlog_s(self, workers: Sequence[WorkerView], answer_tokens: float) -> float:
        """The work of what waits there, an answer of so many tokens each included."""
        backlog_s = 0.0
        for worker in workers:
            ahead = 0
            for booked in worker.booked.prefills.values():
                if ahead >= CHUNK_TOKENS:
                    backlog_s += prefill_work_s(booked.uncached_tokens, booked.prompt_tokens, self._c)
                    backlog_s += decode_work_s(booked.prompt_tokens, answer_tokens, self._c)
                ahead += booked.uncached_tokens
        return backlog_s

    def _credit(self, now_s: float) -> None:
        """Lateness that is certain already counts before the first token is here."""
        for waiting in self._waiting.values():
            if waiting.first_token_s is None:
                late_s = max(0.0, now_s - waiting.arrival_s - waiting.tau_ttft_s)
                self._ttft_deficit_s = max(0.0, self._ttft_deficit_s + late_s - waiting.credited_s)
                waiting.credited_s = late_s

    def observe(self, request_id: str, outcome: Outcome, now_s: float) -> None:
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return
        if outcome.kind is OutcomeKind.FIRST_TOKEN:
            waiting.first_token_s = now_s
            late_s = now_s - waiting.arrival_s - waiting.tau_ttft_s
            self._ttft_deficit_s = max(0.0, self._ttft_deficit_s + late_s - waiting.credited_s)
        elif outcome.kind is OutcomeKind.TOKEN:
            waiting.tokens += outcome.n_tokens
        elif outcome.kind in _OVER:
            del self._waiting[request_id]
            if outcome.kind is OutcomeKind.END and waiting.first_token_s is not None and waiting.tokens:
                itl_s = (now_s - waiting.first_token_s) / waiting.tokens
                self._itl_deficit_s = max(0.0, self._itl_deficit_s + itl_s - waiting.tau_itl_s)
                self._answers += 1
                self._answer_tokens += waiting.tokens + 1


def _targets(request: SimRequest) -> tuple[float, float]:
    return request.slo_ttft_s or TAU_TTFT_S, request.slo_tpot_s or TAU_ITL_S


ARMS: dict[str, Factory] = {"edpp": Edpp}
