"""The price of one request on one rank, in predicted seconds, from what is booked, scraped and held there."""

from __future__ import annotations

from indexer import Holder, Match
from scorer.cost import CostModel
from scorer.fleet import Worker
from scorer.ledger import Load
from scorer.types import EngineStats, Price, RequestFacts

Place = tuple[Worker, Holder, Load]
"""A rank that could take a request."""
USUAL_BLOCK_SIZE = 16
"""vLLM's default, until an engine says its own."""


class Pricer:
    """Prices by the formulas of docs/architecture.md."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def local(self, facts: RequestFacts, place: Place, match: Match, now_s: float) -> tuple[Price, int]:
        """(price of the whole prompt computed there, tokens that need not be computed)."""
        worker, _, load = place
        cost = self.cost
        n = facts.prompt_tokens
        block_size = worker.block_size() or USUAL_BLOCK_SIZE
        cached = min(match.reach_tokens, (max(n, 1) - 1) // block_size * block_size)
        gpu = min(match.gpu_tokens, cached)
        cpu = max(0, min(match.cpu_tokens, cached) - gpu)
        front_s = cost.front_s(n)
        comp_s = cost.comp_s(n, cached, worker.weight)
        stats = worker.fresh_stats(now_s)
        wait_s = load.prefill_backlog_s(now_s) + self._foreign_wait_s(worker, stats)
        adm_s = self._admission_s(worker, stats, load, (n - gpu) / block_size)
        load_s = cost.load_s(cpu, cached - gpu - cpu)
        harm_s = load.streams * comp_s
        ttft_s = front_s + wait_s + adm_s + load_s + comp_s
        price = Price(
            front_s=front_s,
            wait_s=wait_s,
            adm_s=adm_s,
            load_s=load_s,
            comp_s=comp_s,
            ttft_s=ttft_s,
            stall_s=comp_s,
            harm_s=harm_s,
            total_s=ttft_s + harm_s,
        )
        return price, cached

    def remote(
        self, facts: RequestFacts, decode: Place, at_decode: Price, at_prefill: Price, held_tokens: int
    ) -> Price:
        """The prompt computed by a prefill worker, at whose price that is `at_prefill`, and its KV pulled to `decode`,
        which holds `held_tokens` of it.
        """
        worker, _, load = decode
        c = self.cost.constants
        blocks = -(-(facts.prompt_tokens - held_tokens) // (worker.block_size() or USUAL_BLOCK_SIZE))
        pull_s = c.pull_base_s + c.pull_per_block_s * blocks
        wait_s = max(0.0, at_decode.wait_s - at_prefill.ttft_s)
        step_s = self.cost.step_s(load.streams + 1, load.kv_tokens, worker.weight)
        ttft_s = at_prefill.ttft_s + c.hop_s + at_decode.front_s + wait_s + at_decode.adm_s + pull_s + step_s
        harm_s = at_prefill.harm_s + load.streams * c.pull_stall_s
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
            total_s=ttft_s + harm_s,
        )

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

    def _admission_s(self, worker: Worker, stats: EngineStats | None, load: Load, needed_blocks: float) -> float:
        """Until enough KV blocks are free: what is missing, at the rate at which running answers give theirs back."""
        if stats is None or stats.kv_usage is None or not stats.kv_blocks:
            return 0.0
        used = stats.kv_usage * stats.kv_blocks
        missing = needed_blocks - (stats.kv_blocks - used)
        if missing <= 0 or used <= 0:
            return 0.0
        streams = max(1.0, stats.running or float(load.streams))
        answer_s = self.cost.output_tokens(None) * self.cost.step_s(streams, load.kv_tokens, worker.weight)
        return missing / (used / answer_s)
