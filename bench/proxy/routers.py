"""How each router is started: ours with what it does by default, peers by the command line a user would write."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from bench.proxy import http1
from bench.proxy.processes import pinned, tree, tree_cpu_s, tree_rss_bytes
from bench.proxy.prompts import MODEL

OURS = "ours"
FLOOR = "floor"
"""A proxy in Python that does nothing but pass on what comes (`bench/proxy/floor.py`)."""
DIRECT = "direct"
PINS = {"vllm-router": "0.1.17", "sglang-router": "0.3.2", "smg": "1.13.0"}
"""Packages of PyPI and the versions this was written for."""
_START_S = 60.0
_STOP_S = 5.0
_HOST = "127.0.0.1"
_PROBES = 8
"""Answers in a row before a router counts as ready: it must know all workers by then."""


class Missing(Exception):
    """This router cannot be measured here; the text says why and what to do."""


class Workers(msgspec.Struct, frozen=True):
    """What a router is put in front of: ports of the backends and addresses of their KV events."""

    ports: Sequence[int]
    events: Sequence[str] = ()

    @property
    def urls(self) -> list[str]:
        return [f"http://{_HOST}:{port}" for port in self.ports]


class Spec(msgspec.Struct, frozen=True):
    """`command(workers, port, other, folder)`: its arguments; `other` is a second free port."""

    name: str
    command: Callable[[Workers, int, int, Path], list[str]]
    environment: Mapping[str, str] = {}
    package: str | None = None
    decides: bool = False
    """It is a gateway of ours."""


def ours(name: str, tree_folder: Path, tokenizer: Path) -> Spec:
    """The gateway of the checkout at `tree_folder`."""

    def command(workers: Workers, port: int, other: int, folder: Path) -> list[str]:
        file = gateway_config(folder / f"{name}.yaml", workers, port, other, tokenizer)
        return [sys.executable, "-m", "gateway", "gateway", "--config", str(file)]

    return Spec(name, command, {"PYTHONPATH": str(tree_folder)}, decides=True)


def floor(tree_folder: Path) -> Spec:
    def command(workers: Workers, port: int, other: int, folder: Path) -> list[str]:
        return [sys.executable, "-m", "bench.proxy.floor", str(port), *map(str, workers.ports)]

    return Spec(FLOOR, command, {"PYTHONPATH": str(tree_folder)})


def gateway_config(file: Path, workers: Workers, port: int, admin_port: int, tokenizer: Path) -> Path:
    """Addresses and a tokenizer; all else is as by default."""
    listed = [{"url": url, "events": events} for url, events in zip(workers.urls, workers.events, strict=True)]
    config = {
        "gateway": {"host": _HOST, "port": port, "admin_host": _HOST, "admin_port": admin_port},
        "workers": listed,
        "tokens": {"tokenizer": str(tokenizer)},
    }
    file.write_bytes(msgspec.json.encode(config))  # Which is YAML.
    return file


def peers(bin_folder: str | None) -> list[Spec]:
    """Those of `PINS`, in `bin_folder` or on PATH, in the policies they are known by."""

    def spec(package: str, short: str, policy: str, *launch: str) -> Spec:
        def command(workers: Workers, port: int, other: int, folder: Path) -> list[str]:
            program = shutil.which(package, path=bin_folder)
            if program is None:
                where = f"in {bin_folder}" if bin_folder else "on PATH"
                raise Missing(f"no {package} {where}; python -m bench proxy --install-peers DIR gets it")
            own = ["--host", _HOST, "--port", str(port), "--prometheus-port", str(other)]
            return [program, *launch, *own, "--policy", policy, "--worker-urls", *workers.urls]

        return Spec(f"{short} {policy}", command, {"HF_HUB_OFFLINE": "1"}, package)

    return [
        spec("vllm-router", "vllm-router", "round_robin"),
        spec("vllm-router", "vllm-router", "cache_aware"),
        spec("sglang-router", "sglang-router", "round_robin", "launch"),
        spec("sglang-router", "sglang-router", "cache_aware", "launch"),
        spec("smg", "smg", "round_robin", "launch"),
        spec("smg", "smg", "cache_aware", "launch"),
    ]


def version_of(package: str, bin_folder: str | None) -> str | None:
    """As its own Python tells."""
    program = shutil.which(package, path=bin_folder)
    if program is None:
        return None
    with open(program, "rb") as file:
        interpreter = file.readline().removeprefix(b"#!").strip().decode(errors="replace")
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, timeout=30, check=True)  # noqa: S603
        return found.stdout.strip()
    return None


class Running:
    """A router that serves, pinned to its core, with its output in a file. `ports` is where it is asked."""

    def __init__(
        self,
        name: str,
        ports: Sequence[int],
        process: subprocess.Popen[bytes] | None,
        admin_port: int,
        log: Path,
        *,
        decides: bool = False,
    ) -> None:
        self.name = name
        self.decides = decides
        self.ports = ports
        self.admin_port = admin_port
        self.log = log
        self._process = process

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def cpu_s(self) -> float:
        return 0.0 if self._process is None else tree_cpu_s(self._process.pid)

    def rss_bytes(self) -> int:
        return 0 if self._process is None else tree_rss_bytes(self._process.pid)

    def alive(self) -> bool:
        return self._process is None or self._process.poll() is None

    def forget_log(self) -> None:
        """Logs are written as by default, but a run must not fill the disk."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.truncate(self.log, 0)

    def close(self) -> None:
        if self._process is not None:
            stop(self._process)


def direct(workers: Workers) -> Running:
    """No router at all."""
    return Running(DIRECT, workers.ports, None, 0, Path(os.devnull))


def start(spec: Spec, workers: Workers, core: int | None, folder: Path) -> Running:
    """Until it answers; `core` None: on any. Raises Missing, with the end of its output, if it does not."""
    port, other = free_port(), free_port()
    command = spec.command(workers, port, other, folder)
    log = folder / f"{spec.name.replace(' ', '-')}.log"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WARMROUTE_")}
    with log.open("ab") as output, contextlib.nullcontext() if core is None else pinned(core):
        process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**kept, **spec.environment},
            cwd=folder,
        )
    running = Running(spec.name, [port], process, other, log, decides=spec.decides)
    try:
        wait_until_answered(running)
    except BaseException:
        stop(process)
        raise
    return running


def wait_until_answered(running: Running) -> None:
    """Raises Missing, with the end of its output, where it does not answer."""
    body = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
    deadline_s = time.monotonic() + _START_S
    good, last = 0, "no answer"
    while time.monotonic() < deadline_s and running.alive():
        status = _status(running.ports[0], body)
        good, last = (good + 1, "") if status == 200 else (0, f"last answer: status {status}" if status else last)
        if good >= _PROBES:
            return
        if status != 200:
            time.sleep(0.1)
    end = running.log.read_text(encoding="utf-8", errors="replace")[-500:]
    what = "ended" if not running.alive() else f"does not answer within {_START_S:.0f} s ({last})"
    raise Missing(f"{running.name} {what}; its output ends with: {end}")


def _status(port: int, body: bytes) -> int:
    """Of one request; 0 when there is no answer."""
    answer = http1.Answer()
    with contextlib.suppress(OSError), socket.create_connection((_HOST, port), 5.0) as link:
        link.sendall(http1.post("/v1/chat/completions", _HOST, body))
        while data := link.recv(65536):
            if answer.feed(data):
                break
    return answer.status


def free_port() -> int:
    with socket.socket() as s:
        s.bind((_HOST, 0))
        port: int = s.getsockname()[1]
        return port


def stop(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started."""
    below = tree(process.pid)[1:]
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pid in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


class Backends:
    """The workers' process. Ends with this one, whatever becomes of it, as its standard input does."""

    def __init__(self, n_workers: int, core: int | None) -> None:
        """`core` None: on any."""
        command = [sys.executable, "-m", "bench.proxy.backend", "--workers", str(n_workers)]
        with contextlib.nullcontext() if core is None else pinned(core):
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
        output: IO[bytes] | None = self._process.stdout
        line = b"" if output is None else output.readline()
        if not line:
            raise RuntimeError(f"the backends ended with exit code {self._process.wait()}")
        self.ports: list[int] = msgspec.json.decode(line)["ports"]

    def cpu_s(self) -> float:
        return tree_cpu_s(self._process.pid)

    def check(self) -> None:
        """Raises RuntimeError when they are gone: every router would look broken."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the backends ended with exit code {self._process.returncode}")

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            stop(self._process)
