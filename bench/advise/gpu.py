"""Data sheets of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bench.advise.errors import InputError

_GB: Final = 1e9
_TFLOP: Final = 1e12


@dataclass(frozen=True, slots=True)
class Gpu:
    """Dense peaks, no sparsity. `peer_bytes_per_s`: one direction of what joins the GPUs of a server."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    flop_per_s: float
    """In 16 bits."""
    low_flop_per_s: float
    """In 8 bits; the 16-bit peak where there is no FP8."""
    peer_bytes_per_s: float


def _gpu(name: str, gb: float, gb_per_s: float, tflop: float, low_tflop: float, peer_gb_per_s: float) -> Gpu:
    return Gpu(name, gb * _GB, gb_per_s * _GB, tflop * _TFLOP, low_tflop * _TFLOP, peer_gb_per_s * _GB)


GPUS: Final = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40gb", 40, 1555, 312, 312, 300),
        _gpu("a100", 80, 2039, 312, 312, 300),
        _gpu("h20", 96, 4000, 148, 296, 450),
        _gpu("h100", 80, 3350, 989, 1979, 450),
        _gpu("h200", 141, 4800, 989, 1979, 450),
        _gpu("b200", 180, 8000, 2250, 4500, 900),
        _gpu("l4", 24, 300, 121, 242, 32),
        _gpu("l40s", 48, 864, 362, 733, 32),
    )
}
"""SXM forms where there are several; l4 and l40s talk over PCIe 4.0."""


def gpu(name: str) -> Gpu:
    """Raises InputError that names the known ones."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise InputError(f"--gpu {name}: not known; there is: {', '.join(GPUS)}") from None
