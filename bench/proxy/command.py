"""`python -m bench proxy`: routers by themselves on one core, ours with its whole decision on.

CPU time of each router's process tree per finished request and per streamed chunk, latency against no router at all,
requests per second, success, memory. Medians of interleaved rounds. docs/proxy-benchmark.md says how and what it shows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.proxy import prompts, report
from bench.proxy.decider import Decider
from bench.proxy.feed import Feed, wait_until_known
from bench.proxy.measure import Case, Figure, Sample, cases, rounds
from bench.proxy.processes import choose_cores
from bench.proxy.routers import (
    DIRECT,
    OURS,
    PINS,
    Backends,
    Missing,
    Running,
    Spec,
    Workers,
    direct,
    ours,
    peers,
    start,
    version_of,
)

N_WORKERS = 4
_CONCURRENCIES = (1, 32, 256)
_HERE = Path(__file__).resolve().parents[2]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench proxy", description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--quick", action="store_true", help="one short round (figures are not comparable)")
    parser.add_argument("--rounds", type=int, help="rounds over all routers (5; with --quick 1)")
    parser.add_argument("--duration", type=float, help="seconds of one sample (0.5; with --quick 0.2)")
    parser.add_argument("--concurrency", help=f"comma-separated; the middle one is judged {_CONCURRENCIES}")
    parser.add_argument("--only", help="cases whose names contain one of these, comma-separated (2kb,64kb_c32,sse)")
    parser.add_argument("--routers", help="those whose names contain one of these, comma-separated (direct,ours,vllm)")
    parser.add_argument("--peers-venv", metavar="PATH", help="a virtual environment with the peers (else PATH)")
    parser.add_argument("--against", metavar="DIR", help="measure the gateway of another checkout too")
    parser.add_argument("--markdown", metavar="FILE", help="write the page docs/proxy-benchmark.md")
    parser.add_argument("--install-peers", metavar="DIR", help="make such an environment and end")
    return parser


def install_peers(folder: str) -> int:
    """A virtual environment with the peers; they are never dependencies of ours."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)  # noqa: S603
    pip = [f"{folder}/bin/pip", "install", *(f"{name}=={version}" for name, version in PINS.items())]
    return subprocess.run(pip, check=False).returncode  # noqa: S603


def _wanted(name: str, chosen: str | None) -> bool:
    return chosen is None or any(part.strip() in name for part in chosen.split(","))


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.install_peers:
        return install_peers(args.install_peers)
    numbers = args.concurrency.split(",") if args.concurrency else _CONCURRENCIES
    concurrencies = sorted({int(number) for number in numbers})
    middle = concurrencies[len(concurrencies) // 2]
    duration_s = args.duration or (0.2 if args.quick else 0.5)
    chosen = [case for case in cases(concurrencies, duration_s) if _wanted(case.name, args.only)]
    if not chosen:
        print(f"bench: error: no case is named like {args.only!r}", file=sys.stderr)
        return 2
    run = measure(
        chosen,
        args.rounds or (1 if args.quick else 5),
        routers=args.routers,
        bin_folder=f"{args.peers_venv}/bin" if args.peers_venv else None,
        against=args.against,
    )
    report.show(run, middle)
    if args.json:
        found = {"bench": "proxy", "figures": report.flat(run), "targets": report.targets(run, middle)}
        print(json.dumps({**found, "missing": run.missing}))
    return 0


def measure(
    chosen: Sequence[Case], n_rounds: int, *, routers: str | None, bin_folder: str | None, against: str | None
) -> report.Run:
    """Start everything, measure it, stop it. Raises what keeps ours from starting."""
    import uvloop

    cores = choose_cores(os.sched_getaffinity(0))
    tokenizer = prompts.model_folder()
    bodies = prompts.bodies()
    specs = [ours(OURS, _HERE, tokenizer)]
    if against is not None:
        specs.append(ours("against", Path(against).resolve(), tokenizer))
    specs = [spec for spec in (*specs, *peers(bin_folder)) if _wanted(spec.name, routers)]
    missing: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-proxy-")))
        backends = Backends(N_WORKERS, cores.backend)
        stack.callback(backends.close)
        feed = Feed(N_WORKERS)
        stack.callback(feed.close)
        workers = Workers(backends.ports, feed.endpoints)
        running = [direct(workers)] if _wanted(DIRECT, routers) else []
        for spec in specs:
            try:
                running.append(start(spec, workers, cores.router, folder))
                stack.callback(running[-1].close)
            except Missing as exc:
                if spec.decides:
                    raise RuntimeError(str(exc)) from None
                missing.append(str(exc))
        mine = [router for router in running if router.decides]
        decider = Decider(folder, workers, tokenizer, cores.router) if mine else None
        if decider is not None:
            stack.callback(decider.close)
            _fill(feed, bodies, [router.admin_port for router in mine] + [decider.admin_port], tokenizer)
        os.sched_setaffinity(0, {cores.load})
        decisions: list[dict[str, float]] = []

        def between() -> None:
            if decider is not None:
                decisions.append(decider.measure())

        figures: list[Figure] = uvloop.run(
            rounds(chosen, running, backends, bodies, n_rounds, between=between, note=_note)
        )
        return report.Run(
            figures,
            report.medians(decisions),
            {router.name: router.rss_bytes() for router in running},
            _versions(running, specs, bin_folder),
            missing,
            [cores.told(), f"{n_rounds} rounds, samples of {chosen[0].duration_s:g} s"],
        )


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


def _note(turn: int, taken: Sample) -> None:
    cost = "" if taken.cpu_us is None or taken.router == DIRECT else f"{taken.cpu_us:9.1f} us"
    failed = f"  failed {taken.failures}" if taken.failures else ""
    busy = f"busy {taken.router_busy:.2f}, load {taken.load_busy:.2f}{'' if taken.accepted else ' (not accepted)'}"
    print(f"round {turn + 1}  {taken.case:<16} {taken.router:<26} {cost:>12}  {busy}{failed}", flush=True)
