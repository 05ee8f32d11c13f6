"""What may happen to the hub of a gateway that has one: the process that follows the engines for its data planes, and
through which these hear each other. No request notices, so nothing is excused but what a killed data plane had.
"""

from __future__ import annotations

import asyncio
import signal

from tests.faults.fleet import HUB
from tests.faults.trial import Trials

_WITHOUT = 12
"""Requests that come to an end while it is away."""
_STOPPED_S = 6.0
"""Longer than it is waited for (4 s), and than others' load is believed (3 s)."""


async def test_the_hub_is_killed(trials: Trials) -> None:
    gateway = trials.fleet.alone
    async with trials(f"kill -9: hub of {gateway.name}", [gateway]):
        before = await gateway.places()
        await gateway.signal_hub(signal.SIGKILL)
        await trials.asked(_WITHOUT)
        await gateway.replaced({HUB: before[HUB]})


async def test_the_hub_and_a_data_plane_are_killed(trials: Trials) -> None:
    """The one that keeps what has been learned; who comes then has nobody to hear it from at first."""
    gateway, place = trials.fleet.alone, "0"
    async with trials(f"kill -9: hub and data plane {place} of {gateway.name}", [gateway]):
        before = await gateway.places()
        await gateway.signal_hub(signal.SIGKILL)
        await gateway.kill_plane(place)
        await trials.asked(_WITHOUT)
        await gateway.replaced({HUB: before[HUB], place: before[place]})


async def test_the_hub_is_stopped_for_a_while(trials: Trials) -> None:
    gateway = trials.fleet.alone
    async with trials(f"SIGSTOP, SIGCONT: hub of {gateway.name}", [gateway]):
        await gateway.signal_hub(signal.SIGSTOP)
        try:
            await asyncio.sleep(_STOPPED_S)
            await trials.asked(_WITHOUT)
        finally:
            await gateway.signal_hub(signal.SIGCONT)


async def test_the_hub_is_stuck(trials: Trials) -> None:
    """It stays stopped, until the supervisor has waited long enough and puts another in its place."""
    gateway = trials.fleet.alone
    async with trials(f"SIGSTOP for good: hub of {gateway.name}", [gateway]):
        before = await gateway.places()
        await gateway.signal_hub(signal.SIGSTOP)
        await gateway.replaced({HUB: before[HUB]})


async def test_the_hub_and_its_data_planes_are_replaced_one_after_the_other(trials: Trials) -> None:
    gateway = trials.fleet.alone
    async with trials(f"SIGUSR2: hub and data planes of {gateway.name} in turn", [gateway]):
        before = await gateway.places()
        gateway.restart_in_turn()
        await gateway.replaced(before)
