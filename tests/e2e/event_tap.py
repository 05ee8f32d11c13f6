"""A raw view of one engine's KV events: its PUB socket and its replay socket, nothing of ours in between."""

import time
from types import TracebackType
from typing import Self

import zmq

DEADLINE_S = 20.0
_END = (1 << 64) - 1


class EventTap:
    """Subscribes to one engine and can ask it for a replay.

    `batches` has every (sequence, payload) received on the PUB socket, in the order received.
    """

    def __init__(self, events_endpoint: str, replay_endpoint: str) -> None:
        self.batches: list[tuple[int, bytes]] = []
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, 0)
        self._sub.subscribe(b"")
        self._sub.connect(events_endpoint)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(replay_endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def poll(self, timeout_s: float = 0.0) -> int:
        """Take what has arrived on the PUB socket, waiting up to `timeout_s` for the first; returns how many."""
        count = 0
        while self._sub.poll(0 if count else int(timeout_s * 1000)):
            _, sequence, payload = self._sub.recv_multipart()
            self.batches.append((int.from_bytes(sequence, "big"), payload))
            count += 1
        return count

    def replay(self, start: int = 0) -> list[tuple[int, bytes]]:
        """The engine's buffered (sequence, payload) from `start` on. Raises TimeoutError when the end does not come."""
        self._dealer.send_multipart([b"", start.to_bytes(8, "big")])
        received: list[tuple[int, bytes]] = []
        deadline_s = time.monotonic() + DEADLINE_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not self._dealer.poll(int(left_s * 1000) + 1):
                break
            *_, raw, payload = self._dealer.recv_multipart()
            sequence = int.from_bytes(raw, "big")
            if sequence == _END:
                return received
            received.append((sequence, payload))
        raise TimeoutError(f"no end of replay after {DEADLINE_S:.0f} s, {len(received)} batches came")

    def published(self, start: int = 0) -> list[tuple[int, bytes]]:
        """Everything from `start` on, once the engine's publisher has nothing left to publish.

        The engine queues a step's events before it answers the request, and its publisher thread alternates between one
        replay and one queued batch. So when two replays in a row bring nothing new, the queue was empty between them.
        """
        batches: list[tuple[int, bytes]] = []
        quiet = 0
        while quiet < 2:
            new = self.replay(start + len(batches))
            quiet = 0 if new else quiet + 1
            batches += new
        return batches

    def settle(self) -> None:
        """Return when all that the engine has published so far has arrived on the PUB socket.

        Needs one batch received before, see `joined`. Raises TimeoutError when a published batch does not arrive.
        """
        self.poll()
        last = self.batches[-1][0]
        published = self.published(last + 1)
        deadline_s = time.monotonic() + DEADLINE_S
        while self.batches[-1][0] < last + len(published):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"sequence {last + len(published)} was published and did not arrive")
            self.poll(0.1)

    @property
    def joined(self) -> bool:
        """Whether the PUB socket knows of this subscription: it loses what it publishes before."""
        return bool(self.batches)
