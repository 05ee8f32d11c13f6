"""The index of a large fleet on real processes: who starts from what, what following costs, how soon it answers.

All parts are of one fleet, with one indexer that is full, so that what one part has started the next ones use.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import msgspec

from bench.scale.dynamo import Dynamo
from bench.scale.fleet import SCRAPE_S, Fleet, Process, Served, until
from bench.scale.held import Held, questions

ENTRIES = "warmroute_index_entries"
ACCOUNTED = "warmroute_index_bytes"
BATCHES = "warmroute_event_batches_total"
COPIED = 'warmroute_event_ingest_total{what="copy_blocks"}'
_LOOK_S = 2.0
"""Between two looks at whether a process has all; with many workers its page of metrics takes time to make."""
_QUESTIONS = 64
_TURNS = 2


class Options(msgspec.Struct, kw_only=True):
    """`rate`: changes a second, of `seconds` each measurement is. `peers`: the Python that has dynamo.indexer."""

    held: Held
    rate: float = 100_000.0
    seconds: float = 10.0
    clients: int = 8
    followers: int = 8
    peers: Path | None = None
    told: Callable[[str], None] = lambda line: None


class Started(msgspec.Struct, frozen=True):
    """`s`: from the command to having all. `rest_cores`: what it takes afterwards, when nothing comes. `peak_mb` until
    then, `rss_mb` once it has settled; `accounted_mb`: by its own count, which `index.budget_bytes` bounds.
    """

    s: float
    cpu_s: float
    rest_cores: float
    peak_mb: float
    rss_mb: float
    accounted_mb: float

    def figures(self, name: str, copies: int) -> dict[str, float]:
        return {
            f"{name}_start_s": self.s,
            f"{name}_start_cpu_s": self.cpu_s,
            f"{name}_start_us_per_copy": max(0.0, self.cpu_s - self.rest_cores * self.s) / copies * 1e6,
            f"{name}_peak_mb": self.peak_mb,
            f"{name}_rss_mb": self.rss_mb,
            f"{name}_bytes_per_copy": self.rss_mb * 1e6 / copies,
            f"{name}_accounted_bytes_per_copy": self.accounted_mb * 1e6 / copies,
        }


class Shared:
    """What the parts have in common, started when the first of them needs it; in a ``with`` statement."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._stack = ExitStack()
        self.figures: dict[str, float] = {}
        """Of what was started."""

    def __enter__(self) -> Shared:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def copies(self) -> int:
        return self.options.held.copies

    @property
    def fleet(self) -> Fleet:
        """Its engines have sent all that they hold; dynamo.indexer has heard it, if it is there."""
        return self._followed[0]

    @property
    def dynamo(self) -> Dynamo | None:
        return self._followed[1]

    @cached_property
    def _followed(self) -> tuple[Fleet, Dynamo | None]:
        fleet = self._stack.enter_context(Fleet(self.options.held, told=self.options.told))
        peer = None if self.options.peers is None else Dynamo(fleet, self.options.peers)
        batches = fleet.fill()
        if peer is not None:
            until(lambda: peer.applied() >= batches, peer.process)
            self.figures |= {
                "dynamo_fill_us_per_copy": peer.process.cpu_s() / self.copies * 1e6,
                "dynamo_rss_mb": peer.process.rss_mb(),
                "dynamo_bytes_per_copy": peer.process.rss_mb() * 1e6 / self.copies,
            }
        return fleet, peer

    @cached_property
    def indexer(self) -> tuple[Served, str]:
        """It knows all, by replay."""
        process, address = self.fleet.indexer()
        started = self.full(process)
        until(lambda: process.metric("warmroute_indexer_ready") == 1.0, process)
        self.figures |= started.figures("replay", self.copies)
        return process, address

    @cached_property
    def follower(self) -> Served:
        """A gateway that has a copy of the indexer's index."""
        address = self.indexer[1]
        process = self.fleet.gateway("gateway", {"source": "service", "service": {"addresses": [address]}})
        self.figures |= self.full(process).figures("snapshot", self.copies)
        return process

    def have(self) -> None:
        """Start what is followed and who follows."""
        _ = self.follower

    def rest(self) -> None:
        """Until all that was sent is in the index, and in dynamo.indexer."""
        indexer, peer = self.indexer[0], self.dynamo
        if peer is not None:
            until(lambda: peer.applied() >= self.fleet.batches, peer.process)
        until(lambda: indexer.metric(BATCHES) == self.fleet.batches, indexer, poll_s=_LOOK_S)

    def full(self, process: Served) -> Started:
        """Once it knows all."""
        until(lambda: process.metric(ENTRIES) == self.copies, process, poll_s=_LOOK_S)
        took_s, cpu_s, peak_mb = time.monotonic() - process.began_s, process.cpu_s(), process.peak_mb()
        at_rest, rest_s = _spent({"it": process}, lambda: time.sleep(2 * SCRAPE_S))
        accounted_mb = (process.metric(ACCOUNTED) or 0.0) / 1e6
        return Started(took_s, cpu_s, at_rest["it"] / rest_s, peak_mb, process.rss_mb(), accounted_mb)


def starts(shared: Shared) -> dict[str, float]:
    """An indexer by replay, and a gateway from the indexer's snapshot."""
    shared.have()
    return {"workers": float(shared.options.held.workers), "copies": float(shared.copies), **shared.figures}


def steady(shared: Shared) -> dict[str, float]:
    """CPU time while nothing changes and while `rate` blocks a second do, half of them stored, half removed. What is
    still to be done when the last of it is sent counts too.
    """
    follower, (indexer, _), peer = shared.follower, shared.indexer, shared.dynamo
    watched: dict[str, Process] = {"indexer": indexer, "gateway": follower}
    if peer is not None:
        watched["dynamo"] = peer.process
    options = shared.options
    time.sleep(SCRAPE_S)
    shared.rest()
    idle, idle_s = _spent(watched, lambda: time.sleep(options.seconds))
    before = follower.metric(COPIED) or 0.0
    told: dict[str, float] = {}

    def run() -> None:
        told.update(shared.fleet.run(options.rate, options.seconds))
        shared.rest()
        until(lambda: (follower.metric(COPIED) or 0.0) - before >= told["blocks"], follower, poll_s=_LOOK_S)

    busy, busy_s = _spent(watched, run)
    out = {"steady_changes_per_s": told["blocks"] / told["elapsed_s"], "steady_behind_s": busy_s - told["elapsed_s"]}
    for name in watched:
        at_rest = idle[name] / idle_s
        out[f"{name}_idle_cores"] = at_rest
        out[f"{name}_us_per_reading"] = at_rest * SCRAPE_S / options.held.workers * 1e6
        out[f"{name}_us_per_change"] = max(0.0, busy[name] - at_rest * busy_s) / told["blocks"] * 1e6
    until(lambda: all(it.metric(ENTRIES) == shared.copies for it in (indexer, follower)), indexer, follower)
    return out


def fanout(shared: Shared) -> dict[str, float]:
    """What one more watcher costs the indexer: `followers` of them, and none, in turns, at the same rate."""
    indexer, address = shared.indexer
    options = shared.options
    watchers = shared.fleet.start("watchers", [sys.executable, "-m", "gateway.measure", "watch", address])
    spent_s, blocks = {0: 0.0, options.followers: 0.0}, {0: 0.0, options.followers: 0.0}
    read_bytes = 0
    watchers.ask("0")
    for _ in range(_TURNS):
        for n in spent_s:
            watchers.ask(str(n))
            before_s = indexer.cpu_s()
            told = shared.fleet.run(options.rate, options.seconds / _TURNS)
            shared.rest()
            read_bytes += watchers.ask("0")["read_bytes"]  # Once all has been read.
            spent_s[n] += indexer.cpu_s() - before_s
            blocks[n] += told["blocks"]
    shared.fleet.stop(watchers)
    of_all = spent_s[options.followers] / blocks[options.followers] - spent_s[0] / blocks[0]
    return {
        "fanout_us_per_change": max(0.0, of_all) / options.followers * 1e6,
        "fanout_bytes_per_change": read_bytes / options.followers / blocks[options.followers],
    }


def matches(shared: Shared) -> dict[str, float]:
    """Prompts that are held, asked by one client and by several; of dynamo.indexer the same ones."""
    indexer, address = shared.indexer
    options, held = shared.options, shared.options.held
    text = msgspec.json.encode(held).decode()
    shared.rest()
    asking = shared.fleet.start("questions", [sys.executable, "-m", "gateway.measure", "ask", text, address])
    asking.answer()
    out: dict[str, float] = {"match_tokens": float(held.prompt_blocks * 16)}
    for kind in ("keys", "tokens"):
        for clients in (1, options.clients):
            cpu_s = indexer.cpu_s()
            told = asking.ask(f"{kind} {clients} {options.seconds / 2}")
            out |= _of_load(f"match_{kind}_{clients}", told, indexer.cpu_s() - cpu_s)
    shared.fleet.stop(asking)
    if shared.dynamo is not None:
        out |= _of_dynamo(shared, shared.dynamo)
        for kind in ("keys", "tokens"):
            name = f"match_{kind}_{options.clients}_per_s"
            out[f"{name}_over_dynamo"] = out[name] / out[f"dynamo_{name}"]
    return out


def _of_dynamo(shared: Shared, peer: Dynamo) -> dict[str, float]:
    options = shared.options
    holders = min(options.held.sharers, options.held.workers)
    prompts = list(questions(options.held, _QUESTIONS))
    out: dict[str, float] = {}
    for kind in ("keys", "tokens"):
        bodies = peer.bodies(kind, prompts)
        for clients in (1, options.clients):
            cpu_s = peer.process.cpu_s()
            told = asyncio.run(peer.load(bodies, clients, options.seconds / 2, holders))
            out |= _of_load(f"dynamo_match_{kind}_{clients}", told, peer.process.cpu_s() - cpu_s)
    return out


def _of_load(name: str, told: dict[str, float], cpu_s: float) -> dict[str, float]:
    return {
        f"{name}_per_s": told["per_s"],
        f"{name}_p50_ms": told["p50_ms"],
        f"{name}_p99_ms": told["p99_ms"],
        f"{name}_cpu_us": cpu_s / told["answers"] * 1e6,
    }


def redis(shared: Shared) -> dict[str, float]:
    """All of it written to Redis once, and a gateway that starts from there."""
    fleet = shared.fleet
    url = fleet.redis()
    if url is None:
        return {}
    workers = fleet.file("workers.json", msgspec.json.encode(fleet.workers).decode())
    keeping = [sys.executable, "-m", "gateway.measure", "keep", str(workers), str(shared.copies), url]
    writer = fleet.start("the writer to Redis", keeping)
    wrote = writer.answer()
    fleet.stop(writer)
    gateway = fleet.gateway("gateway with Redis", {}, url)
    figures = shared.full(gateway).figures("redis", shared.copies)
    replayed = gateway.metric(BATCHES) or 0.0
    fleet.stop(gateway)
    return {
        "redis_write_us_per_copy": wrote["cpu_s"] / shared.copies * 1e6,
        "redis_write_s": wrote["wrote_s"],
        "redis_bytes_per_copy_kept": wrote["bytes"] / shared.copies,
        "redis_replayed_share": replayed / fleet.batches,
        **figures,
    }


def _spent(processes: dict[str, Process], run: Callable[[], None]) -> tuple[dict[str, float], float]:
    """CPU seconds of each while it ran, and how long that was."""
    began_s = time.monotonic()
    before = {name: process.cpu_s() for name, process in processes.items()}
    run()
    return {name: process.cpu_s() - before[name] for name, process in processes.items()}, time.monotonic() - began_s
