"""The HTTP side of vLLM's NixlConnector: a prefill server pins blocks and names them, a decode server pulls them.

A pull is only a delay. Servers of one process find each other by engine id; a prefill server that is not there (or was
restarted and has a new id) makes the pull fail, as it does with real NIXL.
"""

import asyncio
import functools
import uuid
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakValueDictionary

from bench.engine.config import FakeVllmConfig
from bench.engine.driver import Driver
from bench.engine.protocol import ApiError
from bench.engine.request import Pull

_NEEDED: Final = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port")
_servers: "Final[WeakValueDictionary[str, NixlSide]]" = WeakValueDictionary()


class EngineDiedError(ApiError):
    """What was asked kills a real engine core; the server must go down with it."""

    def __init__(self, why: str) -> None:
        super().__init__(500, f"EngineCore encountered an issue: {why}", "InternalServerError")


class NixlSide:
    """One rank's connector. `expired`, `late` and `failed` are vLLM's counters of the same meaning."""

    def __init__(self, driver: Driver, config: FakeVllmConfig, port: int) -> None:
        self.engine_id = str(uuid.uuid4())
        self.expired = self.late = self.failed = 0
        self._driver = driver
        self._config = config
        self._port = port
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._expected: dict[str, dict[str, Any]] = {}  # our request id -> the parameters it came with
        driver.pull = self._start_pull
        driver.recompute_failed_pulls = config.kv_load_failure_policy == "recompute"
        _servers[self.engine_id] = self

    def close(self) -> None:
        for lease in self._leases.values():
            lease.cancel()
        _servers.pop(self.engine_id, None)

    def offer(self, request_id: str, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """The prefill answer's `kv_transfer_params`; the blocks stay pinned until pulled or the lease ends."""
        loop = asyncio.get_running_loop()
        self._leases[request_id] = loop.call_later(self._config.kv_lease_s, self._expire, request_id)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [self._driver.engine.held_blocks(request_id)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": self._config.host,
            "remote_port": self._port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": prompt_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached_tokens,
        }

    def expect(self, request_id: str, params: dict[str, Any]) -> None:
        """Our request will pull with these parameters."""
        self._expected[request_id] = params

    def take(self, request_id: str) -> None:
        """A decode server has pulled these blocks or gave them up."""
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            lease.cancel()
        if not self._driver.release(request_id):
            self.late += 1

    def _start_pull(self, pull: Pull) -> tuple[float, Callable[[], bool]]:
        delay_s = self._config.kv_pull_base_s + self._config.kv_pull_per_block_s * pull.num_blocks
        return delay_s, functools.partial(self._finish_pull, pull.request_id)

    def _finish_pull(self, request_id: str) -> bool:
        found = notify(self._expected.pop(request_id, {}))
        self.failed += not found
        return found

    def _expire(self, request_id: str) -> None:
        self._leases.pop(request_id, None)
        if self._driver.release(request_id):
            self.expired += 1


def remote_tokens(params: dict[str, Any], prompt_tokens: int, block_size: int) -> int:
    """How many leading tokens are to be pulled; EngineDiedError for what kills (or hangs) a real engine."""
    missing = [name for name in _NEEDED if not params.get(name)]
    if missing:
        raise EngineDiedError(f"kv_transfer_params without {', '.join(missing)}")
    blocks = params["remote_block_ids"]
    count = min(int(params.get("remote_num_tokens") or prompt_tokens), prompt_tokens)
    if not isinstance(blocks, list) or not isinstance(blocks[0], list) or len(blocks[0]) * block_size < count:
        raise EngineDiedError("num_decode_blocks <= len(prefill_group)")
    return count


def notify(params: dict[str, Any]) -> bool:
    """Tell the prefill server its blocks are no longer needed; False if it is not there."""
    side = _servers.get(str(params.get("remote_engine_id")))
    if side is None:
        return False
    side.take(str(params.get("remote_request_id")))
    return True
