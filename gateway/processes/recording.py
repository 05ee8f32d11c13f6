"""A trace of what all processes are asked: each tells its requests with the keys of their blocks, which never leave the
machine, and they are numbered where they come together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from aiohttp import web

from gateway.processes.asking import Asking
from gateway.processes.crew import Crew
from gateway.processes.frames import frame, read_frame
from gateway.processes.internal import RECORD as ROWS
from gateway.processes.process import Process
from gateway.proxy.errors import ApiError
from gateway.record.recorder import Recorder

_MOST_WAITING = 4_096
_LOOK_S = 0.1


class Row(msgspec.Struct, frozen=True, array_like=True):
    """`began_s`: of the machine's monotonic clock; `keys`: of its whole blocks, None where its tokens are not known."""

    began_s: float
    model: str
    keys: list[int] | None
    input_tokens: int
    output_tokens: int


class Rows:
    """Of one process, for as long as somebody reads them: `/internal/record`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    async def page(self, request: web.BaseRequest) -> web.StreamResponse:
        """Frames with rows. Raises ApiError."""
        telling = _Telling()
        with self._recorder.followed_by(telling):
            response = web.StreamResponse()
            response.force_close()
            try:
                await response.prepare(request)
                while (row := await telling.rows.get()) is not None:
                    await response.write(frame(row))
                await response.write_eof()
            except ConnectionError:
                pass  # The supervisor has left.
        return response


class _Telling:
    def __init__(self) -> None:
        self.rows: asyncio.Queue[Row | None] = asyncio.Queue()

    def add(
        self, began_s: float, model: str, keys: Sequence[int] | None, input_tokens: int, output_tokens: int
    ) -> None:
        if self.rows.qsize() < _MOST_WAITING:
            self.rows.put_nowait(Row(began_s, model, None if keys is None else list(keys), input_tokens, output_tokens))

    def end(self, reason: str) -> None:
        self.rows.put_nowait(None)


class Recording:
    """The page of them all."""

    def __init__(self, crew: Crew, asking: Asking) -> None:
        self.recorder = Recorder()
        self._crew = crew
        self._asking = asking
        self._gathering: asyncio.Task[None] | None = None

    async def page(self, request: web.BaseRequest) -> web.StreamResponse:
        """As `Recorder.page`."""
        if self._gathering is None or self._gathering.done():
            self._gathering = asyncio.create_task(self._gather(), name="record")
        return await self.recorder.page(request)

    async def _gather(self) -> None:
        """From all there are, those that come later included, until nobody reads any more."""
        told: dict[Process, asyncio.Task[None]] = {}
        try:
            while True:
                for process in self._crew.serving():
                    if process not in told or told[process].done():
                        told[process] = asyncio.create_task(self._follow(process), name="record")
                await asyncio.sleep(_LOOK_S)
                if not self.recorder.active:
                    return
        finally:
            for task in told.values():
                task.cancel()
            await asyncio.gather(*told.values(), return_exceptions=True)

    async def _follow(self, process: Process) -> None:
        try:
            async with self._asking.reading(process, ROWS) as content:
                while True:
                    row = msgspec.convert(await read_frame(content), Row)
                    self.recorder.add(row.began_s, row.model, row.keys, row.input_tokens, row.output_tokens)
        except (ApiError, ConnectionError, msgspec.ValidationError):
            return  # It has ended; who comes after is found.
