"""An API that answers what no API should, and clusters that are larger or other than usual."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from gateway.discovery.kubernetes.reflector import Timers
from tests.support.kube_server import OBJECTIVES, PODS, POOLS, REWRITES, KubeServer
from tests.support.kube_world import QUICK, KubeWorld
from tests.support.pods import objective, pod, pool, rewrite

A, B = "10.0.0.1", "10.0.0.2"
META = {"resourceVersion": "1"}
GOOD = {
    "metadata": {"name": "ghost", "resourceVersion": "1", "labels": {"app": "vllm"}},
    **{"status": pod(B)["status"]},
}


class OddServer(KubeServer):
    """`lists` are given in place of the next lists of pods, `lines` to the next watches of pods."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lists: list[bytes] = []
        self.lines: list[bytes] = []
        self.endless = False

    def _list(self, request: web.BaseRequest, kind: str, namespace: str) -> web.Response:
        if kind == PODS and self.lists:
            return web.Response(body=self.lists.pop(0), content_type="text/html")
        if kind == PODS and self.endless:
            return web.json_response({"metadata": {**META, "continue": "again"}, "items": []})
        return super()._list(request, kind, namespace)

    async def _watch(self, request: web.BaseRequest, kind: str, namespace: str) -> web.StreamResponse:
        if kind != PODS or not self.lines:
            return await super()._watch(request, kind, namespace)
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(self.lines.pop(0) + b"\n")
        return answer


def world(**config: Any) -> tuple[KubeWorld, OddServer]:
    made = KubeWorld(**config)
    made.kube = OddServer()
    return made, made.kube


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html>a captive portal</html>",
        b"null",
        b"[]",
        b"{}",
        json.dumps({"metadata": META, "items": "pods"}).encode(),
        json.dumps({"metadata": META, "items": [GOOD]}).encode()[:-9],
        json.dumps({"metadata": META, "items": [GOOD, None]}).encode(),
        json.dumps({"metadata": META, "items": [{"metadata": None}, GOOD]}).encode(),
        b'{"metadata":{"resourceVersion":"1"},"items":[{"metadata":{"name":"\xff"}}]}',
    ],
)
async def test_a_list_that_is_none_changes_nothing(answer: bytes) -> None:
    made, kube = world()
    async with made:
        kube.put(POOLS, "pool", pool())
        kube.put(PODS, "a", pod(A))
        await made.follow()
        await made.serving(a=f"{A}:8000")
        kube.lists = [answer] * 2
        kube.compact()
        kube.cut()
        await made.until(lambda: not kube.lists)
        assert made.fleet.seen[0] == ("added", "a")
        assert "a" in made.fleet.serving
        kube.put(PODS, "b", pod(B))
        await made.until(lambda: set(made.fleet.serving) == {"a", "b"})
        assert ("draining", "a") not in made.fleet.seen
        await made.until(lambda: made.discovery.problem is None)


@pytest.mark.parametrize(
    "line",
    [
        b"<html>",
        b"null",
        b'{"type":"ADDED"}',
        b'{"type":"ADDED","object":null}',
        b'{"type":"ADDED","object":{"metadata":[]}}',
        b'{"type":"ERROR","object":"no status"}',
        b'{"type":"ERROR","object":{}}',
        b'{"type":"RENAMED","object":{"metadata":{"name":"a"}}}',
        b'{"type":"DELETED","object":{"metadata":{"name":"nobody"}}}',
    ],
)
async def test_a_line_of_a_watch_that_is_none_changes_nothing(line: bytes) -> None:
    made, kube = world()
    async with made:
        kube.put(POOLS, "pool", pool())
        kube.put(PODS, "a", pod(A))
        kube.lines = [line] * 4
        await made.follow()
        await made.serving(a=f"{A}:8000")
        await made.until(lambda: not kube.lines)
        kube.put(PODS, "b", pod(B))
        await made.serving(a=f"{A}:8000", b=f"{B}:8000")
        assert ("draining", "a") not in made.fleet.seen


async def test_pages_without_an_end_are_given_up_and_told() -> None:
    made, kube = world()
    async with made:
        kube.put(POOLS, "pool", pool())
        kube.put(PODS, "a", pod(A))
        kube.endless = True
        await made.follow()
        await made.until(lambda: "page" in (made.discovery.problem or ""))
        kube.endless = False
        await made.serving(a=f"{A}:8000")


async def test_hundreds_of_pods_come_and_go() -> None:
    timers = Timers(
        watch_s=5.0, overdue_s=1.0, relist_s=30.0, backoff_s=QUICK.backoff_s, longest_s=0.05, slow_s=0.05, page=100
    )
    async with KubeWorld(timers=timers) as made:
        kube = made.kube
        kube.put(POOLS, "pool", pool(8000, 8001))
        for i in range(400):
            kube.put(PODS, f"p{i}", pod(f"10.1.{i // 250}.{i % 250}", ready=i % 4 != 3))
        await made.follow()
        await made.until(lambda: len(made.fleet.serving) == 600, 30)
        for i in range(0, 400, 2):
            kube.delete(PODS, f"p{i}")
        for i in range(3, 400, 4):
            kube.put(PODS, f"p{i}", pod(f"10.1.{i // 250}.{i % 250}"))
        left = {f"p{i}-rank-{rank}" for i in range(1, 400, 2) for rank in (0, 1)}
        await made.until(lambda: made.fleet.serving.keys() == left, 30)


async def test_addresses_of_all_kinds() -> None:
    """IPv6 in brackets, as URLs and endpoints are; one without an address waits for it."""
    async with KubeWorld() as made:
        kube = made.kube
        kube.put(POOLS, "pool", pool())
        kube.put(PODS, "six", pod("fd00::17"))
        kube.put(PODS, "none", pod(""))
        await made.follow()
        await made.serving(six="[fd00::17]:8000")
        kube.put(PODS, "none", pod(A))
        await made.serving(none=f"{A}:8000", six="[fd00::17]:8000")
        assert made.discovery.problem is None


@pytest.mark.parametrize(
    ("selector", "serve"),
    [
        ("app in (vllm, sglang),tier!=dev", {"a", "c"}),
        ("app notin (vllm)", {"c", "d"}),
        ("app,!tier", {"a"}),
        ("tier in (dev)", {"b"}),
    ],
)
async def test_selectors_by_sets(selector: str, serve: set[str]) -> None:
    async with KubeWorld(selector=selector, ports=(8000,)) as made:
        for i, (name, labels) in enumerate(
            {
                "a": {"app": "vllm"},
                "b": {"app": "vllm", "tier": "dev"},
                "c": {"app": "sglang", "tier": "prod"},
                "d": {"tier": "none"},
            }.items()
        ):
            made.kube.put(PODS, name, pod(f"10.0.0.{i}", labels=labels))
        await made.follow()
        await made.until(lambda: set(made.fleet.serving) == serve)


async def test_two_pools_of_one_namespace_keep_to_themselves() -> None:
    async with KubeWorld(pool="one") as one, KubeWorld(pool="two") as two:
        two.kube = kube = one.kube
        kube.installed |= {OBJECTIVES, REWRITES}
        kube.put(POOLS, "one", pool(8000, model="one"))
        kube.put(POOLS, "two", pool(9000, model="two"))
        for name in ("one", "two"):
            kube.put(OBJECTIVES, f"of-{name}", objective(len(name), name))
            kube.put(REWRITES, f"of-{name}", rewrite((["m"], {f"m-{name}": 1}), pool=name))
        kube.put(PODS, "a", pod(A, labels={"model": "one"}))
        kube.put(PODS, "b", pod(B, labels={"model": "two"}))
        await one.follow()
        await two.follow()
        await one.serving(a=f"{A}:8000")
        await two.serving(b=f"{B}:9000")
        for made, name in ((one, "one"), (two, "two")):
            await made.until(lambda m=made, n=name: m.objectives and m.objectives[-1] == {f"of-{n}": len(n)})
            await made.until(lambda m=made, n=name: m.rewrites and m.rewrites[-1][0].targets[0].model == f"m-{n}")
        kube.put(PODS, "a", pod(A, labels={"model": "two"}))
        await two.serving(a=f"{A}:9000", b=f"{B}:9000")
        await one.serving()


@pytest.mark.parametrize("priority", ["high", "5", 1.5, [1], {"a": 1}, True, 2**40])
async def test_an_objective_of_the_wrong_type_is_left_out_and_told(priority: Any) -> None:
    async with KubeWorld() as made:
        kube = made.kube
        kube.installed.add(OBJECTIVES)
        kube.put(POOLS, "pool", pool())
        kube.put(OBJECTIVES, "good", objective(2))
        kube.put(OBJECTIVES, "bad", objective(priority))
        await made.follow()
        await made.until(lambda: made.objectives and made.objectives[-1] == {"good": 2})
        assert "bad of inferenceobjectives.llm-d.ai is left out" in (made.discovery.problem or "")
        kube.put(OBJECTIVES, "bad", objective(-7))
        await made.until(lambda: made.objectives[-1] == {"good": 2, "bad": -7})
        assert made.discovery.problem is None


@pytest.mark.parametrize("weight", [-1, 10**400], ids=["below zero", "beyond all numbers"])
async def test_a_rewrite_of_no_weight_and_one_that_is_none(weight: int) -> None:
    async with KubeWorld() as made:
        kube = made.kube
        kube.installed.add(REWRITES)
        kube.put(POOLS, "pool", pool())
        kube.put(REWRITES, "none", rewrite((["m"], {"a": 0, "b": 0})))
        kube.put(REWRITES, "odd", rewrite((["m"], {"c": weight})))
        await made.follow()
        await made.until(lambda: made.rewrites and made.rewrites[-1])
        assert [[(it.model, it.weight) for it in rule.targets] for rule in made.rewrites[-1]] == [[("a", 0), ("b", 0)]]
        assert "odd of inferencemodelrewrites.llm-d.ai is left out" in (made.discovery.problem or "")
