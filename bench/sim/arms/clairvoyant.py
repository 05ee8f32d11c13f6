"""What greed could do that knows everything: each engine's queue, cache and running answers, and every answer's length.

It takes what costs least now, for this request and for those it disturbs, all with the engines' own true times. It does
not look ahead to requests that have not come yet, so a router that leaves room for them can beat it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from bench.sim.peers import PeerPlacement
from bench.sim.router import Arm, ClairvoyantView, EngineState, Factory, Placement, SimRequest, View, WorkerView
from scorer.types import Outcome, OutcomeKind, Role

_OVER = (OutcomeKind.END, OutcomeKind.ERROR, OutcomeKind.CANCELLED)
VIOLATION_S = 20.0
"""What a missed TTFT target is worth."""


class Queue(NamedTuple):
    """An engine's prompts in line: when a newcomer's could start, and how many answers it would meet then."""

    wait_s: float
    streams: int
    kv_tokens: int


class Clairvoyant(Arm):
    """`transfers`: may have the prompt computed elsewhere and its KV moved, by prefill workers or by any other worker
    that holds more of it.
    """

    clairvoyant = True

    def __init__(self, name: str, transfers: bool = True) -> None:
        self.name = name
        self._transfers = transfers
        self._prompts: dict[str, int] = {}

    def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
        known = cast(ClairvoyantView, view)
        out = known.output_tokens(request.request_id)
        decoders = rng.sample(view.decoders, len(view.decoders))
        engines = {worker.name: known.engine(worker.name) for worker in (*decoders, *view.prefillers)}
        queues = {name: self._queue(engine) for name, engine in engines.items()}
        held = {name: engine.cached_tokens(request) for name, engine in engines.items()}
        rooms = {worker.name: self._room_s(request, engines[worker.name], worker) for worker in decoders}
        options: list[tuple[float, Placement]] = []
        for worker in decoders:
            name, engine = worker.name, engines[worker.name]
            comp_s = engine.prefill_s(request.prompt_tokens, held[name])
            wait_s = max(queues[name].wait_s, rooms[name])
            ttft_s = max(engine.front_s(request.prompt_tokens), wait_s) + comp_s
            cost_s = self._total_s(request, engine, queues[name], out, ttft_s, wait_s, comp_s)
            options.append((cost_s, Placement(name, cached_tokens=held[name])))
        for source in (*view.prefillers, *decoders) if self._transfers else ():
            there = engines[source.name]
            comp_s = there.prefill_s(request.prompt_tokens, held[source.name])
            done_s = max(there.front_s(request.prompt_tokens), queues[source.name].wait_s) + comp_s
            harm_s = comp_s * len(there.running())
            for worker in decoders:
                name, engine = worker.name, engines[worker.name]
                if name == source.name or (source.role is not Role.PREFILL and held[source.name] <= held[name]):
                    continue
                pull_s = known.transfer_s(source.name, name, request.prompt_tokens - held[name])
                at_s = max(done_s + engine.front_s(request.prompt_tokens), rooms[name]) + pull_s
                queue = queues[name]
                step_s = engine.step_s(queue.streams + 1, queue.kv_tokens + request.prompt_tokens)
                ttft_s = max(at_s, queue.wait_s) + step_s
                cost_s = harm_s + self._total_s(request, engine, queue, out, ttft_s, at_s, 0.0)
                options.append((cost_s, Placement(name, source.name, held[name], held[source.name])))
            if held[source.name] and source.role is not Role.PREFILL:
                options += self._pulls(request, known, decoders, source.name, held, queues, rooms, out)
        self._prompts[request.request_id] = request.prompt_tokens
        return min(options, key=lambda option: option[0])[1]

    def _pulls(
        self,
        request: SimRequest,
        known: ClairvoyantView,
        decoders: Sequence[WorkerView],
        source: str,
        held: Mapping[str, int],
        queues: Mapping[str, Queue],
        rooms: Mapping[str, float],
        out: int,
    ) -> list[tuple[float, Placement]]:
        """What `source` holds moved to a worker that holds less, and the rest computed there."""
        options: list[tuple[float, Placement]] = []
        for worker in decoders:
            name, more = worker.name, held[source] - held[worker.name]
            if more <= 0:
                continue
            engine = known.engine(name)
            comp_s = engine.prefill_s(request.prompt_tokens, held[source])
            pull_s = known.transfer_s(source, name, more)
            at_s = max(queues[name].wait_s, max(engine.front_s(request.prompt_tokens), rooms[name]) + pull_s)
            cost_s = self._total_s(request, engine, queues[name], out, at_s + comp_s, at_s, comp_s)
            placed = PeerPlacement(name, cached_tokens=held[name], source=source, source_tokens=held[source])
            options.append((cost_s, placed))
        return options

    def _queue(self, engine: EngineState) -> Queue:
        wait_s = 0.0
        waiting = engine.waiting()
        for request_id, left in waiting:
            n = max(left, self._prompts.get(request_id, left))
            wait_s += engine.prefill_s(n, n - left)
        running = engine.running()
        return Queue(wait_s, len(running) + len(waiting), sum(kv_tokens for _, kv_tokens, _ in running))

    def _total_s(
        self,
        request: SimRequest,
        engine: EngineState,
        queue: Queue,
        out: int,
        ttft_s: float,
        at_s: float,
        stall_s: float,
    ) -> float:
        """Until its last token, and what the answers under way lose: a stall, and slower steps beside it."""
        n = request.prompt_tokens
        alone_s = engine.step_s(max(1, queue.streams), queue.kv_tokens)
        step_s = engine.step_s(queue.streams + 1, queue.kv_tokens + n + out // 2)
        harm_s = 0.0
        for _, _, left in engine.running():
            if left * alone_s > at_s:
                harm_s += stall_s + min(out, left) * (step_s - alone_s)
        late_s = VIOLATION_S if request.slo_ttft_s is not None and ttft_s > request.slo_ttft_s else 0.0
        return ttft_s + out * step_s + harm_s + late_s

    def _room_s(self, request: SimRequest, engine: EngineState, worker: WorkerView) -> float:
        """Until its blocks are free: the answers under way end in the order of what is left of them."""
        missing = -(-request.prompt_tokens // worker.block_size) - engine.free_blocks()
        if missing <= 0:
            return 0.0
        running: Sequence[tuple[str, int, int]] = engine.running()
        step_s = engine.step_s(len(running), sum(kv_tokens for _, kv_tokens, _ in running))
        for _, kv_tokens, left in sorted(running, key=lambda each: each[2]):
            missing -= kv_tokens // worker.block_size
            if missing <= 0:
                return left * step_s
        return max((left for _, _, left in running), default=0) * step_s

    def observe(self, request_id: str, outcome: Outcome, now_s: float) -> None:
        if outcome.kind in _OVER:
            self._prompts.pop(request_id, None)


ARMS: dict[str, Factory] = {
    "clairvoyant": lambda setup: Clairvoyant("clairvoyant"),
    "clairvoyant-local": lambda setup: Clairvoyant("clairvoyant-local", transfers=False),
}
