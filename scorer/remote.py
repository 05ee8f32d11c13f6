"""Whether a prefill worker computes the prompt for a decode worker, and which one.

By a rule: decode first, as llm-d does; where the answer runs is settled, and the rule looks at that worker alone. By
cost: the best decode workers and the best prefill workers are paired, and each pair has a price beside those of the
decode workers by themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from indexer import Holder, Match
from scorer.disaggregation import PdPolicy
from scorer.fleet import Fleet, Worker
from scorer.pairs import Names, Pairs
from scorer.pricing import Place, Pricer
from scorer.types import Candidate, PdReason, Price, RequestFacts, Role, TokenSource

NEAR = 1.1
"""Prefill workers within a tenth of the best price are as good: among many deciders that see the same figures, all
would else take the same one.
"""
BEST = 4
"""So many prefill workers, and so many decode workers, are paired."""


class Choice(msgspec.Struct, frozen=True):
    """One prefill worker's rank, with the price of the whole way."""

    candidate: Candidate
    decode: Place
    place: Place
    comp_s: float
    """Its computing, as it is booked there."""
    stall_s: float
    """What each answer that runs there loses by it."""
    usual_pull_s: float = 0.0
    """The pull by the constants alone."""
    meeting_s: float = 0.0
    """The handshake before it."""


class Remote:
    """The prefill side of a decision. `policy` is the rule for requests nobody has decided about yet."""

    def __init__(self, fleet: Fleet, pricer: Pricer, pairs: Pairs, policy: PdPolicy) -> None:
        self._fleet = fleet
        self._pricer = pricer
        self.pairs = pairs
        self.policy = policy

    def decide(
        self,
        facts: RequestFacts,
        local: Candidate,
        decode: Place,
        held: Mapping[Holder, Match],
        available: Collection[str] | None,
        now_s: float,
        rng: random.Random,
    ) -> tuple[PdReason, list[Choice]]:
        """Why, and where: no choices mean local; else the first is chosen."""
        kept = self.kept_local(facts, decode[0])
        if kept is not None:
            return kept, []
        if not facts.prefill_hint and not self.policy.rule(facts.prompt_tokens, local.cached_tokens):
            return self.policy.reason, []
        choices, nobody = self._choices(facts, [(local, decode)], held, available, now_s)
        if nobody is not None:
            return nobody, []
        if facts.prefill_hint:
            return PdReason.HINT, _preferred(choices, facts.prefill_hint)
        return self.policy.reason, _cheapest(choices, rng)

    def by_cost(
        self,
        facts: RequestFacts,
        locals_: Sequence[tuple[Candidate, Place]],
        held: Mapping[Holder, Match],
        available: Collection[str] | None,
        now_s: float,
        late: Callable[[], list[float]],
    ) -> tuple[PdReason, list[Choice]]:
        """Pairs of the given decode workers and the best prefill workers, the cheapest first; or why there are none.
        `PdReason.COST`: the prices decide. `late()`: `Pricer.pulls_late` of the decode workers.
        """
        kept = self.kept_local(facts, locals_[0][1][0])
        if kept is not None:
            return kept, []
        choices, nobody = self._choices(facts, locals_, held, available, now_s, late)
        if nobody is not None:
            return nobody, []
        return PdReason.COST, sorted(choices, key=lambda choice: choice.candidate.price.total_s)

    def kept_local(self, facts: RequestFacts, decode: Worker) -> PdReason | None:
        """Why the prompt can only be computed by `decode` itself, if so."""
        if facts.keep_local is not None:
            return facts.keep_local
        block_size = decode.block_size()
        if block_size is None:
            return PdReason.UNKNOWN_BLOCK_SIZE  # Without it no answer of a prefill worker can be checked.
        if facts.prompt_tokens < block_size:
            return PdReason.SHORT_PROMPT
        counted = facts.token_source is not TokenSource.ESTIMATE
        longest = max(facts.prompt_tokens + 1 if counted else 0, facts.max_output_tokens or 0)
        if decode.max_model_len is not None and longest > decode.max_model_len:
            return PdReason.WOULD_BE_REJECTED  # An answer that only the prompt makes too long is shortened instead.
        return None

    def _choices(
        self,
        facts: RequestFacts,
        locals_: Sequence[tuple[Candidate, Place]],
        held: Mapping[Holder, Match],
        available: Collection[str] | None,
        now_s: float,
        late: Callable[[], list[float]] | None = None,
    ) -> tuple[list[Choice], PdReason | None]:
        """The pairs there are, or why there is none. `late` as in `by_cost`; None: by a rule, for which all prefill
        workers are wanted.
        """
        places = self._places(facts, available)
        if not places:
            return [], PdReason.NO_PREFILL_WORKER
        priced = [
            (place, *each) for place, each in zip(places, self._pricer.local(facts, places, held, now_s), strict=True)
        ]
        handshake_s = self._pricer.handshake_s()
        streams_late: Sequence[float | None] = [None] * len(locals_)
        if late is not None:
            priced = sorted(priced, key=lambda each: each[1].total_s)[:BEST]
            streams_late = late()
        usual_s = [self._pricer.usual_pull_s(facts, decode[0], local.cached_tokens) for local, decode in locals_]
        out: list[Choice] = []
        why = PdReason.NO_PREFILL_WORKER
        for place, price, cached in priced:
            for (local, decode), each_late, each_s in zip(locals_, streams_late, usual_s, strict=True):
                names = (place[0].name, decode[0].name)
                if self.pairs.allows(names, now_s):
                    out.append(self.choice(facts, local, decode, place, price, cached, each_late, handshake_s, each_s))
                elif why is not PdReason.PAIR_BROKEN:
                    why = self.barred(names)
        return out, None if out else why

    def barred(self, names: Names) -> PdReason:
        """Why a pair that is not allowed is not."""
        return PdReason.PAIR_BROKEN if self.pairs.incompatible(names) is None else PdReason.PAIR_INCOMPATIBLE

    def _places(self, facts: RequestFacts, available: Collection[str] | None) -> list[Place]:
        """A hinted worker that was not asked yet what it serves is taken at its word."""
        hinted = facts.prefill_hint
        unasked = [
            (worker, (name, rank), load)
            for name in hinted
            if (worker := self._fleet.workers.get(name)) is not None and worker.models is None and not worker.draining
            for rank, load in worker.loads.items()
        ]
        return [
            place
            for place in unasked + self._fleet.holders(facts.model, (Role.PREFILL,))
            if (available is None or place[0].name in available)
            and place[0].name not in facts.excluded
            and (not hinted or place[0].name in hinted)
        ]

    def choice(
        self,
        facts: RequestFacts,
        local: Candidate,
        decode: Place,
        place: Place,
        at_prefill: Price,
        cached_tokens: int,
        streams_late: float | None,
        handshake_s: float,
        usual_s: float | None = None,
    ) -> Choice:
        """`place` computes the prompt, at the price `at_prefill`, for the local way `local` of `decode`. `streams_late`
        as in `Pricer.judged`; None: broken objectives are not counted. `handshake_s`: `Pricer.handshake_s()`;
        `usual_s`: `Pricer.usual_pull_s(...)`, where that is known already.
        """
        names = place[0].name, decode[0].name
        meeting_s = 0.0 if self.pairs.have_met(names) else handshake_s
        if usual_s is None:
            usual_s = self._pricer.usual_pull_s(facts, decode[0], local.cached_tokens)
        price = self._pricer.remote(facts, decode, names[0], local.price, at_prefill, usual_s, meeting_s)
        if streams_late is not None:
            price = self._pricer.judged(facts, decode, price, streams_late)
        candidate = Candidate(
            decode=local.decode,
            prefill=place[1],
            peer=place[0].role is not Role.PREFILL,
            cached_tokens=local.cached_tokens,
            prefill_cached_tokens=cached_tokens,
            cpu_tokens=local.cpu_tokens,
            disk_tokens=local.disk_tokens,
            approximate=local.approximate,
            price=price,
            reasons=local.reasons,
        )
        return Choice(candidate, decode, place, at_prefill.comp_s, at_prefill.stall_s, usual_s, meeting_s)


def _preferred(choices: list[Choice], names: Sequence[str]) -> list[Choice]:
    return sorted(choices, key=lambda choice: (names.index(choice.place[0].name), choice.candidate.price.total_s))


def _cheapest(choices: list[Choice], rng: random.Random) -> list[Choice]:
    choices = sorted(choices, key=lambda choice: choice.candidate.price.total_s)
    best_s = _prompt_s(choices[0])
    near = sum(_prompt_s(choice) <= NEAR * best_s for choice in choices)
    first = rng.randrange(near)
    return [choices[first], *choices[:first], *choices[first + 1 :]]


def _prompt_s(choice: Choice) -> float:
    """The price without the answer, which is the same whoever computes the prompt."""
    price = choice.candidate.price
    return price.total_s - price.decode_s
