"""Whose a request is, and the cache salt that keeps tenants' KV caches apart.

A salt that a client chooses isolates nobody: who knows it, or guesses it, hits. Here it is made of the tenant that the
proxy in front has authenticated, with a secret; the client's own salt only divides its tenant's part further.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping

import msgspec
from multidict import CIMultiDict

from gateway.bad_request import BadRequest
from gateway.config.schema import TenancyConfig
from gateway.errors import UserError
from gateway.handoff.bodies import is_takeable
from gateway.handoff.fields import NotAnObject, join, split, with_member
from gateway.proxy.errors import ApiError
from gateway.proxy.headers import is_encoded

_FIELD = "cache_salt"
_LONGEST_NAME = 256
_LONGEST_SALT = 1024
"""As in vLLM."""
_SALT_BYTES = 32
_LEAST_SECRET = 16


class Tenancy:
    """Reads `tenancy.*`. `secret` is what the variable `tenancy.secret_env` holds."""

    def __init__(self, settings: TenancyConfig, secret: str = "", *, keyed: bool = False) -> None:  # nosec B107
        self._settings = settings
        self._knows_by_itself = keyed or settings.certificate
        self._key = hashlib.blake2b(secret.encode("utf-8", "surrogateescape"), digest_size=32).digest()

    @classmethod
    def of(cls, settings: TenancyConfig, environment: Mapping[str, str], *, keyed: bool = False) -> Tenancy:
        """`keyed`: who asks is known by API key, whatever `tenancy.header` says. Raises UserError for salts that could
        not isolate.
        """
        secret = environment.get(settings.secret_env, "")
        named = keyed or settings.header is not None or settings.certificate
        if settings.salt == "derive":
            if not named:
                raise UserError(
                    "tenancy.salt: derive needs to know the tenant: by API key (auth.keys_file), by certificate "
                    "(tenancy.certificate), or by tenancy.header"
                )
            if len(secret) < _LEAST_SECRET:
                raise UserError(
                    f"tenancy.salt: derive needs a secret of {_LEAST_SECRET} characters or more in the environment "
                    f"variable {settings.secret_env}, the same for all gateways of a fleet"
                )
        if settings.required and not named:
            raise UserError("tenancy.required needs tenancy.header, which names the tenant")
        return cls(settings, secret, keyed=keyed)

    @property
    def by_tenant(self) -> bool:
        """Whether requests can be of several tenants."""
        return self._knows_by_itself or self._settings.header is not None

    @property
    def by_certificate(self) -> bool:
        return self._settings.certificate

    def take(
        self,
        headers: CIMultiDict[str],
        body: bytes,
        *,
        salted: bool,
        takes_salt: bool = True,
        anonymous: bool = False,
        authenticated: str | None = None,
    ) -> tuple[str | None, bytes]:
        """(the tenant, the body that goes on); the identity is taken out of `headers`. `salted`: the request can use
        the KV cache; `takes_salt`: engines read a salt in it; `anonymous`: it need not say whose it is;
        `authenticated`: who it is by its key or certificate, which no header changes. Raises BadRequest, and ApiError
        (401) without an identity where one is required.
        """
        name = self._settings.header
        if authenticated is not None:
            tenant: str | None = authenticated
            if name is not None:
                headers.popall(name, None)
                if self._settings.forward_header:
                    headers[name] = authenticated
        elif name is not None and not self._knows_by_itself:
            tenant = self._tenant(name, headers, anonymous)
            if not self._settings.forward_header:
                headers.popall(name, None)
        elif not self._knows_by_itself:
            return None, body
        else:
            self._check_nobody(headers, anonymous)
            tenant = None
        if self._settings.salt == "derive" and salted and body:
            if not takes_salt:
                raise BadRequest("Engines take no cache salt of your tenant on this path.", code="not_salted")
            body = self._salted(tenant or "", headers, body)
        return tenant, body

    def take_session(self, headers: CIMultiDict[str], authenticated: str | None = None) -> str | None:
        """The tenant of a connection without a body that a salt could go into; refused where salts are derived, since
        its prompts would be shared with all. Raises as `take`.
        """
        tenant, _ = self.take(headers, b"", salted=False, authenticated=authenticated)
        if self._settings.salt == "derive":
            raise BadRequest("What is said here cannot be given its tenant's cache salt.", code="not_salted")
        return tenant

    def _tenant(self, name: str, headers: CIMultiDict[str], anonymous: bool) -> str | None:
        values = {value.strip(" \t") for value in headers.getall(name, ())}
        if len(values) > 1:
            raise BadRequest(f"The header {name} says who you are more than once.", code="ambiguous_identity")
        tenant = values.pop() if values else ""
        if len(tenant) > _LONGEST_NAME:
            raise BadRequest(f"The header {name} is longer than {_LONGEST_NAME} characters.", code="bad_identity")
        if not tenant and self._settings.required and not anonymous:
            raise ApiError(
                401, f"The header {name} must say who you are; a proxy in front of this gateway sets it.",
                type_="authentication_error", code="no_identity",
            )  # fmt: skip
        return tenant or None

    def _check_nobody(self, headers: CIMultiDict[str], anonymous: bool) -> None:
        """Of a request that has shown neither key nor certificate: a header says nothing here."""
        if self._settings.header is not None:
            headers.popall(self._settings.header, None)
        if self._settings.required and not anonymous:
            raise ApiError(401, "You must show who you are.", type_="authentication_error", code="no_identity")

    def _salted(self, tenant: str, headers: Mapping[str, str], body: bytes) -> bytes:
        if is_encoded(headers):
            raise BadRequest("A compressed request body cannot be given its tenant's cache salt.", code="not_salted")
        if not is_takeable(body):
            raise BadRequest("The request body has too many members.", code="invalid_json")
        try:
            fields = split(body)
        except NotAnObject as exc:
            raise BadRequest(
                f"Only a JSON object can be given its tenant's cache salt: {exc}.", code="not_salted"
            ) from None
        salt = self._derived(tenant, _own_salt(fields.get(_FIELD)))
        value = msgspec.json.encode(salt)
        if 0 in body[:4]:  # UTF-16 or 32, into which bytes cannot be put.
            return join({**fields, _FIELD: msgspec.Raw(value)})
        return with_member(body, _FIELD, value)

    def _derived(self, tenant: str, own: str | None) -> str:
        """Framed by lengths, so that no two pairs are one text."""
        mac = hashlib.blake2b(key=self._key, digest_size=_SALT_BYTES, person=b"warmroute-salt")
        for part in (tenant, own):
            raw = b"" if part is None else part.encode("utf-8", "surrogatepass")
            mac.update((0 if part is None else len(raw) + 1).to_bytes(8, "big") + raw)
        return base64.urlsafe_b64encode(mac.digest()).rstrip(b"=").decode()


def _own_salt(raw: msgspec.Raw | None) -> str | None:
    """What the client said; as vLLM, a text that is not empty."""
    if raw is None or bytes(raw) == b"null":
        return None
    try:
        salt = msgspec.json.decode(raw, type=str)
    except (msgspec.MsgspecError, UnicodeError):
        salt = ""
    if not 0 < len(salt) <= _LONGEST_SALT:
        raise BadRequest("`cache_salt` must be a text of 1 to 1024 characters.", param=_FIELD)
    return salt


def shown(tenant: str) -> str:
    """A tenant in pages: a header may hold what is secret. `printf NAME | b2sum -l 48` gives the same."""
    return hashlib.blake2b(tenant.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest() if tenant else "none"


NO_TENANCY = Tenancy(TenancyConfig())
