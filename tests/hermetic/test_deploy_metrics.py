"""Every metric, label and value that deploy/'s rules and dashboards ask for is one that `/metrics` shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.config.schema import PdConfig
from gateway.indexservice.source import LinkMetrics
from gateway.processes import families
from gateway.processes.crew import Place
from gateway.processes.front import Front
from tests.support.deployed import DEPLOY, ROOT
from tests.support.gateway_world import Fleet, decode, prefill
from tests.support.promql import Selector, dashboard_expressions, groupings, rules, selectors

RULES = DEPLOY / "prometheus" / "rules.yaml"
TARGET = frozenset({"job", "instance", "namespace"})
"""What Prometheus and its operator put on every series."""
LONG = "the quick brown fox jumps over the lazy dog " * 40


class Shown:
    """Series names with the labels and the values they came with."""

    def __init__(self) -> None:
        self.labels: dict[str, set[str]] = {"up": set()}
        self.values: dict[tuple[str, str], set[str]] = {}

    def add(self, families: Iterable[Metric]) -> None:
        for family in families:
            for sample in family.samples:
                self.labels.setdefault(sample.name, set()).update(sample.labels)
                for label, value in sample.labels.items():
                    self.values.setdefault((sample.name, label), set()).add(value)

    def declare(self, name: str, labels: Iterable[str]) -> None:
        """What has no series yet."""
        self.labels.setdefault(name, set()).update(labels)

    def wrong(self, selector: Selector, also: frozenset[str] = frozenset()) -> list[str]:
        known = self.labels.get(selector.metric)
        if known is None:
            return [f"{selector.metric} is not there"]
        odd = (selector.labels | also) - known - TARGET
        found = [f"{selector.metric} has no label {label}" for label in sorted(odd)]
        for label, values in selector.values.items():
            seen = self.values.get((selector.metric, label))
            if seen is not None and label not in TARGET:
                found += [f"{selector.metric} never has {label}={value}" for value in sorted(values - seen)]
        return found


async def shown_by_a_gateway() -> Shown:
    shown = Shown()
    pd = PdConfig(policy="always-remote")
    async with Fleet(pd=pd, p=prefill(), d=decode(), e=decode()) as fleet:
        for i in range(4):
            await fleet.complete(f"{i} {LONG}")
        body = {"model": "tiny", "prompt": LONG, "max_tokens": 4, "stream": True}
        await fleet.post(fleet.url + "/v1/completions", body)
        await fleet.post(fleet.url + "/v1/completions", {"model": "nobody's", "prompt": "x"})
        status, text = await fleet.get(fleet.url + "/metrics")
        assert status == 200
        shown.add(text_string_to_metric_families(text))
        for family in fleet.core.metrics.registry.collect():
            if not family.samples:
                collector = fleet.core.metrics.registry._names_to_collectors.get(family.name, family)
                suffix = "_total" if family.type == "counter" else ""
                shown.declare(family.name + suffix, collector._labelnames)
    return shown


class Follows:
    """Of an indexer."""

    is_stale = False


def add_indexer(shown: Shown) -> None:
    """A gateway's that follows one."""
    link: Any = Follows()
    shown.add(LinkMetrics(link).collect())


def add_processes(shown: Shown) -> None:
    """Of a gateway that has several."""
    crew: Any = SimpleNamespace(alive=[], ends={}, places=[Place("data", 0)])
    asking: Any = None
    shown.add(families.metrics(Front(crew, asking, lambda: None)._own()))


def add_recorded_rules(shown: Shown) -> None:
    for rule in rules(RULES):
        if "record" in rule:
            shown.declare(rule["record"], groupings(rule["expr"]))


def add_vllm(shown: Shown) -> None:
    series = json.loads((ROOT / "tests" / "data" / "vllm_0.32_metrics.json").read_text())["series"]
    for name, labels in series.items():
        shown.declare(name, labels)


async def test_rules_and_dashboards_ask_for_what_is_there() -> None:
    shown = await shown_by_a_gateway()
    add_indexer(shown)
    add_processes(shown)
    add_recorded_rules(shown)
    add_vllm(shown)
    expressions = [(RULES.name, rule["expr"]) for rule in rules(RULES)]
    for path in sorted((DEPLOY / "grafana").glob("*.json")):
        expressions += [(path.name, expr) for expr in dashboard_expressions(path)]
    found = []
    for file, expr in expressions:
        asked = list(selectors(expr))
        assert asked, expr
        for selector in asked:
            found += [f"{file}: {each}: {expr}" for each in shown.wrong(selector)]
        all_labels = set().union(*(shown.labels.get(selector.metric, ()) for selector in asked))
        odd = groupings(expr) - all_labels - TARGET
        found += [f"{file}: nothing here has a label {label}: {expr}" for label in sorted(odd)]
    assert found == []


async def test_metrics_named_in_the_pages_are_there() -> None:
    shown = await shown_by_a_gateway()
    add_recorded_rules(shown)
    pages = [ROOT / "docs" / "deploy.md", *(ROOT / "docs").glob("migrate-from-*.md")]
    assert len(pages) == 4
    for page in pages:
        named = set(re.findall(r"`(warmroute[_:][\w:]+)(?!\*)[`{]", page.read_text(encoding="utf-8")))
        families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown.labels}
        assert named <= shown.labels.keys() | families, page.name


async def test_the_check_finds_what_is_wrong() -> None:
    shown = Shown()
    text = 'warmroute_degraded{what="a"} 0\n# TYPE x gauge\nwarmroute_x_bucket{le="1.6"} 1\n'
    shown.add(text_string_to_metric_families(text))
    wrong = [
        each
        for expr in (
            "warmroute_gone > 1",
            'warmroute_degraded{who="a"}',
            'warmroute_degraded{what=~"a|b"}',
            'rate(warmroute_x_bucket{le="2"}[5m])',
            'warmroute_degraded{what!~"a|worker_.+", job=~"$job"}',
        )
        for selector in selectors(expr)
        for each in shown.wrong(selector)
    ]
    assert wrong == [
        "warmroute_gone is not there",
        "warmroute_degraded has no label who",
        "warmroute_degraded never has what=b",
        "warmroute_x_bucket never has le=2",
    ]
    assert groupings("sum by (a, b) (x) unless on (c) y") == {"a", "b", "c"}
