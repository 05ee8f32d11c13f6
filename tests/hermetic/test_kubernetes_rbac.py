"""deploy/kubernetes/rbac.yaml gives every right that is used, and no other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from gateway.discovery.kubernetes import Access, Api, Elector
from tests.support.kube_server import OBJECTIVES, OLD_OBJECTIVES, OLD_REWRITES, PODS, POOLS, REWRITES
from tests.support.kube_world import KubeWorld
from tests.support.pods import objective, pod, pool, rewrite
from tests.support.virtual_time import event_loop_policy

__all__ = ["event_loop_policy"]

FILE = Path(__file__).parents[2] / "deploy/kubernetes/rbac.yaml"
GROUPS = ({OBJECTIVES, REWRITES}, {OLD_OBJECTIVES, OLD_REWRITES})


def rights() -> set[tuple[str, str]]:
    account, role, binding = yaml.safe_load_all(FILE.read_text())
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]
    return {
        (verb, f"{resource}.{group}" if group else resource)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


async def asked_for(installed: set[str]) -> set[tuple[str, str]]:
    async with KubeWorld(pool="pool") as world:
        kube = world.kube
        kube.installed |= installed
        kube.put(POOLS, "pool", pool())
        kube.put(PODS, "a", pod())
        for kind in installed:
            kube.put(kind, "x", objective(1) if "objectives" in kind else rewrite((["m"], {"n": 1})))
        await world.follow()
        api = Api(Access(server=kube.url))
        elector = Elector(api, "default", "lease")
        task = asyncio.get_running_loop().create_task(elector.run())
        await world.until(lambda: len(kube.watches) == 4 and elector.leads)
        kube.compact()
        kube.cut()  # Whatever is asked for after a fault is asked for now.
        kube.put(PODS, "b", pod("10.0.0.2"))
        await world.until(lambda: len(kube.watches) == 4 and len(world.fleet.serving) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await elector.release()
        await api.close()
        return set(kube.asked)


@pytest.mark.parametrize("installed", GROUPS, ids=["newer", "older"])
async def test_what_is_asked_for_is_allowed(installed: set[str]) -> None:
    assert await asked_for(installed) <= rights()


async def test_what_is_allowed_is_asked_for() -> None:
    assert rights() == set().union(*[await asked_for(installed) for installed in GROUPS])
