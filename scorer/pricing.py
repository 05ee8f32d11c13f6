"""The price of one request on one rank, in predicted seconds, from what is booked, scraped and held there."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from indexer import Holder, Match, PrefixIndex
from scorer.calibrate import Calibration, Part
from scorer.cost import CostModel
from scorer.fleet import Worker
from scorer.ledger import Load
from scorer.objectives import LATE_WORTH, SPREAD, VIOLATION_S, late_share
from scorer.types import EngineStats, Price, RequestFacts

Place = tuple[Worker, Holder, Load]
"""A rank that could take a request."""
USUAL_BLOCK_SIZE = 16
"""vLLM's default, until an engine says its own."""


class Pricer:
    """Prices by the formulas of docs/architecture.md. `index` tells how full a worker's cache is."""

    def __init__(self, cost: CostModel, calibration: Calibration, index: PrefixIndex) -> None:
        self.cost = cost
        self._calibration = calibration
        self._index = index

    def out_tokens(self, facts: RequestFacts) -> float:
        """How long the answer is thought to get."""
        expected = self.cost.constants.expected_output_tokens * self._calibration.value(Part.OUTPUT, facts.model)
        return expected if facts.max_output_tokens is None else min(expected, facts.max_output_tokens)

    def comp_s(self, worker: Worker, n_tokens: int, held_tokens: int) -> float:
        return self.cost.comp_s(n_tokens, held_tokens, worker.weight, worker.floor_factor, worker.work_factor)

    def step_s(self, worker: Worker, streams: float, kv_tokens: float) -> float:
        return worker.step_factor * self.cost.step_s(streams, kv_tokens, worker.weight)

    def local(
        self,
        facts: RequestFacts,
        place: Place,
        match: Match,
        now_s: float,
        *,
        out_tokens: float = 0.0,
        waiting: float = 0.0,
    ) -> tuple[Price, int]:
        """(price of the whole request there, tokens that need not be computed). Without `out_tokens` only the prompt is
        priced. `waiting` prompts there are for each worker that could take them: computing is shared by all of these,
        wherever they are, so that each second of it is a second to so many. Broken objectives are not in it: see
        `judged`.
        """
        worker, holder, load = place
        cost = self.cost
        n = facts.prompt_tokens
        block_size = worker.block_size() or USUAL_BLOCK_SIZE
        cached = min(match.reach_tokens, (max(n, 1) - 1) // block_size * block_size)
        gpu = min(match.gpu_tokens, cached)
        cpu = max(0, min(match.cpu_tokens, cached) - gpu)
        front_s = cost.front_s(n)
        comp_s = self.comp_s(worker, n, cached)
        stats = worker.fresh_stats(now_s)
        wait_s = load.prefill_backlog_s(now_s) + self._foreign_wait_s(worker, stats)
        new_blocks = (n + out_tokens - gpu) / block_size
        # What is cached and not in use is free memory, and is taken too.
        adm_s = self._admission_s(worker, stats, load, n / block_size, block_size)
        load_s = cost.load_s(cpu, cached - gpu - cpu)
        streams = len(load.streaming)
        # A prefill replaces the decode steps that would have run meanwhile.
        stall_s = comp_s - self.step_s(worker, max(1, streams), load.kv_tokens)
        stall_s = max(stall_s, worker.work_factor * cost.work_s(n, cached) / worker.weight)
        harm_s = streams * stall_s
        ttft_s = front_s + wait_s + adm_s + load_s + comp_s
        decode_s = out_tokens * self.step_s(worker, streams + 1, load.kv_tokens + n) if out_tokens else 0.0
        queue_s = waiting * comp_s if facts.slo_ttft_s is None else 0.0
        displaced_s = self._displaced_s(worker, holder, new_blocks, block_size)
        price = Price(
            front_s=front_s,
            wait_s=wait_s,
            adm_s=adm_s,
            load_s=load_s,
            comp_s=comp_s,
            ttft_s=ttft_s,
            stall_s=stall_s,
            harm_s=harm_s,
            decode_s=decode_s,
            queue_s=queue_s,
            displaced_s=displaced_s,
            total_s=ttft_s + harm_s + decode_s + queue_s + displaced_s,
        )
        return price, cached

    def remote(
        self, facts: RequestFacts, decode: Place, prefill: str, at_decode: Price, at_prefill: Price, held_tokens: int
    ) -> Price:
        """The prompt computed by `prefill`, at whose price that is `at_prefill`, and its KV pulled to `decode`, which
        holds `held_tokens` of it.
        """
        worker, _, load = decode
        c = self.cost.constants
        blocks = -(-(facts.prompt_tokens - held_tokens) // (worker.block_size() or USUAL_BLOCK_SIZE))
        factor = self._calibration.value(Part.PULL, pair_name(prefill, worker.name))
        pull_s = factor * (c.pull_base_s + c.pull_per_block_s * blocks)
        wait_s = max(0.0, at_decode.wait_s - at_prefill.ttft_s)
        streams = len(load.streaming)
        step_s = self.step_s(worker, streams + 1, load.kv_tokens)
        ttft_s = at_prefill.ttft_s + c.hop_s + at_decode.front_s + wait_s + at_decode.adm_s + pull_s + step_s
        harm_s = at_prefill.harm_s + streams * c.pull_stall_s
        displaced_s = at_decode.displaced_s + at_prefill.displaced_s
        return Price(
            front_s=at_prefill.front_s + at_decode.front_s,
            wait_s=at_prefill.wait_s + wait_s,
            adm_s=at_prefill.adm_s + at_decode.adm_s,
            load_s=at_prefill.load_s,
            comp_s=at_prefill.comp_s,
            hop_s=c.hop_s,
            pull_s=pull_s,
            step_s=step_s,
            ttft_s=ttft_s,
            stall_s=c.pull_stall_s,
            harm_s=harm_s,
            decode_s=at_decode.decode_s,
            queue_s=at_prefill.queue_s,
            displaced_s=displaced_s,
            total_s=ttft_s + harm_s + at_decode.decode_s + at_prefill.queue_s + displaced_s,
        )

    def judged(self, facts: RequestFacts, decode: Place, price: Price, out_tokens: float) -> Price:
        """The price with what it costs that objectives are broken."""
        if facts.slo_ttft_s is None and facts.slo_tpot_s is None and not decode[2].streaming:
            return price
        viol_s = self._viol_s(facts, decode, price, out_tokens)
        if facts.slo_ttft_s is not None and price.ttft_s > facts.slo_ttft_s:
            viol_s -= (1 - LATE_WORTH) * (price.ttft_s - facts.slo_ttft_s)
        return msgspec.structs.replace(price, viol_s=viol_s, total_s=price.total_s + viol_s) if viol_s else price

    def _viol_s(self, facts: RequestFacts, decode: Place, price: Price, out_tokens: float) -> float:
        """What the objectives cost that it is predicted to break: its own, and those of the streams beside it."""
        worker, _, load = decode
        spread = self._calibration.spread(Part.WORK, worker.name, SPREAD)
        late = late_share(price.ttft_s, facts.slo_ttft_s, spread)
        streams = len(load.streaming)
        if facts.slo_tpot_s is not None or streams:
            before_s = self.step_s(worker, max(1, streams), load.kv_tokens)
            after_s = self.step_s(worker, streams + 1, load.kv_tokens + facts.prompt_tokens)
            late += late_share(after_s, facts.slo_tpot_s, spread)
            for booking in load.streaming:
                if booking.slo_tpot_s is not None:
                    lost_s = booking.stalled_s / booking.out_tokens
                    then_s = after_s + lost_s + price.stall_s / booking.out_tokens
                    late += late_share(then_s, booking.slo_tpot_s, spread)
                    late -= late_share(before_s + lost_s, booking.slo_tpot_s, spread)
        return VIOLATION_S * max(0.0, late)

    def _displaced_s(self, worker: Worker, holder: Holder, new_blocks: float, block_size: int) -> float:
        """Cached blocks that new ones push out, at what it takes to compute those again that will be asked for."""
        stats = worker.stats
        if stats is None or not stats.kv_blocks:
            return 0.0
        room = stats.kv_blocks / len(worker.loads) - self._index.resident_blocks(*holder)
        pushed = new_blocks - max(0.0, room)
        if pushed <= 0:
            return 0.0
        c = self.cost.constants
        again_s = worker.work_factor * c.comp_per_token_s / worker.weight
        return pushed * block_size * again_s * worker.reuse(c.reuse)

    def _foreign_wait_s(self, worker: Worker, stats: EngineStats | None) -> float:
        """Requests that wait in the worker's own queue and are not ours, at its mean prefill time."""
        if stats is None or stats.waiting is None:
            return 0.0
        own = sum(len(load.prefills) for load in worker.loads.values())
        foreign = stats.waiting - own
        if foreign <= 0:
            return 0.0
        mean_s = self.cost.constants.comp_floor_s / worker.weight
        if stats.prefill_time_count:
            mean_s = (stats.prefill_time_sum_s or 0.0) / stats.prefill_time_count
        return foreign / len(worker.loads) * mean_s

    def _admission_s(
        self, worker: Worker, stats: EngineStats | None, load: Load, needed_blocks: float, block_size: int
    ) -> float:
        """Until enough KV blocks are free: what is missing, at the rate at which running answers give theirs back."""
        if stats is None or stats.kv_usage is None or not stats.kv_blocks:
            return 0.0
        used = max(stats.kv_usage * stats.kv_blocks, load.kv_tokens / block_size)  # The figure is up to a second old.
        missing = needed_blocks - (stats.kv_blocks - used)
        if missing <= 0 or used <= 0:
            return 0.0
        streams = max(1.0, stats.running or float(load.streams))
        answer_s = self.cost.output_tokens(None) * self.cost.step_s(streams, load.kv_tokens, worker.weight)
        return missing / (used / answer_s)


def pair_name(prefill: str, decode: str) -> str:
    """The name of a pair in a calibration."""
    return f"{prefill}>{decode}"


def prompts_waiting(places: Sequence[Place]) -> float:
    """Prompts booked and not computed yet, for each of the ranks."""
    return sum(len(load.prefills) for _, _, load in places) / len(places) if places else 0.0
