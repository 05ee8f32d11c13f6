"""A picker that decides nothing: endpoints by turns. What it takes is what external processing takes."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Sequence
from typing import Literal

from multidict import CIMultiDict

from gateway.extproc.server import PickerServer, PickerSettings
from gateway.extproc.types import Ask, Pick, Refusal
from gateway.service import tune_interpreter


class _Deaf:
    def responded(self, status: int, headers: CIMultiDict[str], served: str | None) -> None: ...
    def chunk(self, data: bytes) -> None: ...
    def ended(self) -> None: ...
    def aborted(self) -> None: ...
    def unseen(self) -> None: ...
    def recalled(self) -> None: ...


class _ByTurns:
    def __init__(self, endpoints: Sequence[str]) -> None:
        self._turns = itertools.cycle([(endpoint,) for endpoint in endpoints])
        self._watch = _Deaf()

    async def pick(self, _: Ask) -> Pick | Refusal:
        return Pick(endpoints=next(self._turns), watch=self._watch)


def serve_picker(port: int, sees_responses: bool, grpc: Literal["fast", "grpcio"], endpoints: Sequence[str]) -> None:
    """Until SIGTERM. `endpoints`: `ip:port`, one at least."""
    import uvloop

    tune_interpreter()
    settings = PickerSettings(host="127.0.0.1", port=port, health_port=None, sees_responses=sees_responses, grpc=grpc)
    uvloop.run(_serve(settings, endpoints))


async def _serve(settings: PickerSettings, endpoints: Sequence[str]) -> None:
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    server = PickerServer(_ByTurns(endpoints), settings)
    await server.start()
    await told.wait()
    await server.close()
