"""Figures as files. matplotlib comes with `warmroute[bench]` and is loaded when the first one is drawn."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES = (7.0, 4.5)
_DPI = 150


class NoPlots(Exception):
    """matplotlib is not installed; the text says what to do."""


def _module(name: str) -> Any:
    """One of matplotlib's that draw without a display and without global state. Raises NoPlots."""
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ImportError:
        raise NoPlots("a plot needs matplotlib: pip install 'warmroute[bench]'") from None


def check() -> None:
    """Raises NoPlots; to be asked before hours of simulation."""
    _module("figure")


def one_color(color: str) -> Any:
    """A colour map for meshes that are filled or not (NaN). Raises NoPlots."""
    return _module("colors").ListedColormap([color])


def blank(width_inches: float, height_inches: float) -> Figure:
    """An empty figure, which lays itself out. Raises NoPlots."""
    figure: Figure = _module("figure").Figure(figsize=(width_inches, height_inches), layout="constrained")
    return figure


@contextmanager
def drawn(path: Path, *, title: str, x: str, y: str) -> Iterator[Axes]:
    """The axes of a figure that is written to `path` afterwards (its suffix is the format). Raises NoPlots."""
    figure = blank(*_INCHES)
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    yield axes
    figure.savefig(path, dpi=_DPI)
