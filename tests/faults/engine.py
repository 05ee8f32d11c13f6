"""`python -m tests.faults.engine NUMBER SEED PORTS...`: a fake engine that tells what its cache really holds.

PORTS: HTTP, events, replay, control; then events and replay as it is to announce them. On the control port:

    GET  /held                                    {"blocks", "keys_sum", "is_idle"}: the digest that an index must have
    POST /flap {"times", "up_s", "down_s"}        it ends and starts again in place, so often
    POST /clears {"per_s", "seconds"}             as many AllBlocksCleared; after the last one the cache is really empty

What the cache holds is read off its block pool, and block keys are made here, from the tokens of the blocks as they are
stored: no code of the index is used, and nothing of what was published.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import xxhash
from aiohttp import web

from bench.engine.config import FakeVllmConfig
from bench.engine.events import AllBlocksCleared, BlockStored, Event, encode_batch
from bench.engine.server import FakeVllm
from tests.faults.truth import engine_config

_ROOT = f"base:0::{engine_config().engine.block_size}".encode()
_IDLE_WITHIN_S = 60.0


class TrueEngine(FakeVllm):
    def __init__(self, config: FakeVllmConfig, announced: tuple[str, str]) -> None:
        super().__init__(config)
        self._announced = announced
        self._keys: dict[Any, int] = {}

    def event_sources(self) -> dict[str, Any]:
        endpoint, replay = self._announced
        return {
            rank: {**source, "endpoint": f"tcp://*:{endpoint}", "replay_endpoint": f"tcp://*:{replay}"}
            for rank, source in super().event_sources().items()
        }

    def _publish(self, rank: int) -> Callable[[float, list[Event]], None]:
        publish = super()._publish(rank)

        def noted(at_s: float, events: list[Event]) -> None:
            for event in events:
                if isinstance(event, BlockStored):
                    self._note(event)
            publish(at_s, events)

        return noted

    def _note(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        key = xxhash.xxh3_64_intdigest(_ROOT) if parent is None else self._keys[parent]
        size = event.block_size
        for i, block_hash in enumerate(event.block_hashes):
            tokens = array("I", event.token_ids[i * size : (i + 1) * size])
            key = self._keys[block_hash] = xxhash.xxh3_64_intdigest(tokens.tobytes(), seed=key)

    @property
    def is_idle(self) -> bool:
        """Nobody computes, and nothing is still to be announced."""
        busy = any(it.running or it.waiting or it.incoming for it in self.stats())
        return not busy and all(driver._pending is None for driver in self.drivers)

    def held(self) -> dict[str, Any]:
        if not self.is_idle:  # Blocks are in the pool before anybody is told.
            return {"is_idle": False}
        keys = [self._keys[block_hash] for driver in self.drivers for block_hash, _ in driver.engine.resident()]
        return {"blocks": len(keys), "keys_sum": f"{sum(keys) % 2**64:016x}", "is_idle": True}

    def clear(self) -> bool:
        """Say that the cache is empty. Whether it is: not while anybody computes."""
        is_empty = self.is_idle and self.drivers[0].engine.pool.reset()
        self.inject(encode_batch(time.time(), [AllBlocksCleared()], 0))
        return is_empty


class Control:
    def __init__(self, engine: TrueEngine) -> None:
        self._engine = engine

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/held", self._held)
        app.router.add_post("/flap", self._flap)
        app.router.add_post("/clears", self._clears)
        return app

    async def _held(self, _: web.Request) -> web.Response:
        return web.json_response(self._engine.held())

    async def _flap(self, request: web.Request) -> web.Response:
        body = await request.json()
        for _ in range(body["times"]):
            await self._engine.restart(down_s=body["down_s"])
            await asyncio.sleep(body["up_s"])
        return web.json_response({})

    async def _clears(self, request: web.Request) -> web.Response:
        body = await request.json()
        loop = asyncio.get_running_loop()
        began_s, n = loop.time(), round(body["per_s"] * body["seconds"])
        for i in range(n):
            await asyncio.sleep(began_s + i / body["per_s"] - loop.time())
            self._engine.clear()
        async with asyncio.timeout(_IDLE_WITHIN_S):
            while not self._engine.clear():  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.005)
        return web.json_response({"cleared": n})


async def main(arguments: list[str]) -> None:
    seed, http, events, replay, control, *announced = arguments
    base = engine_config()
    config = replace(
        base.with_engine(seed=int(seed)),
        port=int(http),
        events_endpoint=f"tcp://*:{events}",
        replay_endpoint=f"tcp://*:{replay}",
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with TrueEngine(config, (announced[0], announced[1])) as engine:
        runner = web.AppRunner(Control(engine).app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(control), reuse_address=True).start()
        await stop.wait()
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
