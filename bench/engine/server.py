"""A fake `vllm serve`: engine models driven by wall clock behind vLLM's HTTP and ZMQ faces.

In a test: ``async with FakeVllm(FakeVllmConfig(...)) as engine:``, then `engine.url`, `.events_endpoint` and so on.
From a shell: ``python -m bench.engine.server --port 0``; the first line on stdout is JSON with the chosen endpoints.
"""

import argparse
import asyncio
import dataclasses
import json
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import zmq
from aiohttp import web

from bench.engine import timing, tokenizer
from bench.engine.config import FakeVllmConfig, Faults
from bench.engine.driver import Driver
from bench.engine.events import EVENT_FORMATS, Event, encode_batch
from bench.engine.http import Api, entropy_stream
from bench.engine.model import Engine
from bench.engine.nixl import NixlSide
from bench.engine.protocol import ServedModel
from bench.engine.publisher import Publisher, for_rank
from bench.engine.realtime import RealtimeSession
from bench.engine.request import EngineConfig, EngineStats
from bench.engine.seen import Seen
from bench.engine.side_channel import SideChannel
from bench.engine.stored import Store

_PORT_ATTEMPTS: Final = 50
_IN_A_ROW: Final = (12_000, 32_000)
_START_APART_S: Final = 0.05  # start times are told to 10 ms; no real process comes up again so soon


class FakeVllm:
    """One server. `faults` may be changed at any time (call `apply_faults` after touching `stall`)."""

    def __init__(self, config: FakeVllmConfig | None = None) -> None:
        self.config = config or FakeVllmConfig()
        self.faults: Faults = dataclasses.replace(self.config.faults)
        self.models: dict[str, ServedModel] = {}
        self.adapters: dict[str, str] = {}
        self.drivers: list[Driver] = []
        self.publishers: list[Publisher] = []
        self.nixl: list[NixlSide] = []
        self.requests: deque[Seen] = deque(maxlen=self.config.record_requests)
        self._side_channel = SideChannel(
            self.config.nixl_host or self.config.host, self.config.nixl_port, self.config.data_parallel_size
        )
        self.started = 0.0
        self.sleep_level: int | None = None
        self.dead = False
        self.store = Store()
        self.sessions: set[RealtimeSession] = set()
        self.port = self.config.port
        self.fingerprint = f"vllm-{self.config.version}-{self.config.engine.seed:08x}"
        self._endpoints = (self.config.events_endpoint, self.config.replay_endpoint)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._runner: web.AppRunner | None = None
        self._answering = asyncio.Event()
        self._restarts: set[asyncio.Task[None]] = set()
        self.entropy = entropy_stream(self.config.engine.seed)

    # --- addresses --------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://{self.config.host}:{self.port}"

    @property
    def nixl_ports(self) -> Sequence[int]:
        """By rank. Those of a server that has not started yet may change."""
        return self._side_channel.ports

    @property
    def events_endpoint(self) -> str:
        """Rank 0's PUB endpoint, ready to connect to (or what it connects to)."""
        return self._endpoint(self.publishers[0].endpoint if self.publishers else None)

    @property
    def replay_endpoint(self) -> str:
        """Rank 0's ROUTER endpoint, ready to connect to."""
        return self._endpoint(self.publishers[0].replay_endpoint if self.publishers else None)

    @staticmethod
    def _endpoint(endpoint: str | None) -> str:
        if endpoint is None:
            raise RuntimeError("this server publishes no events there")
        return endpoint

    def event_sources(self) -> dict[str, Any]:
        """`GET /kv_event_sources`: per rank, endpoints as configured with real ports."""
        return {
            str(rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": _as_configured(self.config.events_endpoint, publisher.endpoint),
                "replay_endpoint": _as_configured(self.config.replay_endpoint, publisher.replay_endpoint),
                "buffer_steps": self.config.buffer_steps,
                "hwm": self.config.hwm,
                "max_queue_size": 100_000,
                "topic": self.config.topic,
            }
            for rank, publisher in enumerate(self.publishers)
        }

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the ports and answer; a failed start leaves nothing open."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self.config
        self.started = time.time()
        self.dead = False
        self.sleep_level = None
        self.store = Store()
        self.adapters = {}
        self.models = {name: ServedModel(name) for name in (config.model, *config.aliases)}
        for name, path in config.lora_modules.items():
            self.add_adapter(name, path)
        await self._open_publishers()
        publish = [self._publish(rank) for rank in range(config.data_parallel_size)]
        self.drivers = [Driver(Engine(config.engine), each) for each in publish]
        if config.kv_connector:
            await self._side_channel.listen()
            pairs = enumerate(zip(self.drivers, self.nixl_ports, strict=True))
            self.nixl = [NixlSide(driver, config, rank, port, self.kill_engine) for rank, (driver, port) in pairs]
        self.apply_faults()
        app = Api(self).app()
        self._runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=config.keepalive_timeout_s,
            handler_cancellation=True,
            shutdown_timeout=0.05,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, config.host, self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close everything; open streams are cut."""
        self._side_channel.close()
        self._answering.set()
        self.store.close()
        for connection in self._runner.server.connections if self._runner and self._runner.server else ():
            if connection.transport is not None:
                connection.transport.abort()
        for side in self.nixl:
            side.close()
        for driver in self.drivers:
            driver.close()
        if self._runner is not None:
            await self._runner.cleanup()
        for publisher in self.publishers:
            await publisher.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        self.nixl, self.drivers, self.publishers, self._runner, self._context = [], [], [], None, None

    async def restart(self, down_s: float = 0.0) -> None:
        """A crash and restart in place, `down_s` later: same ports, empty cache, sequence numbers from 0, a new process
        start time.
        """
        endpoints = tuple(
            _as_configured(given, real)
            for given, real in zip(
                (self.config.events_endpoint, self.config.replay_endpoint),
                (self.publishers[0].endpoint, self.publishers[0].replay_endpoint) if self.publishers else (None, None),
                strict=True,
            )
        )
        self._endpoints = (endpoints[0], endpoints[1])
        earlier = self.started
        await self.stop()
        await asyncio.sleep(max(down_s, earlier + _START_APART_S - time.time()))
        await self.start()

    def restart_soon(self) -> None:
        """Restart after the current request was answered."""
        task = asyncio.get_running_loop().create_task(self.restart())
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def __aenter__(self) -> "FakeVllm":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _open_publishers(self) -> None:
        events, replay = self._endpoints
        if events is None:
            return
        for attempt in range(_PORT_ATTEMPTS):
            self._context = zmq.Context()
            try:
                await self._open_ranks(self._tried(events), replay and self._tried(replay))
            except zmq.ZMQError:
                # With several ranks a free base port may be followed by a taken one.
                for publisher in self.publishers:
                    await publisher.close()
                self.publishers = []
                self._context.destroy(linger=0)
                self._context = None
                if attempt + 1 == _PORT_ATTEMPTS or not (events.endswith(":0") or (replay or "").endswith(":0")):
                    raise
            else:
                return

    def _tried(self, endpoint: str) -> str:
        """Several ranks want ports in a row: below those that the system gives to whoever connects."""
        if not endpoint.endswith(":0") or self.config.data_parallel_size == 1:
            return endpoint
        return f"{endpoint[:-1]}{random.randrange(*_IN_A_ROW)}"

    async def _open_ranks(self, events: str, replay: str | None) -> None:
        config = self.config
        for rank in range(config.data_parallel_size):
            assert self._context is not None  # noqa: S101 - set by the caller
            publisher = Publisher(
                self._context,
                topic=config.topic,
                buffer_steps=config.buffer_steps,
                hwm=config.hwm,
                with_topic=config.replay_with_topic,
                faults=self.faults,
            )
            self.publishers.append(publisher)
            patient = self._endpoints != (config.events_endpoint, config.replay_endpoint)
            await publisher.open(for_rank(events, rank), replay and for_rank(replay, rank), config.host, patient)
            if rank == 0:  # the ranks after it count up from the real port
                events = _as_configured(events, publisher.endpoint) or events
                replay = _as_configured(replay, publisher.replay_endpoint)

    def _publish(self, rank: int) -> Any:
        if not self.publishers:
            return lambda ts, events: None
        publisher, layout = self.publishers[rank], self.config.event_format

        def publish(ts: float, events: list[Event]) -> None:
            publisher.publish(encode_batch(ts, events, rank, layout))

        return publish

    # --- state the handlers use -------------------------------------------------------------------------------------

    def chance(self) -> float:
        """A seeded number in [0, 1)."""
        return self.entropy() / 2**64

    def least_loaded_rank(self) -> int:
        """Where a request without a rank goes: vLLM's coordinator weighs waiting requests four times."""
        if len(self.drivers) == 1:
            return 0
        loads = [(it.running + 4 * (it.waiting + it.incoming), rank) for rank, it in enumerate(self.stats())]
        return min(loads)[1]

    @property
    def held_blocks(self) -> int:
        """Blocks that finished prefills pin for a decode server, over all ranks."""
        return sum(stats.held_blocks for stats in self.stats())

    def stats(self) -> list[EngineStats]:
        return [driver.engine.stats() for driver in self.drivers]

    def add_adapter(self, name: str, path: str) -> None:
        self.adapters[name] = path
        used = [model.lora_id or 0 for model in self.models.values()]
        self.models[name] = ServedModel(name, max(used, default=0) + 1, name)

    def remove_adapter(self, name: str) -> None:
        del self.adapters[name], self.models[name]

    def reset_prefix_cache(self) -> bool:
        done = [driver.engine.reset_prefix_cache() for driver in self.drivers]
        return all(done)

    def sleep(self, level: int | None) -> None:
        """Sleep at a level (drops the cache) or wake up (None)."""
        self.sleep_level = level
        if level is not None:
            self.reset_prefix_cache()
        self.apply_faults()

    def kill_engine(self) -> None:
        """The engine core dies: every stream fails, /health answers 503."""
        self.dead = True
        self._side_channel.close()
        for side in self.nixl:
            side.close()
        for driver in self.drivers:
            driver.close()

    def apply_faults(self) -> None:
        """Make `faults.stall` take effect."""
        for driver in self.drivers:
            driver.pause(self.faults.stall or self.sleep_level is not None or self.dead)
        if self.faults.stall:
            self._answering.clear()
        else:
            self._answering.set()

    async def until_answering(self) -> None:
        if not self._answering.is_set():
            await self._answering.wait()

    def inject(self, payload: bytes, rank: int = 0) -> None:
        """Publish a payload of the test's own as the next numbered batch."""
        self.publishers[rank].publish(payload)


def _as_configured(given: str | None, real: str | None) -> str | None:
    """The configured endpoint with its real port; `*` stays, as it decides between bind and connect."""
    if given is None or real is None:
        return given
    if given.startswith("tcp://*:"):
        return f"tcp://*:{real.rpartition(':')[2]}"
    return real


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.server", description="A vLLM server without a model.")
    parser.add_argument("--model", default="fake-model")
    parser.add_argument("--served-model-name", nargs="*", default=[], help="further names of the model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free port")
    parser.add_argument(
        "--events-endpoint", default="tcp://*:0", help="vLLM's kv-events endpoint; 'none' for no events"
    )
    parser.add_argument("--replay-endpoint", default="tcp://*:0", help="'none' for no replay")
    parser.add_argument("--topic", default="")
    parser.add_argument("--event-format", choices=EVENT_FORMATS, default="map")
    parser.add_argument("--replay-without-topic", action="store_true", help="replay frames of vLLM before 0.26")
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-gpu-blocks", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--timing", choices=tuple(timing.PRESETS), default="cpu-fast")
    parser.add_argument("--speedup", type=float, default=1.0, help="run that many times as fast")
    parser.add_argument("--mean-output-tokens", type=float, default=None, help="the model stops by itself around there")
    parser.add_argument("--lora", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument(
        "--kv-connector",
        action="store_true",
        help="prefill/decode hand-off as NixlConnector; between the servers of one process only",
    )
    parser.add_argument("--kv-lease-s", type=float, default=30.0)
    parser.add_argument("--kv-load-failure-policy", choices=("fail", "recompute"), default="fail")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def config_from_arguments(argv: Sequence[str] | None = None) -> FakeVllmConfig:
    args = _arguments(argv)
    engine = EngineConfig(
        block_size=args.block_size,
        num_gpu_blocks=args.num_gpu_blocks,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        seed=args.seed,
        timing=timing.preset(args.timing).faster(args.speedup),
        generated_ids=tokenizer.GENERATED_IDS,
    )
    return FakeVllmConfig(
        model=args.model,
        aliases=tuple(args.served_model_name),
        lora_modules=dict(pair.partition("=")[::2] for pair in args.lora),
        engine=engine,
        data_parallel_size=args.data_parallel_size,
        host=args.host,
        port=args.port,
        events_endpoint=None if args.events_endpoint == "none" else args.events_endpoint,
        replay_endpoint=None if args.replay_endpoint == "none" else args.replay_endpoint,
        topic=args.topic,
        event_format=args.event_format,
        replay_with_topic=not args.replay_without_topic,
        mean_output_tokens=args.mean_output_tokens,
        kv_connector=args.kv_connector,
        kv_lease_s=args.kv_lease_s,
        kv_load_failure_policy=args.kv_load_failure_policy,
    )


async def serve(config: FakeVllmConfig) -> None:
    """Run until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with FakeVllm(config) as engine:
        sources = engine.event_sources()
        print(json.dumps({"url": engine.url, "model": config.model, "kv_event_sources": sources}), flush=True)
        await stop.wait()


def main(argv: Sequence[str] | None = None) -> int:
    try:
        asyncio.run(serve(config_from_arguments(argv)))
    except (ValueError, OSError) as error:
        print(f"bench.engine.server: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
