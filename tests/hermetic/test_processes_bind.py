"""Engines that connect to a gateway of several processes: its hub listens, and is replaced by another."""

from __future__ import annotations

from typing import Any

from tests.hermetic.test_processes import restarted
from tests.support.gateway_world import engine
from tests.support.processes_world import Processes, eventually
from tests.support.sidecar_world import free_port

Digests = dict[str, tuple[int, str]]
BOTH = ("a", "b")
N_BLOCKS = 6
"""Of a prompt."""


def prompt(seed: int) -> list[int]:
    return [seed * 100 + i for i in range(96)]


async def compute(them: Processes, name: str, ids: list[int]) -> None:
    """Past the gateway."""
    body = {"model": "tiny", "prompt": ids, "max_tokens": 1}
    async with them.http.post(them.engines[name].url + "/v1/completions", json=body) as answer:
        assert answer.status == 200


async def held(them: Processes, process: str) -> Digests:
    """What that process knows of each engine that it knows anything of, by the engine's name here."""
    found = (await them.get(f"/debug/cache?digests&process={process}"))["digests"]
    names = {server.url.removeprefix("http://"): name for name, server in them.engines.items()}
    told = {names[worker]: ranks["0"] for worker, ranks in found.items()}
    return {name: (it["blocks"], it["keys_sum"]) for name, it in told.items() if it["blocks"]}


async def feed(them: Processes, name: str) -> dict[str, Any]:
    """Of its events, as the hub has them."""
    page = await them.get("/debug/cache?process=hub")
    told: dict[str, Any] = page["workers"][them.engines[name].url.removeprefix("http://")]["ranks"]["0"]["events"]
    return told


class Bound(Processes):
    """Engines that connect to the gateway, and tell nothing twice. Each holds `prompt(1)`, and the hub has missed
    nothing.
    """

    def __init__(self) -> None:
        at = f"tcp://127.0.0.1:{free_port()}"
        engines = {name: engine(events_endpoint=at, replay_endpoint=None, topic=name) for name in BOTH}
        super().__init__(2, "--events-mode=bind", f"--events-bind-endpoint={at}", **engines)

    async def _know_all(self) -> bool:
        for name in BOTH:
            if (await feed(self, name))["partial"]:  # Its first words came before anybody had subscribed.
                await self.engines[name].restart()
            await compute(self, name, prompt(1))
        return await super()._know_all() and not any([(await feed(self, name))["partial"] for name in BOTH])

    async def hub_replaced(self) -> None:
        """Every process is, and the engines are connected to the new hub."""
        await restarted(self)

        async def are_connected() -> bool:
            page = await self.get("/debug/cache?process=hub")
            return bool(page["event_intake"]["connects"] >= len(BOTH))

        await eventually(are_connected)

    async def all_hold(self, n_blocks: dict[str, int]) -> None:
        async def do() -> bool:
            found = [await held(self, process) for process in ("hub", "0", "1")]
            return all({name: n for name, (n, _) in each.items()} == n_blocks for each in found)

        await eventually(do)


async def test_a_new_hub_goes_on_where_nothing_was_lost_meanwhile() -> None:
    async with Bound() as them:
        before = await held(them, "hub")
        for _ in range(2):
            await them.hub_replaced()
            assert await held(them, "hub") == {}, "no engine has said yet that nothing is missing"
            await compute(them, "a", prompt(2))
            await them.all_hold({"a": 2 * N_BLOCKS})
            assert (await feed(them, "a"))["counters"]["joins"] == 1
            assert not (await feed(them, "a"))["partial"]
            await compute(them, "b", prompt(2))
            await them.all_hold({"a": 2 * N_BLOCKS, "b": 2 * N_BLOCKS})
            for name in BOTH:
                async with them.http.post(them.engines[name].url + "/reset_prefix_cache") as answer:
                    assert answer.status == 200
                await compute(them, name, prompt(1))
            await them.all_hold(dict.fromkeys(BOTH, N_BLOCKS))
            assert await held(them, "hub") == before


async def test_a_new_hub_begins_anew_with_engines_of_which_something_was_lost() -> None:
    async with Bound() as them:
        await them.hub_replaced()
        them.engines["a"].faults.drop_batches = 1
        for number in (2, 3):
            await compute(them, "a", prompt(number))
        await compute(them, "b", prompt(2))
        await them.all_hold({"a": N_BLOCKS, "b": 2 * N_BLOCKS})
        assert (await feed(them, "a"))["counters"]["joins_refused"] == 1
        assert (await feed(them, "a"))["partial"]
        log = await them.command.terminate()
        assert "is not known any more" in log
