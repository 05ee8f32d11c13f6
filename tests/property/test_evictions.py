"""Requests that come, are answered, leave or are taken back in any order: each has one end, and nothing is left."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from gateway.config.schema import EppConfig, QueueConfig
from gateway.extproc.types import Pick, Refusal
from tests.support.epp_world import BASE, P, Pool, answer, request

PODS = 2
WITHIN_S = 60.0
OBJECTIVES = {"batch": -1, "bulk": -2, "usual": 0, "urgent": 5}
COMES = st.tuples(
    st.just("comes"), st.sampled_from(sorted(OBJECTIVES)), st.sampled_from([BASE, "bar"]), st.sampled_from([None, 0, 1])
)
STEP = st.one_of(
    COMES,
    COMES,
    st.tuples(st.just("says"), st.integers(0, PODS - 1), st.integers(0, 2)),
    st.tuples(st.sampled_from(["begins", "ends", "leaves", "gives up", "time", "time", "time"])),
)

FULL = [
    *[("comes", "batch", BASE, pod) for pod in range(PODS)],
    ("time",),
    *[("says", pod, 1) for pod in range(PODS)],
    ("comes", "urgent", BASE, 0),
]
"""What there is before anything else happens."""


class One:
    """A request, and the proxy that carries it out."""

    def __init__(self, pool: Pool, objective: str, model: str, pod: int | None) -> None:
        self.priority = OBJECTIVES[objective]
        self.allowed = None if pod is None else (pool.endpoint(pod),)
        self.begun = self.over = False
        self.refusal: Refusal | None = None
        self.pick: Pick | None = None
        self._pool = pool
        headers = {"x-llm-d-inference-objective": objective}
        self.task = asyncio.create_task(self._ask(request(model=model, subset=self.allowed, headers=headers)))

    async def _ask(self, asked: object) -> None:
        verdict = await self._pool.pick(asked)  # type: ignore[arg-type]
        if isinstance(verdict, Refusal):
            self.refusal, self.over = verdict, True
            return
        self.pick = verdict
        assert self.allowed is None or verdict.endpoints == self.allowed
        if verdict.recall is not None:
            assert self.priority < 0
            verdict.recall.bind(self._refused)

    def _refused(self, refusal: Refusal) -> bool:
        assert not self.begun
        assert not self.over
        self.refusal, self.over = refusal, True
        assert self.pick is not None
        self.pick.watch.recalled()
        return True

    @property
    def runs(self) -> bool:
        return self.pick is not None and not self.over

    def begin(self) -> None:
        assert self.pick is not None
        if not self.begun:
            self.begun = True
            self.pick.watch.responded(200, CIMultiDict({"content-type": "text/event-stream"}), None)

    def end(self) -> None:
        assert self.pick is not None
        self.over = True
        if self.begun:
            self.pick.watch.ended()
        else:
            answer(self.pick, b"{}")


def step(pool: Pool, ones: list[One], given: tuple, rng: random.Random) -> None:  # type: ignore[type-arg]
    running, waiting = [one for one in ones if one.runs], [one for one in ones if not one.task.done()]
    match given:
        case ("comes", objective, model, pod):
            ones.append(One(pool, objective, model, pod))
        case ("says", pod, inside):
            pool.say(f"p{pod}", P(queue=inside, running=1))
        case ("begins",) if running:
            rng.choice(running).begin()
        case ("ends",) if running:
            rng.choice(running).end()
        case ("leaves",) if running:
            one = rng.choice(running)
            assert one.pick is not None
            one.over = True
            one.pick.watch.aborted()
        case ("gives up",) if waiting:
            one = rng.choice(waiting)
            one.over = True
            one.task.cancel()


@settings(max_examples=30, deadline=None)
@given(st.lists(STEP, min_size=10, max_size=30), st.integers(0, 99))
def test_whatever_comes_and_goes_each_has_one_end_and_nothing_is_left(steps: list, seed: int) -> None:  # type: ignore[type-arg]
    async def run() -> None:
        rng = random.Random(seed)
        epp = EppConfig(objectives=tuple(f"{name}={priority}" for name, priority in OBJECTIVES.items()))
        queue = QueueConfig(waiting_per_worker=1, evict_after_s=0.001)
        async with Pool(*[P(adapters=("bar",))] * PODS, epp=epp, queue=queue) as pool:
            ones: list[One] = []
            for each in [*FULL, *steps]:
                step(pool, ones, each, rng)
                await asyncio.sleep(0.025 if each[0] == "time" else 0)
            async with asyncio.timeout(WITHIN_S):
                while not all(one.over for one in ones):
                    for pod in range(PODS):
                        pool.say(f"p{pod}", P())
                    for one in ones:
                        if one.runs:
                            one.end()
                    await asyncio.sleep(0.001)
            await asyncio.gather(*(one.task for one in ones), return_exceptions=True)
            evicted = [one for one in ones if one.pick is not None and one.refusal is not None]
            assert all(one.priority < 0 for one in evicted)
            assert pool.value("warmroute_requests_rejected_total", reason="evicted") == len(evicted)
            assert not len(pool.queue.evictables)
            assert not pool.queue.evictables.going
            assert not pool.queue.n_waiting
            assert pool.is_idle()

    asyncio.run(run())
