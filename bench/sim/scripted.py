"""Requests at given times on given servers: for measuring the simulator itself."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from bench.sim.fleet import FleetSpec
from bench.sim.flight import Run
from bench.sim.load import Ask, Stage
from bench.sim.prompts import unique
from bench.sim.record import Record
from bench.sim.router import Arm, Placement, SimRequest, View
from bench.sim.world import World


@dataclass(frozen=True, slots=True)
class Line:
    """One request. `texts` are the stretches its prompt is made of, as (number, tokens)."""

    at_s: float
    texts: tuple[tuple[int, int], ...]
    decode: str
    prefill: str | None = None
    output_tokens: int = 1
    name: str = ""


class Script:
    """A workload and the arm that goes with it."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = list(lines)

    def start(self, stage: Stage) -> None:
        for number, line in enumerate(self.lines):

            def tokens(line: Line = line) -> bytes:
                return b"".join([unique(text, n) for text, n in line.texts])

            ask = Ask(tokens, line.output_tokens, line.output_tokens, session=str(number), group=line.name, seed=number)
            stage.submit(line.at_s, ask)

    def ended(self, ask: Ask, record: Record, stage: Stage) -> None:
        pass


class _AsTold(Arm):
    name = "script"

    def __init__(self, script: Script) -> None:
        self._script = script

    def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
        line = self._script.lines[int(request.session or 0)]
        return Placement(line.decode, line.prefill)


def play(spec: FleetSpec, lines: Iterable[Line]) -> Run:
    script = Script(lines)
    return World(spec, lambda setup: _AsTold(script), script).run()


def named(run: Run, name: str) -> list[Record]:
    return [record for record in run.records if record.group == name]
