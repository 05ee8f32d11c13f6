"""vLLM's inference endpoints over the engines of one server, and the faults every request may meet."""

import asyncio
import socket
import struct
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from bench.engine import answers, nixl, tokenizer
from bench.engine.answers import json_response
from bench.engine.generate import Run
from bench.engine.operations import Operations
from bench.engine.protocol import ApiError, Generation, Parser, ServedModel, parse_body
from bench.engine.request import mix64

if TYPE_CHECKING:
    from bench.engine.server import FakeVllm

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MAX_BODY_BYTES: Final = 256 * 1024 * 1024
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close sends RST


class Api:
    """Handlers of one server; state lives in `FakeVllm`."""

    def __init__(self, server: "FakeVllm") -> None:
        self.server = server
        config = server.config
        self.parser = Parser(max_model_len=config.engine.max_model_len, mean_output_tokens=config.mean_output_tokens)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard])
        post = app.router.add_post
        post("/v1/completions", self._completions)
        post("/v1/chat/completions", self._chat)
        post("/v1/messages", self._messages)
        post("/v1/messages/count_tokens", self._count_tokens)
        post("/v1/responses", self._responses)
        Operations(self).add_to(app)
        return app

    # --- every request ----------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        faults = self.server.faults
        if request.path.startswith(faults.paths):
            await self.server.until_answering()
            if faults.reset_rate and self.server.chance() < faults.reset_rate:
                reset_connection(request)
                return web.Response()
            if faults.headers_delay_s:
                await asyncio.sleep(faults.headers_delay_s)
            if faults.error_rate and self.server.chance() < faults.error_rate:
                return self._error(request, ApiError(faults.error_status, "injected fault", "InternalServerError"))
        try:
            response = await handler(request)
        except nixl.EngineDiedError as error:
            self.server.kill_engine()
            return self._error(request, error)
        except ApiError as error:
            return self._error(request, error)
        except web.HTTPException as error:
            return self._error(request, ApiError(error.status, error.reason or "error", "Not Found"))
        if not response.prepared:
            self._stamp(request, response)
        return response

    def _stamp(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "uvicorn"
        if self.server.config.request_id_headers:
            response.headers["X-Request-Id"] = request.headers.get("X-Request-Id") or uuid.uuid4().hex

    def _error(self, request: web.Request, error: ApiError) -> web.Response:
        response = json_response(error.body, error.status)
        self._stamp(request, response)
        return response

    # --- generation -------------------------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, is_chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, is_chat=True)

    async def _generate(self, request: web.Request, is_chat: bool) -> web.StreamResponse:
        body = await self.body(request)
        try:
            job = self._job(request, body, is_chat)
            with self._start(request, job) as run:
                return await (self._stream(request, run) if job.stream else self._whole(run))
        except nixl.EngineDiedError:
            raise
        except ApiError:
            params = body.get("kv_transfer_params")
            if self.server.config.kv_connector and isinstance(params, dict) and params.get("do_remote_prefill"):
                nixl.notify(params)  # a rejected decode releases the prefill server's blocks
            raise

    def _job(self, request: web.Request, body: dict[str, Any], is_chat: bool) -> Generation:
        model = self.model(body.get("model"))
        wanted = request.headers.get("X-Request-Id") or body.get("request_id") or uuid.uuid4().hex[:16]
        rid = f"{'chatcmpl' if is_chat else 'cmpl'}-{wanted}"
        parse = self.parser.chat if is_chat else self.parser.completion
        return parse(body, request.headers, model, rid)

    def _start(self, request: web.Request, job: Generation) -> Run:
        server = self.server
        rank = self._rank(request)
        driver = server.drivers[rank]
        params = job.kv_transfer_params if server.config.kv_connector else None
        remote = 0
        if params and params.get("do_remote_prefill"):
            remote = nixl.remote_tokens(params, len(job.prompts[0]), server.config.engine.block_size)
        hold = bool(params and params.get("do_remote_decode"))
        run = Run(job, driver, server.entropy(), uuid.uuid4().hex[:8], remote, hold, rank)
        if params and remote:
            for choice in run.choices:
                server.nixl[rank].expect(choice.stream.request.request_id, params)
        return run

    def _rank(self, request: web.Request) -> int:
        size = self.server.config.data_parallel_size
        header = request.headers.get("X-data-parallel-rank")
        if header is None:
            return self.server.least_loaded_rank()
        try:
            rank = int(header)
        except ValueError:
            raise ApiError(400, f"data_parallel_rank {header!r} is not an integer.") from None
        if not 0 <= rank < size:
            raise ApiError(400, f"data_parallel_rank {rank} is out of range [0, {size}).")
        return rank

    async def _whole(self, run: Run) -> web.Response:
        async for _ in run.deltas():
            pass
        job, server = run.job, self.server
        usage = run.usage(server.config.prompt_tokens_details, full=True)
        params = None
        choices: list[dict[str, Any]] = []
        for choice in run.choices:
            if job.is_chat:
                body = answers.chat_choice(job, choice.index, choice.text, choice.ids, choice.reason, choice.stop)
            else:
                text = tokenizer.decode(choice.prompt) + choice.text if job.echo else choice.text
                body = answers.completion_choice(
                    job, choice.index, text, choice.ids, choice.prompt, choice.reason, choice.stop
                )
            choices.append(body)
            if choice.stream.request.hold_blocks:
                # Only one of several is named; the others stay pinned until their lease ends, as in vLLM.
                offered = server.nixl[run.rank].offer(
                    choice.stream.request.request_id, len(choice.prompt), run.cached_tokens()
                )
                params = params or offered
        build = answers.chat_completion if job.is_chat else answers.completion
        return json_response(build(job, run.created, server.fingerprint, choices, usage, params))

    async def _stream(self, request: web.Request, run: Run) -> web.StreamResponse:
        job, server = run.job, self.server
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        self._stamp(request, response)
        writer = await response.prepare(request)
        if writer is not None:
            writer.send_headers()  # vLLM's headers leave before the first token
        chunks = answers.Chunks(job, run.created, server.fingerprint)
        begun: set[int] = set()
        open_choices = len(run.choices)
        sent = 0
        try:
            async for delta in run.deltas():
                choice = run.choices[delta.index]
                frames = b""
                text = delta.text
                if delta.index not in begun:
                    begun.add(delta.index)
                    if job.is_chat:
                        frames = chunks.role(delta.index, choice.prompt)
                    elif job.echo:
                        text = tokenizer.decode(choice.prompt) + text
                open_choices -= delta.reason is not None
                frames += chunks.text(
                    delta.index,
                    text,
                    delta.ids,
                    prompt_ids=choice.prompt if len(choice.ids) == 1 else None,
                    reason=delta.reason,
                    stop=delta.stop,
                    usage_body=run.usage(False, full=False) if job.continuous_usage else None,
                    last=open_choices == 0 and not job.include_usage,
                )
                await server.until_answering()
                await response.write(frames)
                sent += 1
                if server.faults.die_after_chunks is not None and sent >= server.faults.die_after_chunks:
                    abort_connection(request)
                    return response
        except ApiError as error:
            await response.write(chunks.error(str(error)))
        else:
            if job.include_usage:
                details = server.config.prompt_tokens_details
                await response.write(chunks.usage(run.usage(details, full=False)))
        await response.write(answers.DONE)
        await response.write_eof()
        return response

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body = await self.body(request)
        job = self._anthropic(request, body)
        with self._start(request, job) as run:
            await self._whole(run)
            choice = run.choices[0]
            cached = run.cached_tokens()
            return json_response(
                {
                    "id": job.request_id,
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "text", "text": choice.text}],
                    "model": job.model.name,
                    "stop_reason": "max_tokens" if choice.reason == "length" else "end_turn",
                    "usage": {
                        "input_tokens": len(choice.prompt) - cached,
                        "output_tokens": len(choice.ids),
                        "cache_creation_input_tokens": 0,
                        "cache_read_input_tokens": cached,
                    },
                }
            )

    async def _count_tokens(self, request: web.Request) -> web.Response:
        count = len(self._anthropic(request, await self.body(request)).prompts[0])
        return json_response({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    def _anthropic(self, request: web.Request, body: dict[str, Any]) -> Generation:
        self._no_stream(body)
        messages = body.get("messages")
        system = body.get("system")
        if system and isinstance(messages, list):
            messages = [{"role": "system", "content": system}, *messages]
        return self._job(request, {**body, "messages": messages}, is_chat=True)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = await self.body(request)
        self._no_stream(body)
        given = body.get("input")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if body.get("instructions") and isinstance(messages, list):
            messages = [{"role": "system", "content": body["instructions"]}, *messages]
        limit = body.get("max_output_tokens")
        job = self._job(request, {**body, "messages": messages, "max_tokens": limit}, is_chat=True)
        rid = job.request_id.removeprefix("chatcmpl-")
        with self._start(request, job) as run:
            await self._whole(run)
            choice = run.choices[0]
            cut = choice.reason == "length"
            content: list[dict[str, Any]] = [
                {"annotations": [], "text": choice.text, "type": "output_text", "logprobs": None}
            ]
            message = {
                "id": f"msg_{rid}",
                "content": content,
                "role": "assistant",
                "status": "completed",
                "type": "message",
            }
            return json_response(
                {
                    "id": f"resp_{rid}",
                    "created_at": run.created,
                    "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
                    "instructions": body.get("instructions"),
                    "model": job.model.name,
                    "object": "response",
                    "output": [message],
                    "max_output_tokens": limit,
                    "status": "incomplete" if cut else "completed",
                    "usage": {
                        "input_tokens": len(choice.prompt),
                        "input_tokens_details": {"cached_tokens": run.cached_tokens()},
                        "output_tokens": len(choice.ids),
                        "output_tokens_details": {"reasoning_tokens": 0},
                        "total_tokens": len(choice.prompt) + len(choice.ids),
                    },
                }
            )

    @staticmethod
    def _no_stream(body: dict[str, Any]) -> None:
        if body.get("stream") is True:
            raise ApiError(501, "this fake does not stream here", "NotImplementedError", "stream")

    def model(self, name: Any) -> ServedModel:
        models = self.server.models
        if name is None:
            return ServedModel(self.server.config.model)
        if name not in models:
            valid = ", ".join((self.server.config.model, *self.server.config.aliases))
            message = f"The model `{name}` does not exist. Valid aliases: {valid}."
            raise ApiError(404, message, "NotFoundError", "model")
        return models[name]

    @staticmethod
    async def body(request: web.Request) -> dict[str, Any]:
        return parse_body(await request.read(), request.content_type)


def reset_connection(request: web.Request) -> None:
    """Close the client's connection with RST."""
    transport = request.transport
    if transport is not None:
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        transport.abort()


def abort_connection(request: web.Request) -> None:
    """Cut the connection in the middle of a body."""
    if request.transport is not None:
        request.transport.close()


def entropy_stream(seed: int) -> Callable[[], int]:
    """A seeded stream of 64-bit numbers."""
    state = mix64(seed)

    def draw() -> int:
        nonlocal state
        state = mix64(state)
        return state

    return draw
