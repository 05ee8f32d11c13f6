"""The process that measures our decision by itself (see `decision`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from bench.proxy.processes import pinned
from bench.proxy.routers import Workers, free_port, gateway_config, stop


class Decider:
    """Started on the router's core; works only when asked."""

    def __init__(self, folder: Path, workers: Workers, tokenizer: Path, core: int, n_small: int, n_large: int) -> None:
        config = gateway_config(folder / "decision.yaml", workers, free_port(), free_port(), tokenizer)
        self._log = (folder / "decision.log").open("wb")
        with pinned(core):
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "bench.proxy.decision", str(config), str(n_small), str(n_large)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
        self.admin_port: int = self._read()["admin_port"]

    def measure(self) -> dict[str, float]:
        """CPU microseconds by kind of body."""
        found: dict[str, float] = {}
        if self._process.stdin is not None:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
            found = self._read()
        return found

    def _read(self) -> dict[str, Any]:
        output: IO[bytes] | None = self._process.stdout
        line = b"" if output is None else output.readline()
        if not line:
            raise RuntimeError(f"the decision's process ended with exit code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        stop(self._process)
        for file in (self._process.stdin, self._process.stdout, self._log):
            if file is not None:
                file.close()
