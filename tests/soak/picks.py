"""What a proxy asks the picker, over gRPC: whole exchanges, some cut off, some that make no sense."""

from __future__ import annotations

import asyncio
import json
import random

import grpc

from gateway.pb import ext_proc_pb2 as pb
from tests.soak.clients import Told
from tests.support.extproc import destinations, kind, request_body, request_head, response_body, response_head

_PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_TIMEOUT_S = 20.0
_MODES = (pb.FULL_DUPLEX_STREAMED, pb.FULL_DUPLEX_STREAMED)
_USAGE = {"prompt_tokens": 300, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}


class Proxy:
    """One connection, one request after the other."""

    def __init__(self, address: str, number: int, rate: float, told: Told) -> None:
        self._address = address
        self._rng = random.Random(number)
        self._pause_s = 1 / rate
        self._told = told

    async def run(self) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            process = channel.stream_stream(
                _PROCESS,
                request_serializer=pb.ProcessingRequest.SerializeToString,
                response_deserializer=pb.ProcessingResponse.FromString,
            )
            while True:
                try:
                    self._told.counts[f"pick {await self._exchange(process(timeout=_TIMEOUT_S))}"] += 1
                except grpc.aio.AioRpcError as exc:
                    self._told.counts[f"pick {exc.code().name}"] += 1
                await asyncio.sleep(self._rng.expovariate(1 / self._pause_s))

    async def _exchange(self, call: grpc.aio.StreamStreamCall) -> str:
        rng = self._rng
        body = self._body()
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        try:
            await call.write(request_head(*headers, modes=_MODES))
            if rng.random() < 0.1:
                return "left before its body"
            await call.write(request_body(body[:40]))
            await call.write(request_body(body[40:], ends=True))
            if rng.random() < 0.05:
                return "left before its answer"
            if rng.random() < 0.03:
                await call.write(request_body(b"more than there is", ends=True))
            answer = await call.read()
            if answer is grpc.aio.EOF:
                return "ended"
            if kind(answer) == "immediate_response":
                return str(answer.immediate_response.status.code)
            served = destinations(answer)[0]
            await call.read()
            if rng.random() < 0.1:
                return "left before its response"
            await call.write(
                response_head(("content-type", "text/event-stream"), status=rng.choice((200,) * 9 + (503,)))
            )
            await call.read()
            for _ in range(rng.randrange(1, 6)):
                await call.write(response_body(b'data: {"choices": [{"text": "a"}]}\n\n'))
                await call.read()
                if rng.random() < 0.05:
                    return "left in its response"
            await call.write(response_body(b"data: %b\n\n" % json.dumps({"usage": _USAGE}).encode(), ends=True))
            await call.read()
            await call.done_writing()
            return "served" if served else "nowhere"
        finally:
            call.cancel()

    def _body(self) -> bytes:
        if self._rng.random() < 0.05:
            return b'{"model": ' + self._rng.randbytes(60)
        model = "none" if self._rng.random() < 0.05 else "tiny"
        shared = random.Random(self._rng.randrange(8)).choices(range(1000), k=300)
        own = self._rng.choices(range(1000), k=self._rng.randrange(300))
        return json.dumps({"model": model, "prompt": shared + own, "max_tokens": 4}).encode()
