"""Figures of an earlier run, from which sizes are computed where this run has none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

MEASURED = Path(__file__).with_name("measured.json")
"""The run that docs/scaling.md shows."""
PROXY = Path(__file__).resolve().parents[2] / "docs" / "proxy-benchmark.md"
_ROWS = {
    "gateway_request_us": "### 64 KB bodies, 32 at a time",
    "gateway_chunk_us": "### 64 streams x 200 chunks, one every 10 ms",
}


def proxy_costs(page: str) -> dict[str, float]:
    """What `python -m bench proxy` found that a gateway takes for a request and a chunk. Raises ValueError."""
    out = {}
    for name, head in _ROWS.items():
        found = re.search(r"^\| ours \| ([\d,.]+) \|", page.partition(head)[2], re.MULTILINE)
        if found is None:
            raise ValueError(f"no figure of ours below {head!r}")
        out[name] = float(found[1].replace(",", ""))
    return out


class _Kept(msgspec.Struct):
    used: dict[str, dict[str, Any]] = {}
    figures: dict[str, float] = {}


def read(path: Path) -> dict[str, float]:
    """Raises OSError, and ValueError for what is no such file."""
    return _read(path).figures


def _read(path: Path) -> _Kept:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except msgspec.MsgspecError as exc:
        raise ValueError(f"{path}: not what --keep writes: {exc}") from None


def told(path: Path) -> str:
    """On which machine its parts were measured. Raises OSError, and ValueError for what is no such file."""
    machines: dict[str, list[str]] = {}
    for part, how in _read(path).used.items():
        machines.setdefault(how["machine"], []).append(f"`{part}`")
    return "; ".join(f"{machine} ({', '.join(parts)})" for machine, parts in machines.items())


def write(path: Path, part: str, figures: Mapping[str, float], used: Mapping[str, object]) -> None:
    """In place of what there was of this part, with how they were taken, and with the costs of the proxy where there
    is a checkout. Raises OSError, and ValueError for what is no such file.
    """
    kept = _read(path) if path.exists() else _Kept()
    proxied = proxy_costs(PROXY.read_text(encoding="utf-8")) if PROXY.exists() else {}
    rounded = {name: float(f"{value:.8g}") for name, value in {**figures, **proxied}.items()}
    kept = _Kept({**kept.used, part: dict(used)}, kept.figures | rounded)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")


def machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f} before it began"
