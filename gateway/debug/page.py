"""`/debug`: the page for people. One file, nothing loaded from elsewhere, no script but its own."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from aiohttp import web

from gateway.proxy.errors import SERVER_NAME

PATH = "/debug"
_FILE = "page.html"


def page(request: web.BaseRequest) -> web.Response:
    return web.Response(body=_document(), headers=_headers())


def moved(request: web.BaseRequest) -> web.Response:
    """From /debug/, against which the page's relative addresses would be wrong."""
    return web.Response(status=308, headers={"Location": "../debug", "Server": SERVER_NAME})


@cache
def _document() -> bytes:
    return files(__package__).joinpath(_FILE).read_bytes()


@cache
def _headers() -> dict[str, str]:
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": _policy(_document()),
        "Cache-Control": "no-cache",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Server": SERVER_NAME,
    }


def _policy(document: bytes) -> str:
    """Only this very script and style; whatever text of others got into the page, it could do nothing."""
    allowed = {
        "default-src": "'none'",
        "script-src": _hashed(document, b"script"),
        "style-src": _hashed(document, b"style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return "; ".join(f"{name} {value}" for name, value in allowed.items())


def _hashed(document: bytes, tag: bytes) -> str:
    inline = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), document, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in inline)
