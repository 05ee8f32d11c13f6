"""On grpcio: a stream's end waits for what is being written, by whomever."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from gateway.extproc.on_grpcio import _Process
from gateway.extproc.stream import Shared
from gateway.extproc.types import Ask, Pick
from gateway.pb import ext_proc_pb2 as pb
from tests.support.extproc import POD, Watched, request_body, request_head
from tests.support.gateway_world import until


class Context:
    """A proxy that reads nothing until `reads` is set; what was `written` when the stream was ended or aborted."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.begun = 0
        self.written = 0
        self.aborted_after: int | None = None

    async def read(self) -> Any:
        return await self.messages.get()

    async def write(self, message: pb.ProcessingResponse) -> None:
        self.begun += 1
        await self.reads.wait()
        self.written += 1

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.aborted_after = self.written
        raise grpc.aio.AbortError


class Picker:
    async def pick(self, ask: Ask) -> Pick:
        return Pick(endpoints=(POD,), watch=Watched())


@pytest.mark.parametrize("last", [grpc.aio.EOF, request_head()], ids=["ended", "broken off"])
async def test_it_does_not_end_in_the_middle_of_a_message(last: Any) -> None:
    """Found by the soak test: a proxy that left just then cost an error in gRPC's core, and a traceback in the log."""
    context = Context()
    shared = Shared(Picker(), deadline_s=5.0, max_body_bytes=100, sees_responses=True)
    stream = _Process(shared, cast(Any, context))
    running = asyncio.create_task(stream.run())
    await context.messages.put(request_head())
    await context.messages.put(request_body(b"abc", ends=True))
    await until(lambda: context.begun)
    await context.messages.put(last)
    await until(context.messages.empty)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not running.done()
    assert context.aborted_after is None
    context.reads.set()
    if last is grpc.aio.EOF:
        await running
        assert context.aborted_after is None
    else:
        with pytest.raises(grpc.aio.AbortError):
            await running
        assert context.aborted_after == context.written
    assert context.written == context.begun >= 2
