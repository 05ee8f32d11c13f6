"""The way to Redis or Valkey: clients with short limits, and what is wrong in words an operator can act on.

Nothing here is waited for by a request. Each of the two tasks has its own connection, so that one that blocks in a read
holds up no write; after a failure a task waits, longer each time, and begins with a new connection.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    BusyLoadingError,
    ClusterDownError,
    ClusterError,
    InvalidResponse,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from gateway.config.schema import RedisConfig
from gateway.errors import UserError

_log = logging.getLogger(__name__)
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 5.0
_PORTS = {"single": 6379, "sentinel": 26379, "cluster": 6379}

Client = Redis | RedisCluster

FAILURES = {
    "unreachable": "no connection: start it, mend redis.url or the network between, or raise its maxclients",
    "protocol": "what answers is no Redis: mend redis.url",
    "slow": "no answer in redis.op_timeout_ms: look at its SLOWLOG and LATENCY, or give it more time",
    "auth": "it refuses the password or user: mend redis.user, and {password_env} or redis.password_file",
    "no_permission": "its ACL forbids a command or key that is needed: docs/replicas.md has the user to make",
    "full": "its memory is full (OOM): raise maxmemory, or let it evict (maxmemory-policy volatile-ttl)",
    "readonly": "it is a replica that takes no writes: name the master, or its sentinels with redis.mode sentinel",
    "loading": "it is reading its data after a start: nothing, it ends by itself",
    "cluster": "it is a node of a cluster: set redis.mode: cluster",
    "cluster_down": "its cluster has slots nobody serves: mend the cluster",
    "no_master": "its sentinels know no master named redis.sentinel_master, or it is down",
    "wrong_type": "something else is kept under a key that is needed: delete it, or choose another redis.prefix",
    "refused": "it refuses a command that Redis 5.0 and later know: redis.url leads to something else, or to a proxy",
    "misread": "unexpected: the gateway's log has it",
}
"""Kinds of failure, a closed list, and what to do about each."""


def failure(exc: BaseException, mode: str = "single") -> str:
    """The kind of it, one of FAILURES."""
    match exc:
        case AuthenticationError() | AuthenticationWrongNumberOfArgsError():
            return "auth"
        case NoPermissionError():
            return "no_permission"
        case OutOfMemoryError():
            return "full"
        case ReadOnlyError() | MasterDownError():
            return "readonly"
        case BusyLoadingError():
            return "loading"
        case MasterNotFoundError():
            return "no_master"
        case AskError() if mode != "cluster":
            return "cluster"
        case ClusterDownError() | AskError() | ClusterError() | RedisClusterException():
            cause = exc.__cause__ or exc.__context__
            known = failure(cause, mode) if isinstance(cause, (RedisError, OSError)) else "cluster_down"
            return known if known not in ("misread", "refused") else "cluster_down"
        case RedisTimeoutError() | TimeoutError():
            return "slow"
        case ResponseError():
            return _by_word(str(exc))
        case InvalidResponse():
            return "protocol"
        case RedisError() | OSError():
            return "unreachable"
        case RuntimeError() if str(exc).endswith("handler is closed"):
            return "unreachable"  # What uvloop says where asyncio says ConnectionResetError.
    return "misread"


_WORDS = {
    "NOAUTH": "auth",
    "WRONGPASS": "auth",
    "NOPERM": "no_permission",
    "OOM": "full",
    "WRONGTYPE": "wrong_type",
    "MISCONF": "readonly",
    "NOREPLICAS": "readonly",
}
"""The last two: it takes no writes until its disk or its replicas are well."""


def _by_word(text: str) -> str:
    """Of errors that the client has no class for."""
    for word, kind in _WORDS.items():
        if text.startswith(word):
            return kind
    return "refused"


class Password(CredentialProvider):
    """Read at each connection, so that one that was changed is taken without a restart."""

    def __init__(self, user: str | None, read: Callable[[], str | None]) -> None:
        self._user = user
        self._read = read

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._read() or ""
        return (password,) if self._user is None else (self._user, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()  # that of the class above warns at each connection


def clients(config: RedisConfig, read_password: Callable[[], str | None]) -> Callable[[float], Client]:
    """Makes a client whose answers take so many seconds at most. Raises UserError."""
    assert config.url is not None  # noqa: S101 - who has none does not ask
    scheme, _, rest = config.url.partition("://")
    common: dict[str, Any] = {
        "socket_connect_timeout": config.connect_timeout_s,
        "socket_keepalive": True,
        "health_check_interval": 0,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    if config.user is not None or read_password() is not None:
        common["credential_provider"] = Password(config.user, read_password)
    if scheme == "unix":
        if config.mode != "single":
            raise UserError(f"redis.mode: {config.mode} needs redis:// or rediss://, not a unix socket")
        return lambda timeout_s: Redis(unix_socket_path=rest, socket_timeout=timeout_s, **_without_tcp(common))
    places, _, db = rest.partition("/")
    hosts = [_host(each, _PORTS[config.mode]) for each in places.split(",")]
    number = int(db or 0)
    if scheme == "rediss":
        common |= {"ssl": True, "ssl_ca_certs": config.ca}
    if config.mode == "sentinel":
        sentinel_keys = {k: v for k, v in common.items() if k != "credential_provider"}
        sentinel_keys["socket_timeout"] = config.connect_timeout_s
        return lambda timeout_s: Sentinel(  # type: ignore[no-untyped-call]
            hosts, sentinel_kwargs=sentinel_keys, db=number, socket_timeout=timeout_s, **common
        ).master_for(config.sentinel_master)
    if config.mode == "cluster":
        if number:
            raise UserError("redis.url: a cluster has no database but 0")
        return lambda timeout_s: RedisCluster(
            startup_nodes=[ClusterNode(*host) for host in hosts],
            socket_timeout=timeout_s,
            **{**common, "retry": Retry(NoBackoff(), 1)},  # Once more, where a slot has moved.
        )
    if len(hosts) > 1:
        raise UserError("redis.url: several hosts need redis.mode: sentinel or cluster")
    ((host, port),) = hosts
    return lambda timeout_s: Redis(host=host, port=port, db=number, socket_timeout=timeout_s, **common)


def _without_tcp(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key != "socket_keepalive"}


def _host(place: str, usual_port: int) -> tuple[str, int]:
    host, colon, port = place.rpartition(":")
    if not colon or place.endswith("]"):
        host, port = place, str(usual_port)
    return host.strip("[]"), int(port)


class Link:
    """How one task gets on with Redis. `name` is what it does, for people. `patience`: so many attempts may find nobody
    there before that is in the log, where what is asked is started, and replaced, beside this process.
    """

    def __init__(self, name: str, mode: str, failed: Callable[[str], None], patience: int = 0) -> None:
        self.name = name
        self.is_up = False
        self.problem: str | None = None
        """The kind of the last failure, until something works again; one of FAILURES."""
        self._mode = mode
        self._failed = failed
        self._wait_s = 0.0
        self._patience = self._left = patience
        self._told: str | None = None
        """The kind of the failure that is in the log."""

    def works(self) -> None:
        if self._told is not None:
            _log.info("%s works again", self.name)
        self.is_up, self.problem, self._told, self._wait_s = True, None, None, 0.0
        self._left = self._patience

    def fails(self, exc: Exception, rng: random.Random) -> float:
        """Take it in; how long to wait before the next attempt, in seconds."""
        kind = failure(exc, self._mode)
        self._failed(kind)
        if kind == "misread":
            _log.error("%s: unexpected; going on", self.name, exc_info=exc)
            self._told = kind
        elif kind == "unreachable" and self._left:
            self._left -= 1
        elif kind != self._told:
            _log.warning("%s fails: %s", self.name, FAILURES[kind].partition(":")[0])
            self._told = kind
        self.is_up, self.problem = False, kind
        self._wait_s = min(_LONGEST_WAIT_S, max(_FIRST_WAIT_S, 2 * self._wait_s))
        return self._wait_s * rng.uniform(0.5, 1.0)
