"""`warmroute gateway` as users run it: a process of its own in front of real engines."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from engines import REPOSITORY, VllmServer, free_port

START_DEADLINE_S = 90.0
reports: list[str] = []


def report(figure: str) -> None:
    """A figure to show at the end of the run, where no assertion belongs."""
    reports.append(figure)


class Gateway:
    """Starts, asks and stops one gateway. Its log is beside the engines'."""

    def __init__(self, servers: list[VllmServer], log_dir: pathlib.Path, *args: str) -> None:
        self.servers = servers
        self.log = log_dir / "gateway.log"
        self.args = args
        self.port, self.admin_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def start(self) -> None:
        """Start and wait until every server's model, events and replayed past are there."""
        command = [sys.executable, "-m", "gateway", "gateway", "--gateway-host", "127.0.0.1"]
        command += ["--gateway-port", str(self.port), "--gateway-admin-port", str(self.admin_port), *self.args]
        for server in self.servers:
            command += ["--worker", server.url]
        env = {k: v for k, v in os.environ.items() if not k.startswith("WARMROUTE_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=log, stderr=log)
        poll(self.ready, START_DEADLINE_S, lambda: f"the gateway is not ready:\n{self.log_tail()}")

    def ready(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise AssertionError(f"the gateway ended:\n{self.log_tail()}")
        try:
            return self.get(f"{self.url}/health").get("usable") == len(self.servers) and not self.degraded("events_")
        except OSError:
            return False

    def usable(self, worker: str) -> bool:
        """Whether requests are sent to `worker`."""
        return bool(self.workers()[worker]["state"] == "healthy")

    def degraded(self, prefix: str = "") -> list[str]:
        """What `/readyz?verbose` names as not as it should be."""
        found = self.get(f"{self.url}/readyz?verbose")["degraded"]
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
        workers: dict[str, dict[str, Any]] = self.get(f"{self.url}/health")["workers"]
        return workers

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
