"""The figures of large fleets as tables, for docs/scaling.md and for who keeps their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

STARTS = (
    ("replay", "indexer, by replay"),
    ("snapshot", "gateway, from the indexer's snapshot"),
    ("redis", "gateway, from Redis's snapshots"),
)
_START_ROWS = (("start_s", "s"), ("start_cpu_s", "CPU s"), ("start_us_per_copy", "CPU us per copy"))
_MEMORY_ROWS = (("peak_mb", "peak MB"), ("rss_mb", "then MB"), ("bytes_per_copy", "bytes per copy"))
_FOLLOWERS = (("indexer", "indexer"), ("gateway", "gateway that follows it"), ("dynamo", "dynamo.indexer"))
_ASKED = (("match", "warmroute indexer"), ("dynamo_match", "dynamo.indexer"))


def lines(figures: Mapping[str, float]) -> Iterator[str]:
    """Markdown; what was not measured is left out."""
    starts = [(name, text) for name, text in STARTS if f"{name}_start_s" in figures]
    rows = [*_START_ROWS, *_MEMORY_ROWS]
    if starts:
        head = f"from nothing to {figures['copies']:,.0f} copies, at {figures['workers']:,.0f} workers"
        yield from _head(head, [text for _, text in rows])
        for name, text in starts:
            yield _row(text, [figures[f"{name}_{figure}"] for figure, _ in rows])
        if "dynamo_rss_mb" in figures:
            cpu_us = figures["dynamo_fill_us_per_copy"]
            cells: list[float | str] = ["", cpu_us * figures["copies"] / 1e6, cpu_us, ""]
            memory = (figures["dynamo_rss_mb"], figures["dynamo_bytes_per_copy"])
            yield _row("dynamo.indexer, as it is sent", [*cells, *memory])
        yield ""
    if "steady_changes_per_s" in figures:
        head = f"at {figures['steady_changes_per_s']:,.0f} changes/s"
        yield from _head(head, ["CPU us per change", "cores for that", "cores at rest", "CPU us per page read"])
        for name, text in _FOLLOWERS:
            if f"{name}_us_per_change" in figures:
                each_us, read_us = figures[f"{name}_us_per_change"], figures[f"{name}_us_per_reading"]
                cores = each_us * figures["steady_changes_per_s"] / 1e6
                reads = "" if name == "dynamo" else _number(read_us)
                yield _row(text, [each_us, cores, figures[f"{name}_idle_cores"], reads])
        yield ""
    if "fanout_us_per_change" in figures:
        yield from _head("each watcher more", ["CPU us per change at the indexer", "bytes per change"])
        yield _row("", [figures["fanout_us_per_change"], figures["fanout_bytes_per_change"]])
        yield ""
    yield from _matches(figures)


def _matches(figures: Mapping[str, float]) -> Iterator[str]:
    asked = sorted(
        (kind, int(clients))
        for kind in ("keys", "tokens")
        for clients in _middles(figures, f"match_{kind}_", "_per_s")
        if clients.isdigit()
    )
    if not asked:
        return
    head = f"Match of {figures['match_tokens']:,.0f} tokens"
    yield from _head(head, ["clients", "per s", "p50 ms", "p99 ms", "CPU us"])
    for kind, clients in asked:
        for name, text in _ASKED:
            if (begin := f"{name}_{kind}_{clients}") + "_per_s" in figures:
                values = [figures[f"{begin}_{part}"] for part in ("per_s", "p50_ms", "p99_ms", "cpu_us")]
                yield _row(f"{text}, by {kind}", [str(clients), *values])
    yield ""


def _middles(figures: Mapping[str, float], begin: str, end: str) -> list[str]:
    return [name[len(begin) : -len(end)] for name in figures if name.startswith(begin) and name.endswith(end)]


def _head(title: str, columns: Sequence[str]) -> Iterator[str]:
    yield f"| {title} | {' | '.join(columns)} |"
    yield "|" + "---|" * (len(columns) + 1)


def _row(title: str, cells: Sequence[float | str]) -> str:
    return f"| {title} | {' | '.join(each if isinstance(each, str) else _number(each) for each in cells)} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
