"""What PromQL expressions ask for: metric names, label names and label values, without evaluating anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

_METRIC = re.compile(r"(?<![\w:$])((?:warmroute|vllm)[:_][\w:]*|up)\b(?!\s*\()(?:\s*\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(=~|!~|!=|=)\s*\"([^\"]*)\"")
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
_WORD = re.compile(r"[\w.]+")


class Selector(NamedTuple):
    """`values`: label -> the values it names in full; patterns and variables name none."""

    metric: str
    labels: frozenset[str]
    values: Mapping[str, frozenset[str]]


def selectors(expression: str) -> Iterator[Selector]:
    for metric, inside in _METRIC.findall(expression):
        values: dict[str, frozenset[str]] = {}
        for label, operator, value in _MATCHER.findall(inside):
            named = value.split("|") if operator in ("=~", "!~") else [value]
            if "~" in operator:
                named = [each for each in named if "." not in each]
            values[label] = frozenset(each for each in named if _WORD.fullmatch(each))
        yield Selector(metric, frozenset(values), values)


def groupings(expression: str) -> frozenset[str]:
    """Labels of `by (...)` and the like."""
    inside = ",".join(_GROUPING.findall(expression))
    return frozenset(label.strip() for label in inside.split(",") if label.strip())


def rules(path: Path) -> Iterator[Mapping[str, Any]]:
    for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
        yield from group["rules"]


def panels(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text(encoding="utf-8"))["panels"])


def dashboard_expressions(path: Path) -> Iterator[str]:
    """Of all panels, with Grafana's variables as something that Prometheus can parse."""
    for panel in panels(path):
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "5m")
