"""`warmroute gateway --processes N`: real processes in front of fake engines."""

from __future__ import annotations

import asyncio

import aiohttp

from tests.support.gateway_world import engine
from tests.support.processes_world import Processes, eventually, total


async def test_requests_are_spread_and_counted_once() -> None:
    async with Processes(2) as them:
        sessions = [aiohttp.ClientSession() for _ in range(8)]
        try:
            for turn in range(4):
                answers = await asyncio.gather(
                    *(them.complete(http, list(range(100 * i + turn, 100 * i + 64))) for i, http in enumerate(sessions))
                )
                assert [status for status, _ in answers] == [200] * 8
        finally:
            for http in sessions:
                await http.close()
        made = await them.by_process()
        assert sum(made.values()) == 32
        assert min(made.values()) >= 8, made  # Eight connections, of which each process has four.
        assert total(await them.metrics(), "warmroute_worker_chosen_total") == 32
        async with them.http.get(them.url + "/metrics") as main_port:
            assert "warmroute_process_up" in await main_port.text()
        log = await them.command.terminate()
        assert "by 2 processes" in log
