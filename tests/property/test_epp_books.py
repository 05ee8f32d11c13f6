"""Whatever a proxy tells of picks, in whatever order: nothing is booked twice, below zero, or for good."""

from __future__ import annotations

import asyncio
import time

from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from gateway.config.schema import PdConfig
from gateway.extproc.types import Pick
from tests.support.epp_world import P, Pool, decode, prefill, request
from tests.support.fleets import prompt

OUTCOMES = st.sampled_from(
    [
        {},
        {"x-warmroute-outcome": "id=%s;choice=local;reason=prefill_failed"},
        {"x-warmroute-outcome": "id=%s;choice=remote;reason=cost;prefill_ms=12.5"},
        {"x-warmroute-outcome": "id=%s;choice=peer;reason=hint"},
        {"x-warmroute-outcome": "id=somebody;choice=local"},
        {"x-warmroute-outcome": "\x00;=;"},
    ]
)
HEAD = st.tuples(
    st.sampled_from([101, 200, 204, 400, 429, 500, 501, 502, 503, 504]),
    st.sampled_from(["application/json", "text/event-stream", "text/plain", ""]),
    OUTCOMES,
    st.sampled_from([None, "picked", "other", "192.0.2.1:1"]),
)
CHUNKS = st.lists(
    st.sampled_from(
        [b"", b"data: {}\n\n", b'{"usage":{"prompt_tokens":400,"completion_tokens":3}}', b"overflow", b"\n" * 50]
    ),
    max_size=4,
)
REQUEST = st.tuples(
    st.booleans(),
    st.sampled_from([40, 400, 3000]),
    st.none() | HEAD,
    CHUNKS,
    st.sampled_from(["ended", "aborted", "unseen", "recalled"]),
)


def check(pool: Pool) -> None:
    for worker in pool.fleet.workers.values():
        for load in worker.loads.values():
            assert load.streams >= 0
            assert load.kv_tokens >= 0
            assert load.comp_s >= -1e-9
            assert load.computing >= 0


def respond(pool: Pool, pick: Pick, head: tuple[int, str, dict[str, str], str | None]) -> None:
    status, content_type, said, served = head
    plan_id = pick.set_headers.get("x-warmroute-plan", ";id=;").split(";")[1].removeprefix("id=")
    headers = {name: value.replace("%s", plan_id) for name, value in said.items()}
    if served == "picked":
        served = pick.endpoints[0]
    elif served == "other":
        served = next(e for i in range(4) if (e := pool.endpoint(i)) != pick.endpoints[0])
    pick.watch.responded(status, CIMultiDict({"content-type": content_type, **headers}), served)


@settings(max_examples=100)  # Each starts a pool: a thousand take two minutes.
@given(st.lists(REQUEST, min_size=1, max_size=6), st.sampled_from(["local", "cost", "always-remote"]), st.randoms())
def test_everything_booked_is_given_back(plans: list, policy: str, rng) -> None:  # type: ignore[no-untyped-def,type-arg]
    async def run() -> None:
        async with Pool(prefill(), decode(), P(nixl=True), P(ranks=2), pd=PdConfig(policy=policy)) as pool:
            steps = []
            for i, (stream, n_tokens, head, chunks, end) in enumerate(plans):
                pick = await pool.picked(request(prompt(n_tokens, i), stream=stream))
                told = [] if head is None else [lambda p=pick, h=head: respond(pool, p, h)]
                told += [lambda p=pick, c=chunk: p.watch.chunk(c) for chunk in chunks] if head is not None else []
                steps.append([*told, getattr(pick.watch, end)])
            while steps:
                mine = rng.choice(steps)
                mine.pop(0)()
                check(pool)
                if not mine:
                    steps.remove(mine)
            pool.unseen.look(time.monotonic() + 10_000)
            check(pool)
            assert pool.is_idle()

    asyncio.run(run())
