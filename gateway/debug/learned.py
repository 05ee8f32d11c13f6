"""`/debug/learned`: by how much the predicted seconds were wrong, as far as it was learned."""

from __future__ import annotations

from typing import Any

from gateway.core import Core
from scorer.calibrate import FLEET, MIN_SAMPLES, Factor, Part
from scorer.fleet import Worker
from scorer.peers import hands_over

_FLEET = "fleet"


def learned(core: Core) -> dict[str, Any]:
    """`workers`: the factors in force at those of now. `pulls`: what engines count of the KV they fetch, beside what is
    predicted. `factors`: everything learned, by part, of the fleet and of each subject (worker, prefill>decode, model),
    those of workers that left included.
    """
    own: dict[str, dict[str, Any]] = {part.value: {_FLEET: None, "own": {}} for part in Part}
    for (part, subject), factor in sorted(core.planner.calibration.factors().items(), key=lambda row: row[0][1]):
        if subject == FLEET:
            own[part.value][_FLEET] = _row(factor)
        else:
            own[part.value]["own"][subject] = _row(factor)
    return {
        "file": core.learned.path,
        "problem": core.learned.problem,
        "taken_over": core.learned.loaded,
        "min_samples": MIN_SAMPLES,
        "workers": {name: factors_in_force(worker) for name, worker in sorted(core.fleet.workers.items())},
        "pulls": {name: _pulls(worker) for name, worker in sorted(core.fleet.workers.items()) if hands_over(worker)},
        "factors": own,
    }


def factors_in_force(worker: Worker) -> dict[str, float]:
    return {
        Part.FLOOR.value: worker.floor_factor,
        Part.WORK.value: worker.work_factor,
        Part.STEP.value: worker.step_factor,
    }


def _pulls(worker: Worker) -> dict[str, Any]:
    """Mean seconds of a transfer; null before there were enough. `prior_scale`: what priors of pulls to this worker are
    multiplied by, as its engine's count spoke against them.
    """
    pulls = worker.pulls
    return {
        "engine_mean_s": pulls.engine_mean_s,
        "constants_mean_s": pulls.usual_mean_s,
        "predicted_mean_s": pulls.said_mean_s,
        "agree": pulls.agrees,
        "prior_scale": pulls.scale,
    }


def _row(factor: Factor) -> dict[str, Any]:
    return {
        "value": factor.value,
        "used": factor.is_used,
        "samples": factor.n_samples,
        "mean_error": factor.spread,
    }
