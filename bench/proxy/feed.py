"""Publishes the workers' KV events to gateways, and waits until each has taken them in."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from bench.kv_frames import BLOCK_SIZE, frame, removal

_WAIT_S = 60.0


class Feed:
    """One publisher for each worker, as vLLM's; it waits for subscribers before it sends."""

    def __init__(self, n_workers: int) -> None:
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self.endpoints: list[str] = []
        for _ in range(n_workers):
            publisher = self._context.socket(zmq.XPUB)
            publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
            publisher.setsockopt(zmq.SNDHWM, 0)
            publisher.setsockopt(zmq.LINGER, 0)
            publisher.bind("tcp://127.0.0.1:*")
            self._sockets.append(publisher)
            self.endpoints.append(publisher.getsockopt_string(zmq.LAST_ENDPOINT))
        self._sent = [0] * n_workers
        self._decoded: int | None = None

    def publish(self, frames: Sequence[Sequence[bytes]], subscribers: int) -> None:
        """`frames`: payloads by worker. Raises TimeoutError when there are not that many subscribers."""
        deadline_s = time.monotonic() + _WAIT_S
        for worker, (publisher, payloads) in enumerate(zip(self._sockets, frames, strict=True)):
            for _ in range(subscribers):
                if not publisher.poll(max(0, int(1000 * (deadline_s - time.monotonic())))):
                    raise TimeoutError("a gateway did not subscribe to the KV events")
                publisher.recv()
            for payload in payloads:
                self._send(worker, payload)

    def go_on(self) -> None:
        """Each worker stores a block of nobody's, and gives up the one before, as engines that decode always have
        something to announce. One that is sent prompts and says nothing for 10 s is rightly taken to publish nothing.
        """
        before, self._decoded = self._decoded, (self._decoded or 0) + 1
        stored = frame([self._decoded], None, [self._decoded] * BLOCK_SIZE, 1)
        for worker in range(len(self._sockets)):
            self._send(worker, stored)
            if before is not None:
                self._send(worker, removal([before]))

    def _send(self, worker: int, payload: bytes) -> None:
        seq, self._sent[worker] = self._sent[worker], self._sent[worker] + 1
        self._sockets[worker].send_multipart([b"", seq.to_bytes(8, "big"), payload])

    def close(self) -> None:
        for publisher in self._sockets:
            publisher.close(linger=0)
        self._context.term()


def page(admin_port: int, path: str) -> Any:
    """A JSON page of a gateway's admin port."""
    with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}{path}", timeout=10) as answer:
        return json.load(answer)


def wait_until_known(admin_port: int, batches: Sequence[int]) -> None:
    """Until a gateway has applied so many batches of each worker. Raises TimeoutError."""
    deadline_s = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline_s:
        workers = page(admin_port, "/debug/cache")["workers"].values()
        if sorted(_applied(worker) for worker in workers) == sorted(batches):
            return
        time.sleep(0.1)
    raise TimeoutError("the gateway did not take in all KV events")


def _applied(worker: dict[str, Any]) -> int:
    return sum((rank["events"] or {}).get("batches", 0) for rank in worker["ranks"].values())


class Shares(msgspec.Struct, frozen=True):
    """Counts of a while: prompts, those with real token ids, their tokens, and tokens found cached where they went."""

    prompts: int
    real_ids: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def real_ids_share(self) -> float:
        return self.real_ids / self.prompts if self.prompts else 0.0

    @property
    def hit_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def total(shares: Sequence[Shares]) -> Shares | None:
    """None of none."""
    if not shares:
        return None
    return Shares(
        sum(each.prompts for each in shares),
        sum(each.real_ids for each in shares),
        sum(each.prompt_tokens for each in shares),
        sum(each.cached_tokens for each in shares),
    )


class Hits(msgspec.Struct, frozen=True):
    """What a gateway has decided up to now: prompts by source of their ids, and tokens found cached."""

    served: dict[str, int]
    prompt_tokens: int
    cached_tokens: int

    @classmethod
    def read(cls, admin_port: int) -> Hits:
        return cls.of(page(admin_port, "/debug/cache"))

    @classmethod
    def of(cls, cache: dict[str, Any]) -> Hits:
        """From the text of /debug/cache."""
        hits = [worker["hits"] for worker in cache["workers"].values() if worker["hits"]]
        served: dict[str, int] = {}
        for model in cache["tokens"].values():
            for source, count in model["served"].items():
                served[source] = served.get(source, 0) + count
        prompt_tokens = sum(each["prompt_tokens"] for each in hits)
        return cls(served, prompt_tokens, sum(each["predicted_tokens"] for each in hits))

    def since(self, before: Hits) -> Shares:
        prompts = sum(self.served.values()) - sum(before.served.values())
        estimated = self.served.get("estimate", 0) - before.served.get("estimate", 0)
        return Shares(
            prompts,
            prompts - estimated,
            self.prompt_tokens - before.prompt_tokens,
            self.cached_tokens - before.cached_tokens,
        )
