"""Our decision by itself, in a gateway that serves nobody (`gateway/debug/decision.py`)."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from bench.proxy.load import fresh
from bench.proxy.processes import pinned
from bench.proxy.prompts import Bodies
from bench.proxy.routers import Workers, free_port, gateway_config, stop

_MOST = {"2kb": 256, "64kb": 64, "2kb_fresh": 128, "64kb_fresh": 12}
"""Decisions of each kind, of which the long new ones take long."""


class Decider:
    """Started on the router's core; works only when asked."""

    def __init__(self, folder: Path, workers: Workers, tokenizer: Path, core: int, bodies: Bodies) -> None:
        kinds = dict(zip(_MOST, (bodies.small, bodies.large, bodies.fresh_small, bodies.fresh_large), strict=True))
        self._kinds = {name: asked[: _MOST[name]] for name, asked in kinds.items()}
        self._numbers = itertools.count()
        self._is_warm = False
        config = gateway_config(folder / "decision.yaml", workers, free_port(), free_port(), tokenizer)
        self._log = (folder / "decision.log").open("wb")
        with pinned(core):
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "gateway.debug.decision", str(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
        self.admin_port: int = self._read()["admin_port"]

    def measure(self) -> dict[str, float]:
        """CPU microseconds by kind of body; each body has been decided on before."""
        if not self._is_warm:
            self._ask(self._kinds)
            self._is_warm = True
        return self._ask(self._kinds)

    def _ask(self, kinds: dict[str, list[bytes]]) -> dict[str, float]:
        asked = {name: self._texts(bodies) for name, bodies in kinds.items()}
        assert self._process.stdin is not None  # noqa: S101 - it was asked for
        self._process.stdin.write(msgspec.json.encode(asked) + b"\n")
        self._process.stdin.flush()
        return self._read()

    def _texts(self, bodies: Sequence[bytes]) -> list[str]:
        return [fresh(body, next(self._numbers)).decode() for body in bodies]

    def _read(self) -> dict[str, Any]:
        output: IO[bytes] | None = self._process.stdout
        line = b"" if output is None else output.readline()
        if not line:
            raise RuntimeError(f"the decision's process ended with exit code {self._process.wait()}")
        found: dict[str, Any] = msgspec.json.decode(line)
        return found

    def close(self) -> None:
        stop(self._process)
        for file in (self._process.stdin, self._process.stdout, self._log):
            if file is not None:
                file.close()
