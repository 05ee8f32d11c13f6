"""Which of several replicas leads, by a Lease; the rules are those of Kubernetes' own clients.

Clocks of machines are not compared: a lease has run out when this process has seen it unchanged for as long as it says.
Who leads counts from the moment before its renewal was sent, and stops by itself before others may begin.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from gateway.discovery.kubernetes.api import Api, ApiError, Refused, Unreachable

_log = logging.getLogger(__name__)

_ABSENT: Final = 404
_CONFLICT: Final = 409
_FORBIDDEN: Final = 403
_JITTER: Final = 1.2


class LeaseTimers(msgspec.Struct, frozen=True, kw_only=True):
    """`lease_s`: how long others wait for a leader that says nothing. `renew_s`: after so long without a renewal the
    leader gives up. `retry_s`: between two attempts.
    """

    lease_s: int = 15
    renew_s: float = 10.0
    retry_s: float = 2.0


class _Spec(msgspec.Struct, rename="camel", omit_defaults=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Lease(msgspec.Struct):
    """`whole`: with everything that others keep in it."""

    spec: _Spec
    whole: dict[str, Any]


def lease_name(namespace: str, pool: str) -> str:
    """As llm-d's picker calls it, so that replicas of both could not lead at once."""
    return f"epp-{namespace}-{pool}.llm-d.ai"


def new_identity() -> str:
    """Of this process: a container that is restarted in the same pod is another one."""
    return f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4()}"


class Elector:
    """`start` campaigns in the running event loop until `close`, which lets another replica lead at once; both may be
    left out by who awaits `run` and `release`. `changed(leads)` is called when that changes.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        *,
        identity: str | None = None,
        changed: Callable[[bool], None] = lambda leads: None,
        timers: LeaseTimers | None = None,
        clock: Callable[[], float] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`clock`: monotonic seconds."""
        self.identity = identity or new_identity()
        self.leader: str | None = None
        """Who leads, as far as is known."""
        self.problem: str | None = None
        self._api = api
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._meta = {"name": name, "namespace": namespace}
        self._changed = changed
        self._timers = timers or LeaseTimers()
        self._clock = clock or _awake_or_not_s
        self._rng = rng or random.Random()  # noqa: S311 - spreads attempts, guards nothing
        self._seen: _Spec | None = None
        self._seen_s = 0.0
        """When the lease was first seen as it is."""
        self._renewed_s: float | None = None
        self._led = False
        self._task: asyncio.Task[None] | None = None

    @property
    def leads(self) -> bool:
        """Never true for longer than `renew_s` after the last renewal was sent, whatever else is stuck."""
        return self._renewed_s is not None and self._clock() - self._renewed_s < self._timers.renew_s

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self.run(), name="kubernetes lease")

    async def close(self) -> None:
        """The connection to the API too."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.release()
        await self._api.close()

    async def run(self) -> None:
        while True:
            try:
                await self._attempt()
            except Exception:
                _log.exception("unexpected; going on")
            self._tell()
            pause_s = self._timers.retry_s
            if self._renewed_s is None:
                pause_s *= self._rng.uniform(1.0, _JITTER)
            await self._sleep(pause_s)

    async def release(self) -> None:
        """Give the lease back, if it is ours; best effort."""
        led, self._renewed_s = self._renewed_s is not None, None
        self._tell()
        if not led:
            return
        try:
            found = await self._read()
            if found is not None and found.spec.holder_identity == self.identity:
                now = _now()
                await self._write(found, _Spec("", 1, now, now, found.spec.lease_transitions))
        except ApiError as exc:
            _log.info("the lease %s was not given back, it runs out: %s", self._meta["name"], exc)

    async def _sleep(self, pause_s: float) -> None:
        """`pause_s`, or until leading is over."""
        if self._renewed_s is not None:
            left_s = self._renewed_s + self._timers.renew_s - self._clock()
            if left_s < pause_s:
                await asyncio.sleep(max(0.0, left_s))
                pause_s -= max(0.0, left_s)
                self._tell()
        await asyncio.sleep(pause_s)

    def _tell(self) -> None:
        leads = self.leads
        if not leads:
            self._renewed_s = None
        if leads != self._led:
            self._led = leads
            _log.info("this replica %s (lease %s)", "leads" if leads else "leads no more", self._meta["name"])
            self._changed(leads)

    async def _attempt(self) -> None:
        began_s = self._clock()
        try:
            self._renewed_s = began_s if await self._acquire() else None
            self.problem = None
        except Refused as exc:
            if exc.status == _CONFLICT:
                return  # Somebody else wrote it; the next look shows who.
            self._failed(exc)
        except ApiError as exc:
            self._failed(exc)

    def _failed(self, exc: ApiError) -> None:
        problem = f"the lease {self._meta['name']} cannot be had: {exc}"
        if isinstance(exc, Refused) and exc.status == _FORBIDDEN:
            problem += "; give the service account get, create and update on leases (deploy/kubernetes/rbac.yaml)"
        if problem != self.problem:
            _log.warning("%s", problem)
            self.problem = problem

    async def _acquire(self) -> bool:
        """Whether the lease is ours now; False: another's. Raises ApiError where that is not known."""
        found = await self._read()
        if found is None:
            now = _now()
            self._note(await self._write(None, self._mine(now, now, 0)))
            return True
        self._note(found)
        spec = found.spec
        ours = spec.holder_identity == self.identity
        if spec.holder_identity and not ours and not self._has_run_out(spec):
            return False
        transitions = spec.lease_transitions or 0
        acquired = (spec.acquire_time or _now()) if ours else _now()
        mine = self._mine(acquired, _now(), transitions if ours else transitions + 1)
        self._note(await self._write(found, mine))
        return True

    def _has_run_out(self, spec: _Spec) -> bool:
        lease_s = max(self._timers.lease_s, spec.lease_duration_seconds or 0)
        return self._clock() >= self._seen_s + lease_s

    def _note(self, found: _Lease) -> None:
        self.leader = found.spec.holder_identity or None
        if found.spec != self._seen:
            self._seen, self._seen_s = found.spec, self._clock()

    def _mine(self, acquired: str, renewed: str, transitions: int) -> _Spec:
        return _Spec(self.identity, self._timers.lease_s, acquired, renewed, transitions)

    async def _read(self) -> _Lease | None:
        try:
            answer = await self._api.send("GET", f"{self._path}/{self._meta['name']}", timeout_s=self._answer_s)
        except Refused as exc:
            if exc.status == _ABSENT:
                return None
            raise
        return _decoded(answer)

    async def _write(self, over: _Lease | None, spec: _Spec) -> _Lease:
        """Refused (409) when somebody wrote since `over` was read."""
        told = msgspec.to_builtins(spec)
        if over is None:
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": self._meta, "spec": told}
            return _decoded(await self._api.send("POST", self._path, body=body, timeout_s=self._answer_s))
        body = over.whole | {"spec": (over.whole.get("spec") or {}) | told}
        path = f"{self._path}/{self._meta['name']}"
        return _decoded(await self._api.send("PUT", path, body=body, timeout_s=self._answer_s))

    @property
    def _answer_s(self) -> float:
        return self._timers.renew_s / 4


def _decoded(answer: bytes) -> _Lease:
    try:
        whole = msgspec.json.decode(answer, type=dict[str, Any])
        return _Lease(msgspec.convert(whole.get("spec") or {}, _Spec), whole)
    except msgspec.MsgspecError as exc:
        raise Unreachable(f"the lease cannot be read: {exc}") from None


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _awake_or_not_s() -> float:
    """Monotonic seconds, those of a suspended machine too: others do not wait for it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
