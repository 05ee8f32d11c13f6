"""Control headers of who stands in front of us (llm-d's picker, ours) -> `Hints`.

x-prefiller-host-port        prefill workers to try, in this order         x-data-parallel-rank, -host-port   the engine
x-kv-cache-source-host-port  who holds the prompt's beginning              x-warmroute-plan                   all of it

Where llm-d takes the first prefill target and fails with it, the others are kept as the next to try. None of these
headers goes on to an engine (`gateway.proxy.headers`).
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Collection
from copy import copy
from typing import Literal, NoReturn

import msgspec
from prometheus_client import CollectorRegistry, Counter

from gateway.proxy.errors import ApiError
from gateway.proxy.headers import KV_SOURCE_HEADER as KV_SOURCE
from gateway.proxy.headers import PLAN_HEADER as PLAN
from gateway.proxy.headers import PREFILLER_HEADER as PREFILLER
from gateway.proxy.headers import RANK_ENDPOINT_HEADER as RANK_ENDPOINT
from gateway.proxy.headers import RANK_HEADER
from gateway.proxy.incoming import Sender
from gateway.sidecar.endpoint import Endpoint, parse_endpoint
from gateway.sidecar.pod import Pod
from gateway.sidecar.targets import Refusal, Targets

_log = logging.getLogger(__name__)
RANK = RANK_HEADER.lower()

Ranks = Callable[[str], Collection[int] | None]

_OUTCOMES = {
    PREFILLER: ("used", "denied", "full", "itself", "malformed", "surplus"),
    RANK: ("used", "malformed", "out_of_range", "unknown"),
    RANK_ENDPOINT: ("used", "malformed", "not_here"),
    KV_SOURCE: ("used", "denied", "full", "itself", "malformed", "surplus"),
    PLAN: ("used", "malformed"),
}
_NOTES = {
    "new": "a worker that is not known yet; a request would add it, and nothing is known that could be priced",
    "denied": "a worker that is not allowed: see pd.allow",
    "full": "one worker more than may be added by hints",
    "itself": "this pod itself, which is what local means",
    "malformed": "it cannot be read",
    "surplus": "more values than are used",
    "unknown": "its engine does not say what ranks it has",
}
_MOST_TARGETS = 16
_LONGEST_SHOWN = 128
_LONGEST_PLAN = 512
_PLAN_VERSION = "v1"
_PLAN_ID = re.compile(r"[!-:<-~]{1,128}")
_NUMBER = re.compile(r"[0-9]{1,10}")
_PLAN_NUMBERS = ("n", "hd", "hp")


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody in front of us has settled already.

    prefill: names of prefill workers, the first to be tried first. rank: of an engine that has several behind one port.
    decode: the only workers that may decode. choice: whether the prompt is computed here or elsewhere. kv_source: the
    name of the worker that is to be asked for what it holds of the prompt.
    """

    prefill: tuple[str, ...] = ()
    rank: int | None = None
    decode: frozenset[str] | None = None
    choice: Literal["local", "remote"] | None = None
    plan_id: str | None = None
    kv_source: str | None = None


NO_HINTS = Hints()


def no_hints(request: Sender) -> Hints:
    """For a face whose clients have no say."""
    return NO_HINTS


class HintReader:
    """`pod` None: there is no pod to choose an engine in (the gateway), and only the other headers are read. `ranks`:
    those of an engine that has several behind its one port; None: it does not say, and a rank is left to itself.
    """

    def __init__(
        self,
        targets: Targets,
        registry: CollectorRegistry,
        rng: random.Random,
        *,
        pod: Pod | None = None,
        ranks: Ranks = lambda engine: None,
        sampling: bool = False,
    ) -> None:
        self._targets = targets
        self._ranks = ranks
        self._rng = rng
        self._pod = pod
        self._sampling = sampling
        self._notes: list[str] | None = None
        """Where nothing is to be changed: what a request would do."""
        self._pinned = [frozenset({name}) for name in ([] if pod is None else pod.names)]
        self._counter = Counter(
            "warmroute_hints", "Values of control headers, by what became of them.", ("header", "outcome"),
            registry=registry,
        )  # fmt: skip
        for header, outcomes in _OUTCOMES.items():
            for outcome in outcomes:
                self._counter.labels(header, outcome)

    def look(self, request: Sender) -> tuple[Hints, list[str]]:
        """What `read` would make of it, and what else it would do; but nothing is counted, and no worker added."""
        looking = copy(self)
        notes = looking._notes = []
        return looking.read(request), notes

    def read(self, request: Sender) -> Hints:
        """Raises ApiError: 403 for prefill targets that are not allowed, 400 for what cannot be read."""
        choice, plan_id = self._plan(request)
        prefill, only_itself = self._prefill(request)
        if only_itself:
            choice = "local"  # A prefill here, with the blocks here, is what local means.
        decode, rank = (None, None) if self._pod is None else self._decode(request, self._pod)
        return Hints(
            prefill=prefill,
            rank=rank,
            decode=decode,
            choice=choice,
            plan_id=plan_id,
            kv_source=self._kv_source(request),
        )

    # ---- x-prefiller-host-port ---------------------------------------------------------------------------------------

    def _prefill(self, request: Sender) -> tuple[tuple[str, ...], bool]:
        """Names of the workers, and whether this pod itself was the only one named."""
        values = _values(request, PREFILLER)
        if not values:
            return (), False
        if len(values) > _MOST_TARGETS:
            self._count(PREFILLER, "surplus", len(values) - _MOST_TARGETS)
        names: list[str] = []
        outcomes: set[str] = set()
        for value in values[:_MOST_TARGETS]:
            outcome, name = self._target(value, request)
            outcomes.add(outcome)
            self._count(PREFILLER, outcome)
            if name is not None and name not in names:
                names.append(name)
        if not names and "denied" in outcomes:
            _log.warning("prefill target %a is not allowed: see pd.allow", values[0][:_LONGEST_SHOWN])
            raise ApiError(
                403,
                "The prefill target is not allowed: it is no known prefill worker, and pd.allow does not cover it.",
                code="prefill_target_denied",
            )
        if not names and "malformed" in outcomes:
            _refuse(PREFILLER, "host:port or [IPv6]:port")
        if self._sampling and len(names) > 1:
            names.insert(0, names.pop(self._rng.randrange(len(names))))
        return tuple(names), outcomes == {"itself"}

    def _target(self, value: str, request: Sender) -> tuple[str, str | None]:
        endpoint = _endpoint(value)
        if endpoint is None:
            return "malformed", None
        if self._pod is not None and self._pod.is_self(endpoint, request):
            return "itself", None
        admitted = self._targets.admit(endpoint, look=self._notes is not None)
        return (admitted.value, None) if isinstance(admitted, Refusal) else ("used", admitted)

    # ---- x-data-parallel-* -------------------------------------------------------------------------------------------

    def _decode(self, request: Sender, pod: Pod) -> tuple[frozenset[str], int | None]:
        """The engine, and the rank within it if it has several behind its one port."""
        at = self._rank_endpoint(request, pod)
        if (value := _only(request, RANK)) is None:
            return self._pinned[pod.rank_here(request) if at is None else at], None
        if not _NUMBER.fullmatch(value):
            self._count(RANK, "malformed")
            _refuse(RANK, "the number of a rank")
        rank, several = int(value), len(pod.names) > 1
        ranks = range(len(pod.names)) if several else self._ranks(pod.names[0])
        if ranks is None:
            self._count(RANK, "unknown")
            return self._pinned[0], None
        if rank not in ranks or (several and at is not None and at != rank):
            self._count(RANK, "out_of_range")
            _refuse(RANK, f"a rank from 0 to {max(ranks)}, the same as in {RANK_ENDPOINT} where both are given")
        self._count(RANK, "used")
        return (self._pinned[rank], None) if several else (self._pinned[0], rank)

    def _rank_endpoint(self, request: Sender, pod: Pod) -> int | None:
        """Deprecated by llm-d in favour of the rank itself."""
        value = _only(request, RANK_ENDPOINT)
        if value is None:
            return None
        endpoint = _endpoint(value)
        rank = None if endpoint is None else pod.rank_of(endpoint, request)
        if rank is None:
            self._count(RANK_ENDPOINT, "malformed" if endpoint is None else "not_here")
            _refuse(RANK_ENDPOINT, "host:port of a data-parallel rank of this pod")
        self._count(RANK_ENDPOINT, "used")
        return rank

    # ---- the others --------------------------------------------------------------------------------------------------

    def _kv_source(self, request: Sender) -> str | None:
        """Advice only: what cannot be used is left out. One of several is taken: the first."""
        values = _values(request, KV_SOURCE)
        if not values:
            return None
        if len(values) > 1:
            self._count(KV_SOURCE, "surplus", len(values) - 1)
        outcome, source = self._source(values[0], request)
        self._count(KV_SOURCE, outcome)
        return source

    def _source(self, value: str, request: Sender) -> tuple[str, str | None]:
        """In a pod like ours, which is named by its sidecar's listener, it is the engine that is asked: who may be
        named is who is connected to.
        """
        endpoint = _endpoint(value)
        if endpoint is None:
            return "malformed", None
        if self._pod is not None and self._pod.is_self(endpoint, request):
            return "itself", None
        if self._pod is not None and not self._targets.knows(endpoint):
            endpoint = self._pod.engine_behind(endpoint)
        source = self._targets.source(endpoint, add=self._pod is not None, look=self._notes is not None)
        return (source.value, None) if isinstance(source, Refusal) else ("used", source)

    def _plan(self, request: Sender) -> tuple[Literal["local", "remote"] | None, str | None]:
        values = [value for value in request.headers.getall(PLAN, ()) if value.strip()]
        if not values:
            return None, None
        plan = read_plan(values[0]) if len(values) == 1 else None
        self._count(PLAN, "malformed" if plan is None else "used")
        return (None, None) if plan is None else plan

    def _count(self, header: str, outcome: str, n: int = 1) -> None:
        if self._notes is None:
            self._counter.labels(header, outcome).inc(n)
        elif (note := _NOTES.get(outcome)) is not None:
            self._notes.append(f"{header}: {note}")


def read_plan(value: str) -> tuple[Literal["local", "remote"], str] | None:
    """(choice, id) of `v1;id=..;choice=local|remote;n=..;hd=..;hp=..`; None if it is not one. Keys we do not know are
    left alone, for later writers.
    """
    version, *parts = (part.strip() for part in value.split(";"))
    if version != _PLAN_VERSION or len(value) > _LONGEST_PLAN:
        return None
    pairs = [part.partition("=") for part in parts if part]
    fields = {key: text for key, _, text in pairs}
    if len(fields) < len(pairs) or not all(equals for _, equals, _ in pairs):
        return None
    if not all(_NUMBER.fullmatch(fields[key]) for key in _PLAN_NUMBERS if key in fields):
        return None
    plan_id = fields.get("id", "")
    if not _PLAN_ID.fullmatch(plan_id):
        return None
    match fields.get("choice"):
        case "local":
            return "local", plan_id
        case "remote":
            return "remote", plan_id
    return None


def _values(request: Sender, header: str) -> list[str]:
    """Of all its lines, each of which may be a list."""
    if header not in request.headers:
        return []
    parts = (part.strip() for value in request.headers.getall(header, []) for part in value.split(","))
    return list(dict.fromkeys(filter(None, parts)))


def _only(request: Sender, header: str) -> str | None:
    values = _values(request, header)
    if len(values) > 1:
        _refuse(header, "one value")
    return values[0] if values else None


def _endpoint(value: str) -> Endpoint | None:
    try:
        return parse_endpoint(value)
    except ValueError:
        return None


def _refuse(header: str, expected: str) -> NoReturn:
    raise ApiError(400, f"The header {header} must be {expected}.", code="invalid_header", param=header)
