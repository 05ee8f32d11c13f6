"""The processes of a measurement: engines, whoever follows them, and what each of them takes."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import msgspec

from bench.proxy.processes import cpu_s
from bench.scale.held import Held

START_S = 1800.0
_POLL_S = 0.25
_STOP_S = 30.0
_BUDGET_BYTES = 64 << 30
SCRAPE_S = 5.0
"""Each worker's pages are read once in so long: the engines' process, which serves all of them, is one core."""


class Process:
    """A child that is ended with the measurement. Its CPU time and memory are those of the one process it is."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        self.began_s = time.monotonic()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.pid = self._process.pid

    def ask(self, line: str) -> Any:
        """Its next line, as JSON. Raises RuntimeError if it ends instead."""
        self.tell(line)
        return self.answer()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None  # noqa: S101 - it was asked for
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None  # noqa: S101 - it was asked for
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._process.wait()
        raise RuntimeError(f"{self.name} ended: {self.last_words()}")

    def check(self) -> None:
        """Raises RuntimeError if it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.name} ended: {self.last_words()}")

    def last_words(self) -> str:
        return self.log.read_text(errors="replace").strip()[-500:]

    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    def rss_mb(self) -> float:
        """Now, of 10^6 bytes."""
        return self._memory("VmRSS")

    def peak_mb(self) -> float:
        return self._memory("VmHWM")

    def _memory(self, name: str) -> float:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        if found is None:
            raise RuntimeError(f"{self.name} has no {name}")
        return int(found[1]) * 1024 / 1e6

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Served(Process):
    """A `warmroute` command of this checkout, with a page of metrics."""

    def __init__(self, name: str, command: Sequence[str], log: Path, metrics_port: int) -> None:
        super().__init__(name, command, log)
        self._url = f"http://127.0.0.1:{metrics_port}/metrics"

    def metric(self, name: str) -> float | None:
        """One without labels, or the sum over all labels; None while nothing answers."""
        try:
            with urllib.request.urlopen(self._url, timeout=10) as answer:  # noqa: S310 - our own child
                text = answer.read().decode()
        except OSError:
            return None
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found)) if found else None


class Fleet:
    """In a measurement: ``with Fleet(held) as fleet:``. What is started in it ends with it."""

    def __init__(self, held: Held, *, told: Callable[[str], None] = lambda line: None) -> None:
        self.held = held
        self._told = told
        self._stack = ExitStack()
        self.batches = 0
        """Sent so far."""

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-scale-")))
        try:
            made = [sys.executable, "-m", "bench.scale.engines", msgspec.json.encode(self.held).decode()]
            self.engines = self.start("engines", made)
            self.workers: list[dict[str, str]] = self.engines.answer()["workers"]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fill(self) -> int:
        """Have all sent that is held, which is there for replay then. So many batches."""
        self.batches = int(self.engines.ask("fill")["batches"])
        return self.batches

    def run(self, rate: float, seconds: float) -> dict[str, float]:
        """Have `rate` blocks a second stored or removed: what came of it."""
        told: dict[str, float] = self.engines.ask(f"{rate} {seconds}")
        self.batches += int(told["batches"])
        return told

    def say(self, text: str) -> None:
        self._told(text)

    def start(self, name: str, command: Sequence[str]) -> Process:
        self.say(f"starting {name}")
        process = Process(name, command, self._log(name))
        self._stack.callback(process.stop)
        return process

    def indexer(self) -> tuple[Served, str]:
        """One, with its address."""
        port, metrics_port = free_ports(2)
        sections = {"indexer": {"host": "127.0.0.1", "port": port, "metrics_port": metrics_port, "admin_port": 0}}
        return self._serve("indexer", "indexer", metrics_port, sections), f"127.0.0.1:{port}"

    def gateway(self, name: str, index: dict[str, Any], redis_url: str | None = None) -> Served:
        (port,) = free_ports(1)
        sections: dict[str, Any] = {"gateway": {"host": "127.0.0.1", "port": port, "admin_port": 0}, "index": index}
        if redis_url is not None:
            sections["redis"] = {"url": redis_url}
        return self._serve(name, "gateway", port, sections)

    def redis(self) -> str | None:
        """The URL of a server of our own, without disk; None where there is none to start."""
        binary = shutil.which("redis-server") or shutil.which("valkey-server")
        if binary is None:
            return None
        (port,) = free_ports(1)
        quiet = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self._folder))
        process = self.start("redis", [binary, "--port", str(port), *quiet])
        until(lambda: _listens(port), process)
        return f"redis://127.0.0.1:{port}"

    def stop(self, process: Process) -> None:
        """Before its time."""
        self.say(f"ending {process.name}")
        process.stop()

    def file(self, name: str, content: str) -> Path:
        path = self._folder / name
        path.write_text(content)
        return path

    def _serve(self, name: str, command: str, metrics_port: int, sections: dict[str, Any]) -> Served:
        index = {**sections.pop("index", {}), "budget_bytes": _BUDGET_BYTES}
        config = {
            **sections,
            "workers": self.workers,
            "index": index,
            "health": {"scrape_interval_s": SCRAPE_S},
            "logging": {"level": "warning"},
        }
        path = self.file(f"{name}.yaml", json.dumps(config))
        self.say(f"starting {name}")
        started = [sys.executable, "-m", "gateway", command, "--config", str(path)]
        process = Served(name, started, self._log(name), metrics_port)
        self._stack.callback(process.stop)
        return process

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def until(condition: Callable[[], bool], *needed: Process, within_s: float = START_S, poll_s: float = _POLL_S) -> float:
    """Seconds until it is so. Raises RuntimeError where one of `needed` ends, or where it takes too long."""
    began_s = time.monotonic()
    while not condition():
        for process in needed:
            process.check()
        if time.monotonic() - began_s > within_s:
            raise RuntimeError(f"not there within {within_s:g} s ({', '.join(each.name for each in needed)})")
        time.sleep(poll_s)
    return time.monotonic() - began_s


def free_ports(n: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
