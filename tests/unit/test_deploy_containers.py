"""The Dockerfile, the compose files and the systemd units, by the tools that know them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config.load import load_config
from tests.support.deployed import DEPLOY, ROOT, tool

COMPOSE = DEPLOY / "compose"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
DEV = "pip install -e '.[dev]'"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = run(tool("hadolint", DEV), "--failure-threshold", "style", DEPLOY / "docker" / "Dockerfile")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_runs_as_nobody_of_the_host() -> None:
    final = (DEPLOY / "docker" / "Dockerfile").read_text().split("\nFROM ")[-1]
    assert re.search(r"^USER 10001:10001$", final, re.MULTILINE)
    assert "HEALTHCHECK" in final
    assert "COPY . " not in final


# ---- compose ---------------------------------------------------------------------------------------------------------


def understood(*names: str) -> dict[str, Any]:
    """These files with all profiles, as Compose understands them."""
    files = [word for name in names for word in ("-f", COMPOSE / name)]
    done = run(tool("docker-compose", DEV), *files, "--profile", "*", "config", "--format", "json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return understood("compose.yaml")


def test_what_compose_mounts_from_here_is_here(compose: dict[str, Any]) -> None:
    mounts = [mount for service in compose["services"].values() for mount in service.get("volumes", ())]
    sources = [Path(mount["source"]) for mount in mounts if mount["type"] == "bind"]
    assert sources
    assert [source for source in sources if not source.exists()] == []
    build = compose["services"]["gateway"]["build"]
    assert Path(build["context"]) == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_the_images_of_others_have_versions(compose: dict[str, Any]) -> None:
    images = [service["image"] for service in compose["services"].values() if "build" not in service]
    assert len(images) == 4
    assert [image for image in images if image.endswith(":latest") or ":" not in image] == []


def test_the_gateway_of_compose_may_do_little(compose: dict[str, Any]) -> None:
    gateway = compose["services"]["gateway"]
    assert gateway["read_only"] is True
    assert gateway["cap_drop"] == ["ALL"]
    assert gateway["security_opt"] == ["no-new-privileges:true"]


def test_compose_prometheus_and_the_gateway_name_each_other_rightly(compose: dict[str, Any]) -> None:
    config = load_config(str(COMPOSE / "warmroute" / "warmroute.yaml"))
    hosts = {worker.url.removeprefix("http://").partition(":")[0] for worker in config.workers}
    assert hosts == {name for name in compose["services"] if name.startswith("engine-")}
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "engines.yaml").read_text())[0]["targets"]
    assert {f"http://{target}" for target in scraped} == {worker.url for worker in config.workers}
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert jobs[0]["static_configs"][0]["targets"] == [f"gateway:{config.gateway.port}"]
    grace_s = compose["services"]["gateway"]["stop_grace_period"]
    assert int(grace_s.removesuffix("s")) > config.gateway.drain_timeout_s


def test_the_engines_of_compose_publish_what_the_gateway_needs(compose: dict[str, Any]) -> None:
    for name in ("engine-a", "engine-b"):
        flags = dict(flag.partition("=")[::2] for flag in compose["services"][name]["command"])
        assert "--enable-prompt-tokens-details" in flags
        events = json.loads(flags["--kv-events-config"])
        assert events["enable_kv_cache_events"] is True
        assert events["endpoint"].startswith("tcp://*:")
        assert events["replay_endpoint"] != events["endpoint"]


def test_two_gateways_of_compose_share_through_redis_and_nothing_else() -> None:
    services = understood("compose.yaml", "replicas.yaml")["services"]
    a, b = services["gateway"], services["gateway-b"]
    for gateway in (a, b):
        config = load_config(str(COMPOSE / "warmroute" / "warmroute.yaml"), gateway["environment"])
        assert config.redis.url == "redis://redis:6379"
        assert gateway["depends_on"].keys() == {"redis"}
    assert [[(port["published"], port["target"]) for port in each["ports"]] for each in (a, b)] == [
        [("8000", 8000)],
        [("8001", 8000)],
    ]
    learned = [{mount["source"] for mount in each["volumes"] if mount["type"] == "volume"} for each in (a, b)]
    assert learned == [{"learned"}, {"learned-b"}]
    own = {"ports", "volumes"}
    assert {key: a[key] for key in a.keys() - own} == {key: b[key] for key in b.keys() - own}
    assert ":latest" not in services["redis"]["image"]
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert jobs[0]["dns_sd_configs"][0]["names"] == ["gateway-b"]


# ---- systemd ---------------------------------------------------------------------------------------------------------


def analyze(*args: str | Path) -> str:
    done = run(tool("systemd-analyze", "Debian: apt-get install systemd"), *args)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_systemd_has_nothing_to_say_about_a_unit(unit: Path, tmp_path: Path) -> None:
    installed = Path(sys.executable).parent / "warmroute"
    here = tmp_path / unit.name
    here.write_text(unit.read_text().replace("/opt/warmroute/bin/warmroute", str(installed)))
    said = [line for line in analyze("verify", here).splitlines() if unit.name in line]
    assert said == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_unit_may_do_little(unit: Path) -> None:
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", analyze("security", "--offline=true", unit))
    assert exposure is not None
    assert float(exposure[1]) < 2.0


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_unit_gives_the_process_time_to_drain(unit: Path) -> None:
    settings = dict(line.partition("=")[::2] for line in unit.read_text().splitlines() if "=" in line)
    assert int(settings["TimeoutStopSec"]) > load_config().gateway.drain_timeout_s


def test_the_collectors_pipelines_name_what_is_configured() -> None:
    config = yaml.safe_load((ROOT / "deploy/opentelemetry/collector.yaml").read_text(encoding="utf-8"))
    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert names
            assert set(names) <= config[kind].keys()
    listening = config["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    assert listening.endswith(":4318")  # Where OTLP over HTTP goes by default.
