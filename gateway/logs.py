"""Log records on standard error: their form, and their least severe level, which may change at any time."""

from __future__ import annotations

import logging
from typing import Any, get_args

import msgspec
from aiohttp import web

from gateway.config import Config
from gateway.config.schema import LogLevel
from gateway.proxy import errors
from gateway.proxy.access import AccessLog, told
from gateway.proxy.body import read_body
from gateway.proxy.errors import ApiError, json_response

PATH = "/admin/log-level"
_log = logging.getLogger(__name__)
_LONGEST_BODY_BYTES = 1024
_GET = ("GET", "HEAD")


class _JsonLines(logging.Formatter):
    def __init__(self, process: str | None = None) -> None:
        super().__init__()
        self._process = {} if process is None else {"process": process}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": told(record.created),
            "level": record.levelname.lower(),
            **self._process,
            "logger": record.name,
            "message": _encodable(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = _encodable(self.formatException(record.exc_info))
        return msgspec.json.encode(line).decode()


def _encodable(text: str) -> str:
    """Bytes of clients that are no UTF-8 are shown as escapes; msgspec would refuse the whole line."""
    return text.encode("utf-8", "backslashreplace").decode()


def set_up_logging(config: Config, process: str | None = None) -> None:
    """Everything to standard error, in the configured form. `process`: which one of several says it."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        _JsonLines(process)
        if config.logging.format == "json"
        else logging.Formatter(f"%(asctime)s %(levelname)s {f'{process}: ' if process else ''}%(message)s")
    )
    logging.basicConfig(level=config.logging.level.upper(), handlers=[handler], force=True)


def logs_requests(level: LogLevel) -> bool:
    """Whether access lines, which are of level info, are written."""
    return level in ("debug", "info")


class Level:
    """The level in force, and its page on the admin port: GET, or PUT `{"level": ...}`, which lasts until the
    configuration names another one or the process ends.
    """

    def __init__(self, level: LogLevel, access: AccessLog) -> None:
        self.level = level
        self._access = access

    def set(self, level: LogLevel) -> None:
        self.level = level
        logging.getLogger().setLevel(level.upper())
        self._access.enabled = logs_requests(level)

    async def page(self, request: web.BaseRequest) -> web.Response:
        if request.method == "PUT":
            body = await read_body(request, _LONGEST_BODY_BYTES)
            try:
                wanted = msgspec.json.decode(body, type=_Wanted).level
            except msgspec.DecodeError as exc:
                levels = ", ".join(get_args(LogLevel))
                text = f'Expected {{"level": LEVEL}} with one of {levels}: {exc}.'
                raise ApiError(400, text, code="bad_level") from None
            _log.warning("log level set to %s, it was %s", wanted, self.level)
            self.set(wanted)
        elif request.method not in _GET:
            raise errors.method_not_allowed(request.method, PATH, frozenset({*_GET, "PUT"}))
        return json_response(msgspec.json.encode({"level": self.level}))


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    level: LogLevel
