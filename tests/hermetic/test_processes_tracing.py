"""Spans of a gateway of several processes."""

from __future__ import annotations

import aiohttp

from bench.engine.server import FakeVllm
from tests.hermetic.test_processes import prompt, restarted
from tests.support.gateway_world import engine
from tests.support.processes_world import Processes, eventually
from tests.support.traced import Collector, collector, tree

NAMES = ["POST /v1/completions", "read_body", "tokenise", "decide", "decode"]


def traced(at: Collector, delay_ms: int) -> Processes:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{at.port}", "OTEL_BSP_SCHEDULE_DELAY": str(delay_ms)}
    return Processes(2, "--tracing-enabled", env=env, a=engine())


def from_gateway(server: FakeVllm) -> set[str]:
    """Traces of requests that it was sent on."""
    paths = [it for it in server.requests if it.path == "/v1/completions"]
    return {it.headers["traceparent"].split("-")[1] for it in paths}


async def ask_all(them: Processes, first: int) -> int:
    """Requests on new connections until each process had some; how many."""
    before, n = await them.by_process(), 0

    async def all_had() -> bool:
        nonlocal n
        async with aiohttp.ClientSession() as http:
            assert (await them.complete(http, prompt(first + n)))[0] == 200
        n += 1
        now = await them.by_process()
        return all(now[each] > before[each] for each in now)

    await eventually(all_had)
    return n


async def test_each_process_sends_its_spans_and_each_request_is_one_trace() -> None:
    async with collector() as at, traced(at, 20) as them:
        n = await ask_all(them, 0)
        spans = await at.until(lambda spans: sum(span.kind == "SERVER" for span in spans) == n)
        traces = {span.trace for span in spans}
        assert traces == from_gateway(them.engines["a"])
        for trace in traces:
            mine = [span for span in spans if span.trace == trace]
            assert tree(mine) == NAMES
            assert len({span.instance for span in mine}) == 1
        assert {span.service for span in spans} == {"warmroute-gateway"}
        assert len({span.instance for span in spans}) == 2
        await them.command.terminate()


async def test_who_leaves_sends_its_last_spans_and_who_comes_has_spans_of_its_own() -> None:
    async with collector() as at, traced(at, 600_000) as them:
        n = await ask_all(them, 0)
        assert at.spans == []
        await restarted(them)
        await at.until(lambda spans: sum(span.kind == "SERVER" for span in spans) == n)
        n += await ask_all(them, 100)
        await them.command.terminate()
        assert sum(span.kind == "SERVER" for span in at.spans) == n
        assert len({span.instance for span in at.spans}) == 4


async def test_spans_that_are_lost_are_told_for_the_whole() -> None:
    async with collector() as at, traced(at, 20) as them:
        at.status = 400
        await ask_all(them, 0)

        async def is_told() -> bool:
            ready = await them.get("/readyz?verbose")
            return any(it["what"] == "traces_lost" for it in ready["degraded"])

        await eventually(is_told)
