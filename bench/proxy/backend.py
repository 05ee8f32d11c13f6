"""Workers that cost next to nothing: vLLM's faces on raw protocols, as many ports as workers, in one process.

`python -m bench.proxy.backend --workers N` prints `{"ports": [...]}` and serves until its standard input ends. Answers
are of fixed text. A streamed one has `max_tokens` chunks; `"seed": 10` asks for one every 10 ms (every router passes
that field on), 0 for them as fast as they are taken. All streams of a worker with one pace step together, as an
engine's do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from typing import cast

from bench.proxy import http1
from bench.proxy.prompts import MODEL

_STREAM = re.compile(rb'"stream"\s*:\s*true')
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*(\d+)')
_PACE = re.compile(rb'"seed"\s*:\s*(\d+)')
_ENDS_BYTES = 4096
"""Fields are looked for so far from either end of a body; what is between is prompt. Routers that write bodies anew put
them in another order, between empty fields of their own.
"""
_JSON = "application/json"
_USAGE = {"prompt_tokens": 500, "total_tokens": 516, "completion_tokens": 16, "prompt_tokens_details": None}
_TEXT = "The quick brown fox jumps over the lazy dog and runs away."
_KV_BLOCKS = 100_000
_MAX_MODEL_LEN = 131_072
_PADDING_LINES = 400
"""vLLM 0.32's page has some 70 kB, most of which nobody here reads."""

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 1970 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _completion(chat: bool) -> bytes:
    choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    choice |= {"message": {"role": "assistant", "content": _TEXT, "tool_calls": []}} if chat else {"text": _TEXT}
    kind = "chat.completion" if chat else "text_completion"
    head = {"id": "chatcmpl-0", "object": kind, "created": 1_700_000_000, "model": MODEL}
    body = {**head, "choices": [choice], "system_fingerprint": None, "usage": _USAGE}
    return http1.response("200 OK", _JSON, json.dumps(body, separators=(",", ":")).encode())


def _event(at_ns: int, finish: bytes, text: bytes) -> bytes:
    return http1.chunk(
        b'data: {"id":"chatcmpl-t%019d","object":"chat.completion.chunk","created":1700000000,"model":"%s",'
        b'"choices":[{"index":0,"delta":{"content":"%s"},"logprobs":null,"finish_reason":%s}]}\n\n'
        % (at_ns, MODEL.encode(), text, finish)
    )


_ANSWERS = {
    b"/v1/chat/completions": _completion(chat=True),
    b"/v1/completions": _completion(chat=False),
}
_STREAM_END = _event(0, b'"length"', b"") + http1.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_CARD = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": MODEL, "parent": None}
_PAGES = {
    b"/v1/models": json.dumps({"object": "list", "data": [{**_CARD, "max_model_len": _MAX_MODEL_LEN}]}),
    b"/version": '{"version":"0.32.0"}',
    b"/get_model_info": json.dumps({"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True}),
    b"/get_server_info": json.dumps({"model_id": MODEL, "served_model_name": MODEL, "tp_size": 1, "dp_size": 1}),
    b"/health": "",
    b"/health_generate": "",
    b"/ping": "",
    b"/load": '{"server_load":0}',
}
_NOT_FOUND = http1.response("404 Not Found", _JSON, b'{"detail":"Not Found"}')


class Worker:
    """One port: its streams, and what its metrics say."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._steps: dict[float, set[Connection]] = {}
        self._started_s = time.time()
        self.running = 0
        self.generated = 0

    def stream(self, connection: Connection, pace_s: float) -> None:
        streams = self._steps.setdefault(pace_s, set())
        streams.add(connection)
        if len(streams) == 1:
            self._later(pace_s)

    def resume(self, connection: Connection) -> None:
        if connection.left:
            self.stream(connection, connection.pace_s)

    def drop(self, connection: Connection) -> None:
        for streams in self._steps.values():
            streams.discard(connection)

    def _later(self, pace_s: float) -> None:
        if pace_s:
            self._loop.call_later(pace_s, self._step, pace_s)
        else:
            self._loop.call_soon(self._step, pace_s)

    def _step(self, pace_s: float) -> None:
        """One token for everybody."""
        streams = self._steps[pace_s]
        event = _event(time.monotonic_ns(), b"null", b" word")
        for connection in list(streams):
            connection.left -= 1
            self.generated += 1
            if connection.left > 0:
                connection.transport.write(event)
                if connection.paused and not pace_s:
                    streams.discard(connection)
            else:
                self.running -= 1
                connection.transport.write(_STREAM_END)
                streams.discard(connection)
        if streams:
            self._later(pace_s)

    def metrics(self) -> bytes:
        label = f'{{engine="0",model_name="{MODEL}"}}'
        lines = [
            f"process_start_time_seconds {self._started_s:.2f}",
            f"vllm:num_requests_running{label} {self.running}",
            f"vllm:num_requests_waiting{label} 0",
            f"vllm:kv_cache_usage_perc{label} 0.5",
            f"vllm:prompt_tokens_total{label} {self.generated * 8}",
            f"vllm:generation_tokens_total{label} {self.generated}",
            f"vllm:prefix_cache_queries_total{label} {self.generated * 8}",
            f"vllm:prefix_cache_hits_total{label} {self.generated * 4}",
            'vllm:cache_config_info{engine="0",block_size="16",enable_prefix_caching="True",'
            f'num_gpu_blocks="{_KV_BLOCKS}",cache_dtype="auto"}} 1.0',
        ]
        lines += (
            f'vllm:e2e_request_latency_seconds_bucket{{engine="0",le="{i}",model_name="{MODEL}"}} {self.generated}.0'
            for i in range(_PADDING_LINES)
        )
        return ("\n".join(lines) + "\n").encode()


class Connection(asyncio.Protocol):
    """One keep-alive connection of a router, or of the load itself."""

    transport: asyncio.Transport

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._parts: list[bytes] = []
        self._size = 0
        self._needed = 0
        """Bytes of the request under way, head included; 0 while its head is not complete."""
        self._head_bytes = 0
        self.left = 0
        """Chunks to come of the stream under way; the last one ends it."""
        self.pace_s = 0.0
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.drop(self)
        self._worker.running -= self.left > 0
        self.left = 0

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if not self.pace_s:
            self._worker.resume(self)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        while self._size:
            if not self._needed and not self._measure():
                return
            if self._size < self._needed:
                return
            whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            rest = whole[self._needed :]
            request, head_bytes = whole[: self._needed], self._head_bytes
            self._parts, self._size, self._needed = [rest] if rest else [], len(rest), 0
            self._answer(request, head_bytes)

    def _measure(self) -> bool:
        """Read the head; False while it is not complete. Speakers of HTTP/2 are hung up on."""
        head = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = [head]
        if head.startswith(b"PRI "):
            self.transport.close()
            self._parts, self._size = [], 0
            return False
        end = head.find(http1.HEAD_END)
        if end < 0:
            return False
        self._head_bytes = end + 4
        length = http1.LENGTH.search(head, 0, end + 2)
        if length is not None:
            self._needed = end + 4 + int(length[1])
        elif http1.CHUNKED.search(head, 0, end + 2) is not None:
            last = head.find(http1.LAST_CHUNK, end + 2)
            if last < 0:
                return False
            self._needed = last + len(http1.LAST_CHUNK)
        else:
            self._needed = end + 4
        return True

    def _answer(self, request: bytes, head_bytes: int) -> None:
        target = request[: request.find(b"\r\n")].split(b" ")[1].partition(b"?")[0]
        answer = _ANSWERS.get(target)
        if answer is not None and request.startswith(b"POST"):
            ends = request[head_bytes : head_bytes + _ENDS_BYTES] + request[-_ENDS_BYTES:]
            if _STREAM.search(ends) is None:
                self._worker.generated += 16
                self.transport.write(answer)
            else:
                self._stream(ends)
            return
        self.transport.write(self._page(target))

    def _stream(self, ends: bytes) -> None:
        tokens, pace = _MAX_TOKENS.search(ends), _PACE.search(ends)
        self.left = int(tokens[1]) if tokens else 16
        self.pace_s = int(pace[1]) / 1000 if pace else 0.0
        self._worker.running += 1
        self.transport.write(_STREAM_HEAD)
        self._worker.stream(self, self.pace_s)

    def _page(self, target: bytes) -> bytes:
        if target == b"/metrics":
            return http1.response("200 OK", "text/plain; version=0.0.4", self._worker.metrics())
        page = _PAGES.get(target)
        return _NOT_FOUND if page is None else http1.response("200 OK", _JSON, page.encode())


async def _serve(n_workers: int) -> None:
    loop = asyncio.get_running_loop()
    ports = []
    for _ in range(n_workers):
        worker = Worker(loop)
        server = await loop.create_server(lambda worker=worker: Connection(worker), "127.0.0.1", 0, backlog=4096)  # type: ignore[misc]
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps({"ports": ports}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m bench.proxy.backend", description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    uvloop.run(_serve(parser.parse_args().workers))


if __name__ == "__main__":
    main()
