"""The third way: the prompt computed by a worker that decodes too, and holds more of it than who is to answer.

NIXL moves the blocks of a prompt that somebody was asked to compute for others, and no others. So the source, who
holds the beginning, gets the prompt as a prefill worker would, computes what it does not hold, and all that the decode
worker lacks is pulled. It pays where the source is too busy to answer itself: one prefill step there, instead of the
prompt's computing here or an answer in crowded steps there.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import compress
from typing import Final

import msgspec

from indexer import Holder, Match
from scorer.fleet import STALE_S, Fleet, Worker
from scorer.objectives import VIOLATION_S
from scorer.pairs import Pairs
from scorer.policies import TIE_S
from scorer.pricing import USUAL_BLOCK_SIZE, Place, Pricer
from scorer.remote import Choice, Remote
from scorer.types import Candidate, PdReason, Price, RequestFacts, Role

GAIN: Final = 0.1
"""It must be so much below every local way: a crowd disperses before an answer ends, the copy made for it stays."""
SOURCES: Final = 4
"""So many are priced at most: those that hold the most."""
_NOBODY: Final = frozenset({PdReason.NO_PREFILL_WORKER, PdReason.PAIR_BROKEN, PdReason.PAIR_INCOMPATIBLE})
"""Why there are no prefill workers to choose from, which says nothing of sources."""
_NOTHING: Final = Match()


def hands_over(worker: Worker) -> bool | None:
    """Whether its engine has a NIXL connector, by its own metrics; None before it was asked. vLLM holds no engine to
    its `kv_role`: with a connector it hands over and fetches.
    """
    return None if worker.stats is None else worker.stats.nixl_bytes is not None


class _PullsLate:
    """`Pricer.pulls_late`, which both ways of one decision ask for: worked out when the first does."""

    __slots__ = ("_facts", "_locals", "_pricer", "_shares")

    def __init__(self, pricer: Pricer, facts: RequestFacts, locals_: Sequence[tuple[Candidate, Place]]) -> None:
        self._pricer = pricer
        self._facts = facts
        self._locals = locals_
        self._shares: list[float] | None = None

    def __call__(self) -> list[float]:
        if self._shares is None:
            self._shares = self._pricer.pulls_late(self._facts, [place for _, place in self._locals])
        return self._shares


class Peers:
    """What `remote` decides, and the sources beside it."""

    def __init__(self, fleet: Fleet, pricer: Pricer, pairs: Pairs, remote: Remote, *, chosen: bool = True) -> None:
        """`chosen`: by cost, too, and not only where a source is named."""
        self._chosen = chosen
        self._fleet = fleet
        self._pricer = pricer
        self._pairs = pairs
        self._remote = remote

    def prices_decide(self, facts: RequestFacts) -> bool:
        """Whether nothing but `by_cost` does: neither a rule nor somebody in front of us."""
        return self._remote.policy.by_cost and not facts.prefill_hint and facts.kv_source is None

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
        """As `Remote.decide`, and a named source is asked for the prompt if it can be. Prefill workers that are named
        come before it; where it is of no use, all is as without it, but for the reason of a prompt that stays.
        """
        if facts.kv_source is None or facts.prefill_hint:
            return self._remote.decide(facts, local, decode, held, available, now_s, rng)
        kept = self._remote.kept_local(facts, decode[0])
        if kept is not None:
            return kept, []
        named = self._named(facts, facts.kv_source, local, decode, held, available, now_s)
        if isinstance(named, Choice):
            return PdReason.HINT, [named]
        if self._remote.policy.by_cost:
            reason, choices = self.by_cost(facts, [(local, decode)], held, available, now_s)
            choices = [each for each in choices if each.candidate.price.total_s < local.price.total_s - TIE_S]
        else:
            reason, choices = self._remote.decide(facts, local, decode, held, available, now_s, rng)
        return (named, []) if named is not None and not choices else (reason, choices)

    def by_cost(
        self,
        facts: RequestFacts,
        locals_: Sequence[tuple[Candidate, Place]],
        held: Mapping[Holder, Match],
        available: Collection[str] | None,
        now_s: float,
    ) -> tuple[PdReason, list[Choice]]:
        """As `Remote.by_cost`, with the sources that are cheaper than every local way."""
        late = _PullsLate(self._pricer, facts, locals_)
        reason, choices = self._remote.by_cost(facts, locals_, held, available, now_s, late)
        if not self._chosen:
            return reason, choices
        if reason is not PdReason.COST and reason not in _NOBODY:
            return reason, []
        more = self._choices(facts, locals_, held, available, now_s, late)
        if not more:
            return reason, choices
        return PdReason.COST, sorted([*choices, *more], key=lambda choice: choice.candidate.price.total_s)

    def _choices(
        self,
        facts: RequestFacts,
        locals_: Sequence[tuple[Candidate, Place]],
        held: Mapping[Holder, Match],
        available: Collection[str] | None,
        now_s: float,
        late: Callable[[], list[float]],
    ) -> list[Choice]:
        """Who waits for blocks takes no part: what is held for others is free only when they have fetched it, and two
        full workers would wait for each other.
        """
        takes = [hands_over(place[0]) and not local.price.adm_s for local, place in locals_]
        if not any(takes):
            return []
        least = min(local.cached_tokens for local, _ in compress(locals_, takes))
        sources = self._sources(facts, held, least, available, now_s)
        if not sources:
            return []
        most_s = (1 - GAIN) * min(local.price.total_s for local, _ in locals_)
        takers = list(compress(zip(locals_, late(), strict=True), takes))
        priced = self._pricer.local(facts, sources, held, now_s, waiting=_waiting(*locals_[0]))
        out: list[Choice] = []
        handshake_s = self._pricer.handshake_s()
        nobodys = facts if facts.slo_tpot_s is None else msgspec.structs.replace(facts, slo_tpot_s=None)
        for place, (at_source, cached) in zip(sources, priced, strict=True):
            if at_source.adm_s:
                continue
            viol_s = self._viol_s(nobodys, place, at_source)
            for (local, decode), streams_late in takers:
                names = place[0].name, decode[0].name
                if names[0] == names[1] or cached - local.cached_tokens < _block(place[0]):
                    continue
                again_s = _again_s(local.price, decode) + _again_s(at_source, place)
                least_s = at_source.total_s + local.price.decode_s + local.price.displaced_s + viol_s + again_s
                if least_s >= most_s or not self._pairs.allows(names, now_s):
                    continue
                choice = self._remote.choice(facts, local, decode, place, at_source, cached, streams_late, handshake_s)
                choice = _dearer(choice, viol_s, again_s)
                if choice.candidate.price.total_s < most_s:
                    out.append(choice)
        return out

    def _sources(
        self,
        facts: RequestFacts,
        held: Mapping[Holder, Match],
        least_tokens: int,
        available: Collection[str] | None,
        now_s: float,
    ) -> list[Place]:
        """Those that hold the most, and more than `least_tokens`; of equals the least busy."""
        found: list[tuple[int, int, int, Place]] = []
        for holder, match in held.items():
            if match.reach_tokens <= least_tokens:
                continue
            worker = self._fleet.workers.get(holder[0])
            load = None if worker is None else worker.loads.get(holder[1])
            if worker is None or load is None or worker.role is Role.PREFILL or not hands_over(worker):
                continue
            if worker.serves(facts.model) and _is_there(worker, facts, available) and _is_fresh(worker, now_s):
                found.append((match.reach_tokens, -(load.in_line + load.streams), -len(found), (worker, holder, load)))
        return [each[-1] for each in heapq.nlargest(SOURCES, found)]

    def _viol_s(self, nobodys: RequestFacts, place: Place, at_source: Price) -> float:
        """What it costs that answers which run at the source miss their objectives by it. `nobodys`: the request as if
        its own answer had none, as that runs elsewhere.
        """
        if not place[2].with_objective:
            return 0.0
        return VIOLATION_S * self._pricer.streams_late(nobodys, place, at_source.stall_s)

    def _named(
        self,
        facts: RequestFacts,
        name: str,
        local: Candidate,
        decode: Place,
        held: Mapping[Holder, Match],
        available: Collection[str] | None,
        now_s: float,
    ) -> Choice | PdReason | None:
        """The way by the worker `name`; or why it is none (None: it is the very worker that decodes). Who has not been
        asked yet is taken at the word of the one who has named it.
        """
        worker = self._fleet.workers.get(name)
        if worker is decode[0]:
            return None
        if (
            worker is None
            or worker.serves(facts.model) is False
            or not _is_there(worker, facts, available)
            or hands_over(worker) is False
            or hands_over(decode[0]) is False
        ):
            return PdReason.SOURCE_UNUSABLE
        names = name, decode[0].name
        if not self._pairs.allows(names, now_s):
            return self._remote.barred(names)
        holders = [(name, rank) for rank in worker.loads]
        holder = max(holders, key=lambda each: held.get(each, _NOTHING).reach_tokens)
        place = worker, holder, worker.loads[holder[1]]
        ((at_source, cached),) = self._pricer.local(facts, [place], held, now_s, waiting=_waiting(local, decode))
        if worker.publishes_events and facts.tokens is not None and cached - local.cached_tokens < _block(worker):
            return PdReason.SOURCE_HOLDS_NO_MORE
        return self._remote.choice(facts, local, decode, place, at_source, cached, None, self._pricer.handshake_s())


def _is_there(worker: Worker, facts: RequestFacts, available: Collection[str] | None) -> bool:
    name = worker.name
    return not worker.draining and name not in facts.excluded and (available is None or name in available)


def _is_fresh(worker: Worker, now_s: float) -> bool:
    return worker.stats is not None and now_s - worker.stats.scraped_at_s <= STALE_S


def _block(worker: Worker) -> int:
    return worker.block_size() or USUAL_BLOCK_SIZE


def _waiting(local: Candidate, decode: Place) -> float:
    """Prompts that wait for each rank of weight 1, as the local way was priced by. A source computes in the line of all
    that answer: were only those counted that wait at sources, an idle one would seem to hold up nobody by what holds
    others up when it is computed for its own answer.
    """
    comp_s = local.price.comp_s * decode[0].weight
    return local.price.queue_s / comp_s if comp_s else 0.0


def _again_s(price: Price, place: Place) -> float:
    """What the answers there lose when what is pushed out is computed again. A peer's way is a second copy of what the
    fleet holds, so that cheap ones would fill all caches with the same.
    """
    return price.displaced_s * len(place[2].streaming)


def _dearer(choice: Choice, viol_s: float, again_s: float) -> Choice:
    """With what is broken at the source, and what is lost later."""
    price = choice.candidate.price
    price = msgspec.structs.replace(
        price,
        viol_s=price.viol_s + viol_s,
        displaced_s=price.displaced_s + again_s,
        total_s=price.total_s + viol_s + again_s,
    )
    return msgspec.structs.replace(choice, candidate=msgspec.structs.replace(choice.candidate, price=price))
