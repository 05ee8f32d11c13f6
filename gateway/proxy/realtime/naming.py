"""The model that a client's events name, and the event in which vLLM says what is wrong."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
from aiohttp import WSMsgType

_LONGEST_EVENT_BYTES = 64 << 10


class _NamesModel(msgspec.Struct):
    """`model` is vLLM's place for it, `session.model` OpenAI's."""

    type: str
    model: str | None = None
    session: dict[str, Any] | None = None


_names_model = msgspec.json.Decoder(_NamesModel)


def models_in(message: aiohttp.WSMessage) -> list[str] | None:
    """Whatever an engine could take for a model in it; None: it cannot be read."""
    if message.type is not WSMsgType.TEXT:
        return []
    try:
        event = _names_model.decode(message.data)
    except (msgspec.MsgspecError, RecursionError):
        return None
    inner = (event.session or {}).get("model")
    return [model for model in (event.model, inner) if isinstance(model, str) and model]


def model_of(message: aiohttp.WSMessage) -> str | None:
    """The model that a `session.update` names."""
    if message.type is not WSMsgType.TEXT or len(message.data) > _LONGEST_EVENT_BYTES:
        return None
    try:
        event = _names_model.decode(message.data)
    except (msgspec.MsgspecError, RecursionError):
        return None
    model = event.model or (event.session or {}).get("model")
    return model if event.type == "session.update" and isinstance(model, str) and model else None


def error_event(text: str, code: str | None) -> str:
    text = text.encode("utf-8", "replace").decode()
    return msgspec.json.encode({"type": "error", "error": text, "code": code}).decode()
