"""`warmroute gateway` and `warmroute sidecar` as users run them: processes of their own in front of real engines."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from engines import REPOSITORY, VllmServer, free_port

START_DEADLINE_S = 90.0
reports: list[str] = []


def report(figure: str) -> None:
    """A figure to show at the end of the run, where no assertion belongs."""
    reports.append(figure)


class Face:
    """Starts, asks and stops one warmroute process. Its log is beside the engines'.

    Args:
        command: `gateway` or `sidecar`, whose flags for ports are named after it.
        log_dir: folder for ``<command>.log``; a restart appends.
        args: more of the command line.
        workers: flag and base URL of each worker, such as ``("--prefill", url)``.
    """

    def __init__(self, command: str, log_dir: pathlib.Path, args: Sequence[str], workers: Sequence[tuple[str, str]]):
        self.command = command
        self.log = log_dir / f"{command}.log"
        self.args = args
        self.worker_flags = workers
        self.n_workers = len(workers)
        self.port, self.admin_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def start(self) -> None:
        """Start and wait until every worker's model, events and replayed past are there."""
        name = self.command
        command = [sys.executable, "-m", "gateway", name, f"--{name}-host", "127.0.0.1"]
        command += [f"--{name}-port", str(self.port), f"--{name}-admin-port", str(self.admin_port), *self.args]
        for flag, url in self.worker_flags:
            command += [flag, url]
        env = {k: v for k, v in os.environ.items() if not k.startswith("WARMROUTE_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=log, stderr=log)
        poll(self.ready, START_DEADLINE_S, lambda: f"the {name} is not ready:\n{self.log_tail()}")

    def ready(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise AssertionError(f"the {self.command} ended:\n{self.log_tail()}")
        try:
            workers = self.workers()
            return (
                len(workers) == self.n_workers
                and all(w["state"] == "healthy" and w["models"] for w in workers.values())
                and not self.degraded("events_")
                and not self.degraded("stats_")
            )
        except OSError:
            return False

    def usable(self, worker: str) -> bool:
        """Whether requests are sent to `worker`."""
        return bool(self.workers()[worker]["state"] == "healthy")

    def degraded(self, prefix: str = "") -> list[str]:
        """What `/readyz?verbose` names as not as it should be."""
        found = self.get(f"{self.admin_url}/readyz?verbose")["degraded"]
        return [f"{d['what']} {d.get('worker', '')} {d['detail']}" for d in found if d["what"].startswith(prefix)]

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def workers(self) -> dict[str, dict[str, Any]]:
        """What `/health` says of each worker."""
        workers: dict[str, dict[str, Any]] = self.get(f"{self.admin_url}/health")["workers"]
        return workers

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics`, by its name with labels as printed."""
        with urllib.request.urlopen(f"{self.admin_url}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def metric(self, name: str, *labels: str) -> float:
        """Sum of the samples of one metric whose labels, as printed, contain all of `labels`."""
        return sum(
            value
            for key, value in self.metrics().items()
            if key.partition("{")[0] == name and all(label in key for label in labels)
        )

    def wait_until_nothing_is_booked(self, deadline_s: float = START_DEADLINE_S) -> None:
        """A client may have its answer's last byte just before its booking ends."""
        names = ["requests_in_flight", *(f"worker_booked_{what}" for what in ("prefills", "streams", "kv_tokens"))]

        def booked() -> dict[str, float]:
            found = {name: self.metric(f"warmroute_{name}") for name in names}
            return {name: value for name, value in found.items() if value}

        poll(lambda: not booked(), deadline_s, lambda: f"still booked: {booked()}")

    @staticmethod
    def get(url: str) -> Any:
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            return json.loads(error.read())

    def post(self, path: str, body: dict[str, Any], *, admin: bool = False) -> tuple[int, dict[str, str], Any]:
        """(status, headers in lower case, decoded body)."""
        request = urllib.request.Request(
            (self.admin_url if admin else self.url) + path,
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                status, headers, data = response.status, response.headers, response.read()
        except urllib.error.HTTPError as error:
            status, headers, data = error.code, error.headers, error.read()
        return status, {k.lower(): v for k, v in headers.items()}, json.loads(data) if data else None

    def removed_blocks(self) -> list[int]:
        """Of each worker: blocks its events said were evicted."""
        workers = self.get(f"{self.admin_url}/debug/cache")["workers"]
        return [worker["ranks"]["0"]["held"]["removed_blocks"] for worker in workers.values()]

    def explain(self, body: dict[str, Any]) -> dict[str, int]:
        """Predicted cached tokens by worker, nothing sent."""
        status, _, answer = self.post("/debug/explain", body, admin=True)
        assert status == 200, answer
        return {c["decode"][0]: c["cached_tokens"] for c in answer["considered"]}


class Gateway(Face):
    """`warmroute gateway` over `servers`, and over workers with a role given by URL."""

    def __init__(
        self,
        servers: Sequence[VllmServer],
        log_dir: pathlib.Path,
        *args: str,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
    ) -> None:
        self.servers = list(servers)
        flags = [("--worker", server.url) for server in servers]
        flags += [("--prefill", url) for url in prefill] + [("--decode", url) for url in decode]
        super().__init__("gateway", log_dir, args, flags)


class Sidecar(Face):
    """`warmroute sidecar` before `engine`, with the prefill workers it knows of from the start."""

    def __init__(self, engine: str, log_dir: pathlib.Path, *args: str, prefill: Sequence[str] = ()) -> None:
        super().__init__("sidecar", log_dir, args, [("--engine", engine), *(("--prefill", url) for url in prefill)])


class Epp(Face):
    """`warmroute epp` over prefill servers and, for each decode server, the sidecar before it."""

    def __init__(
        self, prefill: Sequence[VllmServer], decode: Sequence[tuple[Sidecar, VllmServer]], log_dir: pathlib.Path
    ) -> None:
        super().__init__("epp", log_dir, (), [("--prefill", server.url) for server in prefill])
        decoders = [{"url": s.url, "role": "decode", "events": e.events_endpoint} for s, e in decode]
        file = log_dir / f"epp-{self.port}-workers.yaml"
        file.write_text(json.dumps(decoders))
        self.n_workers += len(decoders)
        self.args = (
            *("--workers-file", str(file), "--epp-tls", "off"),
            *("--epp-health-port", str(free_port()), "--epp-metrics-port", str(free_port())),
            *("--pd-policy", "threshold:100", "--health-scrape-interval-s", "0.5"),
        )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def poll(condition: Callable[[], Any], deadline_s: float, message: Callable[[], str]) -> Any:
    """The first true answer of `condition`, asked again and again until the deadline."""
    deadline = time.monotonic() + deadline_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(message())
        time.sleep(0.05)
