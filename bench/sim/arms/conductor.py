"""Mooncake's Conductor (FAST'25, algorithm 1): prefill where the TTFT is predicted to be lowest, decode where the batch
is lightest.

Its transfers between prefill workers are left out (no engine of ours can be handed a prefix before it computes the
rest), and so is its refusing of requests.
"""

from __future__ import annotations

import random

from bench.sim.arms.choosing import lowest
from bench.sim.router import Arm, Factory, Placement, Setup, SimRequest, View, WorkerView
from scorer.cost import CostModel


class Conductor(Arm):
    """Predicted with the cost priors, as the Conductor does with its offline-fitted model."""

    name = "conductor"

    def __init__(self, setup: Setup) -> None:
        self._cost = CostModel(setup.constants)

    def queue_s(self, worker: WorkerView, now_s: float) -> float:
        """The booked prefills, less what the first has had."""
        total_s = head_s = waited_s = 0.0
        for at, booked in enumerate(worker.booked.prefills.values()):
            comp_s = self._cost.comp_s(booked.prompt_tokens, booked.cached_tokens, worker.weight)
            total_s += comp_s
            if not at:
                head_s, waited_s = comp_s, now_s - booked.booked_s
        return total_s - min(head_s, waited_s)

    def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
        cached = view.cached_tokens(request)

        def predicted_s(worker: WorkerView) -> float:
            held = cached.get(worker.name, 0)
            prefill_s = self._cost.comp_s(request.prompt_tokens, held, worker.weight)
            return self.queue_s(worker, now_s) + prefill_s

        if not view.prefillers:
            decode = lowest(view.decoders, [predicted_s(worker) for worker in view.decoders], rng)
            return Placement(decode.name, cached_tokens=cached.get(decode.name, 0))
        decode = lowest(view.decoders, [worker.booked.kv_tokens for worker in view.decoders], rng)
        prefill = lowest(view.prefillers, [predicted_s(worker) for worker in view.prefillers], rng)
        return Placement(decode.name, prefill.name, cached.get(decode.name, 0), cached.get(prefill.name, 0))


ARMS: dict[str, Factory] = {"conductor": Conductor}
