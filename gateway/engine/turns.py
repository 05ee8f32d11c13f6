"""A loop for hundreds of ZeroMQ sockets in one thread, in which none can keep the others waiting.

A ZeroMQ socket has one file descriptor, which becomes readable when the socket's inner state changed: not once per
message, and not again while messages are left. So a socket that became readable stays in the ready queue until
receiving says EAGAIN, and gets only MESSAGES_PER_TURN before the next one has its turn. `zmq.Poller` asks every socket
on every poll instead (317 us for 512 of them), and `zmq.asyncio` costs four times a plain receive.

Only `post` and `stop` may be called from other threads.
"""

from __future__ import annotations

import heapq
import logging
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

import zmq

MESSAGES_PER_TURN = 32
_BYTES_PER_TURN = 4 << 20
_IDLE_S = 3600.0
_AFTER_ERROR_S = 0.05

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]


class Inbox:
    """A socket in the loop. `take` gets every message; `drained` is told whenever nothing is left; `failed`, when the
    socket itself cannot be read any more.
    """

    def __init__(
        self,
        socket: Socket,
        take: Callable[[list[bytes]], None],
        failed: Callable[[zmq.ZMQError], None],
        drained: Callable[[], None] | None = None,
    ) -> None:
        self.socket = socket
        self.take = take
        self.failed = failed
        self.drained = drained
        self.fd = int(socket.getsockopt(zmq.FD))
        self.is_watched = False
        self.is_ready = False
        self.is_closed = False


class Timer:
    """A call at a time. A cancelled one does nothing."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Turns:
    """The loop. What goes wrong in one call is logged and counted in `errors`, and stops nothing else."""

    def __init__(self, now: Callable[[], float], give_way: Callable[[], None] | None = None) -> None:
        """`give_way` is called before each message is received, and before it is taken."""
        self.now = now
        self._give_way = give_way or _do_nothing
        self.errors: Counter[str] = Counter()
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._posted: deque[Callable[[], None]] = deque()
        self._ready: deque[Inbox] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._stopping = False

    # ---- from any thread --------------------------------------------------------------------------------------------

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop's thread call `call`, in the order of posting."""
        self._posted.append(call)
        with suppress(BlockingIOError, OSError):  # full: it will wake up anyhow
            self._waker.send(b"\0")

    def stop(self) -> None:
        self.post(self._stop)

    # ---- from the loop's thread -------------------------------------------------------------------------------------

    def watch(self, inbox: Inbox) -> None:
        self._selector.register(inbox.fd, selectors.EVENT_READ, inbox)
        inbox.is_watched = True
        self.touch(inbox)

    def touch(self, inbox: Inbox) -> None:
        """Read `inbox` soon. Needed after every other use of its socket, which may have eaten the wake-up."""
        if not inbox.is_ready and not inbox.is_closed:
            inbox.is_ready = True
            self._ready.append(inbox)

    def close(self, inbox: Inbox) -> None:
        """Stop reading `inbox` and close its socket."""
        if not inbox.is_closed:
            inbox.is_closed = True
            if inbox.is_watched:
                self._selector.unregister(inbox.fd)
            inbox.socket.close(linger=0)

    def watch_writable(self, fd: socket.socket, call: Callable[[], None]) -> None:
        """Call `call` when the plain socket `fd` is writable or broken."""
        self._selector.register(fd, selectors.EVENT_WRITE, call)

    def unwatch(self, fd: socket.socket) -> None:
        self._selector.unregister(fd)

    def after(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._timers, (self.now() + delay_s, next(self._order), timer))
        return timer

    def run(self) -> None:
        """Until `stop`."""
        try:
            while not self._stopping:
                try:
                    self._turn()
                except Exception as error:
                    self._went_wrong(error)
                    time.sleep(_AFTER_ERROR_S)
        finally:
            self._selector.close()
            self._wake.close()
            self._waker.close()

    # ---- one turn ---------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience_s()):
            if isinstance(key.data, Inbox):
                self.touch(key.data)
            else:
                self._safely(key.data)
        for _ in range(len(self._posted)):
            self._safely(self._posted.popleft())
        while self._timers and self._timers[0][0] <= self.now():
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                self._safely(timer.call)
        for _ in range(len(self._ready)):
            inbox = self._ready.popleft()
            inbox.is_ready = False
            self._read(inbox)

    def _patience_s(self) -> float:
        if self._ready or self._posted:
            return 0.0
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return _IDLE_S
        return min(max(0.0, self._timers[0][0] - self.now()), _IDLE_S)

    def _read(self, inbox: Inbox) -> None:
        """All receiving first: it lets go of the interpreter's lock many times a millisecond, each time for less than a
        waiting thread needs to wake up, which counts as giving way. Mixed with the work it would starve other threads;
        the work by itself gives way every switch interval.
        """
        messages: list[list[bytes]] = []
        n_bytes, ended, error = 0, False, None
        while len(messages) < MESSAGES_PER_TURN and n_bytes < _BYTES_PER_TURN:
            if inbox.is_closed:
                return
            self._give_way()
            try:
                frames = inbox.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                ended = True
                break
            except zmq.ZMQError as exc:
                error = exc
                break
            messages.append(frames)
            n_bytes += sum(map(len, frames))
        for frames in messages:
            self._give_way()
            if inbox.is_closed:
                return
            try:
                inbox.take(frames)
            except Exception as exc:
                self._went_wrong(exc)
        if error is not None:
            self._safely(partial(inbox.failed, error))
        elif not ended:
            self.touch(inbox)
        elif inbox.drained is not None and not inbox.is_closed:
            self._safely(inbox.drained)

    def _safely(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._went_wrong(error)

    def _went_wrong(self, error: Exception) -> None:
        kind = type(error).__name__
        self.errors[kind] += 1
        if self.errors[kind] == 1:
            log.exception("unexpected %s in the event loop; further ones are only counted", kind)

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass

    def _stop(self) -> None:
        self._stopping = True


def _do_nothing() -> None:
    pass
