"""A process of ours under load: what it takes of the machine, and what it says of itself at rest."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from tests.support.command import Command

_END_S = 30.0
BOOKED = (
    "warmroute_worker_booked_prefills",
    "warmroute_worker_booked_streams",
    "warmroute_worker_booked_kv_tokens",
    "warmroute_requests_in_flight",
    "warmroute_queue_requests",
    "warmroute_realtime_sessions",
)
"""All of them are 0 when nobody asks for anything."""


class AtRest(msgspec.Struct, frozen=True, kw_only=True):
    """One look, between two loads. `booked`: what is not 0 and should be. `kinds`: live objects, the most numerous."""

    requests: int
    rss_bytes: int
    descriptors: int
    tasks: int
    threads: int
    objects: int
    index_bytes: int
    booked: dict[str, float]
    kinds: dict[str, int]


class Watched(Command):
    """`metrics_port`: of a face whose pages are not on its port."""

    def __init__(self, folder: Path, face: str, *args: str, metrics_port: int | None = None) -> None:
        super().__init__(face, *args)
        self._told = folder / f"{face}.told"
        self.entry = ("-m", "tests.soak.inside", str(self._told))
        self.env = {"CACHE_SALT_SECRET": "a secret of the soak, of no use"}
        self._metrics_port = metrics_port

    @property
    def pages(self) -> str:
        return f"http://127.0.0.1:{self._metrics_port or self.port}"

    async def at_rest(self, patience_s: float, requests: int) -> AtRest:
        """Wait until nothing is booked, `patience_s` at most, and look."""
        until_s = asyncio.get_running_loop().time() + patience_s
        while True:
            booked = await self.booked()
            if not booked or asyncio.get_running_loop().time() > until_s:
                break
            await asyncio.sleep(0.1)
        told = await self._asked()
        async with self.http.get(self.admin + "/debug/state") as page:
            state = await page.json()
        return AtRest(
            requests=requests,
            rss_bytes=self.rss_bytes(),
            descriptors=len(os.listdir(f"/proc/{self.process.pid}/fd")),
            tasks=told["tasks"],
            threads=told["threads"],
            objects=told["objects"],
            kinds=told["kinds"],
            index_bytes=state["head"]["index_bytes"],
            booked=booked,
        )

    async def ended(self) -> str:
        """Its log, after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(self.process.wait(), _END_S)
        log = (await self._log).decode(errors="replace")
        return log if code == 0 else f"{log}\nTraceback: it ended with {code}"

    def rss_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    async def booked(self) -> dict[str, float]:
        async with self.http.get(self.pages + "/metrics") as page:
            text = await page.text()
        wanted = "\n".join(line for line in text.splitlines() if line.startswith(BOOKED))
        samples = (sample for family in text_string_to_metric_families(wanted + "\n") for sample in family.samples)
        return {f"{it.name}{dict(it.labels)}": it.value for it in samples if it.value}

    async def _is_ready(self) -> bool:
        assert self.process.returncode is None, (await self._log).decode()
        try:
            async with self.http.get(self.pages + "/readyz") as ready:
                return ready.status == 200
        except OSError:
            return False

    async def _asked(self) -> dict[str, Any]:
        self._told.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        async with asyncio.timeout(20):
            while not self._told.exists():  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.02)
        told: dict[str, Any] = json.loads(self._told.read_text(encoding="utf-8"))
        return told
