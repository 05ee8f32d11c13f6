"""Whatever becomes of watches, versions and answers: in the end everybody who is there serves, and nobody else.

Each run is some minutes of a small cluster, with the timers that serve, in virtual time. `WARMROUTE_CHAOS_RUNS` says
how many, `WARMROUTE_CHAOS_SEED` where to begin.
"""

from __future__ import annotations

import asyncio
import os
import random

from gateway.discovery.kubernetes.reflector import Timers
from tests.support.kube_server import PODS, POOLS, KubeServer
from tests.support.kube_world import KubeWorld
from tests.support.pods import pod, pool
from tests.support.virtual_time import event_loop_policy

__all__ = ["event_loop_policy"]

RUNS = int(os.environ.get("WARMROUTE_CHAOS_RUNS", "100"))
SEED = int(os.environ.get("WARMROUTE_CHAOS_SEED", "0"))
CHANGES = 60
PAUSE_S = 5.0
LOOK_S = 1.0
PORTS = (8000, 8001)
TIMERS = Timers(page=3)
SETTLED_WITHIN_S = 1.2 * TIMERS.relist_s + 1.5 * TIMERS.watch_s + TIMERS.overdue_s + TIMERS.longest_s
"""After a watch that lost something and said nothing of it; of everything else it is seconds."""


def expected(kube: KubeServer) -> dict[str, str]:
    """The endpoints that ought to serve now, the naive way."""
    the_pool = kube.get(POOLS, "pool")
    if the_pool is None:
        return {}
    ports = [port["number"] for port in the_pool["spec"]["targetPorts"]]
    wanted = the_pool["spec"]["selector"]["matchLabels"].items()
    found = {}
    for name, it in kube.all(PODS).items():
        meta, status = it["metadata"], it["status"]
        is_ready = {"type": "Ready", "status": "True"} in status["conditions"]
        if not wanted <= meta["labels"].items() or not is_ready or "deletionTimestamp" in meta:
            continue
        active = meta.get("annotations", {}).get("llm-d.ai/active-ports")
        for rank, port in enumerate(ports):
            if active is None or str(port) in active.split(","):
                suffix = f"-rank-{rank}" if len(ports) > 1 else ""
                found[name + suffix] = f"http://{status['podIP']}:{port}"
    return found


class Chaos:
    """Changes of a small cluster, and faults of its API, by one seed."""

    def __init__(self, kube: KubeServer, seed: int) -> None:
        self.kube = kube
        self.rng = random.Random(seed)
        self.addresses = [f"10.0.0.{i}" for i in range(12)]
        kube.put(POOLS, "pool", pool(8000))
        for i in range(5):
            self.put(f"p{i}")

    def put(self, name: str) -> None:
        rng, before = self.rng, self.kube.get(PODS, name)
        taken = {it["status"]["podIP"] for it in self.kube.all(PODS).values()}
        address = before["status"]["podIP"] if before else rng.choice([a for a in self.addresses if a not in taken])
        labels = {"app": "vllm" if rng.random() < 0.85 else "other", "v": rng.choice("12")}
        annotations = {"llm-d.ai/active-ports": rng.choice(["8000", "8001", "8000,8001", ""])}
        self.kube.put(
            PODS,
            name,
            pod(
                address,
                ready=rng.random() < 0.8,
                labels=labels,
                annotations=annotations if rng.random() < 0.1 else None,
                terminating=rng.random() < 0.1,
            ),
        )

    def change(self) -> None:
        rng, kube = self.rng, self.kube
        name, dice = f"p{rng.randrange(10)}", rng.random()
        if dice < 0.03:
            labels = rng.choice([{"app": "vllm"}, {"app": "vllm", "v": "1"}])
            kube.put(POOLS, "pool", pool(*rng.choice([(8000,), PORTS]), **labels))
        elif dice < 0.035:
            if kube.get(POOLS, "pool") is not None:
                kube.delete(POOLS, "pool")
        elif dice < 0.3 and kube.get(PODS, name) is not None:
            kube.delete(PODS, name)
            if rng.random() < 0.3:
                self.put(name)  # At once, perhaps elsewhere.
        else:
            self.put(name)

    def fault(self) -> None:
        rng, kube = self.rng, self.kube
        dice = rng.random()
        if dice < 0.25:
            kube.cut()
        elif dice < 0.4:
            kube.cut()  # What happens next is never told, unless by a list.
            for _ in range(rng.randrange(4)):
                self.change()
            kube.gone_in_stream = rng.random() < 0.5
            kube.compact()
        elif dice < 0.55:
            kube.compact()
        elif dice < 0.7:
            kube.lose(mute=rng.random() < 0.5)
        elif dice < 0.85:
            faults: list[tuple[int, dict[str, str]]] = [(500, {}), (429, {"Retry-After": "0"}), (410, {}), (503, {})]
            kube.refusals += rng.choices(faults, k=rng.randrange(1, 4))
        elif dice < 0.95:
            kube.slow_s = rng.choice([0.0, 0.02])
        else:
            kube.down = True
            kube.cut()

    def heal(self) -> None:
        self.kube.down, self.kube.slow_s = False, 0.0
        self.kube.refusals.clear()
        if self.kube.get(POOLS, "pool") is None:
            self.kube.put(POOLS, "pool", pool(8000))


async def run(seed: int) -> dict[str, int]:
    async with KubeWorld(timers=TIMERS, is_quick=False, seed=seed) as world:
        kube = world.kube
        chaos = Chaos(kube, seed)
        await world.follow()
        for _ in range(CHANGES):
            chaos.change()
            if chaos.rng.random() < 0.25:
                chaos.fault()
            elif kube.down and chaos.rng.random() < 0.2:
                kube.down = False
            await asyncio.sleep(PAUSE_S * chaos.rng.uniform(0.2, 1.8))
        chaos.heal()
        try:
            await world.until(lambda: world.fleet.urls == expected(kube), SETTLED_WITHIN_S, LOOK_S)
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}: {expected(kube)} != {world.fleet.urls}; {exc}") from None
        return {"changes": len(world.fleet.seen), "lists": kube.count("list", PODS)}


async def test_the_workers_converge_on_the_pods_that_are_there() -> None:
    changes = lists = 0
    for seed in range(SEED, SEED + RUNS):
        told = await run(seed)
        changes, lists = changes + told["changes"], lists + told["lists"]
    assert changes > 10 * RUNS, "nothing happened"
    assert lists > 4 * RUNS, "no watch was ever lost"
