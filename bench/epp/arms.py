"""What is compared: Envoy without a picker, with one that decides nothing, and with ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bench.epp.envoy import Envoy, at, cluster, fit, http_filters, shipped
from bench.proxy.processes import cpu_s, pinned, tree_cpu_s
from bench.proxy.routers import Running, Workers, free_port, stop, wait_until_answered

NONE = "no picker"
TRIVIAL = "trivial"
"""On grpcio, as one would write it."""
OURS = "warmroute"
_ON_GRPCIO = ", on grpcio"
_HOST = "127.0.0.1"
HERE = Path(__file__).resolve().parents[2]


class Spec(msgspec.Struct, frozen=True):
    """`command(workers, port, admin_port, folder)`: the picker's arguments; None: there is none."""

    name: str
    envoy: str
    command: Callable[[Workers, int, int, Path], list[str]] | None
    tree: Path = HERE
    """The checkout it is of."""
    decides: bool = False


def specs(tokenizer: Path, ours: Path = HERE) -> list[Spec]:
    """`ours`: the checkout whose `warmroute epp` is measured."""

    def epp(workers: Workers, port: int, admin_port: int, folder: Path, grpc: str = "fast") -> list[str]:
        file = folder / "epp.yaml"
        listed = [{"url": u, "events": e} for u, e in zip(workers.urls, workers.events, strict=True)]
        picker = {"host": _HOST, "port": port, "health_port": 0, "metrics_port": 0, "admin_port": admin_port}
        config = {
            "epp": {**picker, "tls": "off", "sidecar": "none", "grpc": grpc},
            "workers": listed,
            "tokens": {"tokenizer": str(tokenizer)},
        }
        file.write_bytes(msgspec.json.encode(config))  # Which is YAML.
        return [sys.executable, "-m", "gateway", "epp", "--config", str(file)]

    return [
        Spec(NONE, "no-response", None),
        Spec(TRIVIAL, "standalone", _trivial("seen", "grpcio")),
        Spec(TRIVIAL + ", buffered", "buffered", _trivial("seen", "grpcio")),
        Spec(TRIVIAL + ", no response", "no-response", _trivial("unseen", "grpcio")),
        Spec(TRIVIAL + ", on ours", "standalone", _trivial("seen", "fast")),
        Spec(OURS, "standalone", epp, ours, decides=True),
        Spec(OURS + _ON_GRPCIO, "standalone", partial(epp, grpc="grpcio"), ours, decides=True),
    ]


def _trivial(responses: str, grpc: str) -> Callable[[Workers, int, int, Path], list[str]]:
    def command(workers: Workers, port: int, _: int, folder: Path) -> list[str]:
        endpoints = [f"{_HOST}:{each}" for each in workers.ports]
        return [sys.executable, "-m", "gateway.measure", "picker", str(port), responses, grpc, *endpoints]

    return command


class Arm(Running):
    """An Envoy and its picker. `cpu_s` is the picker's; what Envoy took between two calls of it is `envoy_s`."""

    def __init__(
        self, spec: Spec, picker: subprocess.Popen[bytes] | None, envoy: Envoy, admin_port: int, log: Path
    ) -> None:
        super().__init__(spec.name, [envoy.port], picker, admin_port, log, decides=spec.decides)
        self._envoy = envoy
        self._seen_s = 0.0
        self.envoy_s = 0.0

    def cpu_s(self) -> float:
        now_s = cpu_s(self._envoy.pid)
        self.envoy_s, self._seen_s = now_s - self._seen_s, now_s
        return 0.0 if self.pid is None else tree_cpu_s(self.pid)

    def forget_log(self) -> None:
        super().forget_log()
        self._envoy.forget_log()

    def close(self) -> None:
        self._envoy.stop()
        super().close()


def start(spec: Spec, workers: Workers, *, picker_core: int, envoy_core: int, folder: Path) -> Arm:
    """Until requests are answered. Raises Missing where they are not, with the end of the picker's output."""
    folder.mkdir()
    port, admin_port = free_port(), free_port()
    log = folder / "picker.log"
    picker = None
    if spec.command is not None:
        with log.open("ab") as output, pinned(picker_core):
            picker = subprocess.Popen(  # noqa: S603
                spec.command(workers, port, admin_port, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(spec.tree),
                cwd=folder,
            )
    config = shipped(spec.envoy)
    fit(config, picker=port)
    if picker is None:
        _without_picker(config, workers.ports)
    envoy = Envoy(config, folder)
    try:
        with pinned(envoy_core):
            envoy.__enter__()
        arm = Arm(spec, picker, envoy, admin_port, log)
        wait_until_answered(arm)
    except BaseException:
        envoy.stop()
        if picker is not None:
            stop(picker)
        raise
    return arm


def _environment(tree: Path) -> Mapping[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WARMROUTE_")}
    return {**kept, "PYTHONPATH": str(tree)}


def _without_picker(config: dict[str, Any], pods: Sequence[int]) -> None:
    filters = http_filters(config)
    filters[:] = [each for each in filters if each["name"] != "envoy.filters.http.ext_proc"]
    pool = cluster(config, "pods")
    del pool["original_dst_lb_config"]
    pool.update(lb_policy="ROUND_ROBIN", load_assignment={"cluster_name": "pods"})
    at(pool, *pods)
    clusters = config["static_resources"]["clusters"]
    clusters[:] = [each for each in clusters if each["name"] != "picker"]
