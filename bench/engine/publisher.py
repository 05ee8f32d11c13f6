"""vLLM's KV-event publisher: a PUB socket with numbered batches and a ROUTER that replays them.

PUB sends ``[topic, seq (8 bytes, big endian), payload]``. A DEALER asks ``[b"", start_seq]`` and gets every buffered
batch with seq >= start_seq as ``[b"", topic, seq, payload]``, then ``[b"", b"", 8 x 0xff, b""]``. Before vLLM 0.26
replies had no topic frame.
"""

import asyncio
import contextlib
from collections import deque
from typing import Final

import zmq
import zmq.asyncio

from bench.engine.config import Faults

END_SEQ: Final = b"\xff" * 8
_REBIND_DEADLINE_S: Final = 5.0


def seq_bytes(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


def binds(endpoint: str) -> bool:
    """Whether vLLM binds this publisher endpoint (otherwise it connects)."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def for_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: TCP counts the port up, inproc gets a suffix, nothing else can."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    if endpoint.startswith("tcp://"):
        address, _, port = endpoint.rpartition(":")
        return f"{address}:{int(port) + rank}"
    raise ValueError(f"endpoint {endpoint!r} must be tcp or inproc with more than one data-parallel rank")


class ReplayBuffer:
    """The last `steps` batches by sequence number."""

    def __init__(self, steps: int) -> None:
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=steps)

    def append(self, seq: int, payload: bytes) -> None:
        self._batches.append((seq, payload))

    def since(self, start: int) -> list[tuple[int, bytes]]:
        return [batch for batch in self._batches if batch[0] >= start]


def replay_frames(batches: list[tuple[int, bytes]], topic: bytes, with_topic: bool) -> list[list[bytes]]:
    """The messages that answer a replay request, end marker included, as a DEALER receives them."""
    if with_topic:
        frames = [[b"", topic, seq_bytes(seq), payload] for seq, payload in batches]
        return [*frames, [b"", b"", END_SEQ, b""]]
    frames = [[b"", seq_bytes(seq), payload] for seq, payload in batches]
    return [*frames, [b"", END_SEQ, b""]]


class Publisher:
    """One rank's sockets. `endpoint` and `replay_endpoint` are what was bound or connected, with real ports."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        topic: str,
        buffer_steps: int,
        hwm: int,
        with_topic: bool,
        faults: Faults,
    ) -> None:
        self._context = context
        self._topic = topic.encode()
        self._buffer = ReplayBuffer(buffer_steps)
        self._hwm = hwm
        self._with_topic = with_topic
        self._faults = faults
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._server: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self.next_seq = 0
        self.endpoint: str | None = None
        self.replay_endpoint: str | None = None

    async def open(self, endpoint: str, replay_endpoint: str | None, host: str, patient: bool) -> None:
        """Open the sockets; zmq.ZMQError if an address is taken, after retries if `patient` (a restart)."""
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, self._hwm)
        self._pub.setsockopt(zmq.LINGER, 0)
        if binds(endpoint):
            self.endpoint = await _bind(self._pub, endpoint.replace("*", host), patient)
        else:
            self._pub.connect(endpoint)
            self.endpoint = endpoint
        if replay_endpoint is not None:
            self._router = zmq.asyncio.Context.shadow(self._context).socket(zmq.ROUTER)
            self._router.setsockopt(zmq.LINGER, 0)
            self.replay_endpoint = await _bind(self._router, replay_endpoint.replace("*", host), patient)
            self._server = asyncio.create_task(self._serve(self._router))

    async def close(self) -> None:
        tasks = [task for task in (self._server, *self._answers) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=0)

    def publish(self, payload: bytes) -> None:
        """Number, buffer and send one batch."""
        seq = self.next_seq
        self.next_seq += 1
        self._buffer.append(seq, payload)
        if self._faults.drop_batches > 0:
            self._faults.drop_batches -= 1
            return
        self.send_raw([self._topic, seq_bytes(seq), payload])

    def send_raw(self, frames: list[bytes]) -> None:
        """Send frames as they are, outside of the numbering (malformed messages for tests)."""
        if self._pub is not None:
            with contextlib.suppress(zmq.Again):
                self._pub.send_multipart(frames, flags=zmq.DONTWAIT)

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:  # vLLM drops anything else
                continue
            task = asyncio.create_task(self._answer(router, frames[0], int.from_bytes(frames[2], "big")))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)

    async def _answer(self, router: zmq.asyncio.Socket, client: bytes, start: int) -> None:
        if self._faults.replay_delay_s:
            await asyncio.sleep(self._faults.replay_delay_s)
        if self._faults.replay == "off":
            return
        messages = replay_frames(self._buffer.since(start), self._topic, self._with_topic)
        if self._faults.replay == "truncated":
            messages = messages[: len(messages) // 2]
        for frames in messages:
            await router.send_multipart([client, *frames])


async def _bind(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", endpoint: str, patient: bool) -> str:
    deadline = asyncio.get_running_loop().time() + _REBIND_DEADLINE_S
    while True:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if not patient or error.errno != zmq.EADDRINUSE or asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.01)
        else:
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)
