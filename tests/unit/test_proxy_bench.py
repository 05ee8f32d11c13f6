"""The parts of `python -m bench proxy`: reading HTTP, processes, samples, figures, targets, prompts."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.proxy import http1, page, prompts, report
from bench.proxy.backend import Connection, Worker
from bench.proxy.feed import Hits, Shares, total
from bench.proxy.floor import length_bytes
from bench.proxy.kept import Kept
from bench.proxy.load import Load, Requests, Result
from bench.proxy.measure import Case, Figure, Sample, cases, figure, figures, judged, percentile
from bench.proxy.processes import choose_cores, cpu_s, parent_of, pinned, tree, tree_cpu_s, tree_rss_bytes
from bench.proxy.routers import Missing, Workers, peers, start
from indexer import PrefixIndex, decode_batch

EVENTS = [b'data: {"id":"chatcmpl-t0000000000000000001"}\n\n', b'data: {"id":"x"}\n\n', b"data: [DONE]\n\n"]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM = HEAD + b"".join(map(http1.chunk, EVENTS)) + b"0\r\n\r\n"


# ---- HTTP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, len(STREAM)))
def test_a_streamed_answer_is_counted_wherever_it_is_split(at: int) -> None:
    answer = http1.Answer()
    assert not answer.feed(STREAM[:at])
    assert answer.feed(STREAM[at:])
    assert (answer.status, answer.events, answer.done) == (200, 2, True)


def test_a_streamed_answer_is_counted_byte_by_byte() -> None:
    answer = http1.Answer()
    ended = [answer.feed(STREAM[i : i + 1]) for i in range(len(STREAM))]
    assert ended == [False] * (len(STREAM) - 1) + [True]
    assert answer.events == 2


def test_an_answer_of_known_length_is_complete_with_its_last_byte() -> None:
    whole = http1.response("503 Service Unavailable", "application/json", b'{"a":1}')
    answer = http1.Answer()
    assert not answer.feed(whole[:-1])
    assert answer.feed(whole[-1:])
    assert answer.status == 503
    answer.next()
    assert answer.feed(whole)


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    answer = http1.Answer()
    assert not answer.feed(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello")
    assert answer.ended()
    assert answer.closes
    cut = http1.Answer()
    cut.feed(STREAM[:-3])
    assert not cut.ended()


class Pipe:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False
        self.ended = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.written += data
        if self.written.endswith(http1.LAST_CHUNK):
            self.ended.set()

    def close(self) -> None:
        self.closed = True


async def connection() -> tuple[Connection, Pipe]:
    pipe = Pipe()
    made = Connection(Worker(asyncio.get_running_loop()))
    made.connection_made(pipe)  # type: ignore[arg-type]
    return made, pipe


CHUNKED_POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\ntransfer-encoding: chunked\r\n\r\n"
    b'd\r\n{"model":"m"}\r\n0\r\n\r\n'
)


@pytest.mark.parametrize("request_", [http1.post("/v1/chat/completions", "h", b'{"model":"m"}'), CHUNKED_POST])
async def test_the_backend_answers_requests_however_they_are_split(request_: bytes) -> None:
    for at in range(1, len(request_)):
        made, pipe = await connection()
        made.data_received(request_[:at])
        assert pipe.written == b""
        made.data_received(request_[at:] + request_)
        assert pipe.written.count(b"HTTP/1.1 200 OK") == 2


async def test_the_backend_says_what_it_has_not() -> None:
    made, pipe = await connection()
    for path in ("/v1/chat/completions/render", "/tokenize", "/kv_event_sources"):
        made.data_received(http1.post(path, "h", b"{}"))
    assert pipe.written.count(b"HTTP/1.1 404") == 3


async def test_the_backend_hangs_up_on_http2() -> None:
    made, pipe = await connection()
    made.data_received(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert pipe.closed
    assert not pipe.written


async def test_the_backend_streams_as_many_chunks_as_were_asked_for() -> None:
    made, pipe = await connection()
    made.data_received(http1.post("/v1/chat/completions", "h", b'{"max_tokens":5,"stream":true}'))
    answer = http1.Answer()
    async with asyncio.timeout(5):
        await pipe.ended.wait()
    assert answer.feed(pipe.written)
    assert (answer.events, answer.done) == (5, True)


# ---- load ------------------------------------------------------------------------------------------------------------


async def server_of(answer: bytes, *, close: bool = False) -> asyncio.Server:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = http1.LENGTH.search(head)
                assert length is not None
                await reader.readexactly(int(length[1]))
                writer.write(answer)
                await writer.drain()
                if close:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


async def result_of(server: asyncio.Server, *, n: int = 6, chunks: int = 0) -> Result:
    port = server.sockets[0].getsockname()[1]
    async with server, Load([port], Requests("/", [b"{}"]), 2, chunks=chunks) as load:
        return await load.run(5.0, at_most=n)


async def test_load_counts_what_is_answered() -> None:
    result = await result_of(await server_of(http1.response("200 OK", "text/plain", b"hello")))
    assert (result.finished, result.failed) == (6, 0)
    assert len(result.latencies_s) == 6


async def test_load_counts_chunks_and_misses_none_silently() -> None:
    result = await result_of(await server_of(STREAM), chunks=2)
    assert (result.finished, result.chunks, result.failed) == (6, 12, 0)
    result = await result_of(await server_of(STREAM), chunks=3)
    assert (result.finished, result.failures) == (0, {"not all chunks": 6})


async def test_load_counts_errors_by_status() -> None:
    result = await result_of(await server_of(http1.response("503 Service Unavailable", "text/plain", b"")))
    assert (result.finished, result.failures) == (0, {"status 503": 6})


async def test_load_counts_answers_cut_off_and_goes_on() -> None:
    cut = http1.response("200 OK", "text/plain", b"hello")[:-1]
    result = await result_of(await server_of(cut, close=True))
    assert (result.finished, result.failures) == (0, {"connection lost": 6})


async def test_load_takes_another_connection_where_one_is_closed() -> None:
    closing = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    result = await result_of(await server_of(closing, close=True))
    assert (result.finished, result.failed) == (6, 0)


def test_fresh_requests_differ_and_keep_their_length() -> None:
    body = b'{"a":"' + prompts.FRESH_MARK + b'"}'
    asked = Requests("/", [body])
    seen = [asked.next() for _ in range(3)]
    assert len(set(seen)) == 3
    assert {len(each) for each in seen} == {len(http1.post("/", "127.0.0.1", body))}


# ---- processes -------------------------------------------------------------------------------------------------------


def test_the_parent_is_read_behind_any_name() -> None:
    assert parent_of("123 (a) b (c)) S 77 123 123 0 -1") == 77


def test_cores_are_told_apart_as_far_as_there_are_any() -> None:
    assert choose_cores({3}).shared
    two = choose_cores({1, 0})
    assert (two.load, two.backend, two.router, two.shared) == (0, 0, 1, False)
    three = choose_cores({0, 1, 2})
    assert (three.load, three.backend, three.router) == (0, 2, 1)
    assert "only core 3" in choose_cores({3}).told()


def test_cpu_time_is_of_the_whole_tree_and_of_threads_that_ended() -> None:
    burn = "import time\ndef burn():\n    while time.thread_time() < 0.1: pass\n"
    child = f"{burn}import threading; t = threading.Thread(target=burn); t.start(); t.join(); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    allowed = os.sched_getaffinity(0)
    with pinned(min(allowed)):
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert os.sched_getaffinity(0) == allowed
    try:
        while tree_cpu_s(process.pid) - cpu_s(process.pid) < 0.1:
            assert process.poll() is None
        assert len(tree(process.pid)) == 2
        assert tree_rss_bytes(process.pid) > 1 << 20
        assert os.sched_getaffinity(process.pid) == {min(allowed)}
    finally:
        process.communicate(b"\n")
    with pytest.raises(ProcessLookupError):
        cpu_s(process.pid)


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path) -> None:
    for spec in peers(str(tmp_path)):
        with pytest.raises(Missing, match="--install-peers"):
            start(spec, Workers([1]), min(os.sched_getaffinity(0)), tmp_path)


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (b"POST / HTTP/1.1\r\nContent-Le", None),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 27),
        (b"POST / HTTP/1.1\r\nCONTENT-LENGTH: 3\r\n\r\nabc", 41),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 38),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", -1),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\ncontent-length: 3\r\n", -1),
    ],
)
def test_the_floor_finds_where_a_body_ends(message: bytes, size: int | None) -> None:
    assert length_bytes(message) == size


# ---- samples and figures ---------------------------------------------------------------------------------------------


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile([float(i) for i in range(1, 101)], 0.99) == 99.0
    assert percentile([1.0, 2.0], 0.0) == 1.0


def case(**changes: object) -> Case:
    return Case(**{"name": "2kb_c32", "bodies": "2kb", "concurrency": 32, "duration_s": 1.0, **changes})  # type: ignore[arg-type]


def taken(
    cost_us: float, busy: float = 1.0, *, router: str = "ours", failures: int = 0, name: str = "2kb_c32"
) -> Sample:
    n = 1000
    result = Result(
        [0.001] * n, [], n, 0, Counter({"status 503": failures} if failures else {}), cost_us * n / 1e6 / busy
    )
    return judged(case(name=name), router, result, cost_us * n / 1e6, 0.1)


def test_a_sample_counts_where_one_side_was_busy_or_nobody_should_be() -> None:
    idle = Result([0.001], [], 1, 0, Counter(), 1.0)
    assert not judged(case(), "ours", idle, 0.5, 0.5).accepted
    assert judged(case(), "ours", idle, 0.5, 0.9).accepted
    assert judged(case(concurrency=1), "ours", idle, 0.1, 0.1).accepted
    assert judged(case(streams=True, pace_ms=10), "ours", idle, 0.1, 0.1).accepted


def test_cost_is_per_request_or_per_chunk() -> None:
    plain = Result([0.1], [], 10, 0, Counter(), 1.0)
    streamed = Result([0.1], [], 10, 2000, Counter(), 1.0)
    assert judged(case(), "ours", plain, 0.01, 0.0).cpu_us == pytest.approx(1000)
    assert judged(case(streams=True), "ours", streamed, 0.01, 0.0).cpu_us == pytest.approx(5)
    assert judged(case(), "ours", Result(wall_s=1.0), 0.01, 0.0).cpu_us is None


def test_accepted_samples_are_preferred_and_failures_of_all_are_counted() -> None:
    found = figure([taken(100), taken(110), taken(120), taken(900, 0.3, failures=250)])
    assert (found.cpu_us, found.used, found.accepted, found.rounds) == (pytest.approx(110), 3, 3, 4)
    assert (found.failures, found.success_rate) == ({"status 503": 250}, 4000 / 4250)
    few = figure([taken(100), taken(200, 0.3), taken(300, 0.3)])
    assert (few.cpu_us, few.used, few.accepted) == (pytest.approx(200), 3, 1)


def test_samples_of_earlier_runs_count_too(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    first = Kept(file)
    first.sampled(taken(100))
    first.decided({"2kb": 20.0})
    again = Kept(file)
    again.sampled(taken(120))
    again.sampled(taken(50, router="direct"))
    (ours, direct) = figures(Kept(file).samples)
    assert (ours.router, ours.rounds, ours.cpu_us) == ("ours", 2, pytest.approx(110))
    assert (direct.rounds, direct.cpu_us) == (1, None)
    assert Kept(file).decisions == [{"2kb": 20.0}]
    assert Kept(None).samples == []


def test_cases_have_names_of_their_own() -> None:
    names = [each.name for each in cases([1, 32, 256], 0.5)]
    assert len(set(names)) == len(names)
    assert {"2kb_c1", "64kb_c256", "2kb_fresh_c32", "sse_saturated", "sse_paced"} <= set(names)
    assert all(report.title(name) for name in names)


def run_of(**costs: tuple[float, float, float]) -> report.Run:
    """By case: CPU us of ours, vllm-router round_robin, vllm-router cache_aware; 0: not measured."""
    routers = ("ours", report.ROUND_ROBIN, report.CACHE_AWARE)
    found: list[Figure] = [
        figure([taken(us, router=router, name=name)])
        for name, each in costs.items()
        for router, us in zip(routers, each, strict=True)
        if us
    ]
    return report.Run(
        figures=found,
        decision_us={"2kb": 20.0},
        rss_bytes={"ours": 100 << 20, "direct": 0},
        versions={},
        missing=["no smg on PATH; get it"],
        setting=["router on core 1"],
    )


COSTS = {"2kb_c32": (90.0, 80.0, 300.0), "64kb_c32": (400.0, 150.0, 700.0), "sse_saturated": (6.0, 5.0, 9.0)}


def test_targets_are_met_or_missed_by_ratio() -> None:
    found = report.targets(run_of(**COSTS), 32)
    assert [t["measured"] for t in found] == [0.9, 0.571, 1.2]
    assert [t["met"] for t in found] == [True, False, True]


def test_targets_are_open_without_the_peer() -> None:
    found = report.targets(run_of(**{name: (ours, 0.0, 0.0) for name, (ours, _, _) in COSTS.items()}), 32)
    assert [(t["measured"], t["met"]) for t in found] == [(None, None)] * 3


def test_s19_success_is_shown_and_failures_leave_a_target_open() -> None:
    run = run_of(**COSTS)
    failing = figure([taken(1.0, failures=1)])
    run = report.Run(**{**{n: getattr(run, n) for n in run.__struct_fields__}, "figures": [failing, *run.figures[1:]]})
    assert report.targets(run, 32)[0]["met"] is None
    assert any("99.90 % (1 x status 503)" in row for row in report.rows(run, "2kb_c32"))


def test_the_page_shows_all_cases_and_what_is_missing() -> None:
    run = run_of(**COSTS)
    text = page.page(run, report.targets(run, 32))
    assert text.startswith("\n".join(page.HEAD))
    assert all(f"\n## {section}\n" in text for section in page.SECTIONS)
    assert all(f"### {report.title(name)}\n" in text for name in COSTS)
    assert "- no smg on PATH" in text
    assert "| **no** |" in text
    assert json.loads(json.dumps(report.flat(run)))["ours_2kb_c32_us"] == pytest.approx(90)


def test_the_committed_page_is_of_this_form() -> None:
    doc = Path(__file__).resolve().parents[2] / "docs" / "proxy-benchmark.md"
    text = doc.read_text(encoding="utf-8")
    assert text.startswith("\n".join(page.HEAD)), "made by another generator: run the command in its head again"
    assert tuple(part.partition("\n")[0] for part in text.split("\n## ")[1:]) == page.SECTIONS


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_bodies_have_the_sizes_they_are_named_by() -> None:
    made = prompts.bodies(n_small=3, n_large=1)
    assert {len(body) for body in (*made.small, *made.fresh_small)} == {prompts.SMALL_BYTES}
    assert {len(body) for body in (*made.large, *made.fresh_large)} == {prompts.LARGE_BYTES}
    assert len(set(made.small)) == 3
    assert made == prompts.bodies(n_small=3, n_large=1)
    firsts = {json.loads(body)["messages"][0]["content"] for body in (*made.small, *made.large)}
    assert len(firsts) == 1
    for body in (*made.fresh_small, *made.fresh_large):
        assert json.loads(body)["messages"][-1]["content"].encode().endswith(prompts.FRESH_MARK)
    (first, *_) = made.streamed(10)
    assert json.loads(first)["stream"] is True


def test_each_worker_holds_its_prompts_and_what_they_share() -> None:
    shared, own = list(range(32)), [list(range(100 * i, 100 * i + 40)) for i in range(1, 4)]
    asked = [shared + each for each in own]
    index = PrefixIndex()
    for i, frames in enumerate(prompts.kv_frames(asked, 2)):
        for payload in frames:
            index.apply(f"w{i}", 0, decode_batch(payload))
    for i, ids in enumerate(asked):
        found = {worker: match.gpu_tokens for (worker, _), match in index.match(ids).items()}
        assert found == {f"w{i % 2}": 64, f"w{1 - i % 2}": 32}


def test_shares_are_of_the_time_in_between() -> None:
    def cache(local: int, estimate: int, cached: int) -> dict[str, object]:
        hits = {"prompt_tokens": 10 * (local + estimate), "predicted_tokens": cached}
        return {
            "workers": {"a": {"hits": hits}, "b": {"hits": None}},
            "tokens": {"m": {"served": {"local": local, "estimate": estimate}}},
        }

    between = Hits.of(cache(40, 10, 300)).since(Hits.of(cache(10, 0, 50)))
    assert (between.real_ids_share, between.hit_share) == (0.75, 250 / 400)
    assert total([between, between]) == Shares(80, 60, 800, 500)
    assert total([]) is None
