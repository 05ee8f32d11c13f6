"""docs/kubernetes.md names what there is."""

import re
from pathlib import Path

import msgspec
import yaml

from gateway.config import load_config
from gateway.config.keys import fields_of, flag_name
from gateway.config.schema import KubernetesConfig
from gateway.discovery.kubernetes import lease_name, pods
from gateway.discovery.kubernetes.lease import LeaseTimers
from gateway.discovery.kubernetes.pool import read_pool
from gateway.discovery.kubernetes.reflector import Timers

PAGE = (Path(__file__).resolve().parents[2] / "docs/kubernetes.md").read_text(encoding="utf-8")
KEYS = fields_of(KubernetesConfig)


def test_keys_and_flags() -> None:
    assert set(re.findall(r"kubernetes\.(\w+)`", PAGE)) <= KEYS.keys()
    assert set(re.findall(r"--kubernetes-[a-z-]+", PAGE)) <= {flag_name(("kubernetes", name)) for name in KEYS}


def test_labels_and_annotations() -> None:
    named = set(re.findall(r"`([a-z0-9.-]+/[a-z.-]+)`", PAGE)) - {"llm-d.ai/v1alpha2"}
    own = {f"warmroute/{key.replace('_', '-')}" for key in pods._OWN_KEYS}
    assert named == {pods.ROLE_LABEL, *pods.ACTIVE_PORTS, *own}
    for role in pods._ROLES:
        assert f"`{role}`" in PAGE


def test_examples(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for block in blocks:
        if "kind: InferencePool" in block:
            assert read_pool(msgspec.json.encode(yaml.safe_load(block))).ports == (8000,)
        else:
            (tmp_path / "c.yaml").write_text(block)
            load_config(str(tmp_path / "c.yaml"))
    assert len(blocks) == 3


def test_figures() -> None:
    timers, lease = Timers(), LeaseTimers()
    assert f"every {timers.watch_s:g} to {timers.watch_s * 1.5:g} s" in PAGE
    assert f"noticed {timers.overdue_s:g} s after that" in PAGE
    assert f"at least every {timers.relist_s * 1.2 / 60:g} minutes" in PAGE
    assert f"from {timers.backoff_s:g} to {timers.longest_s:g} s" in PAGE
    assert f"every {timers.slow_s:g} s" in PAGE
    assert f"renews every {lease.retry_s:g} s" in PAGE
    assert f"itself {lease.renew_s:g} s after" in PAGE
    assert f"unchanged for {lease.lease_s} s" in PAGE
    assert lease_name("<namespace>", "<pool>") in PAGE
