"""How the gateway of a simulation learns of its engines: KV events, a scrape each second, restarts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from bench.engine.events import Event
from bench.engine.model import Engine
from bench.sim.clock import Clock
from bench.sim.engine import SimEngine
from bench.sim.feed import Feed
from bench.sim.fleet import FleetSpec
from bench.sim.router import Router
from bench.sim.view import MODEL, Knowledge
from indexer import PrefixIndex
from scorer.fleet import Fleet
from scorer.types import ChangeKind, EngineStats, WorkerChange


@dataclass(slots=True)
class PrefillTimes:
    """vLLM's `request_prefill_time_seconds`: from scheduled to first token."""

    sum_s: float = 0.0
    count: int = 0

    def add(self, took_s: float) -> None:
        self.sum_s += took_s
        self.count += 1


class Senses:
    """Feeds the fleet, the index, the view and the router with what is known of `engines` (changed when one is born
    again).
    """

    def __init__(
        self,
        spec: FleetSpec,
        clock: Clock,
        fleet: Fleet,
        index: PrefixIndex,
        seed: int,
    ) -> None:
        self.fleet = fleet
        self.prefill_times = {server.name: PrefillTimes() for server in spec.servers}
        self.feeds = {
            server.name: Feed(
                server.name,
                index,
                random.Random(f"feed {seed} {server.name}"),
                delay_s=spec.event_delay_s,
                loss=spec.event_loss,
                replays=spec.event_replay,
            )
            for server in spec.servers
        }
        self._spec = spec
        self._clock = clock
        self._started_s = dict.fromkeys(self.feeds, 0.0)
        for server in spec.servers:
            fleet.apply(WorkerChange(kind=ChangeKind.ADDED, worker=server.name, role=server.role, weight=server.weight))
            longest = server.kv_blocks * server.block_size
            fleet.set_capabilities(server.name, models=[MODEL], max_model_len=longest)
            fleet.workers[server.name].publishes_events = True
            index.set_worker(server.name, models=[MODEL])

    def start(self, router: Router, engines: Mapping[str, SimEngine], view: Knowledge) -> None:
        self._router, self._engines, self._view = router, engines, view
        for i, name in enumerate(self.feeds):
            self._scrape(name)
            self._scrape_at(self._spec.scrape_s * (i + 1) / len(self.feeds), name)

    def published(self, name: str, events: list[Event]) -> None:
        self.feeds[name].publish(events, self._clock.now_s)

    def drain(self) -> None:
        """Bring the index up to the present."""
        for name, feed in self.feeds.items():
            feed.drain(self._clock.now_s)
            if feed.cleared:
                feed.cleared = False
                self._router.restarted(name)

    def died(self, name: str) -> None:
        self._view.set_down(name, True)

    def back(self, name: str) -> None:
        """A new process answers under that name."""
        self._started_s[name] = self._clock.now_s
        self.prefill_times[name] = PrefillTimes()
        self.feeds[name].restarted(self._clock.now_s)
        self._view.set_down(name, False)
        self._router.restarted(name)
        self._scrape(name)

    def _scrape_at(self, when_s: float, name: str) -> None:
        def scrape() -> None:
            self._scrape(name)
            self._scrape_at(self._clock.now_s + self._spec.scrape_s, name)

        self._clock.at(when_s, scrape, background=True)

    def _scrape(self, name: str) -> None:
        sim = self._engines[name]
        if sim.dead:
            return
        stats = _stats(sim.engine, self.prefill_times[name], self._clock.now_s, self._started_s[name])
        if self._spec.nixl:
            stats = msgspec.structs.replace(stats, nixl_bytes=0.0)
        self.fleet.set_stats(name, stats)
        self._view.worker(name).stats = stats
        self._router.scraped(name, stats)


def _stats(engine: Engine, prefills: PrefillTimes, now_s: float, started_s: float) -> EngineStats:
    """As the gateway reads it from `/metrics`."""
    inside = engine.stats()
    size = engine.config.block_size
    return EngineStats(
        scraped_at_s=now_s,
        running=inside.running,
        waiting=inside.waiting,
        kv_usage=inside.kv_usage,
        block_size=size,
        kv_blocks=engine.pool.num_usable,
        kv_capacity_tokens=engine.pool.num_usable * size,
        prefix_caching=engine.config.enable_prefix_caching,
        prefix_queries_tokens=inside.prefix_queries,
        prefix_hits_tokens=inside.prefix_hits,
        prompt_tokens=inside.prompt_tokens,
        generation_tokens=inside.generated_tokens,
        preemptions=inside.preemptions,
        prefill_time_sum_s=prefills.sum_s,
        prefill_time_count=prefills.count,
        process_start_s=started_s,
    )
