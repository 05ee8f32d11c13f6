"""One SUB socket: connected to one engine's publisher, or bound for one or many engines to connect to.

ZeroMQ reconnects by itself; its monitor tells when. A handshake is acted on only after the messages that were queued
before it have been read, so that what an old process said last never mixes with what a new one says first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from gateway.addresses import check_connected, check_endpoint
from gateway.engine.feed import IngestSettings
from gateway.engine.refusal import RefusalProbe
from gateway.engine.turns import Inbox, Socket, Turns

log = logging.getLogger(__name__)

State = Literal["closed", "connecting", "listening", "connected", "disconnected", "refused", "failed"]

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 2_000
_MAX_MESSAGE_BYTES = 256 << 20
# A host that vanished without a word is noticed after idle + count * interval = 25 s.
_KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 10, zmq.TCP_KEEPALIVE_INTVL: 5, zmq.TCP_KEEPALIVE_CNT: 3}
_LISTEN_AFTER_S = 0.25
_MESSAGES_BEFORE_GREETING = 4096
_MESSAGES_AT_MOST = 100_000
"""Read before a close; who tells more than that meanwhile is told to another."""


class Owner(Protocol):
    """Whom a source reports to."""

    def message(self, source: Source, frames: list[bytes]) -> None: ...

    def greeted(self, source: Source) -> None:
        """A connection is up, for the first time or again."""

    def refused(self, source: Source) -> None:
        """The engine it was connected to listens no more."""


class Source:
    """`worker` and `rank` are what it was declared for; a shared one, which tells engines by topic, has neither."""

    def __init__(
        self,
        owner: Owner,
        endpoint: str,
        *,
        bind: bool,
        worker: str | None = None,
        rank: int | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.bind = bind
        self.worker = worker
        self.rank = rank
        self.state: State = "closed"
        self.connects = 0
        self.disconnects = 0
        self.failed_handshakes = 0
        self.error: str | None = None
        self._owner = owner
        self._inbox: Inbox | None = None
        self._monitor: Inbox | None = None
        self._probe: RefusalProbe | None = None
        self._greeting: int | None = None

    @property
    def is_up(self) -> bool:
        """Whether asking the engine anything makes sense. A bound socket cannot tell."""
        return self.state in ("connected", "listening")

    def open(self, context: zmq.Context[zmq.Socket[bytes]], turns: Turns, settings: IngestSettings) -> None:
        """Connect or bind; tries again later if it cannot."""
        self._turns = turns
        self._reopen: Callable[[], None] = lambda: self.open(context, turns, settings)
        # Who listened there before may only just be going.
        self._reopen_after_s = min(_LISTEN_AFTER_S, settings.reopen_after_s) if self.bind else settings.reopen_after_s
        self._anywhere = self.bind or settings.link_local
        sub: Socket | None = None
        try:
            sub = context.socket(zmq.SUB)
            options = {
                zmq.LINGER: 0,
                zmq.IPV6: 1,
                zmq.RECONNECT_IVL: _RECONNECT_MS,
                zmq.RECONNECT_IVL_MAX: _RECONNECT_MAX_MS,
                zmq.CONNECT_TIMEOUT: int(settings.connect_timeout_s * 1000),
                zmq.MAXMSGSIZE: _MAX_MESSAGE_BYTES,
                **_KEEPALIVE,
            }
            for option, value in options.items():
                sub.setsockopt(option, value)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            monitor: Socket = sub.get_monitor_socket(_EVENTS)
            self._monitor = Inbox(monitor, self._happened, self._broke)
            if self.bind:
                sub.bind(self.endpoint)
            else:
                if not self._anywhere:
                    check_endpoint(self.endpoint)
                sub.connect(self.endpoint)
            self._inbox = Inbox(sub, self._message, self._broke, self._drained)
            turns.watch(self._monitor)
            turns.watch(self._inbox)
        except (zmq.ZMQError, OSError, ValueError, KeyError) as error:
            self._shut(sub)
            self._fail(error)
            return
        self.state = "listening" if self.bind else "connecting"
        self.error = None

    def close(self) -> None:
        self._shut(self._inbox.socket if self._inbox is not None else None)
        self.state = "closed"
        self._reopen = lambda: None

    def read_all(self) -> None:
        """What has arrived, before it is closed."""
        if self._inbox is None or self._inbox.is_closed:
            return
        with suppress(zmq.ZMQError):  # zmq.Again: nothing is left.
            for _ in range(_MESSAGES_AT_MOST):
                self._owner.message(self, self._inbox.socket.recv_multipart(zmq.NOBLOCK))

    def _shut(self, sub: Socket | None) -> None:
        self._greeting = None
        if self._probe is not None:
            self._probe.close()
        if sub is not None and self._monitor is not None and not sub.closed:
            sub.disable_monitor()
        for inbox in (self._inbox, self._monitor):
            if inbox is not None and not inbox.is_closed:
                self._turns.close(inbox)
        if sub is not None and not sub.closed:
            sub.close(linger=0)
        self._inbox = self._monitor = None

    def _fail(self, error: Exception) -> None:
        self.state = "failed"
        if self.error != str(error):
            self.error = str(error)
            log.warning("KV events of %s at %s cannot be read: %s", self.worker or "all", self.endpoint, error)
        self._turns.after(self._reopen_after_s, self._reopen_if_failed)

    def _reopen_if_failed(self) -> None:
        if self.state == "failed":
            self._reopen()

    def _broke(self, error: Exception) -> None:
        self._shut(self._inbox.socket if self._inbox is not None else None)
        self._fail(error)

    # ---- what the sockets say ---------------------------------------------------------------------------------------

    def _message(self, frames: list[bytes]) -> None:
        if self._greeting is not None:
            self._greeting -= 1
            if self._greeting <= 0:
                self._drained()
        self._owner.message(self, frames)

    def _drained(self) -> None:
        if self._greeting is not None:
            self._greeting = None
            self._owner.greeted(self)

    def _happened(self, frames: list[bytes]) -> None:
        seen = parse_monitor_message(frames)
        event = seen["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connects += 1
            self.state = self.state if self.bind else "connected"
            self._greeting = _MESSAGES_BEFORE_GREETING
            if self._inbox is not None:
                self._turns.touch(self._inbox)
        elif event == zmq.EVENT_CONNECTED:
            self._check_peer(seen["value"])
        elif event == zmq.EVENT_DISCONNECTED:
            self.disconnects += 1
            self.state = self.state if self.bind else "disconnected"
        elif event == zmq.EVENT_CLOSED:
            if self.state == "disconnected" and (self._probe is None or self._probe.is_over):
                self._probe = RefusalProbe(self._turns, seen["endpoint"].decode(errors="replace"), self._was_refused)
        else:
            self.failed_handshakes += 1

    def _check_peer(self, fd: int) -> None:
        """ZeroMQ resolves names itself, so that where one has led is known afterwards only."""
        if self._anywhere:
            return
        try:
            check_connected(fd)
        except OSError as error:
            wrong = error
            self._turns.after(0.0, lambda: self._broke(wrong))

    def _was_refused(self) -> None:
        if self.state == "disconnected":
            self.state = "refused"
            self._owner.refused(self)
