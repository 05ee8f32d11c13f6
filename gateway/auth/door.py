"""Who comes in: the key of a request, what it may, and what it takes."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from multidict import CIMultiDict
from prometheus_client import CollectorRegistry, Counter

from gateway.auth.checks import PRIORITY_HEADER
from gateway.auth.keys import Key, digest_of
from gateway.auth.limits import Account, Exceeded
from gateway.bad_request import BadRequest
from gateway.proxy.errors import ApiError
from scorer.types import RequestFacts

AUTHENTICATION = "authentication_error"
PERMISSION = "permission_error"
RATE_LIMIT = "rate_limit_error"
_BEARER = "bearer "
_LONGEST_KEY = 1024
_CREDENTIALS = ("Authorization", "x-api-key")
MOST_TENANTS = 256
"""With series of their own; the rest are `other`."""
OTHER = "other"
OUTCOMES = ("admitted", "requests", "tokens", "concurrency", "forbidden")
_CODES = {
    "requests": ("rate_limit_exceeded", "requests"),
    "tokens": ("rate_limit_exceeded", "tokens"),
    "size": ("request_too_large_for_limit", "tokens"),
    "concurrent requests": ("concurrency_limit_exceeded", "concurrency"),
}


class _Entry:
    """A key with its books, which stay when the keys are read again."""

    __slots__ = ("account", "expires_s", "key", "series", "tokens")

    def __init__(self, key: Key, account: Account, series: dict[str, Counter], tokens: dict[str, Counter]) -> None:
        self.key = key
        self.account = account
        self.expires_s = key.expires_s
        self.series = series
        self.tokens = tokens


MakeAccount = Callable[[Key, float], Account]
"""The books of a key that is new at a time (monotonic seconds)."""


def own_account(key: Key, now_s: float) -> Account:
    return Account(key.limits, now_s)


class Door:
    """`engine_key`: what engines are shown instead of the client's key; empty: nothing."""

    def __init__(
        self,
        keys: Iterable[Key],
        registry: CollectorRegistry,
        *,
        engine_key: str = "",
        account: MakeAccount = own_account,
    ) -> None:
        self._make_account = account
        self._engine = f"Bearer {engine_key}" if engine_key else None
        self._entries: dict[bytes, tuple[bytes, _Entry]] = {}
        self._accounts: dict[tuple[str, str], Account] = {}
        self._tenants: set[str] = set()
        self._requests = Counter(
            "warmroute_tenant_requests",
            "Requests by tenant: admitted, or refused for a limit of its key, or for what the key may not do.",
            ("tenant", "outcome"),
            registry=registry,
        )
        self._tokens = Counter(
            "warmroute_tenant_tokens", "Tokens counted against keys, by tenant.", ("tenant", "kind"), registry=registry
        )
        self.replace(keys)

    def replace(self, keys: Iterable[Key]) -> None:
        """Go by these keys from now on. What runs goes on."""
        now_s = time.monotonic()
        entries: dict[bytes, tuple[bytes, _Entry]] = {}
        accounts: dict[tuple[str, str], Account] = {}
        for key in keys:
            name = key.tenant, key.name
            account = self._accounts.get(name)
            if account is None:
                account = self._make_account(key, now_s)
            else:
                account.configure(key.limits, now_s)
            accounts[name] = account
            entry = _Entry(key, account, *self._series(key.tenant))
            for digest in key.digests:
                entries[digest] = digest, entry
        self._entries, self._accounts = entries, accounts

    def __len__(self) -> int:
        return len(self._accounts)

    def _series(self, tenant: str) -> tuple[dict[str, Counter], dict[str, Counter]]:
        if tenant not in self._tenants:
            if len(self._tenants) >= MOST_TENANTS:
                tenant = OTHER
            else:
                self._tenants.add(tenant)
        return (
            {outcome: self._requests.labels(tenant, outcome) for outcome in OUTCOMES},
            {kind: self._tokens.labels(tenant, kind) for kind in ("prompt", "output")},
        )

    # ---- for requests ------------------------------------------------------------------------------------------------

    def identify(self, headers: CIMultiDict[str]) -> Visit:
        """Whose key is in `headers`, which it is taken out of. Raises ApiError (401), and BadRequest for two keys."""
        given = _keys_in(headers)
        self.hide(headers)
        if len(given) > 1:
            raise BadRequest("The request brings several API keys.", code="ambiguous_identity")
        if not given:
            raise _unauthorized("You must give an API key: `Authorization: Bearer KEY` or `x-api-key: KEY`.")
        key = given.pop()
        digest = digest_of(key[: _LONGEST_KEY + 1])
        known, entry = self._entries.get(digest, (b"", None))
        # Found by its hash, so that what a lookup's time tells is about a hash nobody can aim at.
        if entry is None or not hmac.compare_digest(known, digest):
            raise _unauthorized("The API key is not known.")
        if entry.expires_s is not None and time.time() >= entry.expires_s:
            raise _unauthorized("The API key has expired.", "expired_api_key")
        return Visit(entry)

    def hide(self, headers: CIMultiDict[str]) -> None:
        """What engines see instead of a client's key."""
        for name in _CREDENTIALS:
            headers.popall(name, None)
        if self._engine is not None:
            headers["Authorization"] = self._engine


class Visit:
    """What one request takes of its key's limits: `enter`, perhaps `reserve`, and `leave`, which is always right."""

    __slots__ = ("_entered", "_entry", "_prompt_tokens", "_reserved", "_settled")

    def __init__(self, entry: _Entry) -> None:
        self._entry = entry
        self._entered = False
        self._reserved = 0
        self._prompt_tokens: int | None = None
        self._settled = False

    @property
    def key(self) -> Key:
        return self._entry.key

    @property
    def tenant(self) -> str:
        return self._entry.key.tenant

    def enter(self, *, works: bool = True) -> None:
        """`works`: an engine has work to do for it. Raises ApiError (429)."""
        account = self._entry.account
        try:
            (account.enter if works else account.ask)(time.monotonic())
        except Exceeded as exc:
            raise self._refused(exc) from None
        self._entered = works
        self._entry.series["admitted"].inc()

    def check_model(self, model: str) -> None:
        """Raises ApiError (403)."""
        if not self.key.may_ask_for(model):
            self._entry.series["forbidden"].inc()
            shown = model[:200].encode("utf-8", "replace").decode()
            raise ApiError(
                403, f"Your API key may not use the model `{shown}`.", type_=PERMISSION, code="model_not_allowed",
                param="model",
            )  # fmt: skip

    def check_priority(self, headers: Mapping[str, str], given: Any) -> int | None:
        """The priority it is served with; None: whatever it asks for. `given`: what its body says. Raises ApiError
        (403) and BadRequest.
        """
        if self.key.priority is None:
            return None
        low, high = self.key.priority
        header = headers.get(PRIORITY_HEADER)
        try:
            asked = [] if header is None else [int(header)]
        except ValueError:
            raise BadRequest(f"The header {PRIORITY_HEADER} must be an integer.", param="priority") from None
        if given is not None:
            if type(given) is not int:
                raise BadRequest("`priority` must be an integer.", param="priority")
            asked.append(given)
        for each in asked:
            if not low <= each <= high:
                self._entry.series["forbidden"].inc()
                text = f"Your API key may ask for a priority from {low} to {high}, not {each}."
                raise ApiError(403, text, type_=PERMISSION, code="priority_not_allowed", param="priority")
        return asked[0] if asked else min(max(0, low), high)

    def reserve(self, facts: RequestFacts, output_tokens: int) -> None:
        """Before it is sent: for its prompt, and an answer of so many tokens. Raises ApiError (429)."""
        try:
            self._reserved = self._entry.account.reserve(facts.prompt_tokens, output_tokens, time.monotonic())
        except Exceeded as exc:
            raise self._refused(exc) from None
        self._prompt_tokens = facts.prompt_tokens

    def used(self, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """What it took, when that is known; None: as much as was reserved for it."""
        if self._settled or self._prompt_tokens is None:
            return
        self._settled = True
        prompt = self._prompt_tokens if prompt_tokens is None else prompt_tokens
        output = max(0, self._reserved - prompt) if output_tokens is None else output_tokens
        self._entry.account.settle(self._reserved, prompt + output, time.monotonic())
        self._entry.tokens["prompt"].inc(prompt)
        self._entry.tokens["output"].inc(output)

    def unused(self) -> None:
        """Give back what was reserved, unless it is known what was used."""
        if not self._settled and self._prompt_tokens is not None:
            self._settled = True
            self._entry.account.settle(self._reserved, 0, time.monotonic())

    def leave(self) -> None:
        """It is over."""
        self.unused()
        if self._entered:
            self._entered = False
            self._entry.account.leave()

    def headers(self) -> list[tuple[str, str]]:
        """For its answer."""
        return self._entry.account.headers(time.monotonic())

    def _refused(self, exc: Exceeded) -> ApiError:
        code, series = _CODES[exc.what]
        self._entry.series[series].inc()
        if exc.what == "size":
            text = f"The prompt has about {exc.asked} tokens; your API key is limited to {exc.limit} a minute."
            return ApiError(429, text, type_=RATE_LIMIT, code=code)
        per = "" if exc.what == "concurrent requests" else " a minute"
        text = f"Your API key is limited to {exc.limit} {exc.what}{per}."
        if exc.what == "tokens":
            text += f" This request may take {exc.asked}; a smaller limit of its answer (max_tokens) makes it less."
        return ApiError(429, text, type_=RATE_LIMIT, code=code, retry_after_s=exc.after_s)


def _keys_in(headers: CIMultiDict[str]) -> set[str]:
    given: set[str] = set()
    for row in headers.getall("Authorization", ()):
        if row[: len(_BEARER)].lower() != _BEARER:
            raise _unauthorized("Only `Authorization: Bearer KEY` is understood.")
        given.add(row[len(_BEARER) :].strip(" \t"))
    given.update(row.strip(" \t") for row in headers.getall("x-api-key", ()))
    given.discard("")
    return given


def _unauthorized(text: str, code: str = "invalid_api_key") -> ApiError:
    return ApiError(401, text, type_=AUTHENTICATION, code=code, headers={"WWW-Authenticate": "Bearer"})
