"""A pure vLLM engine core: continuous batching over a paged KV cache, without clock, I/O or model.

Theory of operation. `step(now_s)` does what one pass of vLLM's v1 scheduler and one forward pass do. Running requests
get their tokens first, in order of admission; a dry pool preempts the last admitted one, which is recomputed later.
If nobody was preempted, waiting requests enter first come first served while the token budget, the batch size and
the pool allow. Blocks are hashed when they are scheduled, so a sibling in the same step already hits them. The hit is
limited to floor((n-1)/block_size) blocks because the last token must be computed for its logits. The driver advances
time by `dt_s`, publishes `events` and hands out `tokens`; in between it may add, abort, release or finish pulls.

A request that is not yet visible to the scheduler (front end time) waits in a heap, `next_wake_s` tells when it is due.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator

from bench.engine.events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, Event
from bench.engine.pool import BlockPool
from bench.engine.request import (
    ID_TABLE,
    Admitted,
    EngineConfig,
    EngineStats,
    FinishReason,
    Pull,
    Request,
    StepResult,
    Token,
    Work,
    id_table,
)
from bench.engine.sequence import Sequence, root_hash, stored


class Engine:
    """One engine core (one data-parallel rank)."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_gpu_blocks)
        self._incoming: list[tuple[float, int, Sequence]] = []  # heap by the time the scheduler sees it
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._pulling: dict[str, Sequence] = {}
        self._pulled: deque[Sequence] = deque()  # hold blocks, so they go before the waiting ones
        self._held: dict[str, list[int]] = {}
        self._live: dict[str, Sequence] = {}
        self._unsent: list[Event] = []  # e.g. a reset of an idle engine: leaves with the next step
        self._arrivals = 0
        self._stuck = False  # the last step could schedule nothing; only an outside change can help
        self._ended = False  # there are ended ones among the running
        self._blocked = False  # who waits first finds no room, and will not before somebody gives some back
        self._ids = id_table(config.generated_ids)
        self._prefix_queries = self._prefix_hits = self._external_queries = self._external_hits = 0
        self._prompt_tokens = self._cached_prompt_tokens = self._pulled_tokens = 0
        self._computed_prompt_tokens = self._generated_tokens = 0
        self._preemptions = self._steps = 0

    # --- requests ---------------------------------------------------------------------------------------------------

    def add_request(self, request: Request, now_s: float) -> None:
        """Queue a request; ValueError if it can never be served or its id is taken."""
        prompt_len = len(request.prompt_token_ids)
        if not 1 <= prompt_len < self.config.max_model_len:
            raise ValueError(f"a prompt needs 1..{self.config.max_model_len - 1} tokens, got {prompt_len}")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {request.max_tokens}")
        if not 0 <= request.remote_tokens <= prompt_len:
            raise ValueError(f"remote_tokens {request.remote_tokens} outside of the prompt's {prompt_len}")
        if request.request_id in self._live or request.request_id in self._held:
            raise ValueError(f"request id {request.request_id!r} is in use")
        seq = Sequence(request, now_s, root_hash(request, self.config.seed))
        self._live[request.request_id] = seq
        self._arrivals += 1
        ready_s = now_s + self.config.timing.front_s(prompt_len)
        heapq.heappush(self._incoming, (ready_s, self._arrivals, seq))
        self._stuck = False

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is, held blocks included. False if it is unknown (already ended)."""
        if self.release(request_id):
            return True
        seq = self._live.pop(request_id, None)
        if seq is None:
            return False
        if self._pulling.pop(request_id, None) is None:
            for queue in (self._running, self._waiting, self._pulled):
                if seq in queue:
                    queue.remove(seq)
                    break
            else:
                self._incoming = [entry for entry in self._incoming if entry[2] is not seq]
                heapq.heapify(self._incoming)
        self._free(seq)
        return True

    def release(self, request_id: str) -> bool:
        """Give back the blocks a finished request held for another engine (pulled, or its lease ended)."""
        blocks = self._held.pop(request_id, None)
        if blocks is None:
            return False
        self.pool.free(blocks)
        self._stuck = self._blocked = False
        return True

    def held_blocks(self, request_id: str) -> list[int]:
        """The physical blocks a finished request still pins; empty if none."""
        return list(self._held.get(request_id, ()))

    def pull_done(self, request_id: str, ok: bool = True, garbage: int = 0) -> None:
        """The KV asked for by a `Pull` arrived, or failed and is to be computed here. Unknown ids are ignored.

        KV that is not the prompt's (`garbage`) is taken and cached like any other: it spoils every answer built on it.
        """
        seq = self._pulling.pop(request_id, None)
        if seq is None:
            return
        remote, seq.remote = seq.remote, 0
        if ok:
            if garbage:
                self.pool.spoil(seq.blocks[seq.num_computed // self.config.block_size :], garbage)
                seq.garbage = self.pool.garbage(seq.blocks)
            self._count_prompt(seq, remote - seq.num_computed)
            self._cache(seq, remote, self._unsent)
            seq.num_computed = min(remote, seq.num_tokens - 1)
            self._pulled.append(seq)
        else:
            self._free(seq)
            self._waiting.appendleft(seq)
        self._stuck = self._blocked = False

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; refused (False) while any block is in use. Announced with the next step."""
        if not self.pool.reset():
            return False
        if self.config.enable_prefix_caching:
            self._unsent.append(AllBlocksCleared())
        return True

    # --- time -------------------------------------------------------------------------------------------------------

    def idle(self) -> bool:
        """No request is queued, running or waiting for remote KV (held blocks do not count)."""
        return not self._live

    def next_wake_s(self, now_s: float) -> float | None:
        """When to call `step`: `now_s` if there is work, later if only unripe arrivals, None if nothing will change."""
        if not self._stuck and (self._running or self._waiting or self._pulled):
            return now_s
        return max(now_s, self._incoming[0][0]) if self._incoming else None

    def step(self, now_s: float) -> StepResult:
        """One scheduling pass and forward pass begun at `now_s`."""
        while self._incoming and self._incoming[0][0] <= now_s:
            self._waiting.append(heapq.heappop(self._incoming)[2])
        out = StepResult()
        scheduled: list[tuple[Sequence, int]] = []
        budget = self._schedule_running(out, scheduled)
        if not out.preempted:
            self._schedule_waiting(now_s, budget, out, scheduled)
        self._stuck = not scheduled and not out.preempted
        if scheduled:
            self._steps += 1
            self._forward(out, scheduled)
        if self._unsent and (scheduled or out.events):
            out.events[:0] = self._unsent
            self._unsent = []
        return out

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._pulling) + len(self._pulled),
            waiting_remote=len(self._pulling),
            incoming=len(self._incoming),
            held=len(self._held),
            held_blocks=len({block for blocks in self._held.values() for block in blocks}),
            kv_usage=self.pool.num_used / self.pool.num_usable,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            external_queries=self._external_queries,
            external_hits=self._external_hits,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
            pulled_tokens=self._pulled_tokens,
            computed_prompt_tokens=self._computed_prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
            steps=self._steps,
        )

    def resident(self) -> Iterator[tuple[int, int]]:
        """(block hash, physical copies) that a request could hit now."""
        return self.pool.resident()

    def block_hashes(self, request: Request) -> list[int]:
        """The hashes this engine gives the full blocks of the request's prompt."""
        seq = Sequence(request, 0.0, root_hash(request, self.config.seed))
        seq.hash_full_blocks(self.config.block_size)
        return seq.hashes

    # --- scheduling -------------------------------------------------------------------------------------------------

    def _schedule_running(self, out: StepResult, scheduled: list[tuple[Sequence, int]]) -> int:
        budget = self.config.max_num_batched_tokens
        size = self.config.block_size
        at = 0
        while at < len(self._running) and budget > 0:
            seq = self._running[at]
            count = min(seq.prompt_len + len(seq.output) - seq.num_computed, budget)
            end = seq.num_computed + count
            # Most decode steps stay inside the last block: no call for them.
            grows = count > 1 or end > len(seq.blocks) * size or end % size == 0
            while grows and not self._grow(seq, end, out.events):
                victim = self._running.pop()
                self._preempt(victim, out)
                if victim is seq:
                    return budget
            scheduled.append((seq, count))
            budget -= count
            at += 1
        return budget

    def _schedule_waiting(
        self, now_s: float, budget: int, out: StepResult, scheduled: list[tuple[Sequence, int]]
    ) -> None:
        self._blocked = len(self._running) >= self.config.max_num_seqs
        while budget > 0 and len(self._running) < self.config.max_num_seqs:
            queue = self._pulled or self._waiting
            if not queue:
                return
            seq = queue[0]
            if queue is self._waiting:
                hits = self._hits(seq)
                if not self._fits(seq, hits, budget):
                    self._blocked = True
                    return
                self._admit(seq, hits, now_s, out)
                if seq.remote > seq.num_computed:
                    queue.popleft()
                    self._start_pull(seq, out)
                    continue
            count = min(seq.num_tokens - seq.num_computed, budget)
            if not self._grow(seq, seq.num_computed + count, out.events):
                return
            queue.popleft()
            self._running.append(seq)
            scheduled.append((seq, count))
            budget -= count

    def _hits(self, seq: Sequence) -> list[int]:
        if not self.config.enable_prefix_caching:
            return []
        seq.hash_full_blocks(self.config.block_size)
        return self.pool.lookup(seq.hashes, (seq.num_tokens - 1) // self.config.block_size)

    def _fits(self, seq: Sequence, hits: list[int], budget: int) -> bool:
        size = self.config.block_size
        wanted = seq.num_tokens
        if not self.config.reserve_full_prompt and not seq.remote:
            wanted = min(wanted, len(hits) * size + budget)
        missing = math.ceil(wanted / size) - len(hits)
        return missing + self.pool.num_free_among(hits) <= self.pool.num_free

    def _admit(self, seq: Sequence, hits: list[int], now_s: float, out: StepResult) -> None:
        request = seq.request
        self.pool.touch(hits)
        seq.blocks = hits
        seq.num_cached = len(hits)
        seq.num_computed = len(hits) * self.config.block_size
        if request.report_full and hits:
            out.events.append(stored(seq, 0, len(hits), self.config.block_size))
        seq.garbage = self.pool.garbage(hits)
        remote = max(0, seq.remote - seq.num_computed)
        if not seq.counted and not remote:
            self._count_prompt(seq, 0)
        if seq.seen:
            return
        seq.seen = True
        self._prefix_queries += seq.prompt_len
        self._prefix_hits += seq.num_computed
        self._external_queries += seq.prompt_len - seq.num_computed
        self._external_hits += remote
        out.admitted.append(Admitted(request.request_id, seq.num_computed, remote, now_s - seq.arrival_s))

    def _count_prompt(self, seq: Sequence, pulled: int) -> None:
        seq.counted = True
        self._prompt_tokens += seq.prompt_len
        self._cached_prompt_tokens += seq.num_computed
        self._pulled_tokens += pulled

    def _start_pull(self, seq: Sequence, out: StepResult) -> None:
        request_id = seq.request.request_id
        count = math.ceil(seq.num_tokens / self.config.block_size) - len(seq.blocks)
        self._take(seq, count, out.events)
        self._pulling[request_id] = seq
        out.pulls.append(Pull(request_id, seq.remote - seq.num_computed, tuple(seq.blocks[-count:])))

    def _grow(self, seq: Sequence, num_tokens: int, events: list[Event]) -> bool:
        """Own the blocks for `num_tokens` tokens and make the full ones findable."""
        size = self.config.block_size
        count = -(-num_tokens // size) - len(seq.blocks)
        if count > 0:
            if count > self.pool.num_free:
                return False
            self._take(seq, count, events)
        if num_tokens // size > seq.num_cached:
            self._cache(seq, num_tokens, events)
        return True

    def _take(self, seq: Sequence, count: int, events: list[Event]) -> None:
        blocks, evicted = self.pool.allocate(count)
        seq.blocks += blocks
        events.extend(BlockRemoved(block_hashes=[it], medium=MEDIUM_GPU, group_idx=0) for it in evicted)

    def _cache(self, seq: Sequence, num_tokens: int, events: list[Event]) -> None:
        if not self.config.enable_prefix_caching:
            return
        first, last = seq.num_cached, num_tokens // self.config.block_size
        if first >= last:
            return
        seq.hash_full_blocks(self.config.block_size)
        for index in range(first, last):
            self.pool.cache(seq.blocks[index], seq.hashes[index])
        if seq.garbage:
            self.pool.spoil(seq.blocks[first:last], seq.garbage)
        seq.num_cached = last
        events.append(stored(seq, first, last, self.config.block_size))

    def _preempt(self, seq: Sequence, out: StepResult) -> None:
        self._free(seq)
        self._waiting.appendleft(seq)
        self._preemptions += 1
        out.preempted.append(seq.request.request_id)

    def _free(self, seq: Sequence) -> None:
        self.pool.free(seq.blocks)
        seq.blocks = []
        seq.num_computed = seq.num_cached = 0
        self._stuck = self._blocked = False

    # --- forward pass -----------------------------------------------------------------------------------------------

    def _forward(self, out: StepResult, scheduled: list[tuple[Sequence, int]]) -> None:
        work = self._compute(out, scheduled)
        self._drop_ended()
        out.decode_seqs, out.prefill_tokens = work.decode_seqs, work.prefill_tokens
        out.dt_s = self._time(work)

    def _time(self, work: Work) -> float:
        return self.config.timing.step_s(*work)

    def _compute(self, out: StepResult, scheduled: list[tuple[Sequence, int]]) -> Work:
        decode_seqs = kv_tokens = prefill_tokens = 0
        pairs = 0.0
        for seq, count in scheduled:
            done = seq.num_computed + count
            if count == 1:  # also a prompt's last token: it runs in the decode graph
                decode_seqs += 1
                kv_tokens += done
            else:
                prefill_tokens += count
                pairs += 0.5 * (done * done - seq.num_computed * seq.num_computed)
            if seq.num_computed < seq.prompt_len:
                self._computed_prompt_tokens += min(done, seq.prompt_len) - seq.num_computed
            seq.num_computed = done
            if done == seq.prompt_len + len(seq.output):
                self._sample(seq, out)
        return Work(decode_seqs, kv_tokens, prefill_tokens, pairs)

    def _sample(self, seq: Sequence, out: StepResult) -> None:
        request = seq.request
        index = len(seq.output)
        token_id = self._ids[((seq.draw ^ seq.garbage) + index) % ID_TABLE]
        seq.output.append(token_id)
        self._generated_tokens += 1
        reason: FinishReason | None = "stop" if token_id in request.stop_token_ids else self._reason(seq)
        out.tokens.append(Token(request.request_id, index, token_id, reason))
        if reason is not None:
            self._end(seq)

    def _reason(self, seq: Sequence) -> FinishReason | None:
        """Why its answer ends with the number of tokens it has now."""
        request, done = seq.request, len(seq.output)
        if done == request.stop_after:
            return "stop"
        if done >= request.max_tokens or seq.prompt_len + done >= self.config.max_model_len:
            return "length"
        return None

    def _end(self, seq: Sequence) -> None:
        request_id = seq.request.request_id
        del self._live[request_id]
        self._ended = True
        if seq.request.hold_blocks:
            self._held[request_id] = seq.blocks
        else:
            self._free(seq)

    def _drop_ended(self) -> None:
        if not self._ended:
            return
        self._ended = self._blocked = False
        self._running = [seq for seq in self._running if seq.request.request_id in self._live]
