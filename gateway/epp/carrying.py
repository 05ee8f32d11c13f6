"""A plan as headers: those of llm-d for any sidecar, and ours, which a sidecar of ours carries out without deciding."""

from __future__ import annotations

from gateway.epp.places import Places
from gateway.proxy.headers import KV_SOURCE_HEADER, PLAN_HEADER, PREFILLER_HEADER, RANK_HEADER
from scorer.fleet import Worker
from scorer.types import LOCAL, REMOTE, Plan, RequestFacts


def plan_headers(plan: Plan, facts: RequestFacts, worker: Worker, places: Places, plan_id: str) -> dict[str, str]:
    """`worker` is the plan's decode worker."""
    chosen = plan.chosen
    headers = {
        PLAN_HEADER: f"v1;id={plan_id};choice={REMOTE if plan.remote else LOCAL};n={facts.prompt_tokens};"
        f"hd={chosen.cached_tokens};hp={chosen.prefill_cached_tokens}"
    }
    if chosen.prefill is not None:
        source = places.endpoint(chosen.prefill[0])
        if source is not None:
            headers[KV_SOURCE_HEADER if chosen.peer else PREFILLER_HEADER] = source
    if len(worker.loads) > 1:
        headers[RANK_HEADER.lower()] = str(chosen.decode[1])
    return headers


def scores(plan: Plan, places: Places) -> dict[str, float]:
    """Of the endpoints considered, in (0, 1]: the sooner, the more."""
    found: dict[str, float] = {}
    for candidate in plan.considered:
        endpoint = places.endpoint(candidate.decode[0])
        if endpoint is not None:
            score = 1 / (1 + max(0.0, candidate.price.total_s))
            found[endpoint] = max(score, found.get(endpoint, 0.0))
    return found


def fallbacks(plan: Plan, places: Places, most: int) -> list[str]:
    """Endpoints of the next best decode workers, the best first."""
    found: dict[str, None] = {}
    for candidate in plan.considered:
        endpoint = places.endpoint(candidate.decode[0])
        if endpoint is not None and candidate.decode[0] != plan.chosen.decode[0]:
            found[endpoint] = None
    return list(found)[:most]
