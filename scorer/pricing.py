"""The price of one request on one rank, in predicted seconds, from what is booked, scraped and held there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from indexer import Holder, Match, PrefixIndex
from scorer.answers import Answer
from scorer.calibrate import FLEET, Calibration, Part
from scorer.cost import CostModel
from scorer.fleet import STALE_S, Worker
from scorer.ledger import Load
from scorer.objectives import SPREAD, VIOLATION_S, late_share, relief, safe_ratio
from scorer.types import EngineStats, Price, RequestFacts

Place = tuple[Worker, Holder, Load]
"""A rank that could take a request."""
_SIGMA = 1.25
"""sqrt(pi / 2): a standard deviation over a mean absolute error, of what is distributed normally."""
LONGEST_S = 3600.0
"""Nothing is predicted to take longer: what would is as good as never."""
USUAL_BLOCK_SIZE = 16
"""vLLM's default, until an engine says its own."""


class Pricer:
    """Prices by the formulas of docs/architecture.md. `index` tells how full a worker's cache is."""

    def __init__(self, cost: CostModel, calibration: Calibration, index: PrefixIndex) -> None:
        self.cost = cost
        self._calibration = calibration
        self._index = index

    def answer(self, facts: RequestFacts) -> Answer:
        """How long the answer is thought to get."""
        tokens = self.cost.constants.expected_output_tokens * self._calibration.value(Part.OUTPUT, facts.model)
        if facts.max_output_tokens is not None and facts.max_output_tokens <= tokens:
            return Answer(facts.max_output_tokens)
        return Answer(tokens, _SIGMA * self._calibration.spread(Part.OUTPUT, facts.model, 0.0))

    def pull_stall_s(self, worker: Worker) -> float:
        """What one pull costs each of the answers that run there."""
        return worker.stall_factor * self.cost.constants.pull_stall_s

    def step_s(self, worker: Worker, streams: float, kv_tokens: float) -> float:
        return worker.step_factor * self.cost.step_s(streams, kv_tokens, worker.weight)

    def local(
        self,
        facts: RequestFacts,
        places: Sequence[Place],
        held: Mapping[Holder, Match],
        now_s: float,
        *,
        out_tokens: float = 0.0,
        waiting: float | None = None,
    ) -> list[tuple[Price, int]]:
        """For each place: (price of the whole request there, tokens that need not be computed). Without `out_tokens`
        only the prompt is priced. Computing is shared by the prompts that wait at any of the places (or `waiting` for
        each rank of weight 1, where the places are not all that could take them), so that each second of it is a second
        to so many. Broken objectives are not in it: see `judged`.
        """
        c, resident_blocks = self.cost.constants, self._index.resident_blocks
        n = facts.prompt_tokens
        squared = n * n
        slo_ttft_s = facts.slo_ttft_s
        usual_front_s = self.cost.front_s(n, text=facts.is_text)
        if facts.slo_ttft_s is not None:
            waiting = 0.0
        elif waiting is None:
            waiting = _prompts_waiting(places)
        fixed_s, per_stream_s, per_kv_token_s = c.step_base_s, c.step_per_stream_s, c.step_per_kv_token_s
        priced: list[tuple[Price, int]] = []
        # For every worker and request: the formulas of CostModel are written out, as calls would take as long again.
        for worker, holder, load in places:
            stats = worker.stats
            block_size = USUAL_BLOCK_SIZE if stats is None or stats.block_size is None else stats.block_size
            cached = gpu = 0
            load_s = 0.0
            match = held.get(holder)
            if match is not None:
                most = (n - 1) // block_size * block_size if n else 0
                cached = match.reach_tokens if match.reach_tokens < most else most
                gpu = match.gpu_tokens if match.gpu_tokens < cached else cached
                if gpu < cached:
                    cpu = max(0, min(match.cpu_tokens, cached) - gpu)
                    load_s = self.cost.load_s(cpu, cached - gpu - cpu)
            weight = worker.weight
            work_s = c.comp_per_token_s * (n - cached) + c.comp_per_attention_s * (squared - cached * cached) / 2
            work_s = worker.work_factor * work_s / weight
            comp_s = worker.floor_factor * c.comp_floor_s / weight
            if work_s > comp_s:
                comp_s = work_s
            front_s = worker.front_factor * usual_front_s
            wait_s = worker.wait_factor * load.prefill_backlog_s(now_s) if load.in_line else 0.0
            adm_s = displaced_s = 0.0
            if stats is not None:
                if now_s - stats.scraped_at_s <= STALE_S:
                    if stats.waiting:
                        wait_s += self._foreign_wait_s(worker, stats)
                    # What is cached and not in use is free memory, and is taken too.
                    if stats.kv_usage is not None and stats.kv_blocks:
                        used = stats.kv_usage * stats.kv_blocks
                        booked = load.kv_tokens / block_size  # The figure is up to a second old.
                        if booked > used:
                            used = booked
                        missing = n / block_size - (stats.kv_blocks - used)
                        if not (missing <= 0 or used <= 0):
                            adm_s = self._admission_s(worker, stats, load, missing, used)
                if stats.kv_blocks:
                    room = stats.kv_blocks / len(worker.loads) - resident_blocks(holder)
                    pushed = (n + out_tokens - gpu) / block_size - (room if room > 0 else 0.0)
                    if pushed > 0:
                        again_s = worker.work_factor * c.comp_per_token_s / weight
                        displaced_s = pushed * block_size * again_s * worker.reuse(c.reuse)
            streams, kv_tokens = load.streams, load.kv_tokens
            harm_s = 0.0
            # A prefill replaces the decode steps that would have run meanwhile.
            step_s = fixed_s + per_stream_s * (streams or 1) + per_kv_token_s * kv_tokens
            stall_s = comp_s - worker.step_factor * step_s / weight
            if stall_s < work_s:
                stall_s = work_s
            if streams:
                harm_s = streams * stall_s
            decode_s = 0.0
            if out_tokens:
                step_s = fixed_s + per_stream_s * (streams + 1) + per_kv_token_s * (kv_tokens + n)
                decode_s = out_tokens * worker.step_factor * step_s / weight
            queue_s = waiting * weight * comp_s
            ttft_s = front_s + wait_s + adm_s + load_s + comp_s
            relief_s = 0.0 if slo_ttft_s is None else relief(ttft_s, slo_ttft_s)
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
                viol_s=relief_s,
                total_s=ttft_s + harm_s + decode_s + queue_s + displaced_s + relief_s,
            )
            priced.append((price, cached))
        return priced

    def remote(
        self,
        facts: RequestFacts,
        decode: Place,
        prefill: str,
        at_decode: Price,
        at_prefill: Price,
        usual_pull_s: float,
        meeting_s: float,
    ) -> Price:
        """The prompt computed by `prefill`, at whose price that is `at_prefill`, and its KV pulled to `decode`:
        `usual_pull_s(...)` by the constants, after a handshake of `meeting_s` (as learned).
        """
        worker, _, load = decode
        c = self.cost.constants
        factor = self._calibration.value(Part.PULL, pair_name(prefill, worker.name))
        pull_s = meeting_s + factor * worker.pulls.scale * usual_pull_s
        front_s = at_decode.front_s
        if facts.is_text and not facts.is_text_at_decode:
            front_s = worker.front_factor * self.cost.front_s(facts.prompt_tokens)
        wait_s = max(0.0, at_decode.wait_s - at_prefill.ttft_s)
        streams = load.streams
        step_s = self.step_s(worker, streams + 1, load.kv_tokens)
        ttft_s = at_prefill.ttft_s + c.hop_s + front_s + wait_s + at_decode.adm_s + pull_s + step_s
        stall_s = self.pull_stall_s(worker)
        harm_s = at_prefill.harm_s + streams * stall_s
        displaced_s = at_decode.displaced_s + at_prefill.displaced_s
        relief_s = 0.0 if facts.slo_ttft_s is None else relief(ttft_s, facts.slo_ttft_s)
        return Price(
            front_s=at_prefill.front_s + front_s,
            wait_s=at_prefill.wait_s + wait_s,
            adm_s=at_prefill.adm_s + at_decode.adm_s,
            load_s=at_prefill.load_s,
            comp_s=at_prefill.comp_s,
            hop_s=c.hop_s,
            pull_s=pull_s,
            step_s=step_s,
            ttft_s=ttft_s,
            stall_s=stall_s,
            harm_s=harm_s,
            decode_s=at_decode.decode_s,
            queue_s=at_prefill.queue_s,
            displaced_s=displaced_s,
            viol_s=relief_s,
            total_s=ttft_s + harm_s + at_decode.decode_s + at_prefill.queue_s + displaced_s + relief_s,
        )

    def usual_pull_s(self, facts: RequestFacts, decode: Worker, held_tokens: int) -> float:
        """A pull of what is not held, by the constants alone."""
        block_size = decode.block_size() or USUAL_BLOCK_SIZE
        blocks = -(-(facts.prompt_tokens - held_tokens) // block_size)
        return self.cost.pull_s(blocks, block_size)

    def handshake_s(self) -> float:
        """That of two that have not met: as a pair has one, what is learned of all is used."""
        return self._calibration.value(Part.MEETING, FLEET) * self.cost.constants.first_contact_s

    def judged(self, facts: RequestFacts, decode: Place, price: Price, streams_late: float | None = None) -> Price:
        """The price with what it costs that objectives are broken: never less than without. `streams_late` is
        `streams_late(...)`, where that is known already.
        """
        late = self.streams_late(facts, decode, price.stall_s) if streams_late is None else streams_late
        if facts.slo_ttft_s is not None:
            late += late_share(price.ttft_s, facts.slo_ttft_s, self._spread(decode[0]))
        if late <= 0:
            return price
        viol_s = VIOLATION_S * late
        return msgspec.structs.replace(price, viol_s=price.viol_s + viol_s, total_s=price.total_s + viol_s)

    def pulls_late(self, facts: RequestFacts, decodes: Sequence[Place]) -> list[float]:
        """`streams_late` at each of `decodes` if the prompt is pulled there."""
        return [self.streams_late(facts, place, self.pull_stall_s(place[0])) for place in decodes]

    def streams_late(self, facts: RequestFacts, decode: Place, stall_s: float) -> float:
        """How many of the answers, the request's own and those beside it, are thought to break their TPOT for it."""
        worker, _, load = decode
        own_s = facts.slo_tpot_s
        if own_s is None and not load.with_objective:
            return 0.0
        spread = self._spread(worker)
        streams = load.streams
        before_s = self.step_s(worker, max(1, streams), load.kv_tokens)
        after_s = self.step_s(worker, streams + 1, load.kv_tokens + facts.prompt_tokens)
        late = late_share(after_s, own_s, spread)
        safe = safe_ratio(spread)
        last_objective_s = last_lost_s = then = math.nan
        for booking in load.streaming:
            objective_s = booking.slo_tpot_s
            if objective_s is None:
                continue
            answer, lost_s = booking.answer, booking.stalled_s
            if answer.varies:
                # Too short are those that end before each token has had its part of what is lost.
                done = booking.done_tokens + 1
                if lost_s != last_lost_s or objective_s != last_objective_s:  # Most are as the one before.
                    last_objective_s, last_lost_s = objective_s, lost_s
                    slack_s = objective_s - after_s
                    then = (lost_s + stall_s) / slack_s if slack_s > 0 else math.inf
                if then > done:
                    slack_s = objective_s - before_s
                    late += answer.ends_between(lost_s / slack_s if slack_s > 0 else math.inf, then, done)
                continue
            then_s = after_s + (lost_s + stall_s) / answer.tokens
            if then_s * safe > objective_s:
                late += late_share(then_s, objective_s, spread)
                late -= late_share(before_s + lost_s / answer.tokens, objective_s, spread)
        return late if late > 0 else 0.0

    def _spread(self, worker: Worker) -> float:
        return self._calibration.spread(Part.WORK, worker.name, SPREAD)

    def _foreign_wait_s(self, worker: Worker, stats: EngineStats) -> float:
        """Requests that wait in the worker's own queue and are nobody's we know of, at its mean prefill time."""
        if stats.waiting is None:
            return 0.0
        known = sum(load.in_line for load in worker.loads.values())
        foreign = stats.waiting - known
        if foreign <= 0:
            return 0.0
        mean_s = self.cost.constants.comp_floor_s / worker.weight
        if stats.prefill_time_count:
            mean_s = (stats.prefill_time_sum_s or 0.0) / stats.prefill_time_count
        return min(LONGEST_S, foreign / len(worker.loads) * mean_s)

    def _admission_s(self, worker: Worker, stats: EngineStats, load: Load, missing: float, used: float) -> float:
        """Until so many KV blocks are free that are `missing`: those `used` come back as the running answers end."""
        streams = max(1.0, stats.running or float(load.streams))
        answer_s = self.cost.output_tokens(None) * self.cost.step_s(streams, load.kv_tokens, worker.weight)
        return min(LONGEST_S, missing * answer_s / used)


def pair_name(prefill: str, decode: str) -> str:
    """The name of a pair in a calibration."""
    return f"{prefill}>{decode}"


def _prompts_waiting(places: Sequence[Place]) -> float:
    """Prompts booked and not computed yet, for each rank of weight 1: a second of a slower one holds up less."""
    if not places:
        return 0.0
    return sum(load.in_line for _, _, load in places) / sum(worker.weight for worker, _, _ in places)
