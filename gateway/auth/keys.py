"""API keys, by their hashes: a keys file holds no secret.

A key is 256 random bits, so that its plain SHA-256 cannot be turned back; whoever reads the file can ask for nothing.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from gateway.auth.limits import Limits
from gateway.config.keys import dotted
from gateway.config.yamltree import load_tree
from gateway.errors import UserError, nearest

PREFIX = "wr-"
_KEY_BYTES = 32
LEAST_CHARACTERS = 20
"""Of keys that somebody else made up: shorter ones can be guessed."""
_SEPARATORS = re.compile(r"[\s,]+")

Count = Annotated[int, Meta(ge=1, le=1 << 53)]
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+\Z")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a keys file. Several `sha256` are one key that is being replaced: they share limits."""

    tenant: Name
    name: Name = "default"
    """Tells the keys of one tenant apart."""
    sha256: Digest | Annotated[tuple[Digest, ...], Meta(min_length=1)]
    models: tuple[Name, ...] | None = None
    """Names that may be asked for; one that ends in * covers all that begin so. None: any."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent_requests: Count | None = None
    priority: tuple[Annotated[int, Meta(ge=-(1 << 31))], Annotated[int, Meta(le=1 << 31)]] | None = None
    """The lowest and the highest number that may be asked for, as vLLM counts: the lower the sooner."""
    expires: str | None = None
    """ISO 8601, UTC unless it says otherwise; a date alone is its first second."""

    @property
    def digests(self) -> tuple[bytes, ...]:
        given = (self.sha256,) if isinstance(self.sha256, str) else self.sha256
        return tuple(map(bytes.fromhex, given))

    @property
    def limits(self) -> Limits:
        return Limits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            concurrent_requests=self.concurrent_requests,
        )

    @property
    def expires_s(self) -> float | None:
        """Since the epoch. Raises ValueError."""
        if self.expires is None:
            return None
        when = datetime.fromisoformat(self.expires)
        return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()

    def may_ask_for(self, model: str) -> bool:
        if self.models is None:
            return True
        return any(model.startswith(name[:-1]) if name.endswith("*") else model == name for name in self.models)


class KeysError(UserError):
    """The keys cannot be used; one line per reason."""


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(text: str, file: str) -> tuple[Key, ...]:
    """The keys of a file, YAML or JSON. Raises KeysError with all that is wrong."""
    try:
        tree, lines, repeated = load_tree(text)
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        reason = " ".join(str(getattr(exc, "problem", None) or exc).split())
        raise KeysError(f"{file}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {reason}") from None
    problems = [f"{file}:{line}: {dotted(path)}: given twice" for path, line in repeated]
    keys: list[Key] = []
    entries = tree.get("keys") if isinstance(tree, dict) else None
    if not isinstance(entries, list) or set(tree) != {"keys"}:
        raise KeysError(f"{file}: must hold `keys:` with a list of keys, and nothing else")
    for i, entry in enumerate(entries):
        try:
            key = _converted(entry)
            _ = key.expires_s
        except (msgspec.ValidationError, ValueError) as exc:
            problems.append(f"{file}:{lines.get(('keys', i), 1)}: keys[{i}]: {exc}")
        else:
            keys.append(key)
    problems += [f"{file}: {problem}" for problem in _collisions(keys)]
    if problems:
        raise KeysError("\n".join(problems))
    return tuple(keys)


def _converted(entry: Any) -> Key:
    if isinstance(entry, dict):
        known = Key.__struct_fields__
        for name in entry:
            if name not in known:
                like = nearest(str(name), known)
                raise ValueError(f"unknown key {name}" + (f"; did you mean {like}?" if like else ""))
        if isinstance(expires := entry.get("expires"), date):  # YAML makes datetimes of them, which are dates.
            entry = {**entry, "expires": expires.isoformat()}
        low, high = entry.get("priority") if _is_pair(entry.get("priority")) else (0, 0)
        if low > high:
            raise ValueError("priority is [lowest number, highest number]")
    return msgspec.convert(entry, Key)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(item) is int for item in value)


def _collisions(keys: Iterable[Key]) -> Iterator[str]:
    names: set[tuple[str, str]] = set()
    digests: set[bytes] = set()
    for key in keys:
        if (key.tenant, key.name) in names:
            yield f"two keys of {key.tenant} are called {key.name}; give each a `name`"
        names.add((key.tenant, key.name))
        for digest in key.digests:
            if digest in digests:
                yield f"the key {digest.hex()[:8]}... is given twice"
            digests.add(digest)


def keys_of_variable(text: str, variable: str) -> tuple[Key, ...]:
    """`TENANT=KEY`, separated by spaces or commas, without limits; several of one tenant are one key. Raises
    KeysError, without a key in its text.
    """
    digests: dict[str, list[str]] = {}
    for i, pair in enumerate(filter(None, _SEPARATORS.split(text)), 1):
        tenant, _, key = pair.partition("=")
        if not tenant or len(key) < LEAST_CHARACTERS:
            raise KeysError(
                f"{variable}: entry {i} is no TENANT=KEY with a key of {LEAST_CHARACTERS} characters or more"
            )
        digests.setdefault(tenant, []).append(digest_of(key).hex())
    if not digests:
        raise KeysError(f"auth.keys_env: the environment variable {variable} holds no key")
    keys = [Key(tenant=tenant, name="environment", sha256=tuple(each)) for tenant, each in digests.items()]
    for problem in _collisions(keys):
        raise KeysError(f"{variable}: {problem}")
    return tuple(keys)
