"""What commands ask a running gateway on its admin port."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from gateway.errors import UserError

ADDRESS = "http://127.0.0.1:8001"
TOKEN_VARIABLE = "WARMROUTE_ADMIN_TOKEN"  # noqa: S105 - its name
"""As `admin.token_env` has it by default."""
_TIMEOUT_S = 30.0
NO_HEADERS: Mapping[str, str] = {}
_NO_SUCH_PAGE = ("unknown_url", "method_not_allowed")
_WHICH_PORT = "Is it the main port? --admin takes the gateway's admin address (gateway.admin_port, 8001 by default)."


class Refused(UserError):
    """The gateway answered, and said no."""


def token_headers() -> dict[str, str]:
    """What shows an admin port who we are."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    return {"Authorization": f"Bearer {token}"} if token else {}


def ask(
    url: str,
    body: bytes | None = None,
    method: str | None = None,
    *,
    headers: Mapping[str, str] = NO_HEADERS,
    timeout_s: float = _TIMEOUT_S,
) -> Any:
    """The JSON it answers. POST with a body and GET without, unless `method` says otherwise. Raises Refused or
    UserError.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url} is no http:// or https:// URL")
    sent = {"Content-Type": "application/json", **headers, **token_headers()}
    request = urllib.request.Request(url, body, sent, method=method)  # noqa: S310 - checked above
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:  # noqa: S310
            return json.load(response)
    except urllib.error.HTTPError as exc:
        said, code = _error(exc.read())
        if exc.code in (404, 405) and (code in _NO_SUCH_PAGE or not isinstance(code, str)):
            raise UserError(f"{url}: {said or f'status {exc.code}'} {_WHICH_PORT}") from None
        raise Refused(said or f"{url}: status {exc.code}") from None
    except (OSError, http.client.HTTPException) as exc:  # Among them that it went while it answered.
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else str(exc) or type(exc).__name__
        raise UserError(f"no gateway answers at {url}: {reason}") from None
    except ValueError:
        raise UserError(f"{url} did not answer in JSON; is it a gateway's admin address?") from None


def _error(body: bytes) -> tuple[str | None, object]:
    """Message and code of an OpenAI error; engines have numbers for codes."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, None
