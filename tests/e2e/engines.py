"""Real vLLM servers for the end-to-end tests: start, wait, stop, freeze and restart them.

The engine lives in a venv of its own, made by setup.sh; pytest runs in the project's venv and only starts processes.
Every socket of a server is on the loopback interface.
"""

import contextlib
import http.client
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
VENV = REPOSITORY / os.environ.get("WARMROUTE_E2E_VENV", ".venv-e2e")
MODELS = VENV / "models"

# Smallest block the CPU attention kernel takes.
BLOCK_TOKENS = 32
# The first start after a setup reads 2 GB from disk, and CI machines have two slow cores.
START_DEADLINE_S = 300.0
STOP_DEADLINE_S = 15.0
# Below the range that Linux hands out to outgoing connections, so that a restarted server finds its ports free.
PORT_RANGE = (20_000, 32_000)

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # /reset_prefix_cache, /server_info and the like.
    "VLLM_SERVER_DEV_MODE": "1",
    # The model runs inside the engine process; a separate worker spins on shared memory and starves its neighbours.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # NIXL: metadata and transfers over loopback.
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_NET_DEVICES": "lo",
}
# Byte code makes a start twice as fast; a seed would make the block hashes differ from a default deployment's.
_ENVIRONMENT_DROPPED = ("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONPATH")


class EngineStartError(RuntimeError):
    """The engine died or was not healthy in time; the message ends with the tail of its log."""


running: "list[VllmServer]" = []
"""Those inside a `serving`."""
_ports_given: set[int] = set()
_ports_lock = threading.Lock()


def free_port() -> int:
    """A TCP port on 127.0.0.1 that is free now and was not given out before by this process."""
    with _ports_lock:
        for port in random.SystemRandom().sample(range(*PORT_RANGE), 500):
            if port in _ports_given:
                continue
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
                _ports_given.add(port)
                return port
    raise OSError(f"no free port in {PORT_RANGE}")


def _loopback_host() -> str:
    """The host to put in an endpoint that vLLM shall *bind* on loopback only.

    vLLM binds an endpoint only if it contains ``*`` or ``::`` and connects otherwise (``kv_events.py``,
    ``_is_bind_endpoint``). For ZMQ the IPv4-mapped form is 127.0.0.1. Without IPv6 there is no such form.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::ffff:127.0.0.1", 0))
        return "[::ffff:127.0.0.1]"
    return "*"


@dataclass(frozen=True)
class Response:
    """Status and decoded body (JSON where it is JSON, else text) of one request."""

    status: int
    body: Any


class VllmServer:
    """One ``vllm serve`` process group.

    Args:
        name: names the log file and nothing else.
        log_dir: folder for ``<name>.log``; a restart appends.
        model: folder below ``MODELS``, or an absolute path.
        served_names: names the model answers to; the first is the one in events' topic.
        loras: adapter name -> folder below ``MODELS``.
        num_blocks: KV-cache blocks of ``BLOCK_TOKENS`` tokens (the engine keeps one of them for itself).
        kv_role: ``kv_producer`` or ``kv_consumer`` adds the NIXL connector.
        kv_connector_extra: the connector's ``kv_connector_extra_config``, e.g. ``{"kv_lease_duration": 6}``.
        kv_load_failure_policy: ``fail`` or ``recompute``; None is the engine's default.
        args, environment: added to the command line and environment.
    """

    def __init__(
        self,
        name: str,
        log_dir: pathlib.Path,
        *,
        model: str = "tiny",
        served_names: Sequence[str] = ("tiny", "tiny-alias"),
        loras: Mapping[str, str] | None = None,
        num_blocks: int = 120,
        max_model_len_tokens: int = 2048,
        kv_role: str | None = None,
        kv_connector_extra: Mapping[str, Any] | None = None,
        kv_load_failure_policy: str | None = None,
        args: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_dir / f"{name}.log"
        self.model = model
        self.served_names = tuple(served_names)
        self.loras = {"l1": "l1"} if loras is None else dict(loras)
        self.num_blocks = num_blocks
        self.max_model_len_tokens = max_model_len_tokens
        self.kv_role = kv_role
        self.kv_connector_extra = dict(kv_connector_extra or {})
        self.kv_load_failure_policy = kv_load_failure_policy
        self.args = tuple(args)
        self.environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at_s = 0.0
        self.start_s = 0.0  # how long the last start took, for reports
        self.choose_ports()

    def choose_ports(self) -> None:
        """Take new ports; only while the server is down."""
        self.http_port, self.events_port, self.replay_port, self.side_channel_port = (free_port() for _ in range(4))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def worker(self) -> str:
        """``host:port``, as a router names this server."""
        return f"127.0.0.1:{self.http_port}"

    @property
    def topic(self) -> str:
        return f"kv@{self.worker}@{self.served_names[0]}"

    @property
    def events_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.events_port}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.replay_port}"

    @property
    def pid(self) -> int:
        """Process id, which is also the group id of everything the server started."""
        if self._process is None:
            raise RuntimeError(f"{self.name} is not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def command(self) -> list[str]:
        host = _loopback_host()
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://{host}:{self.events_port}",
            "replay_endpoint": f"tcp://{host}:{self.replay_port}",
            "topic": self.topic,
        }
        command = [str(VENV / "bin" / "vllm"), "serve", str(MODELS / self.model)]
        command += ["--served-model-name", *self.served_names]
        command += ["--host", "127.0.0.1", "--port", str(self.http_port)]
        command += ["--max-model-len", str(self.max_model_len_tokens), "--max-num-seqs", "16"]
        command += ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(self.num_blocks)]
        command += ["--enforce-eager", "--dtype", "float32", "--distributed-executor-backend", "uni", "--seed", "0"]
        command += [
            "--enable-prefix-caching",
            "--enable-prompt-tokens-details",
            "--kv-events-config",
            json.dumps(events),
        ]
        if self.loras:
            command += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules"]
            command += [f"{name}={MODELS / folder}" for name, folder in self.loras.items()]
        if self.kv_role is not None:
            connector: dict[str, Any] = {
                "kv_connector": "NixlConnector",
                "kv_role": self.kv_role,
                "kv_buffer_device": "cpu",
            }
            if self.kv_connector_extra:
                connector["kv_connector_extra_config"] = self.kv_connector_extra
            if self.kv_load_failure_policy is not None:
                connector["kv_load_failure_policy"] = self.kv_load_failure_policy
            command += ["--kv-transfer-config", json.dumps(connector)]
        return [*command, *self.args]

    def launch(self) -> None:
        """Start the process and return at once; ``wait_healthy`` does the waiting."""
        if self.alive:
            raise RuntimeError(f"{self.name} is running already")
        if not (VENV / "bin" / "vllm").exists() or not (MODELS / self.model).is_dir():
            raise EngineStartError(f"no engine in {VENV}: run `make e2e`, or `bash tests/e2e/setup.sh` first")
        environment = {key: value for key, value in os.environ.items() if key not in _ENVIRONMENT_DROPPED}
        environment |= _ENVIRONMENT | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port)} | self.environment
        environment["PATH"] = f"{VENV / 'bin'}{os.pathsep}{environment.get('PATH', os.defpath)}"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.log_path.parent,
                start_new_session=True,
            )
        self._started_at_s = time.monotonic()

    def healthy(self, timeout_s: float = 2.0) -> bool:
        try:
            return self.get("/health", timeout_s=timeout_s).status == 200
        except (OSError, http.client.HTTPException):
            return False

    def wait_healthy(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Poll /health until it answers 200; raises EngineStartError when the process dies or time is up."""
        while not (self.healthy() and self.alive):
            if not self.alive:
                code = self._process.returncode if self._process else None
                raise EngineStartError(f"{self.name} exited with {code}\n{self.log_tail()}")
            if time.monotonic() - self._started_at_s > deadline_s:
                self.stop()
                raise EngineStartError(f"{self.name} not healthy after {deadline_s:.0f} s\n{self.log_tail()}")
            time.sleep(0.1)
        self.start_s = time.monotonic() - self._started_at_s

    def start(self) -> None:
        """Launch and wait; one more try on other ports, should another process have taken one meanwhile."""
        start_all([self])

    def stop(self, patience_s: float = STOP_DEADLINE_S) -> None:
        """SIGTERM, after `patience_s` SIGKILL, to this server's own process group. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill(self) -> None:
        """SIGKILL, as an out-of-memory kill would."""
        os.killpg(self.pid, signal.SIGKILL)
        self.stop()

    def restart_in_place(self) -> None:
        """Stop and start again on the same ports, as a container restarted inside its pod."""
        self.stop()
        self.launch()
        self.wait_healthy()

    def sigstop(self) -> None:
        """Freeze: sockets stay open, nothing is answered."""
        os.killpg(self.pid, signal.SIGSTOP)

    def sigcont(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def log_tail(self, lines: int = 60) -> str:
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return f"--- last lines of {self.log_path}\n" + "\n".join(text.splitlines()[-lines:])

    def get(self, path: str, timeout_s: float = 30.0) -> Response:
        return self._request(urllib.request.Request(self.url + path), timeout_s)

    def metric(self, name: str) -> float:
        """Sum of all samples of one Prometheus metric, 0 when there is none."""
        lines = str(self.get("/metrics").body).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)

    def post(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> Response:
        """POST ``body`` as JSON (no body when None). An HTTP error status is returned, not raised."""
        data = b"" if body is None else json.dumps(body).encode()
        all_headers = {"content-type": "application/json", **(headers or {})}
        return self._request(urllib.request.Request(self.url + path, data=data, headers=all_headers), timeout_s)

    @staticmethod
    def _request(request: urllib.request.Request, timeout_s: float) -> Response:
        # Never through a proxy that the environment may name: every server here is on loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                status, raw, kind = answer.status, answer.read(), answer.headers.get_content_type()
        except urllib.error.HTTPError as error:
            with error:
                status, raw, kind = error.code, error.read(), error.headers.get_content_type()
        return Response(status, json.loads(raw) if kind == "application/json" and raw else raw.decode())


def start_all(servers: Sequence[VllmServer]) -> None:
    """Start servers side by side and wait for all; each failed one gets a second try on new ports.

    Side by side, because a start is mostly one busy core and then waiting: three take 1.6 times as long as one.
    On failure every one of them is stopped before the error is raised.
    """
    try:
        for server in servers:
            server.launch()
        for server in servers:
            try:
                server.wait_healthy()
            except EngineStartError:
                server.stop()
                server.choose_ports()
                server.launch()
                server.wait_healthy()
    except BaseException:
        stop_all(servers)
        raise


def stop_all(servers: Sequence[VllmServer]) -> None:
    """Ask all to end, and wait for all within one deadline."""
    for server in servers:
        if server.alive:
            os.kill(server.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_DEADLINE_S
    for server in servers:
        server.stop(max(0.0, deadline_s - time.monotonic()))


@contextlib.contextmanager
def serving(servers: Sequence[VllmServer]) -> Iterator[None]:
    """Start them all; at the end stop them all."""
    start_all(servers)
    running.extend(servers)
    try:
        yield
    finally:
        for server in servers:
            running.remove(server)
        stop_all(servers)
