"""Events that come in floods or with holes, and engines that come and go."""

from __future__ import annotations

import asyncio
import random

from tests.faults.fleet import Engine
from tests.faults.process import until
from tests.faults.trial import Trials

_LASTS_S = 4.0
_CLEARS_PER_S = 100


async def _storm(trials: Trials, name: str, engines: list[Engine]) -> None:
    async with trials(name):
        body = {"per_s": _CLEARS_PER_S, "seconds": _LASTS_S}
        await asyncio.gather(*(engine.asked("/clears", body) for engine in engines))


async def test_e26_one_engine_clears_all_blocks_100_times_a_second(trials: Trials, seed: int) -> None:
    engine = random.Random(f"clears {seed}").choice(trials.fleet.engines)
    await _storm(trials, "AllBlocksCleared, 100/s: one engine", [engine])


async def test_e26_every_engine_clears_all_blocks_100_times_a_second(trials: Trials) -> None:
    await _storm(trials, "AllBlocksCleared, 100/s each: all engines", trials.fleet.engines)


async def test_s3_engines_flap(trials: Trials, seed: int) -> None:
    engines = random.Random(f"flaps {seed}").sample(trials.fleet.engines, 2)
    names = [engine.name for engine in engines]
    async with trials(f"up and down every second: {' and '.join(names)}"):
        with trials.fleet.broken.cut(*names):
            body = {"times": 3, "up_s": 1.0, "down_s": 1.0}
            await asyncio.gather(*(engine.asked("/flap", body) for engine in engines))


async def test_e1_batches_are_lost(trials: Trials, seed: int) -> None:
    engines = random.Random(f"gaps {seed}").sample(trials.fleet.engines, 4)
    async with trials("gaps in the events of 4 engines"):
        await _lose(engines, batches=2, times=12)


async def test_e1_batches_are_lost_and_replays_are_late(trials: Trials, seed: int) -> None:
    engines = random.Random(f"late replays {seed}").sample(trials.fleet.engines, 4)
    async with trials("gaps in the events of 4 engines, late replays"):
        for engine in engines:
            await engine.faults(replay_delay_s=0.5)
        await _lose(engines, batches=1, times=8)
        for engine in engines:
            await engine.faults(replay_delay_s=0.0)


async def test_e1_batches_are_lost_and_replays_are_given_up(trials: Trials, seed: int) -> None:
    engines = random.Random(f"no replays {seed}").sample(trials.fleet.engines, 2)
    async with trials("gaps in the events of 2 engines, no replays"):
        for engine in engines:
            await engine.faults(replay="off", drop_batches=1)
            await engine.announce()
            await engine.announce()
        await until(lambda: _given_up(trials, engines), "the indexer has given up what was lost")
        for engine in engines:
            await engine.faults(replay="ok")


async def _given_up(trials: Trials, engines: list[Engine]) -> bool:
    partial = await trials.fleet.indexer.partial()
    return all(engine.name in partial for engine in engines)


async def _lose(engines: list[Engine], *, batches: int, times: int) -> None:
    """A gap shows with the batch after it, so that healing is one more batch of each."""
    for _ in range(times):
        for engine in engines:
            await engine.faults(drop_batches=batches)
        await asyncio.sleep(_LASTS_S / times)
    for engine in engines:
        await engine.faults(drop_batches=0)
        await engine.announce()
