"""A vLLM KV-event publisher under a test's full control: it loses, withholds, repeats and restarts when told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from tests.support.wire import stored

SIZE = 16
END = b"\xff" * 8


def until(true: Callable[[], Any], within_s: float = 60.0) -> None:
    """Wait for a condition; fails when it does not come true."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def prompt(number: int, blocks: int = 2) -> list[int]:
    return list(range(number * 1000, number * 1000 + SIZE * blocks))


def store(number: int, *, blocks: int = 2, rank: int | None = 0, ts: float | None = None) -> bytes:
    """The batch that stores `prompt(number, blocks)`."""
    hashes = [number * 1000 + block for block in range(1, blocks + 1)]
    return stored(hashes, prompt(number, blocks), rank=rank, ts=float(number) if ts is None else ts)


class RawEngine:
    """One PUB and, with `replay`, one ROUTER served by a thread. Addresses stay the same over `restart`.

    `connect` makes the PUB connect there (the gateway binds). `answers` False: replay requests are ignored.
    """

    def __init__(
        self, *, topic: bytes = b"", replay: bool = True, connect: str | None = None, old: bool = False
    ) -> None:
        self.topic = topic
        self.answers = True
        self.old_layout = old
        self.lost_in_replay: set[int] = set()
        """Batches that the next answer lacks."""
        self.requests: list[int] = []
        self.history: list[tuple[int, bytes]] = []
        self.next_seq = 0
        self.endpoint = connect or "tcp://127.0.0.1:*"
        self.replay_endpoint = "tcp://127.0.0.1:*" if replay else None
        self._connects = connect is not None
        self._open()

    def _open(self) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        if self._connects:
            self._pub.connect(self.endpoint)
        else:
            self.endpoint = _bind(self._pub, self.endpoint)
        self._running = True
        self._thread: threading.Thread | None = None
        if self.replay_endpoint is not None:
            router = self._context.socket(zmq.ROUTER)
            router.setsockopt(zmq.SNDHWM, 1000)
            self.replay_endpoint = _bind(router, self.replay_endpoint)
            self._thread = threading.Thread(target=self._serve, args=(router,), daemon=True)
            self._thread.start()

    def publish(self, payload: bytes, *, lost: bool = False) -> int:
        """Number a batch and send it, unless it is to be lost on the way; its number."""
        seq = self.next_seq
        self.next_seq += 1
        self.history.append((seq, payload))
        if not lost:
            self._pub.send_multipart([self.topic, seq.to_bytes(8, "big"), payload])
        return seq

    def send_raw(self, frames: list[bytes]) -> None:
        self._pub.send_multipart(frames)

    def close(self) -> None:
        self._running = False
        if self._thread is not None:
            self._thread.join()
        self._context.destroy(linger=0)

    def forget(self) -> None:
        """What a new process knows."""
        self.history.clear()
        self.next_seq = 0

    def reopen(self) -> None:
        self._open()

    def restart(self) -> None:
        self.close()
        self.forget()
        self._open()

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        while self._running:
            if not router.poll(5):
                continue
            frames = router.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, start = frames
            self.requests.append(int.from_bytes(start, "big"))
            if not self.answers:
                continue
            for seq, payload in list(self.history):
                if seq >= self.requests[-1] and seq not in self.lost_in_replay:
                    head = [client, b""] if self.old_layout else [client, b"", self.topic]
                    router.send_multipart([*head, seq.to_bytes(8, "big"), payload])
            self.lost_in_replay = set()
            router.send_multipart([client, b"", END, b""] if self.old_layout else [client, b"", b"", END, b""])


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.bind(endpoint)
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
