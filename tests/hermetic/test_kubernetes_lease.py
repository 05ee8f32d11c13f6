"""Which replica leads: one at a time, and soon another when it is gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from gateway.discovery.kubernetes import Access, Api, Elector, lease_name
from gateway.discovery.kubernetes.lease import LeaseTimers
from tests.support.kube_server import LEASES, KubeServer
from tests.support.stacked import Stacked
from tests.support.virtual_time import event_loop_policy

__all__ = ["event_loop_policy"]

TIMERS = LeaseTimers()
NAME = lease_name("default", "pool")


class Clock:
    ahead_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s


class Replica:
    def __init__(self, kube: KubeServer, name: str) -> None:
        self.name = name
        self.clock = Clock()
        self.told: list[bool] = []
        self.api = Api(Access(server=kube.url, token=name))
        self.elector = Elector(
            self.api, "default", NAME, identity=name, changed=self.told.append, timers=TIMERS, clock=self.clock
        )
        self.task = asyncio.get_running_loop().create_task(self.elector.run())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def leave(self) -> None:
        await self.stop()
        await self.elector.release()

    async def close(self) -> None:
        await self.stop()
        await self.api.close()


class LeaseWorld(Stacked):
    """Replicas that campaign, and a witness that never sees two lead."""

    def __init__(self, *names: str) -> None:
        self.kube = KubeServer()
        self._names = names
        self.replicas: dict[str, Replica] = {}
        self.history: list[str | None] = [None]

    async def _start(self) -> None:
        await self._stack.enter_async_context(self.kube)
        for name in self._names:
            self.join(name)
        witness = asyncio.get_running_loop().create_task(self._witness())
        self._stack.push_async_callback(self._dismiss, witness)

    def join(self, name: str) -> Replica:
        self.replicas[name] = Replica(self.kube, name)
        self._stack.push_async_callback(self.replicas[name].close)
        return self.replicas[name]

    @property
    def leader(self) -> str | None:
        leaders = [name for name, it in self.replicas.items() if it.elector.leads]
        assert len(leaders) <= 1, f"{leaders} lead at once"
        return leaders[0] if leaders else None

    async def _witness(self) -> None:
        while True:
            if self.leader != self.history[-1]:
                self.history.append(self.leader)
            await asyncio.sleep(0.1)

    async def _dismiss(self, witness: asyncio.Task[None]) -> None:
        witness.cancel()
        (result,) = await asyncio.gather(witness, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError), result

    async def until(self, true: Callable[[], Any], within_s: float = 120.0) -> float:
        """Waits for it; how long that took."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        async with asyncio.timeout(within_s):
            while not true():  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.1)
        return clock() - began_s


async def test_one_leads_and_keeps_the_lease() -> None:
    async with LeaseWorld("a", "b") as world:
        await world.until(lambda: world.leader)
        leader = world.leader
        lease = world.kube.get(LEASES, NAME)
        assert lease is not None
        first = lease["spec"]["renewTime"]
        await world.until(lambda: (world.kube.get(LEASES, NAME) or {})["spec"]["renewTime"] > first)
        spec = (world.kube.get(LEASES, NAME) or {})["spec"]
        assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == (leader, 15, 0)
        await world.until(lambda: all(it.elector.leader == leader for it in world.replicas.values()))
        assert world.history == [None, leader]


async def test_another_leads_when_the_leader_cannot_renew_and_not_before() -> None:
    async with LeaseWorld("a") as world:
        await world.until(lambda: world.leader == "a")
        b = world.join("b")
        await world.until(lambda: b.elector.leader == "a")
        world.kube.parted = {"a"}
        assert await world.until(lambda: world.leader is None) <= TIMERS.renew_s + 0.2
        nobody_s = await world.until(lambda: world.leader == "b")
        assert TIMERS.lease_s - TIMERS.renew_s - 2.5 < nobody_s < TIMERS.lease_s - TIMERS.renew_s + 2.5
        assert world.replicas["a"].told == [True, False]
        assert "cannot be had" in (world.replicas["a"].elector.problem or "")
        world.kube.parted.clear()
        await world.until(lambda: world.replicas["a"].elector.leader == "b")
        assert world.replicas["a"].elector.problem is None
        assert world.history == [None, "a", None, "b"]
        assert (world.kube.get(LEASES, NAME) or {})["spec"]["leaseTransitions"] == 1


async def test_a_leader_that_leaves_gives_the_lease_back() -> None:
    async with LeaseWorld("a") as world:
        await world.until(lambda: world.leader == "a")
        world.join("b")
        await world.until(lambda: world.replicas["b"].elector.leader == "a")
        await world.replicas["a"].leave()
        assert await world.until(lambda: world.leader == "b") <= 2.5  # Not when it would have run out.
        assert world.replicas["a"].told == [True, False]


async def test_a_leader_that_was_frozen_does_not_think_it_leads() -> None:
    async with LeaseWorld("a") as world:
        a = world.replicas["a"]
        await world.until(lambda: world.leader == "a")
        a.clock.ahead_s += TIMERS.renew_s
        assert not a.elector.leads
        await world.until(lambda: world.leader == "a")


async def test_clocks_of_others_do_not_matter() -> None:
    async with LeaseWorld() as world:
        for year in (1999, 2099):
            spec = {"holderIdentity": "z", "leaseDurationSeconds": 20, "renewTime": f"{year}-01-01T00:00:00.000000Z"}
            world.kube.put(LEASES, NAME, {"spec": spec})
            replica = world.join(f"r{year}")
            assert await world.until(lambda name=replica.name: world.leader == name) > 19.0
            await replica.leave()


async def test_what_others_keep_in_the_lease_stays() -> None:
    async with LeaseWorld() as world:
        meta = {"labels": {"team": "x"}, "ownerReferences": [{"name": "epp"}]}
        world.kube.put(LEASES, NAME, {"metadata": meta, "spec": {"holderIdentity": "", "strategy": "OldestEmulation"}})
        world.join("a")
        await world.until(lambda: world.leader == "a")
        lease = world.kube.get(LEASES, NAME) or {}
        assert meta.items() <= lease["metadata"].items()
        assert lease["spec"]["strategy"] == "OldestEmulation"


async def test_no_right_to_the_lease_is_told() -> None:
    async with LeaseWorld() as world:
        world.kube.forbidden = {LEASES}
        a = world.join("a")
        await world.until(lambda: "rbac.yaml" in (a.elector.problem or ""))
        assert world.leader is None
        world.kube.forbidden.clear()
        await world.until(lambda: world.leader == "a")
        assert a.elector.problem is None


async def test_never_two_lead_whatever_happens() -> None:
    rng = random.Random(3)
    async with LeaseWorld("a", "b", "c") as world:
        kube = world.kube
        for _ in range(120):
            dice = rng.random()
            if dice < 0.35:
                kube.parted = set(rng.sample("abc", rng.randrange(3)))
            elif dice < 0.5:
                kube.refusals += [(rng.choice([500, 409, 503, 429]), {}) for _ in range(rng.randrange(1, 8))]
            elif dice < 0.6:
                kube.slow_s = rng.choice([0.0, 0.5, 2.0, 4.0])
            elif dice < 0.65 and kube.get(LEASES, NAME) is not None:
                spec = (kube.get(LEASES, NAME) or {})["spec"]
                kube.put(LEASES, NAME, {"spec": spec | {"renewTime": "2020-01-01T00:00:00.000000Z"}})
            elif world.leader is not None and dice < 0.75:
                leader = world.leader
                await world.replicas[leader].leave()
                await world.replicas[leader].close()
                world.join(leader)
            await asyncio.sleep(rng.uniform(0.2, 8.0))
        kube.parted, kube.slow_s = set(), 0.0
        kube.refusals.clear()
        await world.until(lambda: world.leader)
        assert len(world.history) > 10, "nothing happened"
