"""What happens to engines while they serve. One trouble at a time, and then it is over."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Mapping

import aiohttp

from bench.engine.config import Faults
from bench.engine.server import FakeVllm

_FAULTS = {
    "errors": Faults(error_rate=0.3),
    "unavailable": Faults(error_rate=0.3, error_status=503),
    "resets": Faults(reset_rate=0.3),
    "cut streams": Faults(die_after_chunks=2),
    "cut answers": Faults(cut_answers=True),
    "no answers": Faults(answer="no json"),
    "frozen": Faults(stall=True),
    "slow heads": Faults(headers_delay_s=0.3),
    "no offers": Faults(offer_without=("remote_block_ids",)),
    "lost events": Faults(drop_batches=5),
    "lost events, no replay": Faults(drop_batches=5, replay="off"),
}
_OTHERS = ("restart", "cache reset", "drained", "removed")


class Troubles:
    """`engines` by their workers' names; `admin`: the gateway's admin address. `counts`: how often there was which."""

    def __init__(
        self, engines: Mapping[str, FakeVllm], admin: str, http: aiohttp.ClientSession, longest_s: float
    ) -> None:
        self._engines = engines
        self._admin = admin
        self._http = http
        self._longest_s = longest_s
        self._rng = random.Random(1)
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        names = [*_FAULTS, *_OTHERS]
        while True:
            self._rng.shuffle(names)
            for name in names:
                worker = self._rng.choice(list(self._engines))
                self.counts[name] += 1
                await self._one(name, worker)
                await asyncio.sleep(self._rng.uniform(0.2, 1) * self._longest_s / 2)

    async def _one(self, name: str, worker: str) -> None:
        engine = self._engines[worker]
        lasts_s = self._rng.uniform(0.2, 1) * self._longest_s
        try:
            if name in _FAULTS:
                engine.faults = dataclasses.replace(_FAULTS[name])
                engine.apply_faults()
                await asyncio.sleep(lasts_s)
            elif name == "restart":
                await engine.restart()
            elif name == "cache reset":
                await self._ask("POST", "/reset_prefix_cache")
            elif name == "drained":
                await self._ask("POST", f"/admin/workers/{worker}/drain")
                await asyncio.sleep(lasts_s)
            else:
                await self._ask("DELETE", f"/admin/workers/{worker}?force=true")
                await asyncio.sleep(lasts_s)
        finally:
            engine.faults = Faults()
            engine.apply_faults()
            if name == "drained":
                await self._ask("POST", f"/admin/workers/{worker}/undrain")
            elif name == "removed":
                role = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(engine.config.kv_role, "both")
                await self._ask("POST", "/admin/workers", {"url": engine.url, "name": worker, "role": role})

    async def _ask(self, method: str, path: str, body: object = None) -> None:
        async with self._http.request(method, self._admin + path, json=body) as answer:
            self.counts[f"{path.split('?')[0].rsplit('/', 1)[-1] if body is None else 'added'} {answer.status}"] += 1
            await answer.read()
