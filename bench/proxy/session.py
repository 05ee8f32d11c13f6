"""One run: everything started and filled, measured in rounds, and stopped again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.proxy import prompts, report
from bench.proxy.decider import Decider
from bench.proxy.feed import Feed, wait_until_known
from bench.proxy.kept import Kept
from bench.proxy.measure import Case, Sample, figures, rounds
from bench.proxy.processes import choose_cores, pinned
from bench.proxy.routers import (
    DIRECT,
    OURS,
    Backends,
    Missing,
    Running,
    Spec,
    Workers,
    direct,
    floor,
    ours,
    peers,
    start,
    version_of,
)

AGAINST = "against"
N_WORKERS = 4
_HERE = Path(__file__).resolve().parents[2]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `routers`: parts of names, comma-separated; None: all. Peers are looked for in `bin_folder`, or
    on PATH; `against` is another checkout whose gateway is measured too.
    """

    cases: list[Case]
    rounds: int
    routers: str | None = None
    bin_folder: str | None = None
    against: Path | None = None
    samples: Path | None = None
    """A file of samples: those in it count too, and new ones are added."""
    n_small: int = prompts.N_SMALL
    n_large: int = prompts.N_LARGE


def named(name: str, chosen: str | None) -> bool:
    """Whether `name` contains one of the comma-separated parts; None: it does."""
    return chosen is None or any(part.strip() in name for part in chosen.split(","))


def measure(plan: Plan) -> report.Run:
    """Raises RuntimeError where a gateway of ours does not serve; a peer that does not is named in `missing`."""
    import uvloop

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # The backends hold the idle connections of all routers.
    others = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before it began"
    cores = choose_cores(os.sched_getaffinity(0))
    tokenizer = prompts.model_folder()
    bodies = prompts.bodies(n_small=plan.n_small, n_large=plan.n_large)
    kept = Kept(plan.samples)
    specs = [spec for spec in _specs(plan, tokenizer) if named(spec.name, plan.routers)]
    missing: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-proxy-")))
        backends = Backends(N_WORKERS, cores.backend)
        stack.callback(backends.close)
        feed = Feed(N_WORKERS)
        stack.callback(feed.close)
        workers = Workers(backends.ports, feed.endpoints)
        running = [direct(workers)] if named(DIRECT, plan.routers) else []
        for spec in specs:
            try:
                running.append(start(spec, workers, cores.router, folder))
                stack.callback(running[-1].close)
            except Missing as exc:
                if spec.decides:
                    raise RuntimeError(str(exc)) from None
                missing.append(str(exc))
        mine = [router for router in running if router.decides]
        decider = None
        if mine:
            decider = Decider(folder, workers, tokenizer, cores.router, bodies)
            stack.callback(decider.close)
            _fill(feed, bodies, [*(router.admin_port for router in mine), decider.admin_port], tokenizer)

        def between() -> None:
            if decider is not None:
                kept.decided(decider.measure())

        def note(turn: int, taken: Sample) -> None:
            feed.go_on()
            kept.sampled(taken)
            _show(turn, taken)

        stack.enter_context(pinned(cores.load))
        work = rounds(plan.cases, running, backends, bodies, plan.rounds, between=between, note=note)
        uvloop.run(until_told(work))
        return report.Run(
            figures=figures(kept.samples),
            decision_us=report.medians(kept.decisions),
            rss_bytes={router.name: router.rss_bytes() for router in running},
            versions=_versions(running, specs, plan.bin_folder),
            missing=missing,
            setting=[cores.told(), f"samples of {plan.cases[0].duration_s:g} s", others],
        )


async def until_told(work: Coroutine[Any, Any, None]) -> None:
    """SIGTERM ends it; an exception out of a signal handler could be taken for one of a connection."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


def _specs(plan: Plan, tokenizer: Path) -> list[Spec]:
    gateways = [ours(OURS, _HERE, tokenizer)]
    if plan.against is not None:
        gateways.append(ours(AGAINST, plan.against, tokenizer))
    return [*gateways, floor(_HERE), *peers(plan.bin_folder)]


def _fill(feed: Feed, bodies: prompts.Bodies, admin_ports: Sequence[int], tokenizer: Path) -> None:
    ids = prompts.token_ids(tokenizer, [*bodies.small, *bodies.large])
    frames = prompts.kv_frames(ids, N_WORKERS)
    feed.publish(frames, len(admin_ports))
    for port in admin_ports:
        wait_until_known(port, [len(each) for each in frames])


def _versions(running: Sequence[Running], specs: Sequence[Spec], bin_folder: str | None) -> dict[str, str]:
    packages = {spec.name: spec.package for spec in specs}
    found = {}
    for router in running:
        package = packages.get(router.name)
        if package is not None:
            found[router.name] = version_of(package, bin_folder) or "unknown"
    return found


def _show(turn: int, taken: Sample) -> None:
    cost = "" if taken.cpu_us is None or taken.router == DIRECT else f"{taken.cpu_us:9.1f} us"
    failed = f"  failed {taken.failures}" if taken.failures else ""
    busy = f"busy {taken.router_busy:.2f}, load {taken.load_busy:.2f}{'' if taken.accepted else ' (not accepted)'}"
    print(f"round {turn + 1}  {taken.case:<16} {taken.router:<26} {cost:>12}  {busy}{failed}", flush=True)
