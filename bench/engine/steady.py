"""The engine for a driver that need not show each token alone: a simulator, which has no time for that.

Scheduling, blocks and times are those of `Engine`; the difference is in what is said. A token of an answer that simply
goes on is not in `StepResult.tokens`: there are the first of an answer, the last, and the first after a preemption. And
between two changes of the batch, steps differ in nothing but their length, so they may be taken together:
`steady_steps`, then `steady_s` of as many of them as wanted, then `take_steady`.

It is also more exact in one thing. The floor of a prefill step is the time it takes to launch its kernels, and the next
step's are launched while the GPU still works on this one. So a short chunk behind a long one costs only its own work
(on an H200, 8,192 + 64 tokens took 277 ms where 8,192 took 275), and prompts that queue up cost no floor each. A step
that only decodes hides nothing: what followed one took 38..44 ms.
"""

from typing import Final

from bench.engine.events import Event
from bench.engine.model import Engine
from bench.engine.request import ID_TABLE, EngineConfig, Request, StepResult, Work, generated_ids
from bench.engine.sequence import Sequence

_AT_ONCE_S: Final = 1e-6
"""A step that begins so soon after another was launched ahead of its end."""


class SteadyEngine(Engine):
    """One engine core (one data-parallel rank). With `late_sharing`, blocks can be hit once they are computed, as in
    SGLang; vLLM lets a sibling that is scheduled in the same step hit them already.
    """

    def __init__(self, config: EngineConfig, *, late_sharing: bool = False) -> None:
        super().__init__(config)
        self._late_sharing = late_sharing
        self._late: list[tuple[Sequence, int]] = []
        self._ahead_s = 0.0  # of the next step's launching is done when the last one ends
        self._begun_s = self._ends_s = 0.0
        self._resuming: set[str] = set()  # preempted, and not given a token since

    def add_request(self, request: Request, now_s: float) -> None:
        super().add_request(request, now_s)
        seq = self._live[request.request_id]
        bound = request.max_tokens if request.stop_after is None else min(request.max_tokens, request.stop_after)
        seq.end = 0 if request.stop_token_ids else min(bound, self.config.max_model_len - seq.prompt_len)

    def abort(self, request_id: str) -> bool:
        self._resuming.discard(request_id)
        return super().abort(request_id)

    def _preempt(self, seq: Sequence, out: StepResult) -> None:
        super()._preempt(seq, out)
        if seq.output:
            self._resuming.add(seq.request.request_id)

    def next_arrival_s(self) -> float | None:
        """When the scheduler sees the next request that it does not see yet."""
        return self._incoming[0][0] if self._incoming else None

    def entering(self) -> bool:
        """Whether KV that was pulled waits for its request's first step here."""
        return bool(self._pulled)

    # --- what is inside -----------------------------------------------------------------------------------------------

    def prefilling(self) -> list[tuple[str, int]]:
        """(request id, prompt tokens not computed yet) of all without a first token, in the order they are served."""
        seqs = [*self._running, *self._pulled, *self._pulling.values(), *self._waiting]
        seqs += [entry[2] for entry in sorted(self._incoming)]
        return [(seq.request.request_id, max(1, seq.prompt_len - seq.num_computed)) for seq in seqs if not seq.output]

    def decoding(self) -> list[tuple[str, int, int]]:
        """(request id, tokens with KV here, tokens generated) of all that have a first token."""
        return [
            (seq.request.request_id, seq.num_computed, len(seq.output)) for seq in self._live.values() if seq.output
        ]

    # --- steady steps -------------------------------------------------------------------------------------------------

    def steady_steps(self) -> int:
        """How many of the next steps, if nobody interferes, give one token to each running request and do nothing else,
        up to and with the one in which the first of them ends. 0 if the very next is of another kind.
        """
        running = self._running
        if not running or self._pulled or (self._waiting and not self._blocked) or self._unsent or self._resuming:
            return 0
        if len(running) > self.config.max_num_batched_tokens:
            return 0
        if any(not seq.output or seq.num_computed != seq.prompt_len + len(seq.output) - 1 for seq in running):
            return 0
        steps = min([seq.end - len(seq.output) for seq in running])
        size = self.config.block_size
        needed = sum([-(-(seq.num_computed + steps) // size) - len(seq.blocks) for seq in running])
        return steps if steps > 0 and needed <= self.pool.num_free else 0

    def steady_s(self, steps: int) -> float:
        """How long the next `steps` steady steps take together."""
        streams = len(self._running)
        kv_tokens = sum([seq.num_computed for seq in self._running]) + streams
        middle = kv_tokens + streams * (steps - 1) / 2
        return steps * self.config.timing.step_s(streams, middle, 0, 0.0)

    def take_steady(self, steps: int) -> tuple[list[str], list[Event]]:
        """Take `steps` steady steps, at most `steady_steps` of them: whose answers ended, and the events."""
        events: list[Event] = []
        ended: list[Sequence] = []
        size = self.config.block_size
        ids = self.config.generated_ids
        for seq in self._running:
            seq.output += generated_ids(seq.draw ^ seq.garbage, len(seq.output), steps, ids)
            seq.num_computed = done = seq.num_computed + steps
            if done > len(seq.blocks) * size or done // size > seq.num_cached:
                self._grow(seq, done, events)
            if len(seq.output) == seq.end:
                ended.append(seq)
        self._share_late(events)
        self._steps += steps
        self._generated_tokens += steps * len(self._running)
        for seq in ended:
            self._end(seq)
        self._drop_ended()
        return [seq.request.request_id for seq in ended], events

    # --- time ---------------------------------------------------------------------------------------------------------

    def step(self, now_s: float) -> StepResult:
        self._begun_s = now_s
        return super().step(now_s)

    def _time(self, work: Work) -> float:
        timing = self.config.timing
        busy_s = timing.busy_s(*work)
        launch_s = timing.prefill_floor_s if work.prefill_tokens else 0.0
        ahead_s = self._ahead_s if self._begun_s - self._ends_s < _AT_ONCE_S else 0.0
        took_s = max(busy_s, launch_s - ahead_s)
        self._ahead_s = took_s - max(0.0, launch_s - ahead_s) if work.prefill_tokens else 0.0
        self._ends_s = self._begun_s + took_s
        return took_s

    # --- sharing ------------------------------------------------------------------------------------------------------

    def _cache(self, seq: Sequence, num_tokens: int, events: list[Event]) -> None:
        if self._late_sharing:
            self._late.append((seq, num_tokens))
        else:
            super()._cache(seq, num_tokens, events)

    def _share_late(self, events: list[Event]) -> None:
        late, self._late = self._late, []
        for seq, num_tokens in late:
            if num_tokens <= len(seq.blocks) * self.config.block_size:  # else it was preempted or left
                super()._cache(seq, num_tokens, events)

    # --- single steps -------------------------------------------------------------------------------------------------

    def _compute(self, out: StepResult, scheduled: list[tuple[Sequence, int]]) -> Work:
        self._share_late(out.events)
        ids = self._ids
        rest: list[tuple[Sequence, int]] = []
        kv_tokens = 0
        for item in scheduled:
            seq, count = item
            at = len(seq.output)
            goes_on = count == 1 and at and at + 1 < seq.end and seq.num_computed == seq.prompt_len + at - 1
            if goes_on and not (self._resuming and seq.request.request_id in self._resuming):
                seq.num_computed = done = seq.num_computed + 1
                kv_tokens += done
                seq.output.append(ids[((seq.draw ^ seq.garbage) + at) % ID_TABLE])
            else:
                rest.append(item)
        quiet = len(scheduled) - len(rest)
        self._generated_tokens += quiet
        work = super()._compute(out, rest)
        if self._resuming:
            self._resuming.difference_update([token.request_id for token in out.tokens])
        return work._replace(decode_seqs=work.decode_seqs + quiet, kv_tokens=work.kv_tokens + kv_tokens)
