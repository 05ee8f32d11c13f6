"""Pods of a cluster as workers, followed through a stand-in for its API."""

from __future__ import annotations

import pytest

from scorer.types import Role
from tests.support.kube_server import OBJECTIVES, OLD_OBJECTIVES, PODS, POOLS, REWRITES
from tests.support.kube_world import KubeWorld
from tests.support.pods import objective, pod, pool, rewrite
from tests.support.virtual_time import event_loop_policy

__all__ = ["event_loop_policy"]

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


async def test_ready_pods_of_the_pool_serve() -> None:
    async with KubeWorld() as world:
        kube = world.kube
        kube.put(POOLS, "pool", pool(8000))
        kube.put(POOLS, "other", pool(9000, app="other"))
        for i in range(7):  # More than a page.
            kube.put(PODS, f"a-{i}", pod(f"10.0.0.{i}", ready=i != 3))
        kube.put(PODS, "b", pod("10.0.1.1", labels={"app": "other"}))
        await world.follow()
        await world.serving(**{f"a_{i}": f"10.0.0.{i}:8000" for i in range(7) if i != 3})
        assert world.discovery.problem is None
        kube.put(PODS, "a-3", pod("10.0.0.3", labels={"app": "vllm", "llm-d.ai/role": "prefill"}, node="n1"))
        await world.serving(**{f"a_{i}": f"10.0.0.{i}:8000" for i in range(7)})
        change = world.fleet.serving["a-3"]
        assert (change.role, change.labels) == (Role.PREFILL, {"node": "n1"})
        assert world.discovery.synced


async def test_who_is_not_ready_or_terminating_is_draining_then_removed() -> None:
    async with KubeWorld() as world:
        kube, fleet = world.kube, world.fleet
        kube.put(POOLS, "pool", pool())
        kube.put(PODS, "a", pod(A))
        kube.put(PODS, "b", pod(B))
        await world.follow()
        await world.serving(a=f"{A}:8000", b=f"{B}:8000")
        kube.put(PODS, "a", pod(A, ready=False))
        await world.until(lambda: fleet.draining == {"a"})
        kube.put(PODS, "a", pod(A))
        await world.serving(a=f"{A}:8000", b=f"{B}:8000")
        kube.put(PODS, "b", pod(B, terminating=True))
        await world.until(lambda: fleet.draining == {"b"})
        kube.delete(PODS, "b")
        await world.until(lambda: not fleet.draining)
        assert fleet.seen[2:] == [("draining", "a"), ("added", "a"), ("draining", "b"), ("removed", "b")]


async def test_a_pod_that_has_ended_is_removed_at_once() -> None:
    async with KubeWorld() as world:
        kube, fleet = world.kube, world.fleet
        kube.put(POOLS, "pool", pool())
        kube.put(PODS, "a", pod(A))
        kube.put(PODS, "b", pod(B, phase="Succeeded"))
        await world.follow()
        await world.serving(a=f"{A}:8000")
        kube.put(PODS, "a", pod(A, ready=False, phase="Failed"))
        kube.put(PODS, "c", pod(A))  # The address of an evicted pod is free, though the pod is still listed.
        await world.serving(c=f"{A}:8000")
        assert fleet.seen == [("added", "a"), ("removed", "a"), ("added", "c")]


async def test_a_pod_that_comes_back_elsewhere_is_another_server() -> None:
    async with KubeWorld() as world:
        kube, fleet = world.kube, world.fleet
        kube.put(POOLS, "pool", pool())
        kube.put(PODS, "vllm-0", pod(A))
        await world.follow()
        await world.serving(vllm_0=f"{A}:8000")
        kube.delete(PODS, "vllm-0")
        kube.put(PODS, "vllm-0", pod(B))
        await world.serving(vllm_0=f"{B}:8000")
        assert ("removed", "vllm-0") in fleet.seen
        kube.delete(PODS, "vllm-0")  # Its cache is gone, though name and address are the same.
        kube.put(PODS, "vllm-0", pod(B))
        await world.until(lambda: fleet.seen[-2:] == [("removed", "vllm-0"), ("added", "vllm-0")])


async def test_each_target_port_is_an_endpoint_and_a_rank() -> None:
    async with KubeWorld(pool="pool", events="tcp://{ip}:5557") as world:
        kube, fleet = world.kube, world.fleet
        kube.put(POOLS, "pool", pool(8000, 8001, 8002))
        kube.put(PODS, "a", pod("fd00::1", annotations={"inference.networking.k8s.io/active-ports": "8000, 8002"}))
        await world.follow()
        await world.serving(a_rank_0="[fd00::1]:8000", a_rank_2="[fd00::1]:8002")
        assert [fleet.serving[name].rank for name in ("a-rank-0", "a-rank-2")] == [0, 2]
        assert {it.events_endpoint for it in fleet.serving.values()} == {"tcp://[fd00::1]:5557"}
        kube.put(PODS, "a", pod("fd00::1", annotations={"llm-d.ai/active-ports": "8001"}))
        await world.serving(a_rank_1="[fd00::1]:8001")
        assert fleet.draining == {"a-rank-0", "a-rank-2"}


async def test_another_selector_and_other_ports_of_the_pool() -> None:
    async with KubeWorld() as world:
        kube, fleet = world.kube, world.fleet
        kube.put(POOLS, "pool", pool(8000))
        kube.put(PODS, "a", pod(A, labels={"app": "vllm", "v": "1"}))
        kube.put(PODS, "b", pod(B, labels={"app": "vllm", "v": "2"}))
        kube.put(PODS, "c", pod(C, labels={"app": "sglang", "v": "2"}))
        await world.follow()
        await world.serving(a=f"{A}:8000", b=f"{B}:8000")
        kube.put(POOLS, "pool", pool(8000, v="2"))
        await world.serving(b=f"{B}:8000", c=f"{C}:8000")
        assert fleet.draining == {"a"}
        assert ("draining", "b") not in fleet.seen
        kube.put(POOLS, "pool", pool(9000, v="2"))
        await world.serving(b=f"{B}:9000", c=f"{C}:9000")


async def test_a_change_of_selector_and_ports_is_one_change() -> None:
    async with KubeWorld() as world:
        kube, fleet = world.kube, world.fleet
        kube.put(POOLS, "pool", pool(8000, v="1"))
        kube.put(PODS, "a", pod(A, labels={"v": "1"}))
        kube.put(PODS, "b", pod(B, labels={"v": "2"}))
        await world.follow()
        await world.serving(a=f"{A}:8000")
        kube.slow_s = 0.1
        kube.put(POOLS, "pool", pool(9000, v="2"))
        await world.serving(b=f"{B}:9000")
        assert fleet.seen == [("added", "a"), ("draining", "a"), ("added", "b")]


async def test_a_pool_that_is_gone_serves_nobody_and_is_told() -> None:
    async with KubeWorld() as world:
        kube = world.kube
        kube.put(PODS, "a", pod(A))
        await world.follow()
        await world.until(lambda: world.discovery.problem is not None)
        assert world.discovery.problem == "there is no InferencePool pool in namespace default"
        kube.put(POOLS, "pool", pool())
        await world.serving(a=f"{A}:8000")
        kube.delete(POOLS, "pool")
        await world.serving()
        assert world.fleet.draining == {"a"}
        kube.put(POOLS, "pool", pool())
        await world.serving(a=f"{A}:8000")
        assert world.discovery.problem is None


async def test_a_pool_that_cannot_be_read_changes_nothing() -> None:
    async with KubeWorld() as world:
        kube = world.kube
        kube.put(POOLS, "pool", pool())
        kube.put(PODS, "a", pod(A))
        await world.follow()
        await world.serving(a=f"{A}:8000")
        kube.put(POOLS, "pool", {"spec": {"selector": {"matchLabels": {}}, "targetPorts": [{"number": 1}]}})
        await world.until(lambda: "would take every pod" in (world.discovery.problem or ""))
        kube.put(PODS, "b", pod(B))
        await world.serving(a=f"{A}:8000", b=f"{B}:8000")


async def test_pods_of_a_selector_without_a_pool() -> None:
    async with KubeWorld(selector="app in (vllm, canary),tier!=test", ports=(8000, 8001), scheme="https") as world:
        kube = world.kube
        kube.installed = {PODS}
        kube.put(PODS, "a", pod(A, labels={"app": "canary"}))
        kube.put(PODS, "b", pod(B, labels={"app": "vllm", "tier": "test"}))
        await world.follow()
        await world.until(lambda: len(world.fleet.serving) == 2)
        assert world.fleet.urls == {"a-rank-0": f"https://{A}:8000", "a-rank-1": f"https://{A}:8001"}


async def test_an_api_that_is_down_empties_nothing_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with KubeWorld() as world:
        kube = world.kube
        kube.put(POOLS, "pool", pool())
        kube.put(PODS, "a", pod(A))
        kube.put(PODS, "b", pod(B))
        await world.follow()
        await world.serving(a=f"{A}:8000", b=f"{B}:8000")
        kube.down = True
        kube.cut()
        await world.until(lambda: "pods: the Kubernetes API cannot be asked" in (world.discovery.problem or ""))
        assert "what is known stays" in (world.discovery.problem or "")
        kube.delete(PODS, "a")
        kube.compact()
        assert set(world.fleet.serving) == {"a", "b"}
        kube.down = False
        await world.serving(b=f"{B}:8000")
        await world.until(lambda: world.discovery.problem is None)
        told = [record.getMessage() for record in caplog.records if "pods" in record.getMessage()]
        assert len(told) < 6  # Not one line for each attempt.


async def test_what_is_forbidden_is_told_and_asked_for_again() -> None:
    async with KubeWorld() as world:
        kube = world.kube
        kube.forbidden = {PODS}
        kube.put(POOLS, "pool", pool())
        kube.put(PODS, "a", pod(A))
        await world.follow()
        await world.until(lambda: "rbac.yaml" in (world.discovery.problem or ""))
        kube.forbidden.clear()
        await world.serving(a=f"{A}:8000")
        await world.until(lambda: world.discovery.problem is None)


async def test_a_selector_that_is_none_is_told() -> None:
    async with KubeWorld(selector="a in") as world:
        world.kube.refusals = [(400, {})] * 100
        await world.follow()
        await world.until(lambda: world.discovery.problem == "pods: a fault")


async def test_a_busy_api_is_asked_when_it_says() -> None:
    async with KubeWorld() as world:
        kube = world.kube
        kube.put(POOLS, "pool", pool())
        kube.put(PODS, "a", pod(A))
        kube.refusals = [(429, {"Retry-After": "1"}), (500, {}), (503, {"Retry-After": "0"}), (504, {})]
        await world.follow()
        await world.serving(a=f"{A}:8000")
        assert not kube.refusals


async def test_a_pod_that_is_odd_harms_no_other() -> None:
    async with KubeWorld() as world:
        kube = world.kube
        kube.put(POOLS, "pool", pool())
        kube.put(PODS, "a", pod(A, annotations={"warmroute/weight": "fast"}))
        kube.put(PODS, "b", pod(B, labels={"app": "vllm", "llm-d.ai/role": "poet"}))
        kube.put(PODS, "c", pod(C))
        kube.put(PODS, "d", {"metadata": {"labels": {"app": "vllm"}}, "status": {"podIP": 7}})
        await world.follow()
        await world.serving(a=f"{A}:8000", c=f"{C}:8000")
        problem = world.discovery.problem or ""
        assert "pod a: annotation warmroute/weight" in problem
        assert "pod b: llm-d.ai/role=poet" in problem
        assert "d of pods is left out" in problem


async def test_objectives_and_rewrites_of_the_pool_under_both_groups() -> None:
    async with KubeWorld() as world:
        kube = world.kube
        kube.put(POOLS, "pool", pool())
        await world.follow()
        await world.until(lambda: world.objectives == [{}] and world.rewrites == [()])
        kube.installed |= {OLD_OBJECTIVES, REWRITES}
        kube.put(OLD_OBJECTIVES, "old", objective(3))
        kube.put(REWRITES, "rw", rewrite((["m"], {"m-1": 90, "m-2": 10}), ([], {"x": 1})))
        kube.put(REWRITES, "not-ours", rewrite((["m"], {"y": 1}), pool="another"))
        await world.until(lambda: world.objectives[-1] == {"old": 3})
        await world.until(lambda: world.rewrites[-1])
        first, second = world.rewrites[-1]
        assert (first.models, [(it.model, it.weight) for it in first.targets]) == (("m",), [("m-1", 90), ("m-2", 10)])
        assert second.models == ()
        kube.installed.add(OBJECTIVES)
        kube.put(OBJECTIVES, "low", objective(-5))
        kube.put(OBJECTIVES, "none", objective(None))
        kube.put(OBJECTIVES, "elsewhere", objective(1, group="example.com"))
        await world.until(lambda: world.objectives[-1] == {"low": -5, "none": 0})
        kube.installed -= {OBJECTIVES, OLD_OBJECTIVES}
        kube.cut()
        await world.until(lambda: world.objectives[-1] == {})
        assert world.discovery.problem is None


@pytest.mark.parametrize("mute", [True, False], ids=["half-open", "lossy"])
async def test_a_lost_watch_is_noticed(mute: bool) -> None:
    async with KubeWorld() as world:
        kube = world.kube
        kube.put(POOLS, "pool", pool())
        kube.put(PODS, "a", pod(A))
        await world.follow()
        await world.serving(a=f"{A}:8000")
        await world.until(lambda: len(kube.watches) == 2)
        kube.lose(mute=mute)
        kube.delete(PODS, "a")
        kube.put(PODS, "b", pod(B))
        await world.serving(b=f"{B}:8000")


@pytest.mark.parametrize("in_stream", [True, False])
async def test_a_version_that_is_gone_is_listed_anew(in_stream: bool) -> None:
    async with KubeWorld() as world:
        kube = world.kube
        kube.gone_in_stream = in_stream
        kube.put(POOLS, "pool", pool())
        kube.put(PODS, "a", pod(A))
        await world.follow()
        await world.serving(a=f"{A}:8000")
        await world.until(lambda: len(kube.watches) == 2)
        kube.cut()
        kube.delete(PODS, "a")
        kube.put(PODS, "b", pod(B))
        kube.compact()
        await world.serving(b=f"{B}:8000")
