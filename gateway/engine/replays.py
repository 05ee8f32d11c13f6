"""Asking engines for batches again: a DEALER to the ROUTER at the engine's replay endpoint.

A request is ``[b"", start (8 bytes, big endian)]``; the ROUTER drops anything that does not arrive as three frames. The
answer is every batch the engine still has from `start` on, then an end marker. Each request has a socket of its own, so
that an answer which comes after the question was given up meets nobody. A hole in the middle of an answer was made on
the way (a ROUTER drops what its queue cannot hold), so the rest is asked for again as long as that helps.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from gateway.addresses import check_connected, check_endpoint
from gateway.engine.feed import Feed, IngestSettings
from gateway.engine.refusal import address_of
from gateway.engine.turns import Inbox, Turns
from indexer import FrameError, Replay, parse_frames
from indexer.stream import END_OF_REPLAY, SEQ_BYTES

log = logging.getLogger(__name__)

Batch = Callable[[Feed, Replay, int, bytes], None]
Done = Callable[[Feed, Replay, bool], None]


class Request:
    """One question on its way. `next_seq` is what should come next, None before the first batch."""

    def __init__(self, replay: Replay, start: int) -> None:
        self.replay = replay
        self.start = start
        self.next_seq: int | None = None
        self.inbox: Inbox | None = None
        self.monitor: Inbox | None = None
        self.is_asked = False
        self.heard_s = 0.0


class Replays:
    """At most `settings.replays_at_once` run; the others wait in the order they were asked for.

    `on_batch` gets every batch (feed, replay, seq, payload), `on_end` how it ended (True: with the end marker).
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        turns: Turns,
        settings: IngestSettings,
        on_batch: Batch,
        on_end: Done,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._context = context
        self._turns = turns
        self._settings = settings
        self._on_batch = on_batch
        self._on_end = on_end
        self._waiting: deque[Feed] = deque()
        self._running: dict[Feed, Request] = {}

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ask(self, feed: Feed) -> None:
        """Carry out `feed.asked`, instead of whatever was being asked for `feed`."""
        self._drop(feed)
        self._waiting.append(feed)
        self._start_more()

    def cancel(self, feed: Feed) -> None:
        self._drop(feed)
        self._start_more()

    def close(self) -> None:
        """Give up every request, without a word."""
        self._waiting.clear()
        for feed in list(self._running):
            self._end(feed)

    def _start_more(self) -> None:
        while self._waiting and len(self._running) < self._settings.replays_at_once:
            feed = self._waiting.popleft()
            if feed.asked is not None:
                self._running[feed] = Request(feed.asked, feed.asked.start)
                self._send(feed)

    def _send(self, feed: Feed) -> None:
        request = self._running[feed]
        assert feed.replay_endpoint is not None  # noqa: S101 - a stream that cannot replay never asks
        try:
            dealer = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            self._cannot(feed, error)
            return
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.IPV6, 1)
            dealer.setsockopt(zmq.RCVHWM, 0)  # the ROUTER drops what does not fit
            is_checked = self._settings.link_local
            if not is_checked:
                check_endpoint(feed.replay_endpoint)
                is_checked = address_of(feed.replay_endpoint) is not None
            if not is_checked:
                self._ask_when_checked(feed, request, dealer)
            dealer.connect(feed.replay_endpoint)
            if is_checked:
                _ask(dealer, request)
            request.inbox = Inbox(
                dealer, lambda frames: self._take(feed, request, frames), lambda error: self._cannot(feed, error)
            )
            self._turns.watch(request.inbox)
        except (zmq.ZMQError, OSError, OverflowError) as error:
            dealer.close(linger=0)
            self._cannot(feed, error)
            return
        self.counters["requests"] += 1
        request.heard_s = self._turns.now()
        self._watch(feed, request, request.inbox)

    def _ask_when_checked(self, feed: Feed, request: Request, dealer: zmq.Socket[bytes]) -> None:
        """ZeroMQ resolves names itself, so that where one leads is known once it has connected."""

        def connected(frames: list[bytes]) -> None:
            if request.inbox is None or request.inbox.socket is not dealer:
                return
            try:
                check_connected(parse_monitor_message(frames)["value"])
                if not request.is_asked:
                    _ask(dealer, request)
            except (zmq.ZMQError, OSError) as error:
                self._cannot(feed, error)

        monitor = dealer.get_monitor_socket(zmq.EVENT_CONNECTED)
        request.monitor = Inbox(monitor, connected, lambda error: self._cannot(feed, error))
        self._turns.watch(request.monitor)

    def _watch(self, feed: Feed, request: Request, inbox: Inbox) -> None:
        """Give up when nothing was heard for replay_timeout_s."""
        if inbox.is_closed:
            return
        left_s = request.heard_s + self._settings.replay_timeout_s - self._turns.now()
        if left_s > 0 or inbox.is_ready:
            self._turns.after(max(left_s, 0.001), lambda: self._watch(feed, request, inbox))
            return
        self.counters["timeouts"] += 1
        self._finish(feed, request, complete=False)

    def _take(self, feed: Feed, request: Request, frames: list[bytes]) -> None:
        request.heard_s = self._turns.now()
        try:
            seq, payload = parse_frames(frames)
        except FrameError:
            self.counters["bad_frames"] += 1
            return
        if seq == END_OF_REPLAY:
            self._finish(feed, request, complete=True)
            return
        if request.next_seq is not None and seq > request.next_seq > request.start:
            self.counters["holes"] += 1
            self._close(request)
            request.start, request.next_seq = request.next_seq, None
            self._send(feed)
            return
        request.next_seq = seq + 1
        self._on_batch(feed, request.replay, seq, payload)

    def _cannot(self, feed: Feed, error: Exception) -> None:
        self.counters["socket_errors"] += 1
        if self.counters["socket_errors"] == 1:
            log.warning("cannot ask %s rank %d for a replay: %s", feed.worker, feed.rank, error)
        request = self._running[feed]
        # not at once: the stream asks again at once, and an error that stays would spin
        self._close(request)
        self._turns.after(self._settings.replay_timeout_s, lambda: self._finish(feed, request, complete=False))

    def _drop(self, feed: Feed) -> None:
        if feed in self._waiting:
            self._waiting.remove(feed)
        self._end(feed)

    def _finish(self, feed: Feed, request: Request, *, complete: bool) -> None:
        if self._running.get(feed) is not request:
            return
        self._end(feed)
        self._on_end(feed, request.replay, complete)
        self._start_more()

    def _end(self, feed: Feed) -> None:
        request = self._running.pop(feed, None)
        if request is not None:
            self._close(request)

    def _close(self, request: Request) -> None:
        if request.inbox is not None and request.monitor is not None:
            request.inbox.socket.disable_monitor()
        for inbox in (request.monitor, request.inbox):
            if inbox is not None:
                self._turns.close(inbox)
        request.inbox = request.monitor = None
        request.is_asked = False


def _ask(dealer: zmq.Socket[bytes], request: Request) -> None:
    request.is_asked = True
    dealer.send_multipart([b"", request.start.to_bytes(SEQ_BYTES, "big")], zmq.NOBLOCK)
