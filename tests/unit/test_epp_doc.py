"""docs/epp.md against the code: keys, headers, errors, metrics."""

from pathlib import Path

from prometheus_client import CollectorRegistry

from gateway.config.schema import EppConfig
from gateway.epp import control
from gateway.epp.metrics import EppMetrics, StreamCounts
from gateway.epp.refusals import _DROPPED
from gateway.extproc.stream import Counts

DOC = (Path(__file__).resolve().parents[2] / "docs" / "epp.md").read_text(encoding="utf-8")


def test_every_key_is_there_with_its_default() -> None:
    keys = DOC.partition("\n## Keys\n")[2]
    for name in EppConfig.__struct_fields__:
        (row,) = (line for line in keys.splitlines() if line.startswith("| `epp.") and f"`epp.{name}`" in line)
        names, values = (cell.strip() for cell in row.split("|")[1:3])
        several = names.split(", ")
        told = values.split(", ") if len(several) > 1 else [values]
        default = getattr(EppConfig(), name)
        shown = {(): "empty", False: "false"}.get(default, f"{default:g}" if type(default) in (int, float) else default)
        shown = f"{default}" if type(default) is int else shown
        assert told[several.index(f"`epp.{name}`")] == shown, name


def test_every_header_that_is_read_is_there() -> None:
    for name in (
        *control.OBJECTIVE,
        *control.FAIRNESS,
        *control.REWRITE,
        control.CHOSEN_BY_TEST,
        control.SERVED_FOR_TEST,
    ):
        assert f"`{name}`" in DOC


def test_every_reason_for_a_drop_is_there() -> None:
    for code, dropped in _DROPPED.items():
        (row,) = (line for line in DOC.splitlines() if line.startswith("| 4") or line.startswith("| 503")
                  if f"`{code}`" in line)  # fmt: skip
        assert f"`{dropped}`" in row


def test_every_metric_is_there() -> None:
    registry = CollectorRegistry(auto_describe=True)
    EppMetrics(registry)
    registry.register(StreamCounts(Counts()))
    for family in registry.collect():
        name = family.name.removeprefix("warmroute_epp")
        assert f"{name}" in DOC, family.name
