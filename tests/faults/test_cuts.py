"""Networks that fail in each of the ways of `link.py`, between each two that talk."""

from __future__ import annotations

import asyncio
import random
from contextlib import nullcontext

import pytest

from tests.faults.link import Link, Mode
from tests.faults.trial import Trials

_CUT_S = 5.5
"""Longer than anybody waits for a sign of life (`health.eject_after_s` 3 s, an indexer's copy 4 s)."""
_MODES: tuple[Mode, ...] = ("delay", "reset", "half-open", "one-way")
_BREAKING = ("reset", "half-open")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", _MODES)


async def _cut(trials: Trials, what: str, mode: Mode, links: list[Link], *breaks: str) -> None:
    """`breaks`: whose requests go through it, where connections are broken."""
    async with trials(f"{mode}: {what}"):
        with trials.fleet.broken.cut(*breaks) if breaks and mode in _BREAKING else nullcontext():
            for link in links:
                await link.turn(mode)
            await asyncio.sleep(_CUT_S)
            for link in links:
                await link.turn("pass")


async def test_between_gateways_and_redis(trials: Trials, mode: Mode) -> None:
    await _cut(trials, "gateways and Redis", mode, trials.fleet.redis.links_by_gateway)


async def test_between_gateways_and_the_indexer(trials: Trials, mode: Mode) -> None:
    await _cut(trials, "gateways and the indexer", mode, trials.fleet.indexer.watch_links)


async def test_between_the_indexer_and_events(trials: Trials, mode: Mode, seed: int) -> None:
    engines = random.Random(f"events {mode} {seed}").sample(trials.fleet.engines, 3)
    links = [link for engine in engines for link in engine.event_links]
    await _cut(trials, f"the indexer and events of {len(engines)} engines", mode, links)


async def test_between_gateways_and_engines(trials: Trials, mode: Mode, seed: int) -> None:
    engines = random.Random(f"http {mode} {seed}").sample(trials.fleet.engines, 2)
    links, names = [engine.http_link for engine in engines], [engine.name for engine in engines]
    await _cut(trials, f"gateways and {' and '.join(names)}", mode, links, *names)
