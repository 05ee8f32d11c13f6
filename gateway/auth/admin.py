"""The token of the admin port. Where the port is not this machine's own, nothing is shown without it, or without a
certificate of `admin.client_ca`.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Mapping
from ipaddress import ip_address

from multidict import MultiMapping

from gateway.auth.token import checked, read
from gateway.config.schema import AdminConfig
from gateway.errors import UserError
from gateway.proxy.errors import ApiError

_WHAT = "the admin token"
_BEARER, _BASIC = "bearer ", "basic "
_LONGEST = 4096


class AdminToken:
    """Compared in constant time. Taken as `Authorization: Bearer TOKEN`, and as the password of Basic, which browsers
    ask for.
    """

    def __init__(self, token: str) -> None:
        """Raises UserError."""
        self._token = checked(token, _WHAT).encode()

    @classmethod
    def of(cls, settings: AdminConfig, environment: Mapping[str, str]) -> AdminToken | None:
        """None: there is none. Raises UserError."""
        token = read(settings.token_file, settings.token_env, environment, key="admin.token_file", what=_WHAT)
        return None if token is None else cls(token)

    def is_in(self, headers: MultiMapping[str]) -> bool:
        rows = headers.getall("Authorization", ())
        return len(rows) == 1 and hmac.compare_digest(_given(rows[0]), self._token)

    def check(self, headers: MultiMapping[str]) -> None:
        """Raises ApiError (401)."""
        if not self.is_in(headers):
            raise refused()


def refused() -> ApiError:
    return ApiError(
        401,
        "This page needs the admin token: `Authorization: Bearer TOKEN`.",
        type_="authentication_error",
        code="invalid_admin_token",
        headers={"WWW-Authenticate": 'Basic realm="warmroute admin", charset="UTF-8"'},
    )


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def check_reach(host: str, key: str, token: AdminToken | None, settings: AdminConfig, *, is_tls: bool) -> None:
    """Raises UserError where anybody could get at a port that listens on `host`."""
    demands = settings.client_ca is not None and is_tls
    if is_loopback(host) or token is not None or demands or settings.unprotected:
        return
    raise UserError(
        f"{key}: {host} is not this machine's own, and engine controls are there: set a token (the environment "
        f"variable {settings.token_env}, or admin.token_file), admin.client_ca with a certificate to serve with, or "
        "admin.unprotected where something else keeps others away"
    )


def _given(row: str) -> bytes:
    scheme = row[:7].lower()
    if scheme == _BEARER:
        return row[7:].strip().encode("utf-8", "surrogateescape")
    if scheme[:6] == _BASIC and len(row) <= _LONGEST:
        try:
            return base64.b64decode(row[6:].strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""
