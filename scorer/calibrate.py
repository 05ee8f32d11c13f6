"""Learning what the constants do not know: factors on predicted seconds, from what was observed.

A factor is the mean of log(observed / predicted by the prior), forgetting slowly, so that a new engine or a slower card
is followed within some dozen requests. It stays within 1/4 to 4 times the prior. It is used after `MIN_SAMPLES`, and
only while it predicts held samples (each fourth, which is not learned from) better than the prior does: a fit that is
broken is no worse than none. A worker without enough samples of its own uses the fleet's factor.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from scorer.kind import EngineKind

MIN_SAMPLES = 30
BOUND = 4.0
MOST_FACTORS = 8192
"""Six for each worker, one for each pair and model, with room for names that come and go."""
_HELD_EVERY = 4
_FORGET = 0.05
"""Weight of a new sample once there are 1 / 0.05 = 20: about the last 40 count."""
_REMEMBERED = 40
_LEAST_RATIO = 1e-300
"""Beyond every bound; a quotient that underflows has no logarithm."""
LENGTH_BOUND = 64.0
"""Answers differ from what is expected of them by more than hardware does."""


class Part(StrEnum):
    """What a factor is for. FRONT: reading and rendering prompts. WAIT: the queue, relative to what is booked ahead.
    FLOOR: prefills that the floor of a step bounds; WORK: those their tokens do. STEP: decode steps. STALL: what a pull
    adds to one. PULL: transfers, of a pair; MEETING: the handshake before its first. OUTPUT: how long answers
    are, of a model.
    """

    FRONT = "front"
    WAIT = "wait"
    FLOOR = "floor"
    WORK = "work"
    STEP = "step"
    STALL = "stall"
    PULL = "pull"
    MEETING = "meeting"
    OUTPUT = "output"

    @property
    def bound(self) -> float:
        return LENGTH_BOUND if self is Part.OUTPUT else BOUND


class Factor:
    """One factor and how well it does. `spread` is the mean absolute log error of what is used."""

    __slots__ = ("_bound", "_error", "_prior_error", "log", "n_held", "n_samples")

    def __init__(self, bound: float = BOUND) -> None:
        """It stays between 1/`bound` and `bound`."""
        self._bound = math.log(bound)
        self.log = 0.0
        self.n_samples = 0
        self.n_held = 0
        self._error = 0.0
        self._prior_error = 0.0

    def add(self, predicted: float, observed: float) -> None:
        """One observation of what the prior predicts as `predicted`; both above 0, or it is left out."""
        if not (predicted > 0 and observed > 0 and math.isfinite(predicted) and math.isfinite(observed)):
            return
        ratio = min(self._bound, max(-self._bound, math.log(max(observed / predicted, _LEAST_RATIO))))
        self.n_samples += 1
        if self.n_samples % _HELD_EVERY == 0:
            self.n_held += 1
            weight = max(_FORGET, 1 / self.n_held)
            self._error += weight * (abs(ratio - self.log) - self._error)
            self._prior_error += weight * (abs(ratio) - self._prior_error)
        else:
            learned = self.n_samples - self.n_samples // _HELD_EVERY
            self.log += max(_FORGET, 1 / learned) * (ratio - self.log)

    @property
    def is_used(self) -> bool:
        return self.n_samples >= MIN_SAMPLES and self._error < self._prior_error

    @property
    def value(self) -> float:
        return math.exp(self.log) if self.is_used else 1.0

    @property
    def spread(self) -> float | None:
        """None before anything was held against it."""
        if not self.n_held:
            return None
        return self._error if self.is_used else self._prior_error

    @classmethod
    def merged(cls, factors: Sequence[Factor], bound: float = BOUND) -> Factor:
        """Of several that were learned apart: each counts as much as it has samples it has not forgotten."""
        weights = [min(factor.n_samples, _REMEMBERED) for factor in factors]
        total = sum(weights)
        out = cls(bound)
        for factor, weight in zip(factors, weights, strict=True):
            out.log += factor.log * weight / total
            out._error += factor._error * weight / total
            out._prior_error += factor._prior_error * weight / total
        out.n_samples = max(factor.n_samples for factor in factors)
        out.n_held = max(factor.n_held for factor in factors)
        return out

    def state(self) -> list[float]:
        return [self.log, self.n_samples, self.n_held, self._error, self._prior_error]

    @classmethod
    def of_state(cls, state: Iterable[Any], bound: float = BOUND) -> Factor:
        """Raises ValueError for what `state` never gave."""
        try:
            log, n_samples, n_held, error, prior_error = map(float, state)
        except (TypeError, ValueError, OverflowError):
            raise ValueError("not the state of a factor") from None
        fits = abs(log) <= math.log(bound) and 0 <= n_held <= n_samples and error >= 0 and prior_error >= 0
        if not fits or not math.isfinite(n_samples + error + prior_error):
            raise ValueError("not the state of a factor")
        factor = cls(bound)
        factor.log, factor.n_samples, factor.n_held = log, int(n_samples), int(n_held)
        factor._error, factor._prior_error = error, prior_error
        return factor


FLEET = ""
"""The subject that stands for the fleet as a whole."""


class Calibration:
    """Factors by part and subject: a worker, a pair ("prefill>decode") or a model, and the fleet as a whole. At most
    `MOST_FACTORS`, those learned from longest ago go first. Workers that are gone keep theirs, as one that is rolled
    comes back; but for one that comes back as another kind of engine, all is learned anew.
    """

    def __init__(self) -> None:
        self._factors: OrderedDict[tuple[Part, str], Factor] = OrderedDict()
        self._kinds: OrderedDict[str, EngineKind] = OrderedDict()

    def add(self, part: Part, subject: str, predicted: float, observed: float) -> None:
        for name in (subject, FLEET):
            factor = self._factors.get((part, name))
            if factor is None:
                factor = self._put(part, name, Factor(part.bound))
            else:
                self._factors.move_to_end((part, name))
            factor.add(predicted, observed)

    def value(self, part: Part, subject: str) -> float:
        own = self._factors.get((part, subject))
        if own is not None and own.n_samples >= MIN_SAMPLES:
            return own.value
        fleet = self._factors.get((part, FLEET))
        return 1.0 if fleet is None else fleet.value

    def spread(self, part: Part, subject: str, default: float) -> float:
        """Mean absolute log error of the predictions."""
        for name in (subject, FLEET):
            factor = self._factors.get((part, name))
            if factor is not None and factor.n_samples >= MIN_SAMPLES and factor.spread is not None:
                return factor.spread
        return default

    def factors(self) -> Mapping[tuple[Part, str], Factor]:
        """All there are, the one learned from longest ago first."""
        return self._factors

    def meet(self, worker: str, kind: EngineKind) -> bool:
        """The worker says what it is. Whether it is another kind than the one learned of, which is forgotten then."""
        known = self._kinds.pop(worker, None)
        self._kinds[worker] = kind
        if len(self._kinds) > MOST_FACTORS:
            self._kinds.popitem(last=False)
        if known is None or known.is_like(kind):
            return False
        self.forget(worker)
        return True

    def forget(self, worker: str) -> None:
        """What was learned of the worker, and of the pairs it is in; of the fleet too where that was all of it."""
        for part, name in list(self._factors):
            if part is Part.PULL or part is Part.MEETING:
                is_its = name.startswith(worker + ">") or name.endswith(">" + worker)
            else:
                is_its = part is not Part.OUTPUT and name == worker
            if is_its:
                del self._factors[part, name]
        left = {part for part, name in self._factors if name != FLEET}
        for part in Part:
            if part not in left:
                self._factors.pop((part, FLEET), None)

    def forget_pulls(self, decode: str) -> None:
        """Transfers to that worker are predicted from something else now: learn them anew, and the fleet's too, which
        its pairs would use meanwhile.
        """
        for part, name in list(self._factors):
            if part is Part.PULL and (name == FLEET or name.endswith(">" + decode)):
                del self._factors[part, name]

    def adopt(self, states: Iterable[Mapping[str, Any]]) -> int:
        """Begin with what others have learned, where nothing can be said from own samples yet: means, weighted by
        samples. `states` are those of other calibrations. How many factors were taken.
        """
        found: dict[tuple[Part, str], list[Factor]] = {}
        kinds: dict[str, EngineKind] = {}
        for state in states:
            other = Calibration()
            other.load(state)
            kinds.update(other._kinds)
            for (part, name), factor in other.factors().items():
                if not self._is_of_other_kind(other, part, name):
                    found.setdefault((part, name), []).append(factor)
        taken = 0
        for (part, name), factors in found.items():
            own = self._factors.get((part, name))
            if own is not None and own.n_samples >= MIN_SAMPLES:
                continue
            known = factors if own is None else [*factors, own]
            if sum(factor.n_samples for factor in known):
                self._put(part, name, Factor.merged(known, part.bound))
                taken += 1
        for name, kind in kinds.items():
            self._kinds.setdefault(name, kind)  # One that turns out to be of another kind begins anew.
        return taken

    def _is_of_other_kind(self, other: Calibration, part: Part, name: str) -> bool:
        """Whether a worker it is about was another kind of engine there than it is here."""
        workers = name.split(">") if part in (Part.PULL, Part.MEETING) else [name]
        kinds = ((self._kinds.get(worker), other._kinds.get(worker)) for worker in workers)
        return any(ours is not None and theirs is not None and not theirs.is_like(ours) for ours, theirs in kinds)

    def state(self) -> dict[str, Any]:
        """JSON-ready, for `load`."""
        factors: dict[str, dict[str, list[float]]] = {}
        for (part, name), factor in self._factors.items():
            factors.setdefault(part.value, {})[name] = factor.state()
        return {"factors": factors, "engines": {name: msgspec.to_builtins(kind) for name, kind in self._kinds.items()}}

    def load(self, state: Mapping[str, Any]) -> int:
        """Take over what was saved; returns how many entries could not be read and were left out."""
        bad = 0
        for name, saved in _entries(state.get("engines")):
            try:
                self.meet(name, msgspec.convert(saved, EngineKind))
            except msgspec.ValidationError:
                bad += 1
        for part_name, factors in _entries(state.get("factors")):
            try:
                part = Part(part_name)
            except ValueError:
                bad += 1
                continue
            for name, saved in _entries(factors):
                try:
                    self._put(part, name, Factor.of_state(saved, part.bound))
                except ValueError:
                    bad += 1
        return bad

    def _put(self, part: Part, name: str, factor: Factor) -> Factor:
        self._factors[part, name] = factor
        if len(self._factors) > MOST_FACTORS:
            self._factors.popitem(last=False)
        return factor


def _entries(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, Mapping) else ()
