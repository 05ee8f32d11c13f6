"""The one path that decides: match, price, choose, book; then learn how it went.

`plan` prices every rank that serves the model, lets the policy choose and books the choice at once, load and blocks,
so that a burst does not all see the same idle worker. `observe` takes what happened and gives back what was booked on
every way out. Blocks a request will bring are assumed on its worker for a few seconds and given up as soon as the
worker's own events speak for them, or the request fails.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection

from indexer import ApproximateIndex, Holder, Match, PrefixIndex, Prompt
from scorer.cost import CostModel
from scorer.fleet import Fleet, Worker
from scorer.ledger import Booking, Load
from scorer.policies import POLICIES, Offer, Policy
from scorer.types import Candidate, EngineStats, Outcome, OutcomeKind, Plan, Price, RequestFacts, Role

CONSIDERED = 8
EVENT_GRACE_S = 0.5
"""How long after a request's end its blocks stay assumed while its worker's events have not said so."""
_NOTHING = Match()


class ModelNotFound(Exception):
    """No worker serves the model."""

    def __init__(self, model: str, known: Collection[str]) -> None:
        super().__init__(f"The model `{model}` does not exist.")
        self.model = model
        self.known = sorted(known)


class NoWorker(Exception):
    """Workers serve the model, or may, but none can take the request now."""


class _Flight:
    """A planned request that has not ended."""

    __slots__ = ("booking", "facts", "holder", "keys", "planned_s", "predicted_tokens", "prompt", "worker")

    def __init__(self, facts: RequestFacts, worker: Worker, holder: Holder, booking: Booking) -> None:
        self.facts = facts
        self.worker = worker
        self.holder = holder
        self.booking = booking
        self.prompt: Prompt | None = None
        self.keys: list[int] = []
        self.planned_s = booking.booked_s
        self.predicted_tokens = 0


class Planner:
    """Decides where requests run. Not thread-safe: one thread plans and observes.

    `index` is the exact index, fed elsewhere. `policy` is a name of `POLICIES`; an unknown one raises ValueError.
    """

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        *,
        policy: str = "warmroute",
        cost: CostModel | None = None,
        optimistic_ttl_s: float = 4.0,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown policy {policy!r}; there are {', '.join(POLICIES)}")
        self.fleet = fleet
        self.index = index
        self.policy = policy
        self.cost = cost or CostModel()
        self.approximate = ApproximateIndex()
        """For workers without events."""
        self.optimistic = ApproximateIndex(ttl_s=optimistic_ttl_s, capacity_blocks=1 << 20)
        """For workers with events: what was just sent there and not announced yet."""
        self._choose: Policy = POLICIES[policy]
        self._flights: dict[str, _Flight] = {}
        self._unannounced: deque[tuple[float, Holder, list[int], float]] = deque()
        self._turns: dict[Holder, int] = {}
        self._turn = 0

    # ---- workers -----------------------------------------------------------------------------------------------------

    def configure_worker(self, name: str) -> None:
        """Carry what the fleet knows of a worker (names, block size, capacity) into the indexes."""
        worker = self.fleet.workers.get(name)
        if worker is None:
            for index in (self.index, self.approximate, self.optimistic):
                index.remove_worker(name)
            return
        models = None if worker.models is None else list(worker.models)
        self.index.set_worker(name, models=models, loras=worker.adapters)
        stats = worker.stats
        block_size = None if stats is None else stats.block_size
        capacity = None if stats is None else stats.kv_blocks
        self.approximate.set_worker(
            name, models=models, loras=worker.adapters, block_size=block_size, capacity_blocks=capacity
        )
        self.optimistic.set_worker(name, models=models, loras=worker.adapters, block_size=block_size)

    def forget_blocks(self, worker: str, rank: int | None = None) -> None:
        """The worker's cache is gone (restart, reset): nothing assumed there holds any longer."""
        self.approximate.clear(worker, rank)
        self.optimistic.clear(worker, rank)

    # ---- deciding ----------------------------------------------------------------------------------------------------

    def plan(self, facts: RequestFacts, available: Collection[str] | None, now_s: float, rng: random.Random) -> Plan:
        """Choose among `available` workers (None: all) and book. Raises ModelNotFound or NoWorker."""
        prompt = _prompt(facts)
        plan, (worker, holder, load) = self._decide(facts, prompt, available, now_s, rng)
        chosen = plan.chosen
        flight = _Flight(facts, worker, holder, Booking(load, chosen.price.comp_s, facts.prompt_tokens, now_s))
        flight.predicted_tokens = chosen.cached_tokens
        self._turn += 1
        self._turns[holder] = self._turn
        self._flights[facts.request_id] = flight
        flight.prompt = prompt
        if prompt is not None:
            index, known = self.approximate, 0
            if worker.publishes_events:
                index, known = self.optimistic, chosen.cached_tokens // (worker.block_size() or 16)
            flight.keys = index.assume(*holder, prompt, now_s, model=facts.model, lora=facts.lora, first_block=known)
        return plan

    def explain(self, facts: RequestFacts, available: Collection[str] | None, now_s: float, rng: random.Random) -> Plan:
        """The plan `plan` would make, with nothing booked."""
        return self._decide(facts, _prompt(facts), available, now_s, rng)[0]

    def _decide(
        self,
        facts: RequestFacts,
        prompt: Prompt | None,
        available: Collection[str] | None,
        now_s: float,
        rng: random.Random,
    ) -> tuple[Plan, tuple[Worker, Holder, Load]]:
        self._settle_unannounced(now_s)
        places = self._places(facts, available)
        held = {} if prompt is None else self._held(facts, prompt, now_s)
        priced = [self._price(facts, place, held.get(place[1], _NOTHING), now_s) for place in places]
        offers = [
            Offer(
                i,
                price.total_s,
                load.requests,
                cached,
                self._turn - self._turns.get(holder, -1),
            )
            for i, ((_, holder, load), (price, cached, _)) in enumerate(zip(places, priced, strict=True))
        ]
        best = self._choose(offers, rng)
        ranked = sorted(offers, key=lambda offer: (offer.position != best.position, offer.total_s))[:CONSIDERED]
        considered = tuple(
            Candidate(
                decode=places[offer.position][1],
                cached_tokens=priced[offer.position][1],
                cpu_tokens=priced[offer.position][2].cpu_tokens,
                disk_tokens=priced[offer.position][2].disk_tokens,
                approximate=priced[offer.position][2].approximate,
                price=priced[offer.position][0],
            )
            for offer in ranked
        )
        plan = Plan(
            request_id=facts.request_id,
            chosen=considered[0],
            considered=considered,
            policy=self.policy,
            n_candidates=len(places),
            reason=_reason(self.policy, considered, facts),
            decided_at_s=now_s,
        )
        return plan, places[best.position]

    def _places(self, facts: RequestFacts, available: Collection[str] | None) -> list[tuple[Worker, Holder, Load]]:
        places = self.fleet.holders(facts.model, (Role.BOTH, Role.DECODE))
        if not places:
            workers = self.fleet.workers.values()
            if not workers:
                raise NoWorker("no worker is configured")
            if any(worker.models is not None for worker in workers) and not any(w.serves(facts.model) for w in workers):
                raise ModelNotFound(facts.model, self.fleet.models())
            raise NoWorker(f"no worker that serves `{facts.model}` is up")
        usable = [
            place
            for place in places
            if (available is None or place[0].name in available)
            and place[0].name not in facts.excluded
            and (facts.subset is None or place[0].name in facts.subset)
        ]
        if not usable:
            raise NoWorker(f"no worker that serves `{facts.model}` can take requests now")
        return usable

    def _held(self, facts: RequestFacts, prompt: Prompt, now_s: float) -> dict[Holder, Match]:
        held = self.index.match(prompt, model=facts.model, lora=facts.lora)
        for assumed in (
            self.optimistic.match(prompt, now_s=now_s, model=facts.model, lora=facts.lora),
            self.approximate.match(prompt, now_s=now_s, model=facts.model, lora=facts.lora),
        ):
            for holder, match in assumed.items():
                known = held.get(holder)
                if known is None or known.reach_tokens < match.reach_tokens:
                    held[holder] = match
        return held

    def _price(
        self, facts: RequestFacts, place: tuple[Worker, Holder, Load], match: Match, now_s: float
    ) -> tuple[Price, int, Match]:
        """(price, tokens the engine can skip, what is held where)."""
        worker, _, load = place
        cost = self.cost
        n = facts.prompt_tokens
        block_size = worker.block_size() or 16
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
        return price, cached, match

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

    # ---- how it went -------------------------------------------------------------------------------------------------

    def observe(self, request_id: str, outcome: Outcome, now_s: float) -> None:
        """Take in an outcome; an unknown or ended request is ignored, as clients leave in the middle of anything."""
        flight = self._flights.get(request_id)
        if flight is None:
            return
        kind = outcome.kind
        if kind is OutcomeKind.FIRST_TOKEN:
            flight.booking.first_token(now_s)
            self._confirm(flight)
        elif kind is OutcomeKind.TOKEN:
            flight.booking.grow(outcome.n_tokens)
        elif kind is OutcomeKind.CACHED_TOKENS:
            self._correct(flight, outcome.n_tokens)
        elif kind in (OutcomeKind.END, OutcomeKind.ERROR, OutcomeKind.CANCELLED):
            del self._flights[request_id]
            prefilled = not flight.booking.prefilling or kind is OutcomeKind.END
            flight.booking.settle(now_s)
            self._release_blocks(flight, prefilled, now_s)

    def in_flight(self) -> int:
        return len(self._flights)

    def _confirm(self, flight: _Flight) -> None:
        """Give up the assumption when the worker's events have said so themselves."""
        if flight.keys and flight.worker.publishes_events and self.index.holds(*flight.holder, flight.keys[-1]):
            self.optimistic.retract(*flight.holder, flight.keys, flight.planned_s)
            flight.keys = []

    def _release_blocks(self, flight: _Flight, prefilled: bool, now_s: float) -> None:
        if not flight.keys:
            return
        if not flight.worker.publishes_events:
            if not prefilled:
                self.approximate.retract(*flight.holder, flight.keys, flight.planned_s)
            return
        self._confirm(flight)
        if flight.keys:
            until_s = now_s + EVENT_GRACE_S if prefilled else now_s
            self._unannounced.append((until_s, flight.holder, flight.keys, flight.planned_s))

    def _settle_unannounced(self, now_s: float) -> None:
        for _ in range(len(self._unannounced)):
            until_s, holder, keys, planned_s = self._unannounced.popleft()
            if until_s <= now_s or self.index.holds(*holder, keys[-1]):
                self.optimistic.retract(*holder, keys, planned_s)
            else:
                self._unannounced.append((until_s, holder, keys, planned_s))

    def _correct(self, flight: _Flight, cached_tokens: int) -> None:
        if flight.prompt is None or flight.worker.publishes_events:
            return
        facts = flight.facts
        self.approximate.correct(
            *flight.holder, flight.prompt, cached_tokens, flight.planned_s, model=facts.model, lora=facts.lora
        )


def _prompt(facts: RequestFacts) -> Prompt | None:
    if facts.tokens is None:
        return None
    return Prompt(facts.tokens, cache_salt=facts.cache_salt, extra_keys=facts.extra_keys)


def _reason(policy: str, considered: tuple[Candidate, ...], facts: RequestFacts) -> str:
    chosen = considered[0]
    text = f"{policy}: {chosen.cached_tokens} of {facts.prompt_tokens} prompt tokens cached"
    if len(considered) > 1:
        text += f", predicted {chosen.price.total_s:.3f} s, next {considered[1].price.total_s:.3f} s"
    return text
