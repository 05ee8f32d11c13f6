"""vLLM's inference endpoints over the engines of one server, and the faults every request may meet."""

import asyncio
import socket
import struct
import time
import uuid
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from bench.engine import answers, messages, responses, tokenizer
from bench.engine.answers import json_response
from bench.engine.frames import Frames, OpenAiFrames
from bench.engine.generate import Run
from bench.engine.operations import Operations
from bench.engine.protocol import ApiError, ApiKind, EngineDeadError, Generation, Parser, ServedModel, parse_body
from bench.engine.realtime import RealtimeSession
from bench.engine.request import mix64
from bench.engine.seen import Seen
from bench.engine.stored import StoredResponses

if TYPE_CHECKING:
    from bench.engine.server import FakeVllm

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MAX_BODY_BYTES: Final = 256 * 1024 * 1024
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close sends RST
_ID_PREFIX: Final[dict[ApiKind, str]] = {"completions": "cmpl-", "chat": "chatcmpl-", "messages": "chatcmpl-"}


class Api:
    """Handlers of one server; state lives in `FakeVllm`."""

    def __init__(self, server: "FakeVllm") -> None:
        self.server = server
        config = server.config
        self.parser = Parser(
            max_model_len=config.engine.max_model_len,
            mean_output_tokens=config.mean_output_tokens,
            image_tokens=config.image_tokens,
        )

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard])
        if self.server.config.clock_ahead_s:
            app.on_response_prepare.append(self._misdate)
        post = app.router.add_post
        post("/v1/completions", partial(self._generate, "completions"))
        post("/v1/chat/completions", partial(self._generate, "chat"))
        post("/v1/messages", partial(self._generate, "messages"))
        post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/v1/realtime", self._realtime)
        StoredResponses(self, partial(self._run, "responses")).add_to(app)
        Operations(self).add_to(app)
        return app

    async def _misdate(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers["Date"] = formatdate(time.time() + self.server.config.clock_ahead_s, usegmt=True)

    # --- every request ----------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        server, faults = self.server, self.server.faults
        seen = Seen(request.path, request.headers, await request.read() if request.can_read_body else b"")
        if request.method == "POST" and request.path.startswith("/v1/"):
            server.requests.append(seen)
        hit = faults.hit(request.path, seen.leg)
        if hit:
            refused = await self._refuse(request)
            if refused is not None:
                return refused
        if seen.leg == "prefill" and faults.prefill_delay_s:
            await asyncio.sleep(faults.prefill_delay_s)
        try:
            if server.dead and request.method == "POST":
                raise EngineDeadError
            response = await handler(request)
        except ApiError as error:
            return self._error(request, error)
        except web.HTTPException as error:
            return self._error(request, ApiError(error.status, error.reason or "error", "Not Found"))
        if response.prepared:
            return response
        if hit and faults.answer is not None:
            response = web.Response(text=faults.answer, content_type="application/json")
        self._stamp(request, response)
        if hit and faults.cut_answers and isinstance(response, web.Response):
            await self._cut(request, response)
        return response

    async def _refuse(self, request: web.Request) -> web.Response | None:
        """What the faults do to a request before it is handled."""
        faults = self.server.faults
        await self.server.until_answering()
        if faults.reset_rate and self.server.chance() < faults.reset_rate:
            reset_connection(request)
            return web.Response()
        if faults.headers_delay_s:
            await asyncio.sleep(faults.headers_delay_s)
        refused = faults.error_rate > 0 and self.server.chance() < faults.error_rate
        if faults.fail_first > 0:
            faults.fail_first -= 1
            refused = True
        if not refused:
            return None
        return self._error(request, ApiError(faults.error_status, "injected fault", "InternalServerError"))

    async def _cut(self, request: web.Request, response: web.Response) -> None:
        """Send the head and half of the body, then close."""
        body = response.body if isinstance(response.body, bytes) else b""
        half = web.StreamResponse(status=response.status, headers=response.headers)
        half.content_length = len(body)
        await half.prepare(request)
        await half.write(body[: len(body) // 2])
        abort_connection(request)

    def _stamp(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "uvicorn"
        if self.server.config.request_id_headers:
            response.headers["X-Request-Id"] = request.headers.get("X-Request-Id") or uuid.uuid4().hex

    def _error(self, request: web.Request, error: ApiError) -> web.Response:
        # A body that is no valid request is refused before the Anthropic handler can put it into its own words.
        own = request.path.startswith("/v1/messages") and error.body["error"]["type"] != "Bad Request"
        response = json_response(messages.error_body(error) if own else error.body, error.status)
        self._stamp(request, response)
        return response

    # --- generation -------------------------------------------------------------------------------------------------

    async def _generate(self, api: ApiKind, request: web.Request) -> web.StreamResponse:
        return await self._run(api, request, await self.body(request))

    async def _run(self, api: ApiKind, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        try:
            job = self.job(request, api, body)
            with self.start(request, job) as run:
                return await (self._stream(request, run, body) if job.stream else self._whole(run, body))
        except EngineDeadError:
            raise
        except ApiError as error:
            params = body.get("kv_transfer_params")
            wants = isinstance(params, dict) and params.get("do_remote_prefill")
            if self.server.nixl and wants and error.body["error"]["type"] != "Bad Request":
                self.server.nixl[0].reject(params or {})  # a rejected decode releases the prefill server's blocks
            raise

    def job(self, request: web.Request, api: ApiKind, body: dict[str, Any]) -> Generation:
        model = self.model(body.get("model"))
        if api == "responses":  # the one API that does not name itself after the header
            rid = str(body.get("request_id") or f"resp_{uuid.uuid4().hex[:16]}")
            body = responses.chat_body(body)
        else:
            wanted = request.headers.get("X-Request-Id") or body.get("request_id") or uuid.uuid4().hex[:16]
            rid = f"{_ID_PREFIX[api]}{wanted}"
        if api == "completions":
            return self.parser.completion(body, request.headers, model, rid)
        if api == "messages":
            body = messages.chat_body(body)
        return self.parser.chat(api, body, request.headers, model, rid)

    def start(self, request: web.Request, job: Generation) -> Run:
        server = self.server
        rank = self._rank(request)
        params = (job.kv_transfer_params if server.nixl else None) or {}
        remote, hold = bool(params.get("do_remote_prefill")), bool(params.get("do_remote_decode"))
        run = Run(job, server.drivers[rank], server.entropy(), uuid.uuid4().hex[:8], remote, hold, rank)
        for choice in run.choices if remote else ():
            server.nixl[rank].expect(choice.stream.request, params)
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

    def _offered(self, run: Run) -> dict[str, Any] | None:
        """A prefill's `kv_transfer_params`: of the first prompt's last sample; the others' blocks stay pinned until
        their lease ends, as in vLLM."""
        if not self.server.nixl:
            return None
        offer = self.server.nixl[run.rank].offer(run.choices[run.job.n - 1].stream.request.request_id)
        return self.server.faults.tampered(offer)

    async def _whole(self, run: Run, body: dict[str, Any]) -> web.Response:
        async for _ in run.deltas():
            pass
        job, server = run.job, self.server
        offered = self._offered(run)
        details = server.config.prompt_tokens_details
        if job.api == "responses":
            answer = responses.answer(run, body, offered)
            self._keep(body, answer)
            return json_response(answer)
        if job.api == "messages":
            return json_response(messages.answer(run, offered, details=details))
        choices: list[dict[str, Any]] = []
        for choice in run.choices:
            if job.is_chat:
                shown = answers.chat_choice(job, choice.index, choice.text, choice.ids, choice.reason, choice.stop)
            else:
                text = tokenizer.decode(choice.prompt) + choice.text if job.echo else choice.text
                shown = answers.completion_choice(
                    job, choice.index, text, choice.ids, choice.prompt, choice.reason, choice.stop
                )
            choices.append(shown)
        build = answers.chat_completion if job.is_chat else answers.completion
        usage = run.usage(details, full=True)
        return json_response(build(job, run.created, server.fingerprint, choices, usage, offered))

    def _keep(self, body: dict[str, Any], answer: dict[str, Any]) -> None:
        if body.get("store") is True:
            self.server.store.keep(answer)
            self.server.store.messages[answer["id"]] = responses.messages_of(body.get("input"))

    def _frames(self, run: Run, body: dict[str, Any]) -> Frames:
        details = self.server.config.prompt_tokens_details
        if run.job.api == "responses":
            return responses.ResponsesFrames(run, body, lambda: self._offered(run), partial(self._keep, body))
        if run.job.api == "messages":
            return messages.MessagesFrames(run, details=details)
        return OpenAiFrames(run, details, self.server.fingerprint)

    async def _stream(self, request: web.Request, run: Run, body: dict[str, Any]) -> web.StreamResponse:
        server = self.server
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        self._stamp(request, response)
        writer = await response.prepare(request)
        if writer is not None:
            writer.send_headers()  # vLLM's headers leave before the first token
        frames = self._frames(run, body)
        await response.write(frames.begin())
        sent = 0
        try:
            async for delta in run.deltas():
                await server.until_answering()
                await response.write(frames.delta(delta))
                sent += 1
                if server.faults.die_after_chunks is not None and sent >= server.faults.die_after_chunks:
                    abort_connection(request)
                    return response
        except ApiError as error:
            last = frames.failed(error)
            if last is None:
                abort_connection(request)
                return response
        else:
            last = frames.end()
        await response.write(last)
        await response.write_eof()
        return response

    async def _realtime(self, request: web.Request) -> web.StreamResponse:
        if not web.WebSocketResponse().can_prepare(request):
            raise ApiError(404, "Not Found", "Not Found")  # FastAPI knows the path as a WebSocket only.
        return await RealtimeSession(self, request).serve()

    async def _count_tokens(self, request: web.Request) -> web.Response:
        job = self.job(request, "messages", await self.body(request))
        count = len(job.prompts[0])
        return json_response({"input_tokens": count, "context_management": {"original_input_tokens": count}})

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
