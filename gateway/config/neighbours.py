"""How flags of neighbouring routers are read; which there are is in `neighbour_flags.py`.

Each either does the same (EXACT, silent), does nearly the same and says in one line what is different (NEAR), sets
nothing and says what is done instead (TOLD), or is refused with what to do (REFUSED).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final, Literal

from msgspec import Struct

from gateway.config.read import Text
from gateway.errors import UserError

Path = tuple[str, ...]
Arity = Literal["0", "?", "1", "+"]
_WORKERS: Final = ("workers",)
_SELECTOR: Final = ("kubernetes", "selector")
_POOL: Final = ("kubernetes", "pool")


class Kind(Enum):
    EXACT = "exact"
    NEAR = "near"
    TOLD = "told"
    REFUSED = "refused"


class Taken:
    """The keys given by our own flags, to which the neighbours' add; `notes` are lines for standard error."""

    def __init__(self, given: dict[Path, Text]) -> None:
        self.given = given
        self.notes: list[str] = []
        self.scratch: dict[str, list[str]] = {}
        """Values that mean something together with a later flag's."""

    def set(self, path: Path, value: str) -> None:
        """Our own flag for the same key is stronger."""
        self.given.setdefault(path, value)

    @property
    def workers(self) -> list[Any]:
        known = self.given.setdefault(_WORKERS, [])
        assert isinstance(known, list)  # noqa: S101 - the flags that make it append
        return known


Take = Callable[[Taken, list[str]], None]


class Flag(Struct, frozen=True, kw_only=True):
    """`names`: spellings; `of`: whose they are; `ours`: what is done here, a line; `example`: values it may have."""

    names: tuple[str, ...]
    of: str
    kind: Kind
    ours: str
    take: Take | None = None
    nargs: Arity = "1"
    example: str = ""


def split(values: Sequence[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def prefill_urls(values: Sequence[str]) -> tuple[list[str], list[str]]:
    """(URLs, notes) of `--prefill URL [PORT|none]`, where the port is SGLang's bootstrap port."""
    parts = split(values)
    ports = {part for part in parts if part.isdigit() or part.lower() == "none"}
    note = "--prefill: the bootstrap port is not used; NIXL engines say where they are"
    return [part for part in parts if part not in ports], [note] if ports else []


# ---- what a flag does ------------------------------------------------------------------------------------------------


def key(*path: str) -> Take:
    def take(taken: Taken, values: list[str]) -> None:
        taken.set(path, values[-1])

    return take


def keep(name: str) -> Take:
    def take(taken: Taken, values: list[str]) -> None:
        taken.scratch[name] = values

    return take


def ports(role: str, side: str) -> Take:
    """Makes the workers, of its own values and the hosts kept as `side`."""

    def take(taken: Taken, values: list[str]) -> None:
        hosts = taken.scratch.pop(side, ["localhost"])
        if len(hosts) != len(values):
            raise UserError(f"--{side}-hosts names {len(hosts)} and --{side}-ports {len(values)}; give as many of each")
        urls = (f"http://{host}:{port}" for host, port in zip(hosts, values, strict=True))
        taken.workers.extend({"url": url, "role": role} for url in urls)

    return take


def backends(taken: Taken, values: list[str]) -> None:
    taken.scratch["backends"] = urls = split(values)
    taken.workers.extend({"url": url} for url in urls)


def labelled(role: str) -> Take:
    """The backends with these labels have that role."""

    def take(taken: Taken, values: list[str]) -> None:
        urls, labels = taken.scratch.get("backends", []), split(taken.scratch.get("labels", []))
        if len(labels) != len(urls):
            raise UserError(f"--static-model-labels names {len(labels)} and --static-backends {len(urls)}")
        for url, label in zip(urls, labels, strict=True):
            if label in split(values):
                next(worker for worker in taken.workers if _url(worker) == url.rstrip("/"))["role"] = role

    return take


def events(name: Literal["events", "replay"], flag: str) -> Take:
    """`URL=ENDPOINT[,ENDPOINT of the next rank]` of a worker that another flag names."""

    def take(taken: Taken, values: list[str]) -> None:
        for value in values:
            url, _, endpoints = value.partition("=")
            first, *others = endpoints.split(",")
            if not first:
                raise UserError(f"{flag} takes URL=ENDPOINT, got {value}")
            at = next((i for i, known in enumerate(taken.workers) if _url(known) == url.rstrip("/")), None)
            if at is None:
                raise UserError(f"{flag} names {url}, which is none of the workers")
            head, _, port = first.rpartition(":")
            if others and others != [f"{head}:{int(port or 0) + i}" for i in range(1, len(others) + 1)]:
                raise UserError(f"{flag}: each further rank has to be on the next port, as in vLLM")
            worker = taken.workers[at]
            taken.workers[at] = {**(worker if isinstance(worker, dict) else {"url": worker}), name: first}

    return take


def selector(taken: Taken, values: list[str]) -> None:
    taken.set(_SELECTOR, ",".join(values))


def service_discovery(taken: Taken, values: list[str]) -> None:
    """Of what flags before this one select."""
    kind = values[-1] if values else "k8s"
    if kind not in ("k8s", "static"):
        raise UserError(
            f"--service-discovery {kind}: not there; k8s follows pods, and "
            "--discovery-dns http://SERVICE:PORT a headless service"
        )
    if kind == "k8s" and _SELECTOR not in taken.given and _POOL not in taken.given:
        raise UserError("--service-discovery needs --selector (or --kubernetes-pool), else it has no pods to follow")


def backend(taken: Taken, values: list[str]) -> None:
    if values[-1] not in ("vllm", "auto"):
        raise UserError(f"--backend {values[-1]}: engines are vLLM servers")


def tracing(taken: Taken, values: list[str]) -> None:
    taken.set(("tracing", "enabled"), "true")


_LEVELS: Final = {"warn": "warning", "critical": "error", "trace": "debug"}


def log_level(taken: Taken, values: list[str]) -> None:
    taken.set(("logging", "level"), _LEVELS.get(values[-1], values[-1]))


def _url(worker: Any) -> str:
    return str(worker["url"] if isinstance(worker, dict) else worker).rstrip("/")


# ---- policies --------------------------------------------------------------------------------------------------------


class PolicyName(Struct, frozen=True):
    """`also`: another key that the name sets. `note`: what is different; None for the same."""

    ours: str
    note: str | None = None
    also: tuple[Path, str] | None = None

    def __str__(self) -> str:
        return self.ours if self.also is None else f"{self.ours} with {'.'.join(self.also[0])}: {self.also[1]}"


_STRICT: Final = (("scorer", "session_affinity"), "strict")
_REMOTE: Final = (("pd", "policy"), "always-remote")
_COST: Final = PolicyName("warmroute", "predicted cost, with what KV events say is cached")
_LEAST: Final = PolicyName("least-load", "fewest requests in flight, of all workers")
_STAYS: Final = "a session stays while its worker is up and not too busy"
POLICIES: Final = {
    "round_robin": PolicyName("round-robin"),
    "roundrobin": PolicyName("round-robin"),
    **dict.fromkeys(("cache_aware", "kv_aware", "kvaware", "prefixaware"), _COST),
    **dict.fromkeys(("power_of_two", "least_load", "least_request"), _LEAST),
    "sticky_least_loaded": PolicyName("least-load", _STAYS, _STRICT),
    "session": PolicyName("warmroute", f"{_STAYS}; others go by predicted cost", _STRICT),
    **dict.fromkeys(
        ("disaggregated_prefill", "disaggregated_prefill_orchestrated"),
        PolicyName("warmroute", "both workers are chosen by predicted cost", _REMOTE),
    ),
}
_KEEP_SESSIONS: Final = "to keep sessions together: --scorer-session-affinity strict"
NO_POLICIES: Final = {
    **dict.fromkeys(("consistent_hash", "consistent_hashing", "rendezvous_hash", "manual"), _KEEP_SESSIONS),
    "prefix_hash": "to go where a prefix is cached: --policy warmroute",
    "bucket": "prompts of every length are priced: --policy warmroute",
}


def policy(taken: Taken, values: list[str]) -> None:
    """Of `--policy` and `--routing-logic`. Our own names are taken as they are."""
    name = values[-1]
    if name in NO_POLICIES:
        raise UserError(f"policy {name} is not there; {NO_POLICIES[name]}")
    known = POLICIES.get(name, PolicyName(name))
    taken.given["scorer", "policy"] = known.ours
    if known.also is not None:
        taken.set(*known.also)
    if known.note is not None:
        taken.notes.append(f"policy {name} is {known} here: {known.note}")
