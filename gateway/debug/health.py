"""`/health` (can anything be served?) and `/readyz` (and what is worse than it could be?)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gateway.core import Core
from gateway.debug.queue import filling
from gateway.engine.capabilities import EventSource
from gateway.engine.feed import FeedStatus
from gateway.engine.health import State
from gateway.publishing import EVENTS_UP
from scorer.fleet import Worker
from scorer.types import Role

_STALE_INTERVALS = 3.0


DEGRADATIONS = (
    "config_rejected",
    "config_needs_restart",
    "keys_rejected",
    "certificate_rejected",
    "discovery",
    "no_workers",
    "no_decode_worker",
    "no_prefill_worker",
    "worker_draining",
    "worker_asleep",
    "worker_ejected",
    "worker_suspected",
    "worker_down",
    "models_unknown",
    "stats_missing",
    "stats_stale",
    "prefix_caching_off",
    "pair_broken",
    "transfers_failing",
    "events_missing",
    "events_disconnected",
    "events_catching_up",
    "events_partial",
    "events_silent",
    "events_refused",
    "replay_missing",
    "tokens_estimated",
    "tokens_by_engine",
    "tokens_slow",
    "learning_not_kept",
    "replicas_apart",
    "process_lost",
    "indexer_lost",
    "index_trimmed",
    "index_differs",
    "queue_filling",
    "responses_unseen",
    "bodies_unseen",
    "outcomes_missing",
    "leader_unknown",
    "traces_lost",
)


class Degradation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that makes decisions worse or capacity less. `what` is one of DEGRADATIONS."""

    what: str
    worker: str | None = None
    model: str | None = None
    detail: str


def health(core: Core) -> dict[str, Any]:
    """Workers by name with role and state; `usable` counts those a request can be sent to."""
    workers = {name: shown_worker(core, worker) for name, worker in sorted(core.fleet.workers.items())}
    usable = [w for w in core.fleet.workers.values() if is_usable(core, w)]
    return {
        "status": "ok" if usable else "unavailable",
        "usable": len(usable),
        "workers": workers,
        "roles": {role.value: sum(w.role is role for w in core.fleet.workers.values()) for role in Role},
    }


def is_usable(core: Core, worker: Worker) -> bool:
    """Whether it can answer clients' requests now."""
    return worker.role.decodes and is_ready(core, worker)


def is_ready(core: Core, worker: Worker) -> bool:
    """Whether it can do its part now: it answers, has said what it serves, and nothing speaks against it."""
    return bool(worker.models) and not worker.draining and core.is_well(worker.name)


def shown_worker(core: Core, worker: Worker) -> dict[str, Any]:
    """How it is, in JSON's terms."""
    scrape = core.scraper.status_of(worker.name)
    state = core.health.state(worker.name)
    name, reason = state.state.value, state.reason
    if worker.draining or worker.name in core.asleep:
        name = "draining" if worker.draining else "asleep"
    elif scrape is not None and scrape.reachable is False and state.state is State.HEALTHY:
        name, reason = "down", scrape.reason or reason
    return {
        "role": worker.role.value,
        "state": name,
        "reason": reason,
        "models": sorted(worker.models or ()),
        "adapters": sorted(worker.adapters),
        "ranks": len(worker.loads),
        "requests": sum(load.requests for load in worker.loads.values()),
    }


def degradations(core: Core) -> list[Degradation]:
    """Everything that is not as it should be, by name."""
    problems = [d.problem for d in core.discoveries if d.problem is not None] + core.ended_discoveries
    found = [Degradation(what="discovery", detail=problem) for problem in problems]
    if core.learned.problem is not None:
        found.append(Degradation(what="learning_not_kept", detail=core.learned.problem))
    found += [Degradation(what="discovery", detail=detail) for detail in _named_twice(core)]
    found += [Degradation(what="queue_filling", model=model, detail=how) for model, how in filling(core.queue)]
    found += [Degradation(what=what, detail=detail) for others in core.others_degraded for what, detail in others()]
    if not core.fleet.workers:
        return [*found, Degradation(what="no_workers", detail="no worker is configured or discovered")]
    return [*found, *_of_workers(core), *_of_pairs(core), *_of_events(core), *_of_tokens(core)]


def _named_twice(core: Core) -> Iterator[str]:
    """Servers that go by several names, of which each sees half of the load."""
    names: dict[str, list[str]] = {}
    for name, worker in core.fleet.workers.items():
        if worker.url is not None and not worker.draining:
            names.setdefault(worker.url, []).append(name)
    for url, several in sorted(names.items()):
        if len(several) > 1:
            yield f"{', '.join(sorted(several))} are one server ({url}), whose load is counted apart"


def _of_workers(core: Core) -> Iterator[Degradation]:
    now_s = time.monotonic()
    stale_s = _STALE_INTERVALS * core.config.health.scrape_interval_s
    scrapes = core.scraper.status()
    for name, worker in sorted(core.fleet.workers.items()):
        state, scrape = core.health.state(name), scrapes.get(name)
        if worker.draining:
            held = core.roster.is_held(name)
            detail = "an operator has drained it" if held else "it is on its way out"
            yield Degradation(what="worker_draining", worker=name, detail=detail)
        if name in core.asleep:
            yield Degradation(what="worker_asleep", worker=name, detail="the engine sleeps")
        if state.state is not State.HEALTHY:
            yield Degradation(what="worker_ejected", worker=name, detail=f"{state.state.value}: {state.reason}")
        elif state.suspicion is not None:
            yield Degradation(what="worker_suspected", worker=name, detail=state.suspicion)
        if scrape is not None and scrape.reachable is False:
            yield Degradation(what="worker_down", worker=name, detail=scrape.reason or "no answer")
        if worker.models is None:
            reason = scrape.reason if scrape is not None else None
            detail = "it has not said what it serves" + (f" ({reason})" if reason else "")
            yield Degradation(what="models_unknown", worker=name, detail=detail)
        if worker.stats is None:
            yield Degradation(what="stats_missing", worker=name, detail="its metrics were never read")
        elif now_s - worker.stats.scraped_at_s > stale_s:
            age_s = now_s - worker.stats.scraped_at_s
            yield Degradation(what="stats_stale", worker=name, detail=f"its metrics are {age_s:.1f} s old")
        if worker.stats is not None and worker.stats.prefix_caching is False:
            yield Degradation(what="prefix_caching_off", worker=name, detail="the engine keeps no prefixes")


def _of_pairs(core: Core) -> Iterator[Degradation]:
    workers = core.fleet.workers.values()
    wanted = core.config.pd.policy not in ("local", "header")
    if any(w.role is Role.PREFILL for w in workers) and not any(is_usable(core, w) for w in workers):
        yield Degradation(what="no_decode_worker", detail="there are prefill workers, and nobody to decode")
    splits = (wanted and any(w.role is Role.DECODE for w in workers)) or any(w.role is Role.PREFILL for w in workers)
    if splits and not any(w.role is Role.PREFILL and is_ready(core, w) for w in workers):
        yield Degradation(what="no_prefill_worker", detail="every prompt is computed by its decode worker")
    now_s = time.monotonic()
    for (prefill, decode), pair in sorted(core.planner.pairs.pairs.items()):
        state = pair.state(now_s)
        if state != "closed" and decode in core.fleet.workers:
            why = pair.incompatible or f"{state} after {pair.failures} failed handoffs, the last: {pair.last_failure}"
            yield Degradation(what="pair_broken", worker=decode, detail=f"nothing is handed over by {prefill}: {why}")

    for name in core.pairing.failing(now_s):
        detail = (
            "its engine counts failed KV transfers; with kv_load_failure_policy recompute it computes those prompts"
        )
        yield Degradation(what="transfers_failing", worker=name, detail=detail)


def no_events(sources: Mapping[int, EventSource] | None) -> str:
    """Why nobody reads a worker's events."""
    if sources is None:
        return "the engine does not say where it publishes any"
    if unreachable := sorted({source.unreachable for source in sources.values() if source.unreachable}):
        return f"its address cannot be reached from here ({', '.join(unreachable)})"
    connects = sorted({it.endpoint for it in sources.values() if it.engine_connects and it.endpoint is not None})
    if connects:
        return (
            f"the engine does not listen but connects to {', '.join(connects)}: give it an endpoint like tcp://*:5557, "
            "or let the gateway listen there (events.mode: bind, events.bind_endpoint)"
        )
    return "the engine publishes none"


def _of_events(core: Core) -> Iterator[Degradation]:
    if core.link is not None and core.link.is_stale:
        return  # Which is told once, and not for each worker.
    feeds: dict[str, list[FeedStatus]] = {}
    for (name, _), feed in sorted(core.ingest.status().items()):
        feeds.setdefault(name, []).append(feed)
    for name, worker in sorted(core.fleet.workers.items()):
        mine = feeds.get(name)
        if not mine:
            sources = core.capabilities[name].event_sources if name in core.capabilities else None
            why = no_events(sources) if core.link is None else "the indexer hears nothing of a worker of that name"
            yield Degradation(what="events_missing", worker=name, detail=f"{why}; its cache is guessed from our sends")
            continue
        for feed in mine:
            if feed.endpoint_state not in EVENTS_UP:
                detail = f"rank {feed.rank}: {feed.endpoint} is {feed.endpoint_state}"
                yield Degradation(what="events_disconnected", worker=name, detail=detail)
            elif feed.phase != "live" and feed.replay_endpoint is not None:
                detail = f"rank {feed.rank}: earlier events are still being fetched"
                yield Degradation(what="events_catching_up", worker=name, detail=detail)
            elif feed.partial:
                detail = f"rank {feed.rank}: {feed.missing_batches} batches are missing"
                yield Degradation(what="events_partial", worker=name, detail=detail)
            elif feed.replay_endpoint is None:
                yield Degradation(
                    what="replay_missing", worker=name, detail=f"rank {feed.rank}: a gap cannot be filled"
                )
        was_used = (hits := core.hits.workers.get(name)) is not None and hits.requests > 0
        for feed in mine if was_used and not worker.publishes_events else ():
            if feed.endpoint_state in EVENTS_UP and not core.publishing.speaks(feed):
                prompts = core.publishing.unannounced(feed)
                sent = f"{prompts} new prompts were sent to it" if prompts else "requests were sent to the worker"
                detail = f"rank {feed.rank}: no event has come although {sent}"
                yield Degradation(what="events_silent", worker=name, detail=f"{detail}; its cache is guessed")

    refused: dict[str, int] = {}
    for (name, _), n in core.index.refused_events().items():
        refused[name] = refused.get(name, 0) + n
    for name, n in sorted(refused.items()):
        detail = f"{n} events had blocks finer than the GPU's: what its lower tiers hold is not known"
        yield Degradation(what="events_refused", worker=name, detail=detail)


def _of_tokens(core: Core) -> Iterator[Degradation]:
    for model, status in core.tokens.status().items():
        source = status["source"]
        if source == "estimate":
            reason = status["why_not_local"] or status["last_reason"] or "no source"
            detail = f"prompts are not tokenised ({reason}): placed by load alone"
            yield Degradation(what="tokens_estimated", model=model, detail=detail)
        elif source == "engine":
            detail = f"each prompt is tokenised by an engine ({status['why_not_local'] or 'no local tokenizer'})"
            yield Degradation(what="tokens_by_engine", model=model, detail=detail)
        elif why := status["local"].get("why_not_fastokens"):
            detail = f"prompts take longer to tokenise than they could ('fastokens': {why})"
            yield Degradation(what="tokens_slow", model=model, detail=detail)
