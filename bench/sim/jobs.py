"""Calls in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from types import TracebackType
from typing import Any, TypeVar, cast

K = TypeVar("K")
T = TypeVar("T")
_STOPPING = {signal.SIGINT, signal.SIGTERM}
_FORK = multiprocessing.get_context("fork")


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def stopped_alike() -> Iterator[None]:
    """Within it SIGTERM is a KeyboardInterrupt too, so that what is to be cleaned up is."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Jobs:
    """At most `most` calls at once, each in a process forked for it, so that it may be any function and sees everything
    that was there when it began. With `most` = 1 they are made here, when they are waited for. Used as a context:
    whatever ends it, no process is left.
    """

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"there must be at least one process, not {most}")
        self.most = most
        self._here: deque[tuple[Any, Callable[[], Any]]] = deque()
        self._under_way: dict[Connection, tuple[Any, ForkProcess]] = {}

    @property
    def free(self) -> int:
        """So many more may begin now."""
        return self.most - len(self._here) - len(self._under_way)

    @property
    def idle(self) -> bool:
        return self.free == self.most

    def begin(self, key: Any, call: Callable[[], Any]) -> None:
        """`key` will come with the result, which must be picklable."""
        if self.most == 1:
            self._here.append((key, call))
            return
        # A Ctrl-C is the parent's to answer, and not before it knows its child.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        try:
            reader, writer = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=_answer, args=(writer, call), daemon=True)
            process.start()
            writer.close()
            self._under_way[reader] = key, process
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)

    def wait(self) -> list[tuple[Any, Any]]:
        """Waits until one is ready at least. Raises RuntimeError when one failed, with its traceback."""
        if self._here:
            key, call = self._here.popleft()
            return [(key, call())]
        done = []
        for reader in cast("list[Connection]", wait(list(self._under_way))):
            try:
                ok, result = reader.recv()
            except EOFError:
                ok, result = False, "its process ended without a result: killed, perhaps for want of memory"
            key, process = self._under_way.pop(reader)
            reader.close()
            process.join()
            if not ok:
                raise RuntimeError(f"{key}: {result}")
            done.append((key, result))
        return done

    def all(self, calls: Mapping[K, Callable[[], T]]) -> dict[K, T]:
        """The results of all of them, in their order."""
        found: dict[K, T] = {}
        waiting = deque(calls.items())
        while waiting or not self.idle:
            while waiting and self.free:
                self.begin(*waiting.popleft())
            found.update(self.wait())
        return {key: found[key] for key in calls}

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        for _, process in self._under_way.values():
            process.terminate()
        for reader, (_, process) in self._under_way.items():
            process.join()
            reader.close()
        self._under_way.clear()


def _answer(writer: Connection, call: Callable[[], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    try:
        writer.send((True, call()))
    except Exception:
        writer.send((False, traceback.format_exc()))
