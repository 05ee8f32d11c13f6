"""Cases, samples, and rounds over all routers in turn, so that what else the machine does meets them alike."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from bench.proxy.feed import Hits, Shares, total
from bench.proxy.load import Load, Requests, Result
from bench.proxy.prompts import STREAM_CHUNKS, Bodies
from bench.proxy.routers import DIRECT, Backends, Running

PATH = "/v1/chat/completions"
STREAMS = 64
PACE_MS = 10
MIN_BUSY = 0.85
"""A closed loop is limited by one of its sides: where neither was that busy, something else had the core."""
MIN_ACCEPTED = 3
_WARM_REQUESTS_PER_CONNECTION = 1
_WARM_CONNECTIONS = 4
_WARM_S = 120.0
"""At most; a prompt that was not tokenised by then would be taken for one that costs so much each time."""


class Case(msgspec.Struct, frozen=True):
    """One kind of load. `streams`: answers are streamed; `pace_ms` 0: as fast as they are taken."""

    name: str
    bodies: str
    concurrency: int
    duration_s: float
    streams: bool = False
    pace_ms: int = 0

    @property
    def saturates(self) -> bool:
        """Whether one of the two sides should be busy all the time."""
        return self.concurrency > 1 and not self.pace_ms


def cases(concurrencies: Sequence[int], duration_s: float) -> list[Case]:
    """In the order in which they are measured."""
    out = [Case(f"{kind}_c{c}", kind, c, duration_s) for kind in ("2kb", "64kb") for c in concurrencies]
    middle = sorted(concurrencies)[len(concurrencies) // 2]
    out += [Case(f"{kind}_fresh_c{middle}", f"{kind}_fresh", middle, duration_s) for kind in ("2kb", "64kb")]
    out.append(Case("sse_saturated", "sse", STREAMS, duration_s, streams=True))
    out.append(Case("sse_paced", "sse_paced", STREAMS, duration_s, streams=True, pace_ms=PACE_MS))
    return out


def bodies_of(case: Case, bodies: Bodies) -> list[bytes]:
    if case.streams:
        return bodies.streamed(case.pace_ms)
    kinds = {
        "2kb": bodies.small,
        "64kb": bodies.large,
        "2kb_fresh": bodies.fresh_small,
        "64kb_fresh": bodies.fresh_large,
    }
    return kinds[case.bodies]


class Sample(msgspec.Struct, frozen=True):
    """One router under one load. `router_busy`, `load_busy`: shares of a core; the latter is of load and backends."""

    case: str
    router: str
    finished: int
    chunks: int
    failures: dict[str, int]
    wall_s: float
    router_cpu_s: float
    router_busy: float
    load_busy: float
    latency_us: tuple[float, float] | None
    """p50 and p99."""
    chunk_delay_us: tuple[float, float] | None
    accepted: bool
    shares: Shares | None = None
    """Of a gateway of ours."""

    @property
    def cpu_us(self) -> float | None:
        """CPU microseconds of the router per finished request, or per chunk where answers are streamed."""
        n = self.chunks or self.finished
        return self.router_cpu_s / n * 1e6 if n else None


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least the share `q` of all does not exceed. `values` must not be empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def spread_us(values_s: Sequence[float]) -> tuple[float, float] | None:
    return (percentile(values_s, 0.5) * 1e6, percentile(values_s, 0.99) * 1e6) if values_s else None


async def sample(case: Case, router: Running, requests: Requests, backends: Backends) -> Sample:
    """Connections are made and each has had its first answers before anything is counted. A router that takes no
    connections has failed as many requests as there should have been.
    """
    chunks = STREAM_CHUNKS if case.streams else 0
    load = Load(router.ports, requests, case.concurrency, chunks=chunks, stamps=bool(case.pace_ms))
    try:
        async with load:
            if not case.streams:
                await load.run(case.duration_s, at_most=_WARM_REQUESTS_PER_CONNECTION * case.concurrency)
            before = Hits.read(router.admin_port) if router.decides else None
            router_s, load_s = router.cpu_s(), time.process_time() + backends.cpu_s()
            result = await load.run(case.duration_s, at_most=case.concurrency if case.pace_ms else None)
            router_s, load_s = router.cpu_s() - router_s, time.process_time() + backends.cpu_s() - load_s
            shares = None if before is None else Hits.read(router.admin_port).since(before)
    except OSError as exc:  # TimeoutError is one.
        refused = Result(failures=Counter({type(exc).__name__: case.concurrency}), wall_s=case.duration_s)
        return judged(case, router.name, refused, 0.0, 0.0)
    return judged(case, router.name, result, router_s, load_s, shares)


async def warm(routers: Sequence[Running], requests: Sequence[Requests]) -> None:
    """Each router sees each body once: what is measured is not how caches fill."""
    for router in routers:
        for each in requests:
            with contextlib.suppress(OSError):  # It will be seen to fail.
                async with Load(router.ports, each, _WARM_CONNECTIONS) as load:
                    await load.run(_WARM_S, at_most=len(each))
        router.forget_log()


def judged(
    case: Case, router: str, result: Result, router_cpu_s: float, load_cpu_s: float, shares: Shares | None = None
) -> Sample:
    router_busy, load_busy = router_cpu_s / result.wall_s, load_cpu_s / result.wall_s
    return Sample(
        case.name,
        router,
        result.finished,
        result.chunks,
        dict(result.failures),
        result.wall_s,
        router_cpu_s,
        router_busy,
        load_busy,
        spread_us(result.latencies_s),
        spread_us(result.chunk_delays_s),
        not case.saturates or max(router_busy, load_busy) >= MIN_BUSY,
        shares,
    )


class Figure(msgspec.Struct, frozen=True):
    """Medians over the samples of one router in one case; `rounds` were taken, `used` of them count."""

    router: str
    case: str
    rounds: int
    used: int
    accepted: int
    finished: int
    failed: int
    failures: dict[str, int]
    cpu_us: float | None
    cpu_us_range: tuple[float, float] | None
    per_s: float | None
    """Requests, or chunks, per second."""
    router_busy: float
    latency_us: tuple[float, float] | None
    chunk_delay_us: tuple[float, float] | None
    shares: Shares | None = None

    @property
    def success_rate(self) -> float:
        asked = self.finished + self.failed
        return self.finished / asked if asked else 0.0


def figure(samples: Sequence[Sample]) -> Figure:
    """Of those accepted if they are enough, else of all. What failed is counted in all of them, used or not."""
    accepted = [each for each in samples if each.accepted]
    used = accepted if len(accepted) >= min(MIN_ACCEPTED, len(samples)) else list(samples)
    failures: dict[str, int] = {}
    for each in samples:
        for why, count in each.failures.items():
            failures[why] = failures.get(why, 0) + count
    costs = [each.cpu_us for each in used if each.cpu_us is not None and each.router != DIRECT]
    rates = [(each.chunks or each.finished) / each.wall_s for each in used]
    return Figure(
        samples[0].router,
        samples[0].case,
        len(samples),
        len(used),
        len(accepted),
        sum(each.finished for each in samples),
        sum(failures.values()),
        failures,
        statistics.median(costs) if costs else None,
        (min(costs), max(costs)) if costs else None,
        statistics.median(rates) if rates else None,
        statistics.median(each.router_busy for each in used),
        _medians([each.latency_us for each in used]),
        _medians([each.chunk_delay_us for each in used]),
        total([each.shares for each in used if each.shares is not None]),
    )


def figures(samples: Sequence[Sample]) -> list[Figure]:
    """By case and router, in the order in which they first occur."""
    cases_, routers = dict.fromkeys(s.case for s in samples), dict.fromkeys(s.router for s in samples)
    each = ([s for s in samples if (s.case, s.router) == key] for key in itertools.product(cases_, routers))
    return [figure(some) for some in each if some]


def _medians(pairs: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    known = [pair for pair in pairs if pair is not None]
    if not known:
        return None
    return statistics.median(p50 for p50, _ in known), statistics.median(p99 for _, p99 in known)


async def rounds(
    chosen: Sequence[Case],
    routers: Sequence[Running],
    backends: Backends,
    bodies: Bodies,
    n: int,
    *,
    between: Callable[[], None],
    note: Callable[[int, Sample], None],
) -> None:
    """`n` rounds of every case over every router, each round beginning with another router. `between` is called at
    the start of each round, `note` with each sample.
    """
    requests = {case.name: Requests(PATH, bodies_of(case, bodies)) for case in chosen}
    await warm(routers, [Requests(PATH, bodies.small), Requests(PATH, bodies.large)])
    for i in range(n):
        between()
        for case in chosen:
            turn = i % len(routers)
            for router in (*routers[turn:], *routers[:turn]):
                taken = await sample(case, router, requests[case.name], backends)
                backends.check()
                router.forget_log()
                note(i, taken)
