"""kill -9 of each kind, and a service manager that starts it again."""

from __future__ import annotations

import pytest

from tests.faults.fleet import N_ENGINES, N_GATEWAYS, N_PLANES
from tests.faults.process import Process
from tests.faults.trial import Trials

_WITHOUT = 12
"""Requests that come to an end while it is down."""


async def _killed(trials: Trials, process: Process) -> None:
    async with trials(f"kill -9: {process.name}"):
        await process.kill()
        await trials.asked(_WITHOUT)
        await process.start()


@pytest.mark.parametrize("which", range(N_GATEWAYS))
async def test_a_gateway_is_killed(trials: Trials, which: int) -> None:
    await _killed(trials, trials.fleet.sharing[which])


@pytest.mark.parametrize("which", range(N_ENGINES))
async def test_an_engine_is_killed(trials: Trials, which: int) -> None:
    await _killed(trials, trials.fleet.engines[which])


@pytest.mark.parametrize("place", [str(number) for number in range(N_PLANES[-1])])
async def test_a_data_plane_is_killed(trials: Trials, place: str) -> None:
    """One of a gateway's processes: the others go on, and its supervisor starts another."""
    gateway = trials.fleet.sharing[-1]
    async with trials(f"kill -9: data plane {place} of {gateway.name}"):
        before = await gateway.planes()
        await gateway.kill_plane(place)
        await trials.asked(_WITHOUT)
        await gateway.replaced({place: before[place]})


async def test_redis_is_killed(trials: Trials) -> None:
    await _killed(trials, trials.fleet.redis)


async def test_the_indexer_is_killed(trials: Trials) -> None:
    await _killed(trials, trials.fleet.indexer)


async def test_redis_and_the_indexer_are_killed(trials: Trials) -> None:
    redis, indexer = trials.fleet.redis, trials.fleet.indexer
    async with trials("kill -9: redis and indexer at once"):
        await redis.kill()
        await indexer.kill()
        await trials.asked(_WITHOUT)
        await redis.start()
        await indexer.start()


async def test_gateways_are_restarted_one_after_the_other(trials: Trials) -> None:
    """As in a rolling update: the load balancer leaves it out first. Nothing is excused."""
    async with trials("SIGTERM and start: every gateway in turn"):
        for gateway in trials.fleet.sharing:
            gateway.in_rotation = False
            assert await gateway.end(within_s=90.0) == 0, gateway.tail()
            await gateway.start()


async def test_data_planes_are_replaced_one_after_the_other(trials: Trials) -> None:
    """A rolling restart of one gateway, which nobody leaves out meanwhile. Nothing is excused."""
    gateway = trials.fleet.sharing[-1]
    async with trials(f"SIGUSR2: every data plane of {gateway.name} in turn"):
        before = await gateway.planes()
        gateway.restart_in_turn()
        await gateway.replaced(before)
