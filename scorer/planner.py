"""The one path that decides: match, price, choose, book; then learn how it went.

`plan` prices every rank that serves the model, lets the policy choose and books the choice at once, load and blocks,
so that a burst does not all see the same idle worker. `observe` takes what happened and gives back what was booked on
every way out.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

import msgspec

from indexer import Holder, Match, PrefixIndex, Prompt
from scorer.answers import Answer
from scorer.calibrate import Calibration
from scorer.cost import CostModel
from scorer.disaggregation import parse_policy
from scorer.fleet import Fleet
from scorer.holdings import Holdings, Stay
from scorer.journal import Journal, SessionAt
from scorer.learner import Learner, Trace
from scorer.ledger import Booking
from scorer.pairs import Names, Pairs
from scorer.peers import Peers
from scorer.policies import POLICIES, TIE_S, Offer, Policy
from scorer.pricing import Place, Pricer
from scorer.remote import BEST, Choice, Remote
from scorer.sessions import Sessions, SessionSettings, session_outcome
from scorer.types import Candidate, Outcome, OutcomeKind, PdReason, Plan, Price, RequestFacts, Role, SessionOutcome

CONSIDERED = 8
_PREFILLS = 3
"""Of them, so many prefill workers at most, that the local ways are seen beside them."""
_NOTHING = Match()
_NO_TOKENS: Mapping[Holder, int] = {}


class ModelNotFound(Exception):
    """No worker serves the model."""

    def __init__(self, model: str, known: Collection[str]) -> None:
        super().__init__(f"The model `{model}` does not exist.")
        self.model = model
        self.known = sorted(known)


class NoWorker(Exception):
    """Workers serve the model, or may, but none can take the request now."""


class _Flight:
    """A planned request that has not ended. `held`: what the decode worker had of the prompt before. `prefill`: at the
    prefill worker, until that has answered. `pair`: whose handoff is under way.
    """

    __slots__ = ("decode", "facts", "held", "pair", "plan", "prefill", "prompt", "trace")

    def __init__(self, facts: RequestFacts, plan: Plan, prompt: Prompt | None, decode: Stay, held: Match) -> None:
        self.facts = facts
        self.plan = plan
        self.prompt = prompt
        self.decode = decode
        self.held = held
        self.prefill: Stay | None = None
        self.pair: Names | None = None
        self.trace = Trace(plan.decided_at_s)


class _Decision(msgspec.Struct, frozen=True):
    """A plan with what is needed to book it."""

    plan: Plan
    decode: Place
    held: Match
    choice: Choice | None
    answer: Answer


class Planner:
    """Decides where requests run. Not thread-safe: one thread plans and observes.

    `index` is the exact index, fed elsewhere. `policy` is a name of `POLICIES`, `pd_policy` a form of
    `scorer.disaggregation`; unknown ones raise ValueError. `peers`: whether workers that decode may be asked for KV.
    """

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        *,
        policy: str = "warmroute",
        pd_policy: str = "local",
        peers: bool = True,
        cost: CostModel | None = None,
        optimistic_ttl_s: float = 4.0,
        sessions: SessionSettings | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown policy {policy!r}; there are {', '.join(POLICIES)}")
        self.fleet = fleet
        self.index = index
        self.policy = policy
        self.cost = cost or CostModel()
        self.holdings = Holdings(index, optimistic_ttl_s)
        self.pairs = Pairs()
        self.calibration = Calibration()
        self.sessions = Sessions(sessions or SessionSettings(), self.cost)
        self._pricer = Pricer(self.cost, self.calibration, index)
        remote = Remote(fleet, self._pricer, self.pairs, parse_policy(pd_policy))
        self._remote = Peers(fleet, self._pricer, self.pairs, remote, chosen=peers)
        self._learner = Learner(self.calibration, self.cost)
        self._choose: Policy = POLICIES[policy]
        self._flights: dict[str, _Flight] = {}
        self._given_back: Prompt | None = None
        """Of the last request that failed: it is planned anew at once, and need not be hashed again."""
        self._turns: dict[Holder, int] = {}
        self._turn = 0
        self._journal: Journal | None = None

    def tell(self, journal: Journal | None) -> None:
        """Write down in it what other replicas have to hear, from now on."""
        self._journal = self.holdings.journal = self.sessions.journal = journal

    def session_elsewhere(self, at: SessionAt, now_s: float) -> None:
        """Another replica has served a session there, or freed it."""
        worker = None if at.holder is None else self.fleet.workers.get(at.holder[0])
        if worker is not None or at.holder is None:
            self._turn += 1
            self.sessions.served_elsewhere(at, 0 if worker is None else worker.generation, self._turn, now_s)

    # ---- workers -----------------------------------------------------------------------------------------------------

    def configure_worker(self, name: str) -> None:
        """Carry what the fleet knows of a worker (names, block size, capacity) into the indexes, and what was learned
        of it into the fleet.
        """
        worker = self.fleet.workers.get(name)
        if worker is None:
            self.holdings.remove(name)
            self.sessions.gone(name)
            self._turns = {holder: turn for holder, turn in self._turns.items() if holder[0] != name}
            return
        self._learner.recall(worker)
        self.holdings.configure(worker)

    def forget_blocks(self, worker: str, rank: int | None = None) -> None:
        """The worker's cache is gone (restart, reset): nothing assumed there holds any longer."""
        self.holdings.forget(worker, rank)
        self.sessions.emptied(worker, self._turn)

    # ---- deciding ----------------------------------------------------------------------------------------------------

    def plan(self, facts: RequestFacts, available: Collection[str] | None, now_s: float, rng: random.Random) -> Plan:
        """Choose among `available` workers (None: all) and book. Raises ModelNotFound or NoWorker."""
        prompt = self._prompt(facts)
        decision = self._decide(facts, prompt, available, now_s, rng)
        plan, (worker, holder, load) = decision.plan, decision.decode
        choice = decision.choice
        comp_s = plan.chosen.price.comp_s if choice is None else plan.chosen.price.stall_s
        booking = Booking(
            load,
            comp_s,
            facts.prompt_tokens,
            now_s,
            answer=decision.answer,
            slo_tpot_s=facts.slo_tpot_s,
            pulled=choice is not None,
        )
        booking.charge(plan.chosen.price.stall_s)
        decode = Stay(worker, holder, booking)
        self._turn += 1
        self._turns[holder] = self._turn
        if plan.session is not None:
            self.sessions.served(facts, decision.decode, plan.session, self._turn, now_s)
        flight = self._flights[facts.request_id] = _Flight(facts, plan, prompt, decode, decision.held)
        self.holdings.assume(decode, facts, prompt, plan.chosen.cached_tokens, now_s)
        if choice is not None:
            self._book_prefill(flight, choice, now_s)
        if self._journal is not None:
            self._journal.booked(holder)
        return plan

    def _book_prefill(self, flight: _Flight, choice: Choice, now_s: float) -> None:
        worker, holder, load = choice.place
        stay = flight.prefill = Stay(worker, holder, Booking(load, choice.comp_s, flight.facts.prompt_tokens, now_s))
        flight.pair = worker.name, flight.decode.worker.name
        self.pairs.start(flight.pair)
        flight.trace.usual_pull_s, flight.trace.meeting_s = choice.usual_pull_s, choice.meeting_s
        stay.booking.charge(choice.stall_s)
        cached = choice.candidate.prefill_cached_tokens
        if self._journal is not None:
            self._journal.booked(holder)
        self.holdings.assume(stay, flight.facts, flight.prompt, cached, now_s)

    def next_prefill(
        self,
        request_id: str,
        why: PdReason,
        available: Collection[str] | None,
        now_s: float,
        rng: random.Random,
        *,
        local: bool = False,
    ) -> Plan | None:
        """The prefill worker of a request did not do, because of `why`: the next one, or (none is left, or `local`) the
        decode worker itself. What was booked at the prefill worker is given back. None for an unknown request.
        """
        flight = self._flights.get(request_id)
        if flight is None:
            return None
        failed = flight.plan.chosen.prefill
        self._leave_prefill(flight, now_s, prefilled=False)
        self._end_pair(flight)
        flight.trace = Trace(now_s)  # What failed took time, too, which says nothing of who is next.
        if failed is not None:
            flight.facts = msgspec.structs.replace(
                flight.facts, excluded=flight.facts.excluded | {failed[0]}, keep_local=why if local else None
            )
        place = flight.decode.worker, flight.decode.holder, flight.decode.booking.load
        held = {} if flight.prompt is None else self.holdings.held(flight.facts, flight.prompt, now_s)
        # What is assumed there by now is to come with this very request.
        out = self._pricer.answer(flight.facts).tokens
        ((price, _),) = self._pricer.local(flight.facts, [place], {place[1]: flight.held}, now_s, out_tokens=out)
        here = msgspec.structs.replace(
            flight.plan.chosen, prefill=None, peer=False, prefill_cached_tokens=0, price=price
        )
        if self._remote.prices_decide(flight.facts):
            _, choices = self._remote.by_cost(flight.facts, [(here, place)], held, available, now_s)
            choices = [each for each in choices if each.candidate.price.total_s < here.price.total_s - TIE_S]
        else:
            _, choices = self._remote.decide(flight.facts, here, place, held, available, now_s, rng)
        if choices:
            self._book_prefill(flight, choices[0], now_s)
            here, why = choices[0].candidate, flight.plan.pd_reason
        else:
            flight.decode.booking.compute_here(price.comp_s)
            flight.decode.booking.charge(price.stall_s)
            if self._journal is not None:
                self._journal.booked(flight.decode.holder)
        known = {(here.decode, here.prefill), (here.decode, failed)}
        others = [each for each in flight.plan.considered if (each.decode, each.prefill) not in known]
        considered = (here, *others)[:CONSIDERED]
        flight.plan = msgspec.structs.replace(
            flight.plan,
            chosen=here,
            considered=considered,
            pd_reason=why,
            reason=_reason(self.policy, considered, flight.facts, flight.plan.session),
        )
        return flight.plan

    def prefill_wait_s(self, request_id: str, now_s: float) -> float | None:
        """Of the time since the request was booked at its prefill worker, what it spent behind others booked here."""
        flight = self._flights.get(request_id)
        if flight is None or flight.prefill is None:
            return None
        booking = flight.prefill.booking
        return max(0.0, now_s - booking.booked_s - booking.head_s(now_s))

    def explain(self, facts: RequestFacts, available: Collection[str] | None, now_s: float, rng: random.Random) -> Plan:
        """The plan `plan` would make, with nothing booked."""
        return self._decide(facts, self._prompt(facts), available, now_s, rng).plan

    def _prompt(self, facts: RequestFacts) -> Prompt | None:
        if facts.tokens is None:
            return None
        known = self._given_back
        if (
            known is not None
            and known.data is facts.tokens
            and known.cache_salt == facts.cache_salt
            and known.extra_keys is facts.extra_keys
        ):
            return known
        return Prompt(facts.tokens, cache_salt=facts.cache_salt, extra_keys=facts.extra_keys)

    def _decide(
        self,
        facts: RequestFacts,
        prompt: Prompt | None,
        available: Collection[str] | None,
        now_s: float,
        rng: random.Random,
    ) -> _Decision:
        self.holdings.settle(now_s)
        places = self._places(facts, available)
        held = {} if prompt is None else self.holdings.held(facts, prompt, now_s)
        answer = self._pricer.answer(facts)
        out = answer.tokens
        likely, known = self.holdings.with_media(facts, held, now_s) if facts.media_links else (held, _NO_TOKENS)
        priced = self._pricer.local(facts, places, likely, now_s, out_tokens=out)
        of_session = self.sessions.applies(facts)
        home = self.sessions.home(facts, places, now_s) if of_session else None
        if home is not None:
            at, tokens = home
            priced[at] = self.sessions.preferred(facts, places[at], *priced[at], tokens), priced[at][1]
        judged = self._judge(facts, places, priced)
        turn, turns = self._turn, self._turns
        offers = [
            Offer(i, price.total_s, load.in_line + load.streams, cached, turn - turns.get(holder, -1))
            for i, ((_, holder, load), (price, cached)) in enumerate(zip(places, priced, strict=True))
        ]
        bound = home is not None and self.sessions.strict and self.sessions.stays(priced[home[0]][0])
        best = offers[home[0]] if home is not None and bound else self._choose(offers, rng)
        others = sorted((offers[i] for i in judged if i != best.position), key=lambda offer: offer.total_s)
        ranked = [best, *others][:CONSIDERED]
        considered = tuple(_candidate(places[o.position], priced[o.position], held, known) for o in ranked)
        decode = places[best.position]
        if self._remote.prices_decide(facts):
            most = 1 if bound else BEST
            locals_ = [(c, places[o.position]) for c, o in zip(considered, ranked, strict=True)][:most]
            pd_reason, choices = self._remote.by_cost(facts, locals_, held, available, now_s)
            if choices and choices[0].candidate.price.total_s >= considered[0].price.total_s - TIE_S:
                considered = (considered[0], *_merged(considered[1:], choices))[:CONSIDERED]
                choices = []
            elif choices:
                decode = choices[0].decode
                considered = (choices[0].candidate, *_merged(considered, choices[1:]))[:CONSIDERED]
        else:
            pd_reason, choices = self._remote.decide(facts, considered[0], decode, held, available, now_s, rng)
            if choices:
                considered = (*(choice.candidate for choice in choices[:_PREFILLS]), *considered)[:CONSIDERED]
        session = None
        if of_session:
            chosen, is_known = places.index(decode), self.sessions.is_known(facts, now_s)
            session = session_outcome(is_known, home and home[0], chosen, self.sessions.strict)
        plan = Plan(
            request_id=facts.request_id,
            chosen=considered[0],
            considered=considered,
            policy=self.policy,
            n_candidates=len(places) + len(choices),
            reason=_reason(self.policy, considered, facts, session),
            pd_reason=pd_reason,
            decided_at_s=now_s,
            session=session,
        )
        return _Decision(plan, decode, held.get(decode[1], _NOTHING), choices[0] if choices else None, answer)

    def _judge(self, facts: RequestFacts, places: list[Place], priced: list[tuple[Price, int]]) -> list[int]:
        """Add what broken objectives cost, beginning with the best price, until nothing that is left, which could only
        become dearer, is among the best. Positions of those that were judged.
        """
        order = sorted(range(len(priced)), key=[price.total_s for price, _ in priced].__getitem__)
        totals_s: list[float] = []
        for n_judged, i in enumerate(order):
            price, cached = priced[i]
            if n_judged >= CONSIDERED and price.total_s >= sorted(totals_s)[BEST - 1]:
                return order[:n_judged]
            price = self._pricer.judged(facts, places[i], price)
            priced[i] = price, cached
            totals_s.append(price.total_s)
        return order

    def _places(self, facts: RequestFacts, available: Collection[str] | None) -> list[Place]:
        places = self.fleet.holders(facts.model, (Role.BOTH, Role.DECODE))
        if not places:
            workers = self.fleet.workers.values()
            if not workers:
                raise NoWorker("no worker is configured")
            if any(worker.models is not None for worker in workers) and not any(w.serves(facts.model) for w in workers):
                raise ModelNotFound(facts.model, self.fleet.models())
            raise NoWorker(f"no worker that serves `{facts.model}`, and decodes, is up")
        if available is None and not facts.excluded and facts.subset is None and facts.rank is None:
            return places
        usable = [
            place
            for place in places
            if (available is None or place[0].name in available)
            and place[0].name not in facts.excluded
            and (facts.subset is None or place[0].name in facts.subset)
            and (facts.rank is None or place[1][1] == facts.rank)
        ]
        if not usable:
            raise NoWorker(f"no worker that serves `{facts.model}` can take requests now")
        return usable

    # ---- how it went -------------------------------------------------------------------------------------------------

    def observe(self, request_id: str, outcome: Outcome, now_s: float) -> None:
        """Take in an outcome; an unknown or ended request is ignored, as clients leave in the middle of anything."""
        flight = self._flights.get(request_id)
        if flight is None:
            return
        kind = outcome.kind
        if self._journal is not None:
            self._journal.observed(flight.decode.holder, is_growth=kind is OutcomeKind.TOKEN)
        if kind is OutcomeKind.FIRST_TOKEN:
            if not outcome.guessed:
                self._learner.first_token(flight.facts, flight.plan, flight.trace, flight.decode.worker, now_s)
            flight.decode.booking.first_token(now_s)
            self._learner.watch(flight.trace, flight.decode.booking.load)
            if flight.pair is not None:
                self.pairs.worked(flight.pair)
                flight.pair = None
            self.holdings.confirm(flight.decode)
        elif kind is OutcomeKind.TOKEN:
            flight.decode.booking.grow(outcome.n_tokens)
            load = flight.decode.booking.load
            self._learner.tokens(flight.facts, flight.trace, flight.decode.worker, load, outcome, now_s)
        elif kind is OutcomeKind.CACHED_TOKENS:
            self._learner.cached_tokens(flight.plan, flight.trace, outcome.n_tokens)
            if not flight.plan.remote:
                self.holdings.correct(flight.decode, flight.facts, flight.prompt, outcome.n_tokens)
        elif kind is OutcomeKind.PREFILL_DONE:
            if flight.prefill is not None and not outcome.guessed:
                self._learner.prefill_done(flight.facts, flight.plan, flight.trace, flight.prefill.worker, now_s)
            self._leave_prefill(flight, now_s, prefilled=True)
        elif kind is OutcomeKind.PAIR_FAILED:
            if flight.pair is not None:
                self.pairs.broke(flight.pair, now_s, outcome.reason)
                flight.pair = None
        elif kind in (OutcomeKind.END, OutcomeKind.ERROR, OutcomeKind.CANCELLED):
            del self._flights[request_id]
            decode = flight.decode
            if outcome.worker_failed and flight.plan.session is not None:
                self.sessions.failed(flight.facts, decode.holder)
            if kind is not OutcomeKind.END:
                self._given_back = flight.prompt
            else:
                self._learner.ended(flight.facts, flight.plan, flight.trace, decode.worker, outcome.n_tokens)
            self._leave_prefill(flight, now_s, prefilled=False)
            self._end_pair(flight)
            prefilled = not decode.booking.prefilling or kind is OutcomeKind.END
            decode.booking.settle(now_s)
            self.holdings.leave(decode, prefilled, now_s)

    def in_flight(self) -> int:
        return len(self._flights)

    def handing_over(self, worker: str) -> int:
        """Requests whose prompt this worker computes, or holds until their decode worker has it."""
        return sum(flight.pair is not None and flight.pair[0] == worker for flight in self._flights.values())

    def _leave_prefill(self, flight: _Flight, now_s: float, *, prefilled: bool) -> None:
        stay, flight.prefill = flight.prefill, None
        if stay is not None:
            stay.booking.settle(now_s)
            self.holdings.leave(stay, prefilled, now_s)
            if self._journal is not None:
                self._journal.booked(stay.holder)

    def _end_pair(self, flight: _Flight) -> None:
        pair, flight.pair = flight.pair, None
        if pair is not None:
            self.pairs.gave_up(pair)


def _candidate(
    place: Place, priced: tuple[Price, int], held: Mapping[Holder, Match], known: Mapping[Holder, int]
) -> Candidate:
    """`known`: so many tokens are known to be cached where more are likely to be."""
    match = held.get(place[1], _NOTHING)
    price, cached = priced
    return Candidate(
        decode=place[1],
        cached_tokens=min(cached, known.get(place[1], cached)),
        cpu_tokens=match.cpu_tokens,
        disk_tokens=match.disk_tokens,
        approximate=match.approximate,
        price=price,
    )


def _merged(candidates: Sequence[Candidate], choices: Sequence[Choice]) -> list[Candidate]:
    """Both kinds, the cheapest first."""
    return sorted(
        [*candidates, *(choice.candidate for choice in choices)], key=lambda candidate: candidate.price.total_s
    )


def _reason(policy: str, considered: tuple[Candidate, ...], facts: RequestFacts, session: SessionOutcome | None) -> str:
    chosen = considered[0]
    text = f"{policy}: {chosen.cached_tokens} of {facts.prompt_tokens} prompt tokens cached"
    if len(considered) > 1:
        text += f", predicted {chosen.price.total_s:.3f} s, next {considered[1].price.total_s:.3f} s"
    if session is not None:
        text += f"; session {session.value}"
    return text
