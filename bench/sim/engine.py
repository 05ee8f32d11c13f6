"""One engine in simulated time. Steps that only decode are taken together, up to the next thing that happens to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from bench.engine.events import Event
from bench.engine.request import Admitted, EngineConfig, Pull, Request, StepResult
from bench.engine.steady import SteadyEngine
from bench.sim.record import bin_of

REPORT_TOKENS: Final = 16
"""The gateway reports tokens in lots of at least so many."""
MOST_STEPS: Final = 32


class Sink(Protocol):
    """Who is told what an engine does."""

    def admitted(self, engine: SimEngine, admitted: Admitted) -> None:
        """A request begins to be computed, or pulled."""

    def pull(self, engine: SimEngine, pull: Pull) -> float:
        """KV is wanted; by how much fetching it lengthens the step that begins now, in seconds."""

    def token(self, engine: SimEngine, request_id: str, position: int, ended: bool) -> None:
        """A token, now: an answer's first, its last, or the first after a preemption. `position` counts from 0
        (-1: it is not the first). What lies between comes one with each step, see `Pace`.
        """

    def preempted(self, engine: SimEngine, request_id: str) -> None:
        """No more tokens for this answer until it is resumed."""

    def lot(self, engine: SimEngine) -> None:
        """Some REPORT_TOKENS steps were taken since the last time."""

    def published(self, engine: SimEngine, events: list[Event]) -> None:
        """The KV events of a step, or of some."""


class Pace:
    """How long each step of an engine took. Who was decoding from step i to step j got one token with each, so the
    inter-token latencies of all answers are stretches of this.
    """

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self.bins: list[int] = []
        self._last = 0.0, bin_of(0.0)

    def add(self, took_s: float, steps: int = 1) -> None:
        """`steps` steps that took so long together."""
        each_s = took_s / steps
        if each_s != self._last[0]:
            self._last = each_s, bin_of(each_s)
        self.steps_s += [each_s] * steps
        self.bins += [self._last[1]] * steps

    def __len__(self) -> int:
        return len(self.steps_s)


class Timer(Protocol):
    now_s: float

    def at(self, when_s: float, action: Callable[[], None]) -> None: ...


class SimEngine:
    """Drives a `SteadyEngine` by a clock. `dead` ones do nothing any more. `enter_s` is added to a step in which a
    request whose KV was pulled begins."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        clock: Timer,
        sink: Sink,
        *,
        enter_s: float = 0.0,
        late_sharing: bool = False,
    ) -> None:
        self.name = name
        self.engine = SteadyEngine(config, late_sharing=late_sharing)
        self.pace = Pace()
        self.dead = False
        self.busy_s = 0.0
        self._clock = clock
        self._sink = sink
        self._enter_s = enter_s
        self._step: StepResult | None = None  # begun, not over
        self._run_steps = 0
        self._run_from_s = 0.0
        self._took_s = 0.0
        self._ticking = False
        self._reported = 0  # steps
        self._turn = 0  # a tick that was set for another turn is void

    # ---- what others do to it ----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; ValueError if it can never be served."""
        now_s = self._clock.now_s
        self.engine.add_request(request, now_s)
        self._disturb(now_s + self.engine.config.timing.front_s(len(request.prompt_token_ids)))

    def pull_done(self, request_id: str, ok: bool) -> None:
        self.engine.pull_done(request_id, ok)
        self._disturb(self._clock.now_s)

    def release(self, request_id: str) -> bool:
        released = self.engine.release(request_id)
        if released:
            self._disturb(self._clock.now_s)
        return released

    def abort(self, request_id: str) -> None:
        self._cut(self._clock.now_s)
        self.engine.abort(request_id)
        self._disturb(self._clock.now_s)

    def speed_up(self, factor: float) -> None:
        """From its next step on it is `factor` times as fast as it is now."""
        self._cut(self._clock.now_s)
        self.engine.config = replace(self.engine.config, timing=self.engine.config.timing.faster(factor))

    def kill(self) -> None:
        self.dead = True
        self._turn += 1

    # ---- time --------------------------------------------------------------------------------------------------------

    def _disturb(self, when_s: float) -> None:
        """Something is to be looked at by the first step that begins at `when_s` or later."""
        if self.dead or self._ticking or self._step is not None:
            return  # It will be, after this step.
        if self._run_steps:
            self._cut(when_s)
        else:
            wake_s = self.engine.next_wake_s(self._clock.now_s)
            if wake_s is not None:
                self._tick_at(wake_s)

    def _cut(self, when_s: float) -> None:
        """End a run of steps with the step that is going on at `when_s`."""
        if not self._run_steps:
            return
        wanted_s = when_s - self._run_from_s
        steps = max(1, math.ceil(wanted_s / self.engine.steady_s(1)))
        while steps > 1 and self.engine.steady_s(steps - 1) >= wanted_s:
            steps -= 1
        if steps < self._run_steps:
            self._run_steps = steps
            self._tick_at(max(self._clock.now_s, self._run_from_s + self.engine.steady_s(steps)))

    def _tick_at(self, when_s: float) -> None:
        self._turn += 1
        turn = self._turn
        self._clock.at(when_s, lambda: self._tick(turn))

    def _tick(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._ticking = True
        now_s = self._clock.now_s
        if self._step is not None:
            self._deliver(self._step)
        elif self._run_steps:
            self._deliver_run(now_s)
        while not self.dead:
            wake_s = self.engine.next_wake_s(now_s)
            if wake_s is None:
                break
            if wake_s > now_s:
                self._tick_at(wake_s)
                break
            if self._begin(now_s):
                break
        self._ticking = False

    def _begin(self, now_s: float) -> bool:
        """Begin a step or a run of them. False if it was over at once."""
        engine = self.engine
        arrival_s = engine.next_arrival_s()
        ripe = arrival_s is not None and arrival_s <= now_s
        steps = 0 if ripe else min(MOST_STEPS, engine.steady_steps())
        if steps > 1:
            self._run_steps, self._run_from_s = steps, now_s
            self._tick_at(now_s + engine.steady_s(steps))
            if arrival_s is not None:
                self._cut(arrival_s)
            return True
        entering = engine.entering()
        result = engine.step(now_s)
        for request_id in result.preempted:
            self._sink.preempted(self, request_id)
        for admitted in result.admitted:
            self._sink.admitted(self, admitted)
        took_s = result.dt_s + (self._enter_s if entering else 0.0)
        for pull in result.pulls:
            took_s += self._sink.pull(self, pull)
        if not result.scheduled_tokens:
            self._deliver(result)
            return False
        self._step, self._took_s = result, took_s
        self._tick_at(now_s + took_s)
        return True

    def _deliver(self, result: StepResult) -> None:
        if result.scheduled_tokens:
            self._took(self._took_s, 1)
        self._step = None
        if result.events:
            self._sink.published(self, result.events)
        for request_id, position, _, reason in result.tokens:
            self._sink.token(self, request_id, position, reason is not None)

    def _deliver_run(self, now_s: float) -> None:
        steps, self._run_steps = self._run_steps, 0
        self._took(now_s - self._run_from_s, steps)
        ended, events = self.engine.take_steady(steps)
        if events:
            self._sink.published(self, events)
        for request_id in ended:
            self._sink.token(self, request_id, -1, True)

    def _took(self, took_s: float, steps: int) -> None:
        self.busy_s += took_s
        self.pace.add(took_s, steps)
        if len(self.pace) - self._reported >= REPORT_TOKENS:
            self._reported = len(self.pace)
            self._sink.lot(self)
