"""Publishes KV events as busy engines do, until it is killed: `python -m bench.kv_publisher WORKERS BLOCKS_PER_S`.

Each frame stores one chain of 16 blocks in one event and removes one from long ago, block by block, as a full cache
does. The first line on stdout is a JSON list of the engines' endpoints.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

import msgspec
import zmq

from bench.kv_frames import BLOCK_SIZE, VOCABULARY, frame, removal

STORED_PER_FRAME = 16
_FRAMES = 2048
"""Of one engine, before they repeat; half of their blocks are held at any time."""
_PERIOD_S = 0.002


def frames(seed: int) -> list[bytes]:
    """Payloads to send in a circle."""
    rng = random.Random(seed)
    hashes = [[rng.getrandbits(64) for _ in range(STORED_PER_FRAME)] for _ in range(_FRAMES)]
    out = []
    for i, chain in enumerate(hashes):
        ids = [rng.randrange(VOCABULARY) for _ in range(STORED_PER_FRAME * BLOCK_SIZE)]
        stored = msgspec.msgpack.decode(frame(chain, None, ids, STORED_PER_FRAME))[1]
        removed = msgspec.msgpack.decode(removal(hashes[i - _FRAMES // 2][::-1]))[1]
        out.append(msgspec.msgpack.encode([0.0, removed + stored, 0]))
    return out


def main(workers: int, blocks_per_s: float) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets, endpoints, payloads = [], [], []
    for worker in range(workers):
        socket = context.socket(zmq.PUB)
        socket.bind("tcp://127.0.0.1:*")
        sockets.append(socket)
        endpoints.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        payloads.append(frames(worker))
    print(json.dumps(endpoints), flush=True)
    parent = os.getppid()
    began_s, sent = time.monotonic(), 0
    while os.getppid() == parent:
        due = int((time.monotonic() - began_s) * blocks_per_s / STORED_PER_FRAME)
        for n in range(sent, due):
            seq, worker = divmod(n, workers)
            sockets[worker].send_multipart([b"", seq.to_bytes(8, "big"), payloads[worker][seq % _FRAMES]])
        sent = due
        time.sleep(_PERIOD_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
