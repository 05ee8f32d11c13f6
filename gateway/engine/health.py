"""Which workers may be chosen: a pure state machine per worker, from what requests to it met.

    HEALTHY --faults--> EJECTED --back-off over--> HALF_OPEN --probe answered--> HEALTHY
                           ^                          |
                           +------ probe failed ------+   (and the back-off doubles, up to its bound)

Faults are refused or broken connections, 5xx, and a stall: work in hand and not a byte for `eject_after_s`, beyond the
silence that the request was announced with (`quiet_s`: a long prompt, or an answer that is not streamed, is silent for
as long as it is predicted to take). A 4xx is the client's fault and shows that the worker lives; a client that leaves
shows nothing.

Two rules keep a fleet alive. A worker is ejected only if another one of its group did answer after this one's trouble
began: when all fail together the cause is shared (the network, this gateway, one poisonous request), and ejecting
anybody would only add to it. It follows that the last healthy worker stays. And time in which nobody looked (a tick
that comes late) is not held against anyone.

Requests are tickets, bound to the worker's object rather than its name: when a worker was removed and came back, the
old one's requests end without touching the new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from enum import Enum

import msgspec


class End(Enum):
    """How a request to a worker ended."""

    OK = "ok"
    CLIENT_ERROR = "4xx"
    CANCELLED = "cancelled"
    CONNECT = "connect error"
    RESET = "connection reset"
    SERVER_ERROR = "5xx"
    TIMEOUT = "timeout"


class State(Enum):
    HEALTHY = "healthy"
    EJECTED = "ejected"
    HALF_OPEN = "half open"


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`eject_after_s` is both the silence that is a stall and the window faults are counted in.

    Ejected is who had `faults` of them in it, and at least half of its requests, or `connect_faults` that could not
    even connect. The back-off starts at `backoff_min_s` and returns to it after `forgive_after_s` without a fault.
    `max_tick_gap_s` is the longest time between ticks that counts as having looked.
    """

    eject_after_s: float = 3.0
    faults: int = 3
    connect_faults: int = 2
    backoff_min_s: float = 1.0
    backoff_max_s: float = 30.0
    forgive_after_s: float = 60.0
    max_tick_gap_s: float = 1.0


class HealthChange(msgspec.Struct, frozen=True):
    worker: str
    state: State
    reason: str


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """`suspicion` is a reason to eject that was not acted on, because nobody else answers either."""

    state: State
    reason: str
    since_s: float
    in_flight: int
    ejections: int
    backoff_s: float
    suspicion: str | None


class Ticket:
    """One request in flight. `due_s` is when its silence becomes a stall; `quiet_s` of that was expected."""

    __slots__ = ("due_s", "is_probe", "quiet_s", "worker")

    def __init__(self, worker: _Worker, due_s: float, quiet_s: float, is_probe: bool) -> None:
        self.worker = worker
        self.due_s = due_s
        self.quiet_s = quiet_s
        self.is_probe = is_probe

    def stalls_s(self) -> float:
        """`due_s`, without the expected silence while the engine does not answer anything else either."""
        return self.due_s - self.quiet_s if self.worker.is_late else self.due_s


class _Worker:
    def __init__(self, name: str, group: Hashable, now_s: float, settings: HealthSettings) -> None:
        self.name = name
        self.group = group
        self.state = State.HEALTHY
        self.reason = "new"
        self.since_s = now_s
        self.ejected_for: End | None = None
        """None while ejected: for a stall."""
        self.ejected_s = 0.0
        self.tickets: set[Ticket] = set()
        self.probe: Ticket | None = None
        self.outcomes_s: deque[float] = deque()
        """When requests ended, and below those of them that were faults; in the window that faults are counted in."""
        self.faults: deque[tuple[float, End]] = deque()
        self.heard_s: float | None = None
        """Of its engine: answers, and progress of its counters."""
        self.alive_s: float | None = None
        """Of anything of it, its HTTP server included."""
        self.success_s: float | None = None
        self.fault_s: float | None = None
        self.unreachable_s: float | None = None
        self.backoff_s = settings.backoff_min_s
        self.ejections = 0
        self.is_late = False
        """It owes the answer to something that a working engine answers at once."""
        self.pace = 1.0
        self.suspicion: str | None = None


_FAULTS = frozenset({End.CONNECT, End.RESET, End.SERVER_ERROR, End.TIMEOUT})
_UNREACHABLE = frozenset({End.CONNECT, End.RESET})
_UNREACHED = "cannot be reached"


class Health:
    """Workers of one `group` can stand in for each other. All times are monotonic seconds."""

    def __init__(self, settings: HealthSettings | None = None) -> None:
        self.settings = settings or HealthSettings()
        self._workers: dict[str, _Worker] = {}
        self._changes: list[HealthChange] = []
        self._last_tick_s: float | None = None

    # ---- the fleet --------------------------------------------------------------------------------------------------

    def add(self, name: str, now_s: float, group: Hashable = None) -> None:
        """A worker starts healthy. Adding a known one only moves it to `group`."""
        if name in self._workers:
            self._workers[name].group = group
        else:
            self._workers[name] = _Worker(name, group, now_s, self.settings)

    def remove(self, name: str) -> None:
        self._workers.pop(name, None)

    def restarted(self, name: str, now_s: float) -> None:
        """It is a new process: what the old one did is no longer held against it."""
        worker = self._workers.get(name)
        if worker is not None:
            self._clean(worker, now_s)
            if worker.state is not State.HEALTHY:
                self._move(worker, State.HEALTHY, "restarted", now_s)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def request_started(self, name: str, now_s: float, quiet_s: float = 0.0) -> Ticket:
        """A request goes to `name`, from which nothing is expected before `quiet_s`. Every ticket must be ended."""
        worker = self._workers.get(name) or _Worker(name, None, now_s, self.settings)
        is_probe = worker.state is State.HALF_OPEN and worker.probe is None
        quiet_s *= worker.pace
        ticket = Ticket(worker, now_s + quiet_s + self.settings.eject_after_s, quiet_s, is_probe)
        worker.tickets.add(ticket)
        if is_probe:
            worker.probe = ticket
        return ticket

    def byte_received(self, ticket: Ticket, now_s: float) -> None:
        """Part of a good answer came."""
        worker = ticket.worker
        ticket.due_s, ticket.quiet_s = now_s + self.settings.eject_after_s, 0.0
        worker.success_s = now_s
        self._heard(worker, now_s)
        if ticket.is_probe or worker.ejected_for is None:
            self._recover(worker, "answers again", now_s)

    def request_ended(self, ticket: Ticket, end: End, now_s: float) -> None:
        """Ending a ticket twice does nothing."""
        worker = ticket.worker
        if ticket not in worker.tickets:
            return
        worker.tickets.remove(ticket)
        was_probe = ticket.is_probe
        self._probe_over(ticket)
        if end is End.CANCELLED:
            return
        if end in _FAULTS:
            self._fault(worker, end, now_s, was_probe)
            return
        self._heard(worker, now_s)
        if end is End.OK:
            worker.success_s = now_s
            self._note(worker, end, now_s)
        if was_probe and (end is End.OK or worker.ejected_for is not End.SERVER_ERROR):
            self._recover(worker, "answers again", now_s)

    def checked(self, name: str, is_ok: bool, now_s: float, began_s: float | None = None) -> None:
        """Something besides requests looked at `name`: its `/health`, or the scrape of its metrics. Not `is_ok`: it
        cannot be reached, for certain (one late answer is none); a look that began before the worker's last answer,
        at `began_s`, says nothing of it as it is now.

        A good answer ends an ejection for broken connections, once the back-off is over. It does not end one for 5xx
        or a stall: an engine core can hang or fail behind an HTTP server that is well.
        """
        worker = self._workers.get(name)
        if worker is None:
            return
        if is_ok:
            worker.alive_s = now_s
            worker.unreachable_s = None
            if worker.state is State.HALF_OPEN and worker.ejected_for in _UNREACHABLE:
                self._recover(worker, "reachable again", now_s)
            return
        if began_s is not None and worker.alive_s is not None and began_s < worker.alive_s:
            return
        if worker.unreachable_s is None:
            worker.unreachable_s = now_s
        if worker.state is State.HEALTHY:
            self._judge(worker, now_s)
        elif worker.state is State.HALF_OPEN and worker.probe is None:
            worker.ejected_for = End.CONNECT
            self._move(worker, State.EJECTED, _UNREACHED, now_s)

    def progressed(self, name: str, now_s: float) -> None:
        """The engine's own counters moved: it works, however silent it is towards us."""
        worker = self._workers.get(name)
        if worker is not None:
            self._heard(worker, now_s)

    def late(self, name: str, is_late: bool) -> None:
        """Whether the scrape of its metrics is overdue: then no announced silence explains its own."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.is_late = is_late

    def paced(self, name: str, pace: float) -> None:
        """It takes `pace` times as long as is predicted for it; what is announced from now on is stretched by that.
        Raises ValueError below 1.
        """
        if not pace >= 1:
            raise ValueError(f"a pace below 1: {pace}")
        worker = self._workers.get(name)
        if worker is not None:
            worker.pace = pace

    # ---- time -------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[HealthChange]:
        """Look for stalls and let back-offs end; call it a few times a second. Returns what changed since the last."""
        gap_s = 0.0 if self._last_tick_s is None else now_s - self._last_tick_s
        self._last_tick_s = now_s
        unseen_s = gap_s if gap_s > self.settings.max_tick_gap_s else 0.0
        if unseen_s:
            self._forget_time(unseen_s, now_s)
        healthy_groups = {worker.group for worker in self._workers.values() if worker.state is State.HEALTHY}
        for worker in self._workers.values():
            if worker.state is State.EJECTED and worker.group not in healthy_groups:
                self._move(worker, State.HALF_OPEN, f"nobody else is left ({worker.reason})", now_s)
            elif worker.state is State.EJECTED and now_s >= worker.since_s + worker.backoff_s:
                self._move(worker, State.HALF_OPEN, f"back-off over ({worker.reason})", now_s)
            elif worker.state is State.HALF_OPEN and worker.probe is not None and worker.probe.stalls_s() <= now_s:
                self._eject(worker, "a probe stalled", None, now_s)
            elif worker.state is State.HEALTHY:
                self._judge(worker, now_s)
        changes, self._changes = self._changes, []
        return changes

    def available(self, name: str) -> bool:
        """Whether a request may go there now. Half open admits one at a time; a worker not known is not judged."""
        worker = self._workers.get(name)
        if worker is None or worker.state is State.HEALTHY:
            return True
        return worker.state is State.HALF_OPEN and worker.probe is None

    def works(self, name: str) -> bool:
        """Whether it has shown since it was ejected that it works, as it does to others: a request that nobody else can
        serve need not wait for the end of its back-off. What ended the ejection would show it: connections, or its
        engine's progress.
        """
        worker = self._workers.get(name)
        if worker is None or worker.state is State.HEALTHY:
            return True
        shown_s = worker.alive_s if worker.ejected_for in _UNREACHABLE else worker.heard_s
        return shown_s is not None and shown_s > worker.ejected_s

    def state(self, name: str) -> WorkerHealth:
        """Raises KeyError for a worker not known."""
        worker = self._workers[name]
        return WorkerHealth(
            state=worker.state,
            reason=worker.reason,
            since_s=worker.since_s,
            in_flight=len(worker.tickets),
            ejections=worker.ejections,
            backoff_s=worker.backoff_s,
            suspicion=worker.suspicion,
        )

    # ---- rules ------------------------------------------------------------------------------------------------------

    def _heard(self, worker: _Worker, now_s: float) -> None:
        worker.heard_s = worker.alive_s = now_s
        worker.unreachable_s = None

    def _forget_time(self, unseen_s: float, now_s: float) -> None:
        for worker in self._workers.values():
            if worker.heard_s is not None:
                worker.heard_s = min(now_s, worker.heard_s + unseen_s)
            for ticket in worker.tickets:
                ticket.due_s += unseen_s

    def _note(self, worker: _Worker, end: End, now_s: float) -> None:
        worker.outcomes_s.append(now_s)
        if end in _FAULTS:
            worker.faults.append((now_s, end))
        self._forget_old(worker, now_s)

    def _forget_old(self, worker: _Worker, now_s: float) -> None:
        outcomes_s, faults, since_s = worker.outcomes_s, worker.faults, now_s - self.settings.eject_after_s
        while outcomes_s and outcomes_s[0] < since_s:
            outcomes_s.popleft()
        while faults and faults[0][0] < since_s:
            faults.popleft()

    def _fault(self, worker: _Worker, end: End, now_s: float, was_probe: bool) -> None:
        self._note(worker, end, now_s)
        worker.fault_s = now_s
        if was_probe:
            self._eject(worker, f"a probe met a {end.value}", end, now_s)
        elif worker.state is State.HEALTHY:
            self._judge(worker, now_s)

    def _judge(self, worker: _Worker, now_s: float) -> None:
        trouble = self._stalled(worker, now_s) or self._failing(worker, now_s) or self._unreached(worker)
        if trouble is None:
            worker.suspicion = None
            return
        since_s, end, reason = trouble
        if self._others_answer(worker, since_s, end, now_s):
            self._eject(worker, reason, end, now_s)
        else:
            worker.suspicion = reason

    def _stalled(self, worker: _Worker, now_s: float) -> tuple[float, End | None, str] | None:
        patience_s = self.settings.eject_after_s
        if not worker.tickets or (worker.heard_s is not None and now_s < worker.heard_s + patience_s):
            return None
        due_s = min(ticket.stalls_s() for ticket in worker.tickets)
        if due_s > now_s:
            return None
        began_s = max(due_s - patience_s, worker.heard_s or 0.0)
        return began_s, None, f"not a byte for {patience_s:g} s with {len(worker.tickets)} requests in hand"

    def _unreached(self, worker: _Worker) -> tuple[float, End, str] | None:
        return None if worker.unreachable_s is None else (worker.unreachable_s, End.CONNECT, _UNREACHED)

    def _failing(self, worker: _Worker, now_s: float) -> tuple[float, End, str] | None:
        self._forget_old(worker, now_s)
        faults, n_recent = worker.faults, len(worker.outcomes_s)
        if not faults or 2 * len(faults) < n_recent:
            return None
        unconnected = sum(end is End.CONNECT for _, end in faults)
        if len(faults) < self.settings.faults and unconnected < self.settings.connect_faults:
            return None
        last = faults[-1][1]
        return faults[0][0], last, f"{len(faults)} of {n_recent} requests failed ({last.value})"

    def _others_answer(self, worker: _Worker, since_s: float, end: End | None, now_s: float) -> bool:
        """Whether another healthy worker of the group is well since `since_s`."""
        if end is None:  # silence begins at everybody's own last word, so a shared stall shows only in the later half
            since_s = max(since_s, now_s - self.settings.eject_after_s / 2)
        for other in self._workers.values():
            if other is worker or other.group != worker.group or other.state is not State.HEALTHY:
                continue
            if end in _UNREACHABLE:
                well_s = other.alive_s
            elif end is None:  # a stall: who has nothing to do need not speak
                well_s = other.heard_s if other.tickets else other.alive_s
            else:  # may be the request's own doing, so only real answers count
                well_s = other.success_s
            if well_s is not None and well_s >= since_s and (other.fault_s is None or other.fault_s <= well_s):
                return True
        return False

    def _eject(self, worker: _Worker, reason: str, end: End | None, now_s: float) -> None:
        if worker.state is State.HALF_OPEN or (
            worker.ejections and now_s - worker.since_s < self.settings.forgive_after_s
        ):
            worker.backoff_s = min(2 * worker.backoff_s, self.settings.backoff_max_s)
        else:
            worker.backoff_s = self.settings.backoff_min_s
        worker.ejections += 1
        worker.ejected_for = end
        worker.suspicion = None
        self._move(worker, State.EJECTED, reason, now_s)

    def _recover(self, worker: _Worker, reason: str, now_s: float) -> None:
        if worker.state is State.HALF_OPEN:
            self._clean(worker, now_s)
            self._move(worker, State.HEALTHY, reason, now_s)

    def _clean(self, worker: _Worker, now_s: float) -> None:
        worker.outcomes_s.clear()
        worker.faults.clear()
        worker.fault_s = worker.unreachable_s = worker.suspicion = None
        for ticket in worker.tickets:
            ticket.due_s = max(ticket.due_s, now_s + ticket.quiet_s + self.settings.eject_after_s)

    def _probe_over(self, ticket: Ticket) -> None:
        if ticket.is_probe:
            ticket.is_probe = False
            ticket.worker.probe = None

    def _move(self, worker: _Worker, state: State, reason: str, now_s: float) -> None:
        if worker.probe is not None:
            self._probe_over(worker.probe)
        worker.state = state
        if state is State.EJECTED:
            worker.ejected_s = now_s
        worker.reason = reason
        worker.since_s = now_s
        if self._workers.get(worker.name) is worker:
            self._changes.append(HealthChange(worker.name, state, reason))
