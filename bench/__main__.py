"""`python -m bench NAME [--json]`: run one measurement and print its figures."""

import importlib
import sys
from collections.abc import Callable, Sequence

# name -> (module with `main(args) -> int`, what it measures)
BENCHES: dict[str, tuple[str, str]] = {
    "trace": ("bench.trace", "fleets in simulated time: traces, arms, targets"),
    "scale": ("bench.scale.command", "what changes with size: several replicas, in simulated time"),
    "proxy": ("bench.proxy.command", "routers by themselves: CPU per request and per streamed chunk"),
    "processes": ("bench.processes", "a gateway of several processes: requests per second, CPU per request"),
    "epp": ("bench.epp.command", "the endpoint picker behind a real Envoy: CPU per request and per streamed chunk"),
    "indexer": ("bench.indexer", "the index as a service: lookups over gRPC, what a copy takes"),
    "page": ("bench.page", "what it costs a gateway that its page is watched"),
    "micro": ("bench.micro", "index and planner operations on one core"),
}


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print("usage: python -m bench NAME [--json] ...")
        for name, (_, summary) in BENCHES.items():
            print(f"  {name:<12} {summary}")
        return 0 if args else 2
    if args[0] not in BENCHES:
        print(f"bench: error: no measurement named {args[0]!r}; there is: {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    run: Callable[[Sequence[str]], int] = importlib.import_module(BENCHES[args[0]][0]).main
    return run(args[1:])


if __name__ == "__main__":
    raise SystemExit(main())
