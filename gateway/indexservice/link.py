"""A copy of an indexer's index, kept in one thread: decisions go on in this process, and need no answer from anybody.

While no indexer answers the copy stays as it is, marked stale; what is sent meanwhile is assumed. It goes on where it
was if the same indexer still has what followed, else what it holds is put right from a snapshot, a worker at a time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from gateway.engine.feed import FeedStatus
from gateway.indexservice.addresses import Addresses
from gateway.indexservice.followed import Followed
from gateway.indexservice.server import SERVICE
from gateway.indexservice.wire import WireError, change_of, section_changes, status_of
from gateway.pb import indexer_pb2 as pb
from gateway.right_of_way import RightOfWay
from indexer import Change, Holder, Replica
from scorer.types import RequestFacts

_log = logging.getLogger(__name__)
SILENT_S = 4.0
"""An indexer says something every second."""
_FORGET_TIMEOUT_S = 2.0
_MOST_BLOCKS = 1 << 25
"""Of one holder, in a snapshot: far beyond what an engine holds."""
_MOST_HOLDERS = 1 << 16
_APART_S = (1.0, 60.0)
"""Between two snapshots because of what went wrong in a copy: at least, and as it goes on."""


class _Broken(Exception):
    """The stream is of no use."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(why)
        self.what = what


class ReplicaLink(Followed):
    """An `Intake` whose workers an indexer knows. `on_news` and `on_clear` are called from its thread."""

    def __init__(
        self,
        addresses: Addresses,
        replica: Replica,
        *,
        now: Callable[[], float] = time.monotonic,
        right_of_way: RightOfWay | None = None,
    ) -> None:
        """Before each change that is taken in, the thread gives way to who has the `right_of_way`."""
        super().__init__(addresses, now)
        self._replica = replica
        self._right_of_way = right_of_way or RightOfWay()
        self._feeds: dict[Holder, pb.Feed] = {}
        self._heard_s: dict[Holder, float] = {}
        self._instance = ""
        self.sequence = 0
        """Of the last delta taken in."""
        self._last_heard_s = now()
        """Infinite while something is taken in, however long that takes on a busy machine."""
        self._is_silent = False
        """Whether it was hung up on for saying nothing."""
        self._apart_s = _APART_S[0]
        self._told: set[Holder] | None = None
        """Holders the snapshot has told of; None: none is coming in."""
        self._fed: set[Holder] = set()
        """Holders whose feed was told of while it came in."""
        self._parts: list[Change] = []
        self._n_blocks = 0
        self._call: grpc.Call | None = None
        self._channel: grpc.Channel | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="index-copy", daemon=True)

    # ---- from any thread ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._hang_up()
        if self._thread.is_alive():
            self._thread.join()

    def forget(self, worker: str, reason: str) -> None:
        """Told to the indexer, which tells everybody."""
        self._replica.drop(worker)
        channel = self._channel
        if channel is None or not self.is_live:
            self._instance = ""
            return
        method = channel.unary_unary(
            f"/{SERVICE}/Forget", pb.ForgetRequest.SerializeToString, pb.ForgetResponse.FromString
        )
        answer = method.future(
            pb.ForgetRequest(worker=worker), timeout=_FORGET_TIMEOUT_S, metadata=self._addresses.metadata
        )
        answer.add_done_callback(lambda done: self._told_to_forget(worker, done))

    def note(self, facts: RequestFacts) -> str | None:
        return "index stale" if self.is_stale else None

    def degraded(self) -> Iterator[tuple[str, str]]:
        if self.is_stale:
            age_s = self._now() - self._live_until_s
            why = self.problem or "none has answered yet"
            yield "indexer_lost", f"the index is as it was {age_s:.0f} s ago; {self.address}: {why}"
        if self._replica.is_trimmed:
            yield "index_trimmed", "index.budget_bytes is too small for a copy of the indexer's index"
        if self._apart_s > 2 * _APART_S[0]:
            yield "index_differs", f"the copy had to begin anew, several times: {self.problem or 'it is checked now'}"

    def status(self) -> dict[Holder, FeedStatus]:
        now_s = self._now()
        if now_s - self._last_heard_s > SILENT_S:
            self._is_silent = True
            self._hang_up()
        stale = self.is_stale
        return {
            holder: status_of(holder, feed, stale=stale, heard_s_ago=self._age(holder, now_s))
            for holder, feed in list(self._feeds.items())
        }

    def counters(self) -> dict[str, int]:
        return {f"copy_{name}": n for name, n in list(self._counters.items())}

    def replay_levels(self) -> dict[str, int]:
        return {}

    def unmatched_topics(self) -> dict[str, int]:
        return {}

    def _age(self, holder: Holder, now_s: float) -> float | None:
        heard_s = self._heard_s.get(holder)
        return None if heard_s is None else max(0.0, now_s - heard_s)

    def _hang_up(self) -> None:
        call = self._call
        if call is not None:
            call.cancel()

    def _told_to_forget(self, worker: str, done: grpc.Future[pb.ForgetResponse]) -> None:
        error = done.exception()
        if error is not None:
            self._counters["forgets_failed"] += 1
            _log.warning("the indexer was not told that the cache of %s is empty: %s", worker, error)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            wait_s = 0.0
            try:
                self._follow()
                wait_s = self._lost("ended", "it ended the stream")
            except grpc.RpcError as exc:
                code, detail = _said(exc)
                if code is grpc.StatusCode.OUT_OF_RANGE:
                    wait_s = self._apart("cut_off", "this process was too slow for what changes")
                else:
                    wait_s = self._lost("lost", f"it said nothing for {SILENT_S:g} s" if self._is_silent else detail)
            except _Broken as exc:
                wait_s = self._apart(exc.what, str(exc))
            except Exception as exc:
                _log.exception("unexpected while following the indexer; going on")
                self._instance = ""
                wait_s = self._lost("unexpected", type(exc).__name__) + 1.0
            self._stopping.wait(wait_s)
        self._close()

    def _lost(self, what: str, why: str) -> float:
        was_live = self.is_live
        address = self.address
        self._counters[what] += 1
        self._end_of_life(why)
        if was_live and not self._stopping.is_set():
            _log.warning("the indexer at %s is lost, the copy of its index stays as it is: %s", address, why)
        return self._addresses.failed()

    def _apart(self, what: str, why: str) -> float:
        """The same one is asked for a snapshot, not too often: how long to wait until then."""
        self._counters[what] += 1
        self._instance = ""
        self._end_of_life(why)
        _log.warning("the copy of the index at %s begins anew: %s", self.address, why)
        wait_s, self._apart_s = self._apart_s, min(_APART_S[1], 2 * self._apart_s)
        return wait_s

    def _end_of_life(self, why: str) -> None:
        if self.is_live:
            self._live_until_s = self._now()
        self.is_live = False
        if self._told is not None:
            self._instance = ""  # Nothing can go on from within a snapshot.
        self._told = None
        self.problem = why
        self._close()

    def _close(self) -> None:
        channel, self._channel, self._call = self._channel, None, None
        if channel is not None:
            channel.close()

    def _follow(self) -> None:
        options, credentials = self._addresses.options(), self._addresses.credentials()
        if credentials is None:
            channel = grpc.insecure_channel(self.address, options)
        else:
            channel = grpc.secure_channel(self.address, credentials, options)
        self._channel = channel
        self._last_heard_s = self._now()
        self._is_silent = False
        watch = channel.unary_stream(f"/{SERVICE}/Watch", pb.WatchRequest.SerializeToString, pb.Update.FromString)
        request = pb.WatchRequest(instance=self._instance, sequence=self.sequence)
        call = self._call = watch(request, metadata=self._addresses.metadata)
        if self._stopping.is_set():
            call.cancel()
        for update in call:
            self._last_heard_s = math.inf
            try:
                self._take(update)
            except (WireError, ValueError) as exc:
                raise _Broken("unreadable", f"it says what cannot be: {exc}") from None
            self._last_heard_s = self._now()

    def _take(self, update: pb.Update) -> None:
        if update.HasField("begin"):
            self._begin(update.begin)
        for section in update.sections:
            self._right_of_way.give()
            self._section(section)
        for delta in update.deltas:
            if delta.sequence != self.sequence + 1:
                raise _Broken("gaps", f"delta {delta.sequence} came after {self.sequence}")
            for change in delta.changes:
                self._right_of_way.give()
                self._change(change)
            self.sequence = delta.sequence
        if update.HasField("end"):
            self._end(update.end)

    def _begin(self, begin: pb.Begin) -> None:
        if begin.resumed and (begin.instance, begin.sequence) != (self._instance, self.sequence):
            raise _Broken("gaps", "it goes on from where this copy never was")
        self._instance, self.sequence = begin.instance, begin.sequence
        if begin.resumed:
            self._counters["resumed"] += 1
            self._live()
        else:
            self._counters["snapshots"] += 1
            self._told, self._fed, self._parts = set(), set(), []

    def _section(self, section: pb.Section) -> None:
        holder = (section.worker, section.rank)
        if self._told is None:
            raise _Broken("unreadable", "a section came outside of a snapshot")
        if section.first:
            self._parts, self._n_blocks = [], 0
        parts = section_changes(section)
        self._n_blocks += sum(len(part.stored) for part in parts)
        if self._n_blocks > _MOST_BLOCKS or len(self._parts) > _MOST_BLOCKS or len(self._told) >= _MOST_HOLDERS:
            raise _Broken("unreadable", "it tells of more than there can be")
        self._parts += parts
        if section.HasField("feed"):
            self._feeds[holder] = section.feed
        for adapter in section.adapters:
            self._replica.take(Change(worker=section.worker, rank=section.rank, adapter=adapter))
        if section.last:
            self._counters["blocks"] += self._n_blocks
            self._replica.replace(holder, self._parts)
            self._parts = []
            self._told.add(holder)

    def _change(self, message: pb.Change) -> None:
        holder = (message.worker, message.rank)
        if message.HasField("feed"):
            if len(self._feeds) >= _MOST_HOLDERS and holder not in self._feeds:
                raise _Broken("unreadable", "it tells of more than there can be")
            self._feeds[holder] = message.feed
            self._fed.add(holder)
            self._heard_s[holder] = self._now()
            self.on_news(*holder)
            return
        change = change_of(message)
        self._counters["blocks"] += len(change.stored) + len(change.removed)
        is_same = self._replica.take(change)
        if change.gone:
            self._feeds.pop(holder, None)
            self._heard_s.pop(holder, None)
        if change.gone or change.cleared:
            self.on_clear(*holder, "its indexer says so")
        if change.digest is not None and self._told is None and not self._replica.is_trimmed:
            if not is_same:
                raise _Broken("wrong_digests", f"what is here of {holder[0]} is not what the indexer has")
            self._apart_s = _APART_S[0]

    def _end(self, end: pb.End) -> None:
        if self._told is None or end.sequence != self.sequence:
            raise _Broken("gaps", "a snapshot ended where none was")
        told, self._told = self._told, None
        self._replica.keep_only(told)
        for holder in [holder for holder in self._feeds if holder not in told | self._fed]:
            del self._feeds[holder]
        self._live()

    def _live(self) -> None:
        _log.info("following the indexer at %s", self.address)
        self._addresses.worked()
        self.problem = None
        self._live_until_s = self._now()
        self.is_live = True


def _said(error: Exception) -> tuple[grpc.StatusCode | None, str]:
    """What a call ended with; grpc's errors are calls too, which their types do not tell."""
    code = getattr(error, "code", lambda: None)()
    if not isinstance(code, grpc.StatusCode):
        return None, str(error)
    return code, f"{code.name}: {getattr(error, 'details', lambda: '')()}"
