"""deploy/prometheus and deploy/grafana: what promtool says, and what Grafana would trip over."""

import json
import re
import subprocess
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from tests.support.deployed import DEPLOY, tool
from tests.support.promql import dashboard_expressions, panels, rules

PROMETHEUS = DEPLOY / "prometheus"
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
WHERE = "Debian: apt-get install prometheus"


def promtool(*args: str | Path) -> None:
    done = subprocess.run([tool("promtool", WHERE), *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_rules_and_the_scrape_configuration() -> None:
    promtool("check", "rules", PROMETHEUS / "rules.yaml")
    promtool("check", "config", PROMETHEUS / "prometheus.yml")


def test_the_alerts_fire_where_they_should() -> None:
    promtool("test", "rules", PROMETHEUS / "rules.test.yaml")


def test_each_alert_has_a_unit_test_and_says_what_to_do() -> None:
    tests = yaml.safe_load((PROMETHEUS / "rules.test.yaml").read_text())["tests"]
    fired = {test["alertname"] for group in tests for test in group.get("alert_rule_test", ()) if test["exp_alerts"]}
    alerts = [rule for rule in rules(PROMETHEUS / "rules.yaml") if "alert" in rule]
    assert {rule["alert"] for rule in alerts} == fired
    for rule in alerts:
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_promtool_takes_each_expression_of_a_dashboard(path: Path, tmp_path: Path) -> None:
    as_rules = [
        {"record": f"panel:{i}", "expr": expr.replace("$", "")} for i, expr in enumerate(dashboard_expressions(path))
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": as_rules}]}))
    promtool("check", "rules", file)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_one_that_grafana_imports(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem
    assert "id" not in board  # Grafana gives it; one of ours would take another's place.
    variables = {f"${{{variable['name']}}}" for variable in board["templating"]["list"]}
    ids = [panel["id"] for panel in panels(path)]
    assert len(ids) == len(set(ids))
    for panel in panels(path):
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] in variables
            assert [target["refId"] for target in panel["targets"]] == sorted({t["refId"] for t in panel["targets"]})


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_do_not_cover_each_other(path: Path) -> None:
    def covers(a: dict[str, int], b: dict[str, int]) -> bool:
        return (
            a["x"] < b["x"] + b["w"]
            and b["x"] < a["x"] + a["w"]
            and a["y"] < b["y"] + b["h"]
            and b["y"] < a["y"] + a["h"]
        )

    places = [panel["gridPos"] for panel in panels(path)]
    assert not [(a, b) for a, b in combinations(places, 2) if covers(a, b)]
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_each_alert_is_documented() -> None:
    page = (DEPLOY.parent / "docs" / "deploy.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(Warmroute\w+)`", page))
    assert documented == {rule["alert"] for rule in rules(PROMETHEUS / "rules.yaml") if "alert" in rule}
