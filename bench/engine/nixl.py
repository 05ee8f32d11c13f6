"""vLLM's NixlConnector (pull mode) without NIXL: leases on the prefill side, pulls and heartbeats on the decode side.

Theory of operation. A prefill that ends with `do_remote_decode` pins its blocks under a lease and names them in its
answer. The decode engine renews the lease while it has the request queued, pulls the blocks it lacks (always the last
ones of the list) and notifies the prefill engine, which frees them. Nothing guards against a reader that comes too
late: it gets what is in the blocks by then. A pull here is only a delay; what it brings is judged by comparing the
blocks' generations and the prompt with those at the end of the prefill. Engines of one process find each other by the
side channel's host:port, as vLLM does, and the handshake fails on another engine id (a restart) or another model.
"""

import asyncio
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final
from uuid import uuid4
from weakref import WeakValueDictionary

import xxhash

from bench.engine.config import FakeVllmConfig
from bench.engine.driver import Driver, Stream
from bench.engine.histogram import Transfers
from bench.engine.request import Pull, Pulled, Request, mix64

_ADDRESS: Final = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_REMEMBERED: Final = 4096  # ended leases, to tell what a late reader should have found
_sides: "Final[WeakValueDictionary[str, NixlSide]]" = WeakValueDictionary()


@dataclass(slots=True)
class _Lease:
    """A finished prefill's blocks. `timer` is None once they were given back."""

    blocks: list[int]
    generations: list[int]
    digest: int
    params: dict[str, Any]
    expiry_s: float
    timer: asyncio.TimerHandle | None


@dataclass(slots=True)
class _Want:
    """A request of ours whose KV is elsewhere, until its pull has ended."""

    request: Request
    params: dict[str, Any]
    renews: bool
    pulling: bool = False


class NixlSide:
    """One rank's connector. `expired`, `late` and `failed` are vLLM's counters of the same meaning.

    `die` is called when what was asked kills a real engine core.
    """

    def __init__(self, driver: Driver, config: FakeVllmConfig, rank: int, port: int, die: Callable[[], None]) -> None:
        engine_id = config.kv_engine_id or str(uuid4())
        self.engine_id = engine_id if config.data_parallel_size == 1 else f"{engine_id}_dp{rank}"
        self.expired = self.late = self.failed = self.failed_notifications = 0
        self.transfers = Transfers()
        model = (config.root or config.model, config.dtype)
        self._compatibility = (config.version, *model, config.kv_cache_dtype, config.attention_backend)
        self._driver = driver
        self._config = config
        self._die = die
        self._host, self._port = config.nixl_host or config.host, port
        self._loop = asyncio.get_running_loop()
        self._leases: OrderedDict[str, _Lease] = OrderedDict()
        self._wants: dict[str, _Want] = {}
        self._met: set[str] = set()  # engine ids
        self._heartbeat: asyncio.TimerHandle | None = None
        self._closed = False
        driver.connector = self
        driver.recompute_failed_pulls = config.kv_load_failure_policy == "recompute"
        _sides[f"{self._host}:{port}"] = self

    def close(self) -> None:
        """The agent is gone: no lease ends any more, no pull from or to here works."""
        self._closed = True
        for lease in self._leases.values():
            if lease.timer is not None:
                lease.timer.cancel()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if _sides.get(f"{self._host}:{self._port}") is self:
            del _sides[f"{self._host}:{self._port}"]

    # --- prefill side -----------------------------------------------------------------------------------------------

    def finished(self, stream: Stream, num_tokens: int) -> None:
        request_id = stream.request.request_id
        engine = self._driver.engine
        blocks = engine.held_blocks(request_id)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": self._host,
            "remote_port": self._port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": num_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }
        if num_tokens == len(stream.request.prompt_token_ids) and stream.admitted is not None:  # ended at its 1st token
            params["remote_prefill_cached_tokens"] = stream.admitted.cached_tokens + stream.admitted.remote_tokens
        expiry_s = self._loop.time() + self._config.kv_lease_s
        timer = self._loop.call_at(expiry_s, self._expire, request_id)
        generations = [engine.pool.generation[block] for block in blocks]
        self._leases[request_id] = _Lease(blocks, generations, _digest(stream.request), params, expiry_s, timer)
        if len(self._leases) > _REMEMBERED and next(iter(self._leases.values())).timer is None:
            self._leases.popitem(last=False)

    def offer(self, request_id: str) -> dict[str, Any] | None:
        """The prefill answer's `kv_transfer_params`; None if it ended otherwise than by a token of the model."""
        lease = self._leases.get(request_id)
        return None if lease is None else dict(lease.params)

    def renew(self, request_id: str) -> None:
        """A decode engine's heartbeat."""
        lease = self._leases.get(request_id)
        if lease is None or lease.timer is None:
            return
        lease.timer.cancel()
        lease.expiry_s = max(lease.expiry_s, self._loop.time() + self._config.kv_lease_s * 2 / 3)
        lease.timer = self._loop.call_at(lease.expiry_s, self._expire, request_id)

    def take(self, request_id: str) -> None:
        """A decode engine's notification: it has the blocks, or does not want them any more."""
        if not self._end(request_id):
            self.late += 1

    def read(self, request_id: str, blocks: list[int], request: Request) -> int:
        """What a decode engine finds in `blocks`: 0 for the KV of its prompt's end, else a number for the garbage."""
        pool = self._driver.engine.pool
        lease = self._leases.get(request_id)
        if lease is not None:
            length = math.ceil(len(request.prompt_token_ids) / self._config.engine.block_size)
            named = dict(zip(lease.blocks, lease.generations, strict=True))
            untouched = all(pool.generation[block] == named.get(block) for block in blocks)
            right = lease.blocks[:length][-len(blocks) :] == blocks and lease.digest == _digest(request)
            if untouched and right:
                return pool.garbage(blocks)
        return mix64(sum(mix64(block) ^ pool.generation[block] for block in blocks)) | 1

    def _expire(self, request_id: str) -> None:
        self.expired += self._end(request_id)

    def _end(self, request_id: str) -> bool:
        lease = self._leases.get(request_id)
        if lease is None or lease.timer is None:
            return False
        lease.timer.cancel()
        lease.timer = None
        self._driver.release(request_id)
        return True

    # --- decode side ------------------------------------------------------------------------------------------------

    def expect(self, request: Request, params: dict[str, Any]) -> None:
        """Our request, just queued, will pull with these parameters."""
        renews = all(params.get(name) is not None for name in (*_ADDRESS, "tp_size"))
        self._wants[request.request_id] = _Want(request, params, renews)
        if renews and self._heartbeat is None:
            self._beat()

    def reject(self, params: dict[str, Any]) -> None:
        """A request that never reached the engine (or left before its turn): its prefill's blocks are given back."""
        if any(name not in params for name in ("remote_block_ids", *_ADDRESS)):
            self._die()
            return
        peer = self._reach(params)
        if peer is None:
            self.failed += 1  # the handshake
        else:
            peer.take(str(params["remote_request_id"]))

    def left(self, request_id: str) -> None:
        want = self._wants.get(request_id)
        if want is None:
            return
        if not want.pulling:
            del self._wants[request_id]
            self.reject(want.params)
        elif any(name not in want.params for name in _ADDRESS):
            self._die()
        # else the pull runs on and notifies at its end

    def pull(self, pull: Pull) -> None:
        want = self._wants[pull.request_id]
        want.pulling = True
        if not want.params.get("remote_block_ids"):
            self._die()
        elif all(name in want.params for name in _ADDRESS):
            self._loop.call_later(self._delay_s(want.params, pull), self._arrive, pull)
        # else nothing ever arrives: it waits with its blocks until the client leaves

    def _delay_s(self, params: dict[str, Any], pull: Pull) -> float:
        config = self._config
        met = str(params["remote_engine_id"]) in self._met
        if _sides.get(_address(params)) is None and not met:
            return config.kv_handshake_timeout_s
        delay_s = config.kv_pull_base_s + config.kv_pull_per_block_s * pull.num_blocks
        return delay_s if met else delay_s + config.kv_handshake_s

    def _arrive(self, pull: Pull) -> None:
        if self._closed:
            return
        want = self._wants.pop(pull.request_id)
        peer = self._reach(want.params)
        if peer is None:
            self._fail(pull)
            return
        self._met.add(peer.engine_id)
        groups = want.params["remote_block_ids"]
        size, usable = peer._config.engine.block_size, peer._config.engine.num_gpu_blocks
        blocks = groups[0] if isinstance(groups, list) and len(groups) == 1 else None
        if not isinstance(blocks, list) or len(blocks) * size < pull.num_tokens:
            self._die()  # assert num_decode_blocks <= len(prefill_group)
            return
        blocks = blocks[-math.ceil(pull.num_tokens / size) :]
        if any(type(block) is not int or not 0 <= block < usable for block in blocks):
            self._fail(pull)
            return
        remote_id = str(want.params["remote_request_id"])
        garbage = peer.read(remote_id, blocks, want.request)
        peer.take(remote_id)
        self._record(pull, blocks)
        self._driver.pull_done(pull.request_id, Pulled(True, garbage))

    def _record(self, pull: Pull, remote: list[int]) -> None:
        config = self._config
        steps = pairwise(zip(pull.blocks, remote, strict=False))
        runs = 1 + sum((a + 1, b + 1) != then for (a, b), then in steps)
        self.transfers.xfer_time.observe(config.kv_pull_base_s + config.kv_pull_per_block_s * pull.num_blocks)
        self.transfers.post_time.observe(config.kv_pull_per_block_s * pull.num_blocks)
        self.transfers.bytes.observe(pull.num_blocks * config.engine.block_size * config.kv_bytes_per_token)
        self.transfers.descriptors.observe(runs * config.kv_layers)  # neighbours on both sides are merged

    def _fail(self, pull: Pull) -> None:
        self.failed += 1
        self._driver.pull_done(pull.request_id, Pulled(False))

    def _reach(self, params: dict[str, Any]) -> "NixlSide | None":
        peer = _sides.get(_address(params))
        if peer is None or peer.engine_id != params["remote_engine_id"] or peer._compatibility != self._compatibility:
            return None
        refused = self._config.engine.block_size % peer._config.engine.block_size  # the handshake asserts it
        return None if refused else peer

    def _beat(self) -> None:
        self._heartbeat = None
        wants = [want for want in self._wants.values() if want.renews]
        if not wants:
            return
        for want in () if self._driver.paused else wants:  # heartbeats are part of the engine's steps
            peer = self._reach(want.params)
            if peer is not None:
                peer.renew(str(want.params["remote_request_id"]))
        self._heartbeat = self._loop.call_later(self._config.kv_lease_s / 6, self._beat)


def _address(params: dict[str, Any]) -> str:
    return f"{params['remote_host']}:{params['remote_port']}"


def _digest(request: Request) -> int:
    """What the KV of a prompt depends on."""
    adapter = xxhash.xxh3_64_intdigest(repr(request.lora_name).encode())
    return xxhash.xxh3_64_intdigest(array("q", request.prompt_token_ids).tobytes(), seed=adapter)
