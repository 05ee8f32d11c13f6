"""/v1/realtime of vLLM 0.32: its events and errors, with a word for each chunk of audio."""

import base64
import binascii
import json
import time
import uuid
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType, web

if TYPE_CHECKING:
    from bench.engine.http import Api

_MAX_MESSAGE_BYTES = 16 << 20  # uvicorn's
_NOT_VALIDATED = "Model not validated. Make sure to validate the model by sending a session.update event."


class RealtimeSession:
    """One connection. `FakeVllm.sessions` holds those that are open."""

    def __init__(self, api: "Api", request: web.Request) -> None:
        self._api = api
        self.request = request
        self.socket = web.WebSocketResponse(max_msg_size=_MAX_MESSAGE_BYTES, timeout=0.5)
        self.model: str | None = None
        self._words: list[str] = []
        self._chunks = 0
        self._generating = False

    async def serve(self) -> web.WebSocketResponse:
        await self.socket.prepare(self.request)
        self._api.server.sessions.add(self)
        try:
            await self._send("session.created", id=f"sess-{uuid.uuid4().hex}", created=int(time.time()))
            async for message in self.socket:
                if message.type is WSMsgType.TEXT:
                    await self._text(message.data)
        finally:
            self._api.server.sessions.discard(self)
        return self.socket

    async def _text(self, text: str) -> None:
        try:
            event = json.loads(text)
        except ValueError:
            await self._error("Invalid JSON", "invalid_json")
            return
        match event.get("type"):
            case "session.update":
                await self._update(event.get("model"))
            case "input_audio_buffer.append":
                await self._append(event.get("audio"))
            case "input_audio_buffer.commit":
                await self._commit(event.get("final") is True)
            case kind:
                await self._error(f"Unknown event type: {kind}", "unknown_event")

    async def _update(self, model: Any) -> None:
        if model is None:
            await self._error("Missing required field: model", "invalid_event")
        elif model not in self._api.server.models:
            await self._error(f"The model `{model}` does not exist.", "model_not_found")
        else:
            self.model = model

    async def _append(self, audio: Any) -> None:
        try:
            heard = base64.b64decode(audio)
        except (binascii.Error, TypeError, ValueError):
            heard = b""
        if not heard:
            await self._error("Invalid audio data", "invalid_audio")
            return
        self._chunks += 1
        if self._generating:
            await self._delta()

    async def _commit(self, final: bool) -> None:
        if self.model is None:
            await self._error(_NOT_VALIDATED, "model_not_validated")
            return
        if not final:
            self._generating = True
            await self._delta()
            return
        usage = {"prompt_tokens": 1, "completion_tokens": len(self._words), "total_tokens": 1 + len(self._words)}
        await self._send("transcription.done", text="".join(self._words), usage=usage)
        self._words, self._generating = [], False

    async def _delta(self) -> None:
        while self._chunks:
            self._chunks -= 1
            self._words.append(f"word{len(self._words)} ")
            await self._send("transcription.delta", delta=self._words[-1])

    async def _error(self, text: str, code: str) -> None:
        await self._send("error", error=text, code=code)

    async def _send(self, kind: str, **fields: Any) -> None:
        await self.socket.send_str(json.dumps({"type": kind, **fields}))
