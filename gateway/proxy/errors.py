"""Errors in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`; of /v1/messages in Anthropic's."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Mapping, Sequence

import msgspec
from aiohttp import web
from multidict import CIMultiDict

SERVER_NAME = "warmroute"
_JSON = "application/json"
_LONGEST_NAME = 200
"""Of what a client sent and an error repeats: a model's name, a path."""

INVALID = "invalid_request_error"
UNAVAILABLE = "service_unavailable_error"
UPSTREAM = "upstream_error"
TIMEOUT = "timeout_error"
INTERNAL = "internal_error"

_ANTHROPIC = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An error answer. `retry_after_s` becomes a Retry-After header, `allow` the Allow header of a 405."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type_: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        allow: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type_ = type_
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.allow = allow
        self._headers = headers

    @property
    def body(self) -> bytes:
        return error_body(self.message, self.type_, code=self.code, param=self.param)

    def body_for(self, path: str) -> bytes:
        """In the shape of the API at `path`: OpenAI's, or Anthropic's."""
        return _anthropic_body(self) if path in _ANTHROPIC else self.body

    def headers(self) -> CIMultiDict[str]:
        headers = CIMultiDict({"Content-Type": _JSON, "Server": SERVER_NAME})
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.allow is not None:
            headers["Allow"] = self.allow
        if self._headers is not None:
            headers.update(self._headers)
        return headers

    def response(self) -> web.Response:
        return web.Response(body=self.body, status=self.status, headers=self.headers())


def error_body(message: str, type_: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """Lone surrogates, which JSON bodies and headers may bring and nothing can be written with, become "?"."""
    message = message.encode("utf-8", "replace").decode()
    return msgspec.json.encode({"error": {"message": message, "type": type_, "param": param, "code": code}})


def _anthropic_body(error: ApiError) -> bytes:
    """With our code and param, which Anthropic's have not, beside what their clients look at."""
    message = error.message.encode("utf-8", "replace").decode()
    type_ = _ANTHROPIC_TYPES.get(error.status) or (INVALID if error.status < 500 else "api_error")
    body = {"type": type_, "message": message, "param": error.param, "code": error.code}
    return msgspec.json.encode({"type": "error", "error": body})


def log_unexpected(log: logging.Logger, what: str, exc: BaseException) -> None:
    """Where in our code it happened, but not the exception's text, which may quote a request."""
    where = "".join(traceback.format_tb(exc.__traceback__)).rstrip()
    log.error("%s: %s\n%s", what, type(exc).__name__, where)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "..."


def json_response(body: bytes, status: int = 200) -> web.Response:
    headers = CIMultiDict({"Content-Type": _JSON, "Server": SERVER_NAME})
    return web.Response(body=body, status=status, headers=headers)


def unknown_url(method: str, path: str) -> ApiError:
    return ApiError(404, f"Unknown request URL: {_short(method)} {_short(path)}.", code="unknown_url")


def method_not_allowed(method: str, path: str, allowed: frozenset[str]) -> ApiError:
    names = ", ".join(sorted(allowed))
    return ApiError(
        405, f"{_short(method)} is not allowed for {path}; use {names}.", code="method_not_allowed", allow=names
    )


def model_not_found(model: str) -> ApiError:
    return ApiError(404, f"The model `{_short(model)}` does not exist.", code="model_not_found", param="model")


def unknown_worker(names: Sequence[str], known: Sequence[str]) -> ApiError:
    shown = ", ".join(map(_short, names))
    return ApiError(404, f"No worker is named {shown}; there are: {', '.join(known)}.", code="unknown_worker")


def no_worker(message: str) -> ApiError:
    return ApiError(
        503, f"No worker can take this request: {message}.", type_=UNAVAILABLE, code="no_worker", retry_after_s=1
    )


def draining() -> ApiError:
    return ApiError(503, "The gateway is going down.", type_=UNAVAILABLE, code="draining", retry_after_s=1)


def too_many_requests(limit: int) -> ApiError:
    return ApiError(
        503, f"{limit} requests are in flight, the limit.", type_=UNAVAILABLE, code="overloaded", retry_after_s=1
    )


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")
