"""When all is over: nobody is left out, and nothing went wrong unseen."""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.fleet import Gateway
from tests.faults.process import until
from tests.faults.trial import Trials


async def test_every_engine_serves_again(trials: Trials) -> None:
    """Ejected ones come back by requests that try them."""
    fleet = trials.fleet
    for doors in (fleet.sharing, [fleet.alone]):
        async with trials(f"afterwards: {' '.join(gateway.name for gateway in doors)}", doors):

            async def all_healthy(doors: Sequence[Gateway] = doors) -> bool:
                states = [states for gateway in doors for states in await gateway.states()]
                return all(set(each.values()) == {"healthy"} for each in states)

            await until(all_healthy, "every engine is healthy in every one of these gateways")


async def test_no_traceback_in_a_log_of_ours(trials: Trials) -> None:
    for process in (trials.fleet.indexer, *trials.fleet.gateways):
        before, found, after = process.log.read_text(encoding="utf-8", errors="replace").partition("Traceback")
        assert not found, f"{process.name}: {before[-500:]}{found}{after[:5000]}"
